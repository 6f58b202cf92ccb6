"""``dpagent sweep …``: many settings of a virtual fleet side by side, and the job of the chosen one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands import Commands
from cli.job import add
from cli.options.daemons import FleetConfig
from cli.options.rows import CLUSTER, SWEEP_OUTPUT
from cli.options.table import Given, with_options
from cli.output import write_json
from cli.run_request import Stop, places_of, require_whole
from cli.simulate.command import cluster_of
from cli.tables import print_table
from dpagent.errors import ConfigurationError, UsageError
from dpagent.wording import counted

if TYPE_CHECKING:
    from simulation.sweep.page import SweepReport
    from simulation.sweep.sweep import RunOutcome, Sweep
    from simulation.virtual.cluster import ClusterRequest

app = Commands(
    help="Train many settings of a virtual fleet side by side, and put the chosen one on a real fleet.",
    no_args_is_help=True,
)

_ROWS = 12


@app.command()
@with_options(cluster=CLUSTER, output=SWEEP_OUTPUT)
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The sweep's file (docs/simulation.md).")],
    cluster: Given,
    output: Given,
) -> None:
    """Run a sweep: each setting is a task on a core of its own; then a page that compares them.

    Runs that are done are kept, and the same command goes on with the others. With records that the file
    calls private, the page says what looking at it costs them.
    """
    from simulation.sweep.page import write_sweep_page
    from simulation.sweep.sweep import Sweep
    from simulation.virtual.cluster import ray_package

    where, places = cluster_of(cluster), places_of(output, "dpagent-sweep")
    ray_package(where)  # Before anything is written.
    stop = Stop(f"give the same command with --state-dir {places.root}")
    sweep = Sweep(file, places.root)
    with sweep.locked():
        sweep.begin()
        if sweep.is_done:
            typer.echo(f"The sweep in {places.root} is finished: nothing is trained.", err=True)
        else:
            stop.defer()
            try:
                _compute(sweep, where, stop)
            finally:
                stop.check()
        report = report_of(sweep)
        page = write_sweep_page(report, places.report)
    if places.json_file is not None:
        write_json(places.json_file, report.as_json())
    if places.prints:
        _print(report)
        typer.echo(f"Page: {page}")


def _compute(sweep: Sweep, where: ClusterRequest, stop: Stop) -> None:
    from simulation.virtual.cluster import cores_of, ray_on

    def tell(outcome: RunOutcome) -> None:
        typer.echo(
            f"run {len(sweep.done):>{len(str(len(sweep.runs)))}}/{len(sweep.runs)}  "
            f"accuracy {outcome.accuracy:6.2%}  {outcome.run.in_words}, seed {outcome.run.request.seed}  "
            f"{outcome.seconds:.1f} s",
            err=True,
        )

    with ray_on(where, sweep.record_bytes) as ray:
        stop.check()
        typer.echo(
            f"{counted(len(sweep.runs) - len(sweep.done), 'run')} to do of {len(sweep.runs)}, on "
            f"{counted(cores_of(ray), 'core')}; state in {sweep.root}",
            err=True,
        )
        sweep.compute(ray, tell, stop.check)


@app.command()
def job(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="The sweep's state directory.")],
    output: Annotated[Path, typer.Option("--output", help="The job file to write.")],
    setting: Annotated[
        int | None, typer.Option("--setting", help="Number of the setting.", show_default="the best")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Write over a file that is there.")] = False,
    to_fleet: Annotated[
        bool, typer.Option("--add", help="Add it to the fleet's queue, too, as `job add` does.")
    ] = False,
    config: FleetConfig = None,
    paused: Annotated[
        bool, typer.Option("--paused", help="With --add: let it wait for `job resume`.")
    ] = False,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="With --add: a setting over the job's; several times."
        ),
    ] = None,
) -> None:
    """Write the job of a sweep's best setting, or of another one, and put it on a fleet.

    `round`, `test_data` and `linkability` are the fleet's own, and in no simulation: give them with --set, or
    in the file.
    """
    # DPAGENT_CONFIG says which fleet is this machine's, and nothing of this command.
    source = context.get_parameter_source("config")
    is_given = source is not None and source.name == "COMMANDLINE"
    _require_fleet_only_with_add(to_fleet, {"--config": is_given, "--paused": paused, "--set": options})
    from simulation.sweep.file import MOST_RUNS
    from simulation.sweep.job_file import write_job_file
    from simulation.sweep.kept import kept_outcomes
    from simulation.sweep.ranking import ranked
    from simulation.sweep.sweep import settings_of

    if setting is not None:
        require_whole("--setting", setting, MOST_RUNS)
    settings = ranked(kept_outcomes(directory))
    chosen = settings[0] if setting is None else next((s for s in settings if s.number == setting), None)
    if chosen is None:
        numbers = ", ".join(map(str, sorted(each.number for each in settings)))
        raise UsageError(f"--setting: got {setting}; expected one of {numbers}.")
    if output.exists() and not replace:
        raise ConfigurationError(f"--output {output}: the file exists. Give another one, or --replace.")
    values = settings_of(chosen.outcomes[0])
    write_job_file(
        values,
        output,
        f"Setting {chosen.number} of the sweep in {directory.name}: {chosen.outcomes[0].run.in_words}.\n"
        f"Simulated with {counted(values.devices, 'device')} of about "
        f"{counted(values.records_per_device, 'record')} each: accuracy {chosen.accuracy:.2%}.\n"
        "With more devices than that, the mean has less noise, with fewer more; sums are divided by "
        "records_per_device.\n"
        "round (deadline, slots, jitter), test_data and linkability are the fleet's own: add them here where "
        "defaults do not fit.",
    )
    if not to_fleet:
        typer.echo(
            f"{output} is written. Put it on a fleet: dpagent coordinator job add {shlex.quote(str(output))}"
        )
        return
    typer.echo(f"{output} is written.")
    add(output, config=config, paused=paused, options=options)


def _require_fleet_only_with_add(to_fleet: bool, given: Mapping[str, object]) -> None:
    """Refuse options that say how the job is put on a fleet, where it is put on none.

    Args:
        to_fleet: whether it is.
        given: what was given for each of them, by name.

    Raises:
        UsageError: There are some.
    """
    names = [name for name, value in given.items() if value]
    if names and not to_fleet:
        are = "is" if len(names) == 1 else "are"
        raise UsageError(
            f"{' and '.join(names)} {are} given without --add: only the file is written then, which they "
            f"do not change. Give --add, too, or leave {'it' if len(names) == 1 else 'them'} out."
        )


def report_of(sweep: Sweep) -> SweepReport:
    """The report of a sweep, as far as it has come."""
    from simulation.sweep.page import SweepReport
    from simulation.sweep.ranking import ranked

    is_private = sweep.asked.records == "private"
    return SweepReport(
        name=sweep.file.name,
        records=sweep.asked.records,
        settings=ranked([*sweep.done.values()]),
        runs=len(sweep.done),
        wanted=len(sweep.runs),
        prices=sweep.prices() if is_private else [],
        directory=shlex.quote(str(sweep.root)),
    )


def _print(report: SweepReport) -> None:
    from dpagent.notation import upwards
    from simulation.sweep.file import setting_in_words

    print_table(
        ["setting", "accuracy", "± error"],
        [
            [
                f"{each.number}: {setting_in_words(each.varied)}",
                f"{each.accuracy:.2%}",
                "" if each.error is None else f"{each.error:.2%}",
            ]
            for each in report.settings[:_ROWS]
        ],
    )
    if len(report.settings) > _ROWS:
        typer.echo(f"… and {len(report.settings) - _ROWS} more, on the page.")
    if report.records == "public":
        typer.echo("The records are public: nothing is owed for looking at these results.")
    for price in report.prices:
        shown = upwards(price.epsilon) if price.epsilon < float("inf") else "no bound"
        typer.echo(f"Looking at these results costs private records: {price.as_dict()['in_words']} = {shown}")
    typer.echo(f"Put the best one on a real fleet: {report.job_command}")
