"""Runs a demo: broker, coordinator, agents and the noiseless baseline, from start to record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from cli.demo.announcements import say_what_goes_on, say_what_is_trained, say_where
from cli.demo.next_steps import predict_commands
from cli.demo.progress import Progress
from dpagent.errors import BrokerError, PlanError
from dpagent.learning.data.formats.npz import open_npz
from dpagent.learning.models.description import find_model
from dpagent.learning.models.fitting import check_fits
from dpagent.storage import StateDirectory, write_atomically
from simulation.choices import Asked, Choice, choose, choose_model, facts_of
from simulation.collection import Observer, closed_rounds, collect
from simulation.data.shards import deal, is_prepared, prepare_data, write_model
from simulation.data.source import Source, open_source
from simulation.layout import Layout
from simulation.notes import RunNotes, look_of_data, read_notes
from simulation.presets import Preset
from simulation.programs.baseline import read_baseline
from simulation.programs.broker import BrokerAddress, BrokerChild, choose_broker, wait_until_ready
from simulation.programs.configurations import minimum_devices, write_configurations
from simulation.programs.supervisor import Supervisor, python_module
from simulation.record import DemoRecord
from simulation.settings import COMMAND_FILE, DemoOptions, form_of_run

_LOOK_S: Final = 0.3
_SETTLE_S: Final = 3.0
"""After the last round: time for the last receipts to reach the devices."""
_BASELINE_SHARE: Final = 0.5
"""The baseline may go on for this part of the run's time after its end."""
_BASELINE_LEAST_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """What is settled before anything is written or started; without a source, a run goes on."""

    choice: Choice
    source: Source | None
    notes: RunNotes
    changed: bool = False
    """Whether the data look otherwise than when the run began."""


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
    form, look = form_of_run(root), look_of_data(asked.data)
    source = None
    if form is None or not is_prepared(layout):
        wanted = asked.model or preset.model or None
        source = open_source(asked.data, asked.seed, None if wanted is None else find_model(wanted))
        form = source.form
    name, spec = choose_model(asked.model or preset.model or None, form, layout)
    if source is not None:
        check_fits(source.train, spec)
    choice = choose(asked, preset, form, name, spec)
    choice.options.require_match(root)
    if source is None:
        notes = read_notes(root)
        return PreparedRun(choice, None, notes, notes.data not in ("", look))
    deal(choice.options, source)
    notes = RunNotes(
        kind=source.train.origin.kind, columns=source.columns, remarks=tuple(source.remarks(spec)), data=look
    )
    return PreparedRun(choice, source, notes)


def run_demo(
    prepared: PreparedRun,
    root: Path,
    *,
    broker: str,
    broker_port: int,
    mqtt_username: str | None,
    mqtt_password_file: Path | None,
    started_at: float,
    command: str = "",
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
        command: The command line, kept for whoever wants to go on with the run.

    Raises:
        DpagentError: It cannot run; everything that was started is stopped.
    """
    console = Console(stderr=True)
    choice = prepared.choice
    options, spec = choice.options, choice.spec
    layout = Layout(root, options.devices)
    options.save(root)
    with StateDirectory(root):
        if prepared.source is None:
            closed = closed_rounds(layout)
            # The notes alone do not say it: a coordinator that lost its database begins anew.
            is_finished = prepared.notes.finished and closed >= options.rounds
            say_what_goes_on(prepared, layout, console, closed=closed, is_finished=is_finished)
            if is_finished:
                return collect(layout, _facts(prepared, layout, prepared.notes))
        else:
            prepared.notes.save(root)
            write_atomically(root / COMMAND_FILE, f"{command}\n".encode(errors="replace"), mode=0o600)
        write_model(options, layout, spec)
        say_what_is_trained(prepared, layout, console)
        prepare_data(options, layout, prepared.source)
        chosen = choose_broker(broker, root / "broker", broker_port, mqtt_username, mqtt_password_file)
        address = chosen if isinstance(chosen, BrokerAddress) else chosen.address
        times = write_configurations(options, layout, address)
        agents = [f"agent-{number:03d}" for number in range(1, options.devices + 1)]
        with Supervisor(layout.logs) as supervisor:
            finished = False
            try:
                _start_broker(chosen, supervisor)
                say_where(options, times, address, root, console)
                _start_programs(options, layout, agents, supervisor)
                _watch(options, layout, supervisor, console)
                finished = True
            finally:
                peaks = [peak for peak in map(supervisor.peak_mib, agents) if peak is not None]
                notes = prepared.notes.after_start(
                    broker=address.name,
                    seconds=time.monotonic() - started_at,
                    agent_peak_mib=max(peaks, default=None),
                    coordinator_peak_mib=supervisor.peak_mib("coordinator"),
                    restarts=supervisor.restarts,
                    finished=finished,
                )
                notes.save(root)
        # Everybody has stopped and written its last counters.
        return collect(layout, _facts(prepared, layout, notes))


def _start_programs(
    options: DemoOptions, layout: Layout, agents: Sequence[str], supervisor: Supervisor
) -> None:
    supervisor.start(
        "coordinator",
        python_module("cli.main", "coordinator", "run", "--config", str(layout.fleet_file)),
        may_end=True,
    )
    for number, name in enumerate(agents, start=1):
        supervisor.start(name, python_module("cli.main", "run", "--config", str(layout.agent_file(number))))
    if options.baseline and len(read_baseline(layout.baseline_file)) < options.rounds:
        supervisor.start(
            "baseline", python_module("simulation.programs.baseline", str(layout.root)), may_end=True, nice=19
        )


def _facts(prepared: PreparedRun, layout: Layout, notes: RunNotes) -> dict[str, Any]:
    """All fields of the record that are not in the databases of the programs."""
    choice, model = prepared.choice, layout.coordinator_state / "model.onnx"
    test = open_npz(layout.test_file)
    return {
        **facts_of(choice.options, choice.spec, choice.outlook),
        "broker": notes.broker,
        "baseline_history": read_baseline(layout.baseline_file),
        "seconds_total": notes.seconds,
        "agent_peak_mib": notes.agent_peak_mib,
        "coordinator_peak_mib": notes.coordinator_peak_mib,
        "restarts": notes.restarts,
        "remarks": notes.remarks,
        "guessing": int(test.class_counts().max()) / len(test),
        "test_file": str(layout.test_file),
        "predict": predict_commands(
            choice.options.data, notes.kind, notes.columns, model=model, test=layout.test_file
        ),
        "model_file": str(model),
        "state_dir": str(layout.root),
    }


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
    observer, before = Observer(layout), closed_rounds(layout)
    began = time.monotonic()
    ended: float | None = None
    try:
        with Progress(options, console, shown=before) as progress:
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
