"""``dpagent coordinator …``: the coordinator daemon and its operator's commands."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from cli.commands import Commands
from cli.configurations import FleetConfig, SetOptions, fleet_settings
from cli.daemons import LogLevel, LogLevelOption, StopSignals, rest, start_logging
from cli.output import finite
from cli.tables import print_table
from dpagent.wording import counted

if TYPE_CHECKING:
    from dpagent.privacy.statement import BudgetStatement

app = Commands(help="Run and inspect the rounds of a fleet.", no_args_is_help=True)


@app.command()
def run(
    config: FleetConfig = None,
    options: SetOptions = None,
    stay: Annotated[
        bool,
        typer.Option(
            "--stay",
            help="Stay without work once the job is finished, for a container that would be started again.",
        ),
    ] = False,
    log_level: LogLevelOption = LogLevel.INFO,
) -> None:
    """Run the fleet's job until it is finished, or until SIGTERM or Ctrl-C.

    After a restart on the same state directory it continues in the middle of the round. A
    finished job leaves model.onnx in the state directory.
    """
    start_logging(log_level)
    stop = StopSignals()
    from dpagent.extras import extra_needed

    with extra_needed("coordinator", "The coordinator"):
        from coordinator.daemon import Coordinator

    coordinator = Coordinator(fleet_settings(config, options))
    stopping = stop.serving()
    finished = coordinator.run(stopping)
    if finished and stay:
        rest(stopping)
    raise typer.Exit(0 if finished else stop.exit_code)


@app.command()
def key(config: FleetConfig = None) -> None:
    """Print the coordinator's public key (`coordinator_key` in agent.yaml)."""
    from coordinator.keys import load_signer

    settings = fleet_settings(config)
    typer.echo(load_signer(settings.keys_dir, settings.fleet).public_key)


@app.command()
def status(
    config: FleetConfig = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the job's rounds: budget, noise, accuracy and fragments, also during the job."""
    from coordinator.columns import spent_columns
    from coordinator.store import StoreReader

    settings = fleet_settings(config)
    reader = StoreReader(settings.state_dir)
    try:
        rounds, counters, finished = reader.rounds(), reader.counters(), reader.is_finished()
        job, least = reader.job(), reader.least_counted()
    finally:
        reader.close()
    closed = [each for each in rounds if each.closed_at is not None]
    columns: tuple[BudgetStatement, ...] = ()
    if job is not None and closed:
        spent = max(each.epsilon or 0.0 for each in closed)
        columns = spent_columns(job, rounds=len(closed), epsilon=spent, devices=least)
    name = None if job is None else job.id.hex()
    if as_json:
        typer.echo(
            json.dumps(
                finite(
                    {
                        "job": name,
                        "finished": finished,
                        "spent": [column.as_dict() for column in columns],
                        "counters": counters,
                        "rounds": [asdict(r) for r in rounds],
                    }
                ),
                indent=2,
            )
        )
        return
    state = "finished" if finished else "running"
    typer.echo(f"Job {name}: {state}, {len(rounds)} of {counted(settings.rounds, 'round')} started.")
    if rounds:
        follows = settings.privacy.clipping.kind == "quantile"
        print_table(
            [
                *("round", "noise multiplier", "ε so far", "accuracy", "fragments", "clamped", "norm kept"),
                *(["clip norm"] if follows else []),
            ],
            [
                [
                    str(r.number),
                    "open" if r.noise_multiplier is None else f"{r.noise_multiplier:.3f}",
                    ""
                    if r.epsilon is None
                    else f"{r.epsilon:.4f}"
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
        typer.echo(f"Spent so far: {column.sentence()}.")
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
