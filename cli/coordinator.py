"""``dpagent coordinator …``: the coordinator daemon and its operator's commands."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict
from typing import Annotated

import typer

from cli.broker_config import broker_config
from cli.commands import Commands
from cli.configurations import coordinator_settings
from cli.daemons import LogFormat, LogLevel, StopSignals, kept_up, start_logging
from cli.job import NO_JOB, remarks_on
from cli.job import app as job_app
from cli.members import budgets, ca, devices
from cli.members.enrolment import enrolment
from cli.members.invite import invite
from cli.options.daemons import FleetConfig, LogFormatOption, LogLevelOption, SetOptions
from cli.page import page_token, serve
from cli.report import report
from cli.tables import print_table
from cli.watching import watch
from dpagent.notation import upwards
from dpagent.schema.json_values import json_values
from dpagent.wording import counted

log = logging.getLogger(__name__)

app = Commands(help="Run and inspect the rounds of a fleet.", no_args_is_help=True)
app.add_typer(job_app, name="job")
app.add_typer(ca.app, name="ca")
app.command()(invite)
app.command()(enrolment)
app.add_typer(devices.app, name="devices")
app.command("broker-config")(broker_config)
app.add_typer(budgets.app, name="budgets")
app.command()(serve)
app.command()(report)
app.command("page-token")(page_token)


@app.command()
def run(
    config: FleetConfig = None,
    options: SetOptions = None,
    stay: Annotated[
        bool,
        typer.Option(
            "--stay",
            help="Stay once all jobs are over, and wait for others: as a service, or in a container.",
        ),
    ] = False,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Run the jobs of the queue until all are over, or until SIGTERM or Ctrl-C.

    A job in fleet.yaml is the first; `dpagent coordinator job add` adds others, also while this runs. After
    a restart on the same state directory it continues in the middle of the round. Each job leaves model.onnx
    in a directory of its own, jobs/NAME in the state directory.
    """
    start_logging(log_level, log_format, "coordinator")
    stop = StopSignals()
    from dpagent.extras import extra_needed, require_package

    with extra_needed("coordinator", "The coordinator"):
        require_package("onnx")
        from coordinator.daemon import Coordinator
    from coordinator.settings import FleetSettings

    settings = coordinator_settings(config, options)
    if isinstance(settings, FleetSettings):
        for remark in remarks_on(settings):
            log.info("%s", remark)  # No warning: the boards' limits are theirs, and not known here.

    def serve() -> bool:
        coordinator = Coordinator(settings, stays=stay)
        return coordinator.run(stop.serving())

    raise typer.Exit(0 if kept_up(serve, stop) else stop.exit_code)


@app.command()
def worker(
    config: FleetConfig = None,
    options: SetOptions = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Its name in logs and `status`.", show_default="host and process"),
    ] = None,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Count fragments for a coordinator whose state is in PostgreSQL, until SIGTERM or Ctrl-C.

    Any number of workers may run, on any machines: the broker gives each fragment to one of them (shared
    subscriptions, MQTT 5). They need fleet.yaml with store.url, and keys/sealing.key. docs/scale.md
    """
    start_logging(log_level, log_format, "worker")
    stop = StopSignals()
    from dpagent.extras import extra_needed

    with extra_needed("coordinator", "The coordinator"):
        from coordinator.worker import Worker

    settings = coordinator_settings(config, options)

    def serve() -> None:
        Worker(settings, name=name).run(stop.serving())

    kept_up(serve, stop)
    raise typer.Exit(stop.exit_code)


@app.command()
def key(config: FleetConfig = None) -> None:
    """Print the coordinator's public key (`coordinator_key` in agent.yaml)."""
    from coordinator.keys import load_signer

    settings = coordinator_settings(config)
    typer.echo(load_signer(settings.keys_dir, settings.fleet).public_key)


@app.command()
def status(
    config: FleetConfig = None,
    job: Annotated[str | None, typer.Option("--job", metavar="NAME", help="The job that is shown.")] = None,
    watching: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Go on until Ctrl-C; in a pipe, one line for each change."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead; with --watch, an object a line.")
    ] = False,
) -> None:
    """Show a job's rounds: budget, noise, accuracy and fragments, also during the job.

    By default those of the job that goes on, or else of the one that ended last.
    """
    from coordinator.columns import spent_in
    from coordinator.participation import participation_of
    from coordinator.queued_job import JobState
    from coordinator.reader import StoreReader
    from dpagent.protocol.tokens import LINKABILITY_MEANINGS

    settings = coordinator_settings(config)
    if watching:
        watch(settings, job, as_json=as_json)
        return
    reader = StoreReader(settings.store_place, job)
    try:
        queued, rounds, counters = reader.queued(), reader.rounds(), reader.counters()
        waiting = [each for each in reader.jobs() if not each.state.is_over]
        workers = reader.workers()
    finally:
        reader.close()
    columns = () if queued is None else spent_in(queued.job, rounds)
    linkability = "none" if queued is None else queued.job.linkability
    taking_part = None
    if queued is not None and rounds and linkability != "none":
        taking_part = participation_of(settings, queued.job.id, rounds[-1].number, rounds[-1].opened_at)
    if as_json:
        typer.echo(
            json.dumps(
                json_values(
                    {
                        "job": None if queued is None else queued.job.id.hex(),
                        "name": None if queued is None else queued.name,
                        "state": None if queued is None else queued.state,
                        "paused": queued is not None and queued.is_paused,
                        "finished": queued is not None and queued.state is JobState.FINISHED,
                        "spent": [column.as_dict() for column in columns],
                        "counters": counters,
                        "linkability": linkability,
                        "participation": None if taking_part is None else asdict(taking_part),
                        "rounds": [asdict(r) for r in rounds],
                        "workers": [asdict(each) for each in workers],
                    }
                ),
                indent=2,
            )
        )
        return
    if queued is None:
        typer.echo(NO_JOB)
        return
    typer.echo(
        f"Job {queued.name} ({queued.job.id.hex()}): {queued.state_in_words()}, {len(rounds)} of "
        f"{counted(queued.job.rounds, 'round')} started."
    )
    typer.echo(f"Linkability {linkability}: {LINKABILITY_MEANINGS[linkability]}.")
    if taking_part is not None:
        typer.echo(f"Round {rounds[-1].number}: {taking_part.sentence()}.")
    others = [each.name for each in waiting if each.number != queued.number]
    if others:
        typer.echo(f"Also in the queue: {', '.join(others)}. `dpagent coordinator job list` shows all.")
    if settings.store.url is not None:
        names = ", ".join(f"{each.name} ({counted(each.fragments, 'fragment')})" for each in workers)
        typer.echo(f"Workers: {names or 'none'}.")
    if rounds:
        follows = any(each.clip_norm is not None for each in rounds)
        print_table(
            [
                *("round", "noise multiplier", "ε so far", "accuracy", "fragments", "clamped", "norm kept"),
                *(["clip norm"] if follows else []),
            ],
            [
                [
                    str(r.number),
                    "open" if not r.is_over else "given up" if r.given_up_at else f"{r.noise_multiplier:.3f}",
                    ""
                    if r.epsilon is None
                    else upwards(r.epsilon, 4)
                    if math.isfinite(r.epsilon)
                    else "no bound",
                    "" if r.accuracy is None else f"{r.accuracy:.2%}",
                    str(r.fragments),
                    "" if r.clamped is None else str(r.clamped),
                    "" if r.kept is None else f"{r.kept:.1%}",
                    *(["" if r.clip_norm is None else f"{r.clip_norm:.3g}"] if follows else []),
                ]
                for r in rounds
            ],
        )
    for column in columns:
        typer.echo(f"Spent in rounds that are over: {column.sentence()}.")
    if len(columns) > 1:
        typer.echo("These are never added up: each holds for another unit, or trusts other parties.")
    left = dict.fromkeys(layer for each in rounds for layer in each.out_of_range)
    for layer in left:
        numbers = [each.number for each in rounds if layer in each.out_of_range]
        typer.echo(
            f"Layer {layer}: on the devices, its changes lay at the ends of their range in "
            f"{counted(len(numbers), 'round')}, last in round {numbers[-1]}. Raise privacy.two_point.radius "
            "in the next job, or lower privacy.local_training."
        )
    for name, value in sorted(counters.items()):
        typer.echo(f"{name}: {value}")
