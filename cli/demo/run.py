"""Runs a demo: broker, coordinator, agents and the noiseless baseline, from start to record."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from cli.demo.baseline import read_baseline
from cli.demo.broker import BrokerAddress, BrokerChild, choose_broker, wait_until_ready
from cli.demo.collect import Observer, collect
from cli.demo.layout import (
    Layout,
    minimum_devices,
    prepare_data,
    records_per_device,
    require_possible,
    write_configurations,
)
from cli.demo.options import DemoOptions
from cli.demo.progress import Progress
from cli.demo.record import DemoRecord
from cli.demo.supervisor import Supervisor, python_module
from dpagent.errors import BrokerError, PlanError
from dpagent.learning import built_in
from dpagent.storage import StateDirectory

_LOOK_S = 0.3
_SETTLE_S = 3.0
"""After the last round: time for the last receipts to reach the devices."""


def run_demo(
    options: DemoOptions,
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
        options: What to run.
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
    built_in(options.model)
    layout = Layout(root, options.devices)
    options.require_match(root)
    require_possible(options, layout)
    options.save(root)
    with StateDirectory(root):
        prepare_data(options, layout)
        chosen = choose_broker(broker, root / "broker", broker_port, mqtt_username, mqtt_password_file)
        address = chosen if isinstance(chosen, BrokerAddress) else chosen.address
        write_configurations(options, layout, address)
        agents = [f"agent-{number:03d}" for number in range(1, options.devices + 1)]
        with Supervisor(layout.logs) as supervisor:
            _start_broker(chosen, supervisor)
            console.print(
                f"{options.devices} agents train {options.model} on {options.dataset} over {address.name} "
                f"({address.url}); state in {root}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
            supervisor.start(
                "coordinator",
                python_module("cli.main", "coordinator", "run", "--config", str(layout.fleet_file)),
                may_end=True,
            )
            for number, name in enumerate(agents, start=1):
                supervisor.start(
                    name, python_module("cli.main", "run", "--config", str(layout.agent_file(number)))
                )
            if len(read_baseline(layout.baseline_file)) < options.rounds:
                supervisor.start(
                    "baseline", python_module("cli.demo.baseline", str(root)), may_end=True, nice=10
                )
            _watch(options, layout, supervisor, console)
            peaks = [peak for peak in map(supervisor.peak_mib, agents) if peak is not None]
            facts = {
                "dataset": options.dataset,
                "model": options.model,
                "parameters": built_in(options.model).parameter_count,
                "devices": options.devices,
                "rounds": options.rounds,
                "records_per_device": float(records_per_device(options)),
                "schedule": options.schedule,
                "sampling_rate": options.sampling_rate,
                "clip_norm": options.clip_norm,
                "cap": "none" if options.cap == "none" else f"{options.cap} at the {options.cap_at}",
                "broker": address.name,
                "epsilon_target": options.epsilon,
                "delta": options.delta,
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
    """Look after the programs and show how they do, until the job and the baseline are done."""
    observer = Observer(layout)
    settled_at: float | None = None
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
                baseline_done = len(read_baseline(layout.baseline_file)) >= options.rounds
                if supervisor.has_ended("coordinator"):
                    settled_at = settled_at or time.monotonic() + _SETTLE_S
                    settled = glimpse.in_flight == 0 or time.monotonic() >= settled_at
                    if settled and baseline_done:
                        return
                time.sleep(_LOOK_S)
    finally:
        observer.close()
