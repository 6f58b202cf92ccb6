"""The ``dpagent demo`` command: options in, a supervised fleet, a summary and a report out."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cli.data import options as reading
from cli.demo import arguments
from cli.output import write_json
from cli.plan.command import ScheduleKind
from dpagent.errors import (
    ConfigurationError,
    DpagentError,
    ExitCode,
    LedgerError,
    require_between,
    require_count,
    require_positive,
)

if TYPE_CHECKING:
    from dpagent.learning.data.settings import DatasetSettings
    from simulation.settings import DataChoice


class DemoStopped(DpagentError):
    """The demo was stopped before its end."""

    exit_code = ExitCode.INTERRUPTED


def demo(
    devices: Annotated[int | None, typer.Option(help="Agents to run.", show_default="5; mnist: 10")] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds.", show_default="40; mnist: 100; your own data: 60"),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="ε of the job, for each record.", show_default="4; mnist: 2"),
    ] = None,
    delta: Annotated[float, typer.Option(help="δ of the job.")] = 1e-5,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="digits (bundled with scikit-learn) or mnist.", show_default="digits, or --data-dir"
        ),
    ] = None,
    data_dir: arguments.DataDirOption = None,
    model: arguments.ModelOption = None,
    test_data: arguments.TestDataOption = None,
    test_share: arguments.TestShareOption = None,
    split: arguments.SplitOption = arguments.Split.IID,
    alpha: arguments.AlphaOption = 0.5,
    classes_per_device: arguments.ClassesPerDeviceOption = 2,
    kind: reading.KindOption = reading.Kind.AUTO,
    classes: reading.ClassesOption = None,
    shape: reading.ShapeOption = None,
    size: reading.SizeOption = None,
    mode: reading.ModeOption = None,
    label: reading.LabelOption = None,
    features: reading.FeaturesOption = None,
    offset: reading.OffsetOption = None,
    scale: reading.ScaleOption = None,
    window: reading.WindowOption = None,
    stride: reading.StrideOption = None,
    group: reading.GroupOption = None,
    mixed: reading.MixedOption = None,
    delimiter: reading.DelimiterOption = None,
    no_header: reading.NoHeaderOption = False,
    schedule: arguments.ScheduleOption = ScheduleKind.INCREMENTING,
    step: arguments.StepOption = 0.3,
    clip_norm: arguments.ClipNormOption = None,
    learning_rate: arguments.LearningRateOption = None,
    sampling_rate: arguments.SamplingRateOption = None,
    clipping: arguments.ClippingOption = arguments.ClippingKind.WHOLE,
    cap: arguments.CapOption = None,
    cap_at: arguments.CapAtOption = "coordinator",
    engine: arguments.EngineOption = arguments.EngineChoice.AUTO,
    baseline: arguments.BaselineOption = True,
    seed: arguments.SeedOption = 0,
    broker: arguments.BrokerOption = "auto",
    broker_port: arguments.BrokerPortOption = 0,
    mqtt_username: arguments.MqttUsernameOption = None,
    mqtt_password_file: arguments.MqttPasswordFileOption = None,
    jitter_window: arguments.JitterWindowOption = None,
    state_dir: arguments.StateDirOption = None,
    json_file: arguments.JsonOption = None,
    report: arguments.ReportOption = None,
) -> None:
    """Train a whole fleet privately on this machine: broker, coordinator and agents.

    On handwritten digits, MNIST, or data of your own (--data-dir). The programs,
    messages and databases are those of a real deployment; each agent has a state
    directory of its own. Programs that die are started again. Everything started is
    stopped at the end, whatever happens.
    """
    from cli.data.wording import told_as_options
    from simulation.choices import Asked
    from simulation.fleet import prepare_run, run_demo
    from simulation.presets import preset_of

    started_at = time.monotonic()
    _check_choices(dataset, data_dir, test_data, test_share, cap, cap_at, clipping)
    settings = None
    if data_dir is not None:
        settings = reading.dataset_settings(
            data_dir.absolute(), kind=reading.Kind.IDX if dataset == "mnist" else kind, classes=classes,
            half=reading.Half.TRAIN, shape=shape, size=size, mode=mode, label=label, features=features,
            offset=offset, scale=scale, window=window, stride=stride, group=group, mixed=mixed,
            delimiter=delimiter, no_header=no_header,
        )  # fmt: skip
    known = dataset or (None if settings is not None else "digits")
    asked = Asked(
        data=_data_choice(known, settings, test_data, test_share, split.value, alpha, classes_per_device),
        model=None if model is None else _absolute(model),
        devices=_given(devices, lambda value: require_count("--devices", value, maximum=200)),
        rounds=_given(rounds, lambda value: require_count("--rounds", value, maximum=5000)),
        epsilon=_given(epsilon, lambda value: require_positive("--epsilon", value, maximum=1000)),
        delta=require_between("--delta", delta, 0, 1, low_open=True, high_open=True),
        schedule=schedule.value,
        step=require_between("--step", step, 0, 0.99),
        sampling_rate=_given(
            sampling_rate, lambda value: require_between("--sampling-rate", value, 0, 1, low_open=True)
        ),
        clip_norm=_given(clip_norm, lambda value: require_between("--clip-norm", value, 1e-6, 1e6)),
        learning_rate=_given(
            learning_rate, lambda value: require_positive("--learning-rate", value, maximum=1000)
        ),
        clipping=clipping.value,
        cap=cap,
        cap_at=cap_at,
        engine=engine.value,
        jitter_window_s=_given(
            jitter_window, lambda value: require_between("--jitter-window", value, 0, 3600)
        ),
        seed=require_count("--seed", seed, minimum=0),
        baseline=baseline,
    )
    require_count("--broker-port", broker_port, minimum=0, maximum=65_535)
    root = state_dir or Path("dpagent-demo") / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    if any(character < " " for character in str(root)):
        raise typer.BadParameter("control characters in a path.", param_hint="--state-dir")
    _check_outputs(json_file, report, root)

    def stopped(_number: int, _frame: object) -> NoReturn:
        raise DemoStopped(
            f"Stopped. Everything was shut down; to go on, give the same options and --state-dir {root}"
        )

    signal.signal(signal.SIGINT, stopped)
    signal.signal(signal.SIGTERM, stopped)
    with told_as_options():
        prepared = prepare_run(asked, preset_of(known, model, epsilon), root)
    record = run_demo(
        prepared, root, broker=broker, broker_port=broker_port, mqtt_username=mqtt_username,
        mqtt_password_file=mqtt_password_file, started_at=started_at,
        command=_command_line(root),
    )  # fmt: skip
    from cli.demo.summary import print_summary
    from simulation.collection import as_json
    from simulation.report.page import write_report

    results = as_json(record)
    page = write_report(record, report or root / "report")
    if json_file is not None:
        write_json(json_file, results)
    if json_file is None or str(json_file) != "-":
        print_summary(results)
        typer.echo(f"Report: {page}")
    broken = [budget.device for budget in record.budgets if not budget.verified]
    if broken:
        raise LedgerError(f"The ledgers of devices {broken} do not verify; see `dpagent budget verify`.")


def _check_choices(
    dataset: str | None,
    data_dir: Path | None,
    test_data: Path | None,
    test_share: float | None,
    cap: str | None,
    cap_at: str,
    clipping: arguments.ClippingKind,
) -> None:
    """Refuse words that are none of the choices, and options that exclude each other."""
    for name, value, choices in (
        ("--dataset", dataset, ("digits", "mnist")),
        ("--cap", cap, ("clamp", "none")),
        ("--cap-at", cap_at, ("coordinator", "device")),
    ):
        if value is not None and value not in choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}.", param_hint=name)
    if dataset == "digits" and data_dir is not None:
        raise typer.BadParameter(
            "the digits are bundled. Leave out --dataset to train on --data-dir.", param_hint="--dataset"
        )
    if dataset == "mnist" and data_dir is None:
        raise ConfigurationError("--dataset mnist needs --data-dir, the directory of the MNIST IDX files.")
    if data_dir is None and (test_data is not None or test_share is not None):
        raise typer.BadParameter("goes with --data-dir.", param_hint="--test-data, --test-share")
    if test_data is not None and test_share is not None:
        raise typer.BadParameter("give one of them.", param_hint="--test-data, --test-share")
    if test_share is not None:
        require_between("--test-share", test_share, 0, 0.9, low_open=True)
    if cap_at == "device" and clipping != arguments.ClippingKind.WHOLE:
        raise typer.BadParameter(
            f"a cap on the device knows one clip norm; give --clipping whole, not {clipping}.",
            param_hint="--cap-at",
        )


def _command_line(root: Path) -> str:
    """What was typed; with the state directory, if it was left to us."""
    words = ["dpagent", *sys.argv[1:]]
    named = any(word == "--state-dir" or word.startswith("--state-dir=") for word in words)
    return shlex.join(words if named else [*words, "--state-dir", str(root)])


def _check_outputs(json_file: Path | None, report: Path | None, root: Path) -> None:
    """Refuse what could not be written in the end, before anything is trained."""
    if (json_file is not None and str(json_file) != "-") and (
        json_file.is_dir() or not os.access(json_file.absolute().parent, os.W_OK)
    ):
        raise ConfigurationError(f"--json {json_file}: give a file in a directory that can be written.")
    for option, directory in (("--state-dir", root), ("--report", report)):
        if directory is None:
            continue
        place = directory.absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise ConfigurationError(f"{option} {directory}: give a directory that can be written.")


def _data_choice(
    known: str | None,
    settings: DatasetSettings | None,
    test_data: Path | None,
    test_share: float | None,
    split: Any,
    alpha: float,
    classes_per_device: int,
) -> DataChoice:
    from simulation.data.source import data_name
    from simulation.settings import DataChoice

    train = None if settings is None else settings.model_dump(mode="json", exclude_unset=True)
    test = None
    if train is not None and test_data is not None:
        test = train | {"path": str(test_data.absolute()), "half": "test"}
    return DataChoice(
        name=known or data_name(Path(train["path"]) if train else Path()),
        train=train,
        test=test,
        test_share=test_share,
        split=split,
        alpha=require_between("--alpha", alpha, 1e-3, 1e6),
        classes_per_device=require_count("--classes-per-device", classes_per_device),
    )


def _absolute(model: str) -> str:
    """A model file by its whole path, so that a run that goes on elsewhere finds it."""
    from dpagent.learning.model_files import is_model_file

    return str(Path(model).absolute()) if is_model_file(model) else model


def _given(value: Any, check: Any) -> Any:
    """``value`` checked, unless it was not given."""
    return None if value is None else check(value)
