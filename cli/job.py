"""``dpagent coordinator job …``: the coordinator's queue of jobs, also while it runs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli.commands import Commands
from cli.configurations import coordinator_settings
from cli.options.daemons import FleetConfig
from cli.output import write_json
from cli.tables import render_table
from dpagent.errors import ConfigurationError
from dpagent.notation import upwards
from dpagent.wording import counted

if TYPE_CHECKING:
    from coordinator.queue import Queue
    from coordinator.queued_job import QueuedJob
    from coordinator.reader import RoundRecord
    from coordinator.settings import CoordinatorSettings, JobSettings
    from dpagent.privacy.statement import BudgetStatement

app = Commands(
    help="The coordinator's queue of jobs: add, look, pause, cancel, also while it runs.",
    no_args_is_help=True,
)

NO_JOB: Final = "There is no job yet. `dpagent coordinator job add FILE` adds one."

Name = Annotated[str, typer.Argument(metavar="NAME", help="The job's name.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead.")
]


@app.command()
def add(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The job file.")],
    name: Annotated[
        str | None, typer.Option("--name", help="Its name.", show_default="that of the file, without ending")
    ] = None,
    config: FleetConfig = None,
    paused: Annotated[
        bool, typer.Option("--paused", help="Let it wait for `job resume`; others go before it.")
    ] = False,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting over the job file's; several times."),
    ] = None,
) -> None:
    """Add a job to the queue. A running coordinator begins it when its turn comes.

    The file has the keys of a job alone (docs/configuration.md); its settings are kept as they are now. A job
    that no device would accept is refused here. The job in fleet.yaml, if there is one, comes before it.
    """
    from coordinator.settings import load_job_settings
    from dpagent.extras import extra_needed
    from dpagent.overrides import overrides_of

    with extra_needed("coordinator", "The coordinator"):
        from coordinator.running_job import add_job

    shared, chosen = coordinator_settings(config), file.stem if name is None else name
    own = load_job_settings(file, overrides_of({}, options or ()))
    with _queue(shared) as queue:
        typer.echo(add_job(shared, own, chosen, str(file), queue, time.time(), is_paused=paused))
    for remark in remarks_on(own):
        typer.echo(remark)


def remarks_on(job: JobSettings) -> Iterator[str]:
    """What of a job's rounds boards decline whose limits are the default ones."""
    from agent.limit_settings import LimitSettings

    limits = LimitSettings()
    for key, limit in (
        ("compute_slot_s", limits.minimum_compute_slot_s),
        ("jitter_window_s", limits.minimum_jitter_window_s),
    ):
        if (value := getattr(job.round, key)) < limit:
            yield (
                f"round.{key} is {value:g}: boards decline that, unless limits.minimum_{key} in their "
                f"agent.yaml (or their profile) is as small; by default it is {limit:g}."
            )


@app.command(name="list")
def list_jobs(config: FleetConfig = None, json_file: JsonFile = None) -> None:
    """List all jobs, those that are over too, with what each has spent, and what all together may cost."""
    from coordinator.columns import promised_by, together

    jobs = _history(coordinator_settings(config))
    heard_of = [(queued.name, queued.job) for queued, rounds, _ in jobs if rounds]
    # Whoever took part in one job alone has no sum.
    sums = [(names, total) for names, total in together(heard_of) if len(names) > 1]
    if json_file is not None:
        write_json(
            json_file,
            {
                "jobs": [_values(*each) for each in jobs],
                "together": [{"jobs": names, "reserved": total.as_dict()} for names, total in sums],
            },
        )
        return
    if not jobs:
        typer.echo(NO_JOB)
        return
    rows = [
        [
            queued.name, queued.state_in_words(), f"{_closed(rounds)} of {queued.job.rounds}",
            _figure(columns[0]) if columns else "nothing", _figure(promised_by(queued.job)[0]),
            _accuracy(rounds),
        ]
        for queued, rounds, columns in jobs
    ]  # fmt: skip
    header = ["job", "state", "rounds", "ε, rounds over", "ε at most", "accuracy"]
    typer.echo(render_table(header, rows, words=2), nl=False)
    for queued, *_ in jobs:
        if trouble := queued.trouble_in_words():
            typer.echo(f"Job {queued.name} {': '.join(trouble)}")
    for names, total in sums:
        typer.echo(f"Reserved by boards that took part in {_listed(names)}: {total.sentence()}.")
    if len(sums) > 1:
        typer.echo("These are never added up: each holds for another unit, or trusts other parties.")


@app.command()
def show(name: Name, config: FleetConfig = None, json_file: JsonFile = None) -> None:
    """Show a job: its state, its settings, its budget, its models. `status --job NAME` shows its rounds."""
    import json

    from cli.config import flattened, shown
    from coordinator.columns import promised_by
    from coordinator.queue import find

    settings = coordinator_settings(config)
    jobs = _history(settings)
    find([queued for queued, *_ in jobs], name)
    queued, rounds, columns = next(each for each in jobs if each[0].name == name)
    models = _models(settings.directory_of(name))
    if json_file is not None:
        write_json(json_file, _values(queued, rounds, columns) | {"models": [str(model) for model in models]})
        return
    lines = [
        ("job", f"{queued.name} ({queued.job.id.hex()})"),
        ("state", queued.state_in_words()),
        ("rounds", f"{_closed(rounds)} of {queued.job.rounds} closed"),
        *([("trouble", ": ".join(trouble))] if (trouble := queued.trouble_in_words()) else []),
        ("added", _day(queued.added_at)),
        *([("began", _day(queued.begun_at))] if queued.begun_at else []),
        *([("ended", _day(queued.ended_at))] if queued.ended_at else []),
        *([("deadline", f"{queued.deadline_s:g} s a round")] if queued.deadline_s else []),
        *([("minimum", f"{queued.minimum_devices} a round")] if queued.minimum_devices else []),
        *(("promised", column.sentence()) for column in promised_by(queued.job)),
        *(("spent in rounds that are over", column.sentence()) for column in columns),
        *((key, shown(value)) for key, value in flattened(json.loads(queued.settings))),
        ("models", f"{counted(len(models), 'file')} in {settings.directory_of(name)}"),
    ]
    typer.echo(render_table(["key", "value"], [[*line] for line in lines], words=2), nl=False)


@app.command()
def pause(
    name: Name,
    config: FleetConfig = None,
    give_up: Annotated[
        bool,
        typer.Option(
            "--give-up", help="Give its open round up, rather than let it close. What it cost stays."
        ),
    ] = False,
) -> None:
    """Open no further round of a job. One that is open closes as it would, or is given up.

    A job that has not begun is passed over. One that has keeps the others waiting: boards end a job when they
    are charged for another. Boards that were charged for a round that is given up stay so.
    """
    if not give_up:
        _change(config, lambda queue: queue.pause(name))
        typer.echo(
            f"Job {name} is paused: no further round of it opens. `dpagent coordinator job resume {name}`"
        )
        return
    shared = coordinator_settings(config)
    queued = _change(config, lambda queue: queue.give_up(name, shared))
    typer.echo(
        f"Job {name} is paused, and round {queued.gives_up} is given up as soon as the boards are told: "
        "boards that were charged for it stay so, others pay nothing. `dpagent coordinator job resume "
        f"{name}` opens the next one."
    )


@app.command()
def resume(name: Name, config: FleetConfig = None) -> None:
    """Let a paused job go on, in its old place in the queue."""
    _change(config, lambda queue: queue.resume(name))
    typer.echo(f"Job {name} goes on when its turn comes.")


@app.command()
def cancel(
    name: Name,
    config: FleetConfig = None,
    with_model: Annotated[
        bool,
        typer.Option("--with-model", help="Send devices the model of the rounds that are closed."),
    ] = False,
) -> None:
    """Cancel a job for good. Its open round is given up, and devices are told that the job is over.

    Boards that took part keep all that they have reserved for it: a job that ends because of what came of its
    rounds is not cheaper (docs/jobs.md). The models so far are kept.
    """
    from coordinator.queue import cancelled_in_words

    queued = _change(config, lambda queue: queue.cancel(name, time.time(), sends_model=with_model))
    typer.echo(cancelled_in_words(queued))


@app.command()
def deadline(
    name: Name,
    seconds: Annotated[float, typer.Argument(metavar="SECONDS", help="Of a round, from its opening on.")],
    config: FleetConfig = None,
) -> None:
    """Change the deadline of a job's rounds. One that is open has all of it from now on."""
    shared = coordinator_settings(config)
    _change(
        config,
        lambda queue: queue.set_deadline(
            name, seconds, lambda known: replace(known, deadline_s=seconds).settings_in(shared)
        ),
    )
    typer.echo(f"Rounds of job {name} have {seconds:g} s from now on.")


@app.command()
def minimum(
    name: Name,
    boards: Annotated[int, typer.Argument(metavar="BOARDS", help="That every block of a round needs.")],
    config: FleetConfig = None,
) -> None:
    """Let the rounds of a job close with another least number of boards, the open one at its deadline."""
    shared = coordinator_settings(config)
    _change(
        config,
        lambda queue: queue.set_minimum(
            name, boards, lambda known: replace(known, minimum_devices=boards).settings_in(shared)
        ),
    )
    typer.echo(f"Rounds of job {name} close with {counted(boards, 'board')} or more from now on.")


@contextlib.contextmanager
def _queue(settings: CoordinatorSettings) -> Iterator[Queue]:
    """The queue of a coordinator, for a command that writes to it."""
    from coordinator.database.opening import open_beside
    from coordinator.orders import command_line_user
    from coordinator.queue import Queue

    database = open_beside(settings.store_place)
    try:
        yield Queue(database, command_line_user())
    finally:
        database.close()


def _change(config: Path | None, change: Callable[[Queue], QueuedJob]) -> QueuedJob:
    """Change a job of a queue, if there is one."""
    from coordinator.database.opening import is_there

    settings = coordinator_settings(config)
    if not is_there(settings.store_place):
        raise ConfigurationError(NO_JOB)
    with _queue(settings) as queue:
        return change(queue)


def _history(
    settings: CoordinatorSettings,
) -> list[tuple[QueuedJob, list[RoundRecord], tuple[BudgetStatement, ...]]]:
    """All jobs, with their rounds and what they have spent."""
    from coordinator.columns import spent_in
    from coordinator.database.opening import is_there
    from coordinator.reader import StoreReader

    if not is_there(settings.store_place):
        return []
    found = []
    with contextlib.closing(StoreReader(settings.store_place)) as reader:
        for queued in reader.jobs():
            rounds = reader.rounds_of(queued.number)
            found.append((queued, rounds, spent_in(queued.job, rounds)))
    return found


def _values(
    queued: QueuedJob, rounds: list[RoundRecord], columns: tuple[BudgetStatement, ...]
) -> dict[str, Any]:
    """A job, for scripts."""
    import json

    from coordinator.columns import promised_by

    return {
        "name": queued.name,
        "job": queued.job.id.hex(),
        "state": queued.state,
        "paused": queued.is_paused,
        "trouble": queued.trouble,
        "rounds": queued.job.rounds,
        "closed_rounds": _closed(rounds),
        "deadline_s": queued.deadline_s,
        "minimum_devices": queued.minimum_devices,
        "added_at": queued.added_at,
        "begun_at": queued.begun_at,
        "ended_at": queued.ended_at,
        "promised": [column.as_dict() for column in promised_by(queued.job)],
        "spent": [column.as_dict() for column in columns],
        "settings": json.loads(queued.settings),
    }


def _closed(rounds: list[RoundRecord]) -> int:
    return sum(each.closed_at is not None for each in rounds)


def _accuracy(rounds: list[RoundRecord]) -> str:
    last = next((each.accuracy for each in reversed(rounds) if each.closed_at is not None), None)
    return "" if last is None else f"{last:.2%}"


def _figure(statement: BudgetStatement) -> str:
    return upwards(statement.epsilon) if math.isfinite(statement.epsilon) else "no bound"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}"


def _day(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")


def _models(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.onnx"))
