"""The ``dpagent demo`` command: options in, a supervised fleet, a summary and a report out."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from cli.output import write_json
from cli.plan import ScheduleKind
from dpagent.errors import (
    ConfigurationError,
    DpagentError,
    ExitCode,
    require_between,
    require_count,
    require_positive,
)


class DemoStopped(DpagentError):
    """The demo was stopped before its end."""

    exit_code = ExitCode.INTERRUPTED


def _check_outputs(json_file: Path | None, report: Path) -> None:
    """Refuse what could not be written in the end, before anything is trained."""
    if (json_file is not None and str(json_file) != "-") and (
        json_file.is_dir() or not os.access(json_file.absolute().parent, os.W_OK)
    ):
        raise ConfigurationError(f"--json {json_file}: give a file in a directory that can be written.")
    place = report.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ConfigurationError(f"--report {report}: give a directory that can be written.")


def demo(
    devices: Annotated[
        int | None, typer.Option(help="Agents to run.  [default: 5; mnist: 10]", show_default=False)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds.  [default: 40; mnist: 100]", show_default=False)
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="ε of the job, for each record.  [default: 4; mnist: 2]", show_default=False),
    ] = None,
    delta: Annotated[float, typer.Option(help="δ of the job.")] = 1e-5,
    dataset: Annotated[str, typer.Option(help="digits (bundled with scikit-learn) or mnist.")] = "digits",
    data_dir: Annotated[Path | None, typer.Option(help="Directory of the MNIST IDX files.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Built-in model.  [default: the data set's]", show_default=False)
    ] = None,
    schedule: Annotated[
        ScheduleKind, typer.Option(help="How the budget is spread.")
    ] = ScheduleKind.INCREMENTING,
    step: Annotated[float, typer.Option(help="incrementing: step as a fraction of its maximum.")] = 0.3,
    cap: Annotated[str, typer.Option(help="Noise cap: clamp or none.")] = "clamp",
    cap_at: Annotated[str, typer.Option(help="Where the cap acts: coordinator or device.")] = "coordinator",
    broker: Annotated[
        str, typer.Option(help="auto, embedded, mosquitto, or mqtt://host:port of one that runs.")
    ] = "auto",
    broker_port: Annotated[int, typer.Option(help="Port of the broker started; 0 takes a free one.")] = 0,
    mqtt_username: Annotated[str | None, typer.Option(help="User name for --broker mqtt://….")] = None,
    mqtt_password_file: Annotated[
        Path | None, typer.Option(help="Password file for --broker mqtt://….")
    ] = None,
    jitter_window: Annotated[
        float | None,
        typer.Option(
            help="Seconds over which fragments are spread.  [default: by data set]", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of splits and initial weights; never of noise.")] = 0,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where everything is kept; a stopped run goes on.  [default: dpagent-demo/DATE-TIME-PID]",
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results as JSON (`-`: standard output).")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the HTML report.  [default: report in the state directory]", show_default=False
        ),
    ] = None,
) -> None:
    """Train a whole fleet privately on this machine: broker, coordinator and agents.

    The programs, messages and databases are those of a real deployment; each agent has a
    state directory of its own. Programs that die are started again. Everything started is
    stopped at the end, whatever happens.
    """
    from cli.demo.options import DemoOptions
    from cli.demo.presets import PRESETS, DatasetName
    from cli.demo.run import run_demo

    if dataset not in tuple(DatasetName):
        raise typer.BadParameter(
            f"{dataset!r} is not one of {', '.join(DatasetName)}.", param_hint="--dataset"
        )
    for name, value, choices in (
        ("--cap", cap, ("clamp", "none")),
        ("--cap-at", cap_at, ("coordinator", "device")),
    ):
        if value not in choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}.", param_hint=name)
    preset = PRESETS[DatasetName(dataset)]
    options = DemoOptions(
        dataset=dataset,
        data_dir=None if data_dir is None else str(data_dir.absolute()),
        model=model or preset.model,
        devices=require_count("--devices", preset.devices if devices is None else devices, maximum=200),
        rounds=require_count("--rounds", preset.rounds if rounds is None else rounds, maximum=5000),
        epsilon=require_positive("--epsilon", preset.epsilon if epsilon is None else epsilon, maximum=1000),
        delta=require_between("--delta", delta, 0, 1, low_open=True, high_open=True),
        schedule=schedule.value,
        step=require_between("--step", step, 0, 0.99),
        sampling_rate=preset.sampling_rate,
        clip_norm=preset.clip_norm,
        learning_rate=preset.learning_rate,
        momentum=preset.momentum,
        cap=cap,
        cap_at=cap_at,
        seed=require_count("--seed", seed, minimum=0),
        compute_slot_s=preset.compute_slot_s,
        jitter_window_s=require_between(
            "--jitter-window", preset.jitter_window_s if jitter_window is None else jitter_window, 0, 3600
        ),
    )
    require_count("--broker-port", broker_port, minimum=0, maximum=65_535)
    root = state_dir or Path("dpagent-demo") / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    if any(character < " " for character in str(root)):
        raise typer.BadParameter("control characters in a path.", param_hint="--state-dir")
    _check_outputs(json_file, report or root / "report")

    def stopped(_number: int, _frame: object) -> NoReturn:
        raise DemoStopped(
            f"Stopped. Everything was shut down; to go on, give the same options and --state-dir {root}"
        )

    signal.signal(signal.SIGINT, stopped)
    signal.signal(signal.SIGTERM, stopped)
    started_at = time.monotonic()
    record = run_demo(
        options, root, broker=broker, broker_port=broker_port, mqtt_username=mqtt_username,
        mqtt_password_file=mqtt_password_file, started_at=started_at,
    )  # fmt: skip
    from cli.demo.collect import as_json
    from cli.demo.report import write_report
    from cli.demo.summary import print_summary

    results = as_json(record)
    page = write_report(record, report or root / "report")
    if json_file is not None:
        write_json(json_file, results)
    if json_file is None or str(json_file) != "-":
        print_summary(results)
        typer.echo(f"Report: {page}")
    broken = [budget.device for budget in record.budgets if not budget.verified]
    if broken:
        from dpagent.errors import LedgerError

        raise LedgerError(f"The ledgers of devices {broken} do not verify; see `dpagent budget verify`.")
