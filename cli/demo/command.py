"""The ``dpagent demo`` command: options in, a supervised fleet, a summary and a report out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from cli.options.rows import BROKER, COMPARISON, DATA, OUTPUT, RUN
from cli.options.table import Given, with_options
from cli.output import write_json
from cli.run_request import Places, Stop, command_line, excluded, places_of, request_of
from dpagent.errors import LedgerError
from dpagent.wording import named

if TYPE_CHECKING:
    from simulation.request import BrokerRequest, Request


@with_options(
    run=RUN, compare=COMPARISON, data=DATA.without("half", "max_records"), broker=BROKER, output=OUTPUT
)
def demo(run: Given, compare: Given, data: Given, broker: Given, output: Given) -> None:
    """Train a whole fleet privately on this machine: broker, coordinator and agents.

    On handwritten digits, MNIST, or your own data (--data-dir). The programs, messages and
    databases are those of a real deployment; each agent has a state directory of its own.
    A program that dies is started again. Everything that was started is stopped at the end,
    whatever happens. With --compare, a fleet for each method in turn, and a page of all.
    """
    from simulation.request import BrokerRequest, Request

    request, methods = request_of(Request, run, data), _compared(compare, run)
    places = places_of(output, "dpagent-demo")

    Stop(f"give the same options and --state-dir {places.root}")
    if methods:
        _run_several(request, methods, broker.settings(BrokerRequest), places)
    else:
        _run_one(request, broker.settings(BrokerRequest), places)


def _run_one(request: Request, broker: BrokerRequest, places: Places) -> None:
    from cli.demo.console import FleetConsole
    from cli.demo.next_steps import predict_commands
    from cli.demo.summary import print_summary
    from simulation.fleet import Fleet
    from simulation.report.page import write_report
    from simulation.report.results import as_json

    fleet = Fleet(request, places.root, broker=broker, command=command_line(places.root))
    with FleetConsole() as console:
        record = fleet.run(console)
    next_steps = predict_commands(request.data.train, record.notes, record.layout)
    results = as_json(record) | {"predict": next_steps}
    page = write_report(record, places.report)
    if places.json_file is not None:
        write_json(places.json_file, results)
    if places.prints:
        print_summary(results)
        typer.echo(f"Report: {page}")
    if record.unverified:
        raise LedgerError(
            f"The ledgers of devices {list(record.unverified)} do not verify; see `dpagent budget verify`."
        )


def _run_several(request: Request, methods: Sequence[str], broker: BrokerRequest, places: Places) -> None:
    from cli.demo.comparing import Comparison

    comparison = Comparison(request, methods, places.root, broker=broker, command=command_line(places.root))
    comparison.run()
    page = comparison.write(places.report)
    if places.json_file is not None:
        write_json(places.json_file, comparison.results)
    if places.prints:
        comparison.print_table()
        typer.echo(f"Report: {page}")
    if comparison.unverified:
        method, devices = next(iter(comparison.unverified.items()))
        raise LedgerError(
            f"The ledgers of devices {list(devices)} of {method} do not verify; see `dpagent budget verify`."
        )


def _compared(compare: Given, run: Given) -> list[str]:
    """The methods to put side by side; none for a run of one.

    Raises:
        UsageError: The options exclude each other.
    """
    methods: list[str] = compare.nested().get("compare", [])
    for setting in ("method", "noise"):
        if methods and run.values[setting] is not None:
            raise excluded(setting, f"not together with {named('compare')}, which names the methods.")
    return methods
