"""The ``dpagent simulate`` command: options in, virtual devices on Ray, a summary and a report out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from cli.options.rows import CLUSTER, DATA, OUTPUT, SIMULATION
from cli.options.table import Given, with_options
from cli.output import write_json
from cli.run_request import Stop, command_line, places_of, request_of, require_whole
from dpagent.errors import LedgerError, UsageError
from dpagent.wording import named

if TYPE_CHECKING:
    from simulation.virtual.cluster import ClusterRequest

_MOST_CORES = 4096
_OUTPUT = OUTPUT.with_default("state_dir", "dpagent-simulation/DATE-TIME-PID")


@with_options(run=SIMULATION, data=DATA.without("half", "max_records"), cluster=CLUSTER, output=_OUTPUT)
def simulate(run: Given, data: Given, cluster: Given, output: Given) -> None:
    """Train a fleet of virtual devices, on all cores of this machine or on a Ray cluster (--address).

    The computations are those of agents and coordinator: learning, noise, accounting, encoding and
    aggregation. Broker, boards and waiting are missing. A stopped or killed run goes on after its last
    whole round with the same options and --state-dir (docs/simulation.md).
    """
    from cli.demo.next_steps import predict_commands
    from cli.demo.summary import print_summary
    from cli.simulate.console import SimulationConsole
    from simulation.report.page import write_report
    from simulation.report.results import as_json
    from simulation.virtual.cluster import ray_package
    from simulation.virtual.fleet import VirtualFleet
    from simulation.virtual.settings import VirtualRequest

    request = request_of(VirtualRequest, run, data)
    where = cluster_of(cluster)
    places = places_of(output, "dpagent-simulation")
    ray_package(where)  # Before anything is written.
    stop = Stop(f"give the same options and --state-dir {places.root}")
    fleet = VirtualFleet(request, places.root, command=command_line(places.root))
    with SimulationConsole(stop) as console:
        try:
            record = fleet.run(where, console)
        finally:
            stop.check()
    results = as_json(record) | {"predict": predict_commands(request.data.train, record.notes, record.layout)}
    page = write_report(record, places.report)
    if places.json_file is not None:
        write_json(places.json_file, results)
    if places.prints:
        print_summary(results)
        typer.echo(f"Report: {page}")
    if record.unverified:
        raise LedgerError(f"The ledger in {places.root} does not verify; see `dpagent budget verify`.")


def cluster_of(given: Given) -> ClusterRequest:
    """Which Ray the options ask for.

    Raises:
        UsageError: Options exclude each other, or a value is out of its range.
    """
    from simulation.virtual.cluster import ClusterRequest

    address, cores = given.values["address"], given.values["cores"]
    if address is not None and cores is not None:
        raise UsageError(f"{named('cores')}: a cluster has its own. Give it, or {named('address')}.")
    if cores is not None:
        require_whole(named("cores"), cores, _MOST_CORES)
    if address is not None and not address.rpartition(":")[2].isdigit():
        raise UsageError(
            f"{named('address')}: got {address!r}; expected HOST:PORT of a Ray cluster's head node."
        )
    return ClusterRequest(address, cores)
