"""Runs a demo: broker, coordinator, agents and the noiseless baseline, from start to record."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from cli.demo.baseline import read_baseline
from cli.demo.broker import BrokerAddress, BrokerChild, choose_broker, wait_until_ready
from cli.demo.choices import Asked, Choice, choose, choose_model, facts_of, model_in_words
from cli.demo.collect import Observer, collect
from cli.demo.configurations import minimum_devices, write_configurations
from cli.demo.layout import Layout
from cli.demo.options import DemoOptions, form_of_run
from cli.demo.presets import Preset
from cli.demo.progress import Progress
from cli.demo.record import DemoRecord
from cli.demo.shards import deal, is_prepared, prepare_data, write_model
from cli.demo.source import Source, open_source
from cli.demo.supervisor import Supervisor, python_module
from cli.demo.timing import RoundTimes
from dpagent.errors import BrokerError, PlanError
from dpagent.learning import check_fits
from dpagent.storage import StateDirectory

_LOOK_S: Final = 0.3
_SETTLE_S: Final = 3.0
"""After the last round: time for the last receipts to reach the devices."""
_BASELINE_SHARE: Final = 0.5
"""The baseline may go on for this part of the run's time after its end."""
_BASELINE_LEAST_S: Final = 15.0
_WORTH_SAYING_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """What is settled before anything is written or started; without a source, a run goes on."""

    choice: Choice
    source: Source | None


def prepare_run(asked: Asked, preset: Preset, root: Path) -> PreparedRun:
    """Open the data, choose the model and settle the rest, and refuse what cannot be run.

    Args:
        asked: The command line.
        preset: What to start from.
        root: The demo's state directory, new or of the same run.

    Raises:
        DpagentError: It cannot be run; nothing was written.
    """
    layout = Layout(root, 0)
    form = form_of_run(root)
    source = None
    if form is None or not is_prepared(layout):
        source = open_source(asked.data, asked.seed)
        form = source.form
    name, spec = choose_model(asked.model or preset.model or None, form, layout)
    if source is not None:
        check_fits(source.train, spec)
    choice = choose(asked, preset, form, name, spec)
    choice.options.require_match(root)
    if source is not None:
        deal(choice.options, source)
    return PreparedRun(choice, source)


def run_demo(
    prepared: PreparedRun,
    root: Path,
    *,
    broker: str,
    broker_port: int,
    mqtt_username: str | None,
    mqtt_password_file: Path | None,
    started_at: float,
) -> DemoRecord:
    """Run to the end.

    Args:
        prepared: What to run.
        root: The demo's state directory, new or of the same run.
        broker: As ``--broker``.
        broker_port: As ``--broker-port``.
        mqtt_username: For a broker that runs already.
        mqtt_password_file: For a broker that runs already.
        started_at: ``time.monotonic()`` when the command began.

    Raises:
        DpagentError: It cannot run; everything that was started is stopped.
    """
    console = Console(stderr=True)
    choice = prepared.choice
    options, spec = choice.options, choice.spec
    layout = Layout(root, options.devices)
    options.save(root)
    with StateDirectory(root):
        write_model(options, layout, spec)
        _say_what_is_trained(prepared, layout, console)
        prepare_data(options, layout, prepared.source)
        chosen = choose_broker(broker, root / "broker", broker_port, mqtt_username, mqtt_password_file)
        address = chosen if isinstance(chosen, BrokerAddress) else chosen.address
        times = write_configurations(options, layout, address)
        agents = [f"agent-{number:03d}" for number in range(1, options.devices + 1)]
        with Supervisor(layout.logs) as supervisor:
            _start_broker(chosen, supervisor)
            _say_where(options, times, address, root, console)
            supervisor.start(
                "coordinator",
                python_module("cli.main", "coordinator", "run", "--config", str(layout.fleet_file)),
                may_end=True,
            )
            for number, name in enumerate(agents, start=1):
                supervisor.start(
                    name, python_module("cli.main", "run", "--config", str(layout.agent_file(number)))
                )
            if options.baseline and len(read_baseline(layout.baseline_file)) < options.rounds:
                supervisor.start(
                    "baseline", python_module("cli.demo.baseline", str(root)), may_end=True, nice=19
                )
            _watch(options, layout, supervisor, console)
            peaks = [peak for peak in map(supervisor.peak_mib, agents) if peak is not None]
            facts: dict[str, Any] = {
                **facts_of(options, spec, choice.outlook),
                "broker": address.name,
                "baseline_history": read_baseline(layout.baseline_file),
                "seconds_total": time.monotonic() - started_at,
                "agent_peak_mib": max(peaks, default=None),
                "coordinator_peak_mib": supervisor.peak_mib("coordinator"),
                "restarts": supervisor.restarts,
                "model_file": str(layout.coordinator_state / "model.onnx"),
                "state_dir": str(root),
            }
        # Everybody has stopped and written its last counters.
        return collect(layout, facts)


def _say_what_is_trained(prepared: PreparedRun, layout: Layout, console: Console) -> None:
    """Data, model and settings, and what is to be expected of them."""
    choice = prepared.choice
    options, spec, form = choice.options, choice.spec, choice.options.form

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    shape = " × ".join(map(str, form.shape))
    say(
        f"Data: {options.data.name}, {form.train_records:,} records to train on and {form.test_records:,} to "
        f"test on, {shape}, {form.classes} classes; dealt to {options.devices} devices "
        f"{options.data.split_in_words}"
    )
    file = f"; written to {layout.model_file}" if layout.model_file.exists() else ""
    say(f"Model: {model_in_words(options, spec)}, {spec.parameter_count:,} parameters{file}")
    say(
        f"Settings: {options.rounds} rounds, ε = {options.epsilon:g}, δ = {options.delta:g}, sampling rate "
        f"{options.sampling_rate:g}, clip norm {options.clip_norm:g} ({options.clipping}), learning rate "
        f"{options.learning_rate:g}"
    )
    if prepared.source is not None:
        for remark in prepared.source.remarks(spec):
            say(f"Mind: {remark}")
    if (warning := facts_of(options, spec, choice.outlook)["warning"]) is not None:
        say(f"Mind: {warning}")


def _say_where(
    options: DemoOptions, times: RoundTimes, address: BrokerAddress, root: Path, console: Console
) -> None:
    text = f"{options.devices} agents train over {address.name} ({address.url}); state in {root}"
    if times.features_s > _WORTH_SAYING_S:
        text += (
            f". The first round takes about {times.features_s:.0f} s longer: each agent computes its "
            "features, once"
        )
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def _start_broker(chosen: BrokerChild | BrokerAddress, supervisor: Supervisor) -> None:
    if isinstance(chosen, BrokerAddress):
        wait_until_ready(chosen)
        return
    supervisor.start("broker", chosen.command)
    try:
        wait_until_ready(chosen.address)
    except BrokerError:
        supervisor.watch()  # A broker that died says more by its log.
        raise


def _watch(options: DemoOptions, layout: Layout, supervisor: Supervisor, console: Console) -> None:
    """Look after the programs and show how they do, until the job is done, and the baseline or its time."""
    observer = Observer(layout)
    began = time.monotonic()
    ended: float | None = None
    try:
        with Progress(options, console) as progress:
            while True:
                supervisor.watch()
                glimpse = observer.glimpse()
                progress.show(glimpse)
                if glimpse.declined > options.devices - minimum_devices(options):
                    raise PlanError(
                        f"{glimpse.declined} of {options.devices} devices declined to take part, so no "
                        f"round can close: {glimpse.reason}. See `dpagent budget show`; "
                        "a new --state-dir has new budgets."
                    )
                if supervisor.has_ended("coordinator"):
                    now = time.monotonic()
                    ended = ended or now
                    settled = glimpse.in_flight == 0 or now >= ended + _SETTLE_S
                    patience_s = max(_BASELINE_LEAST_S, _BASELINE_SHARE * (ended - began))
                    if settled and (_baseline_is_done(options, layout) or now >= ended + patience_s):
                        return
                time.sleep(_LOOK_S)
    finally:
        observer.close()


def _baseline_is_done(options: DemoOptions, layout: Layout) -> bool:
    return not options.baseline or len(read_baseline(layout.baseline_file)) >= options.rounds
