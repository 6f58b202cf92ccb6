"""Memory of the idle agent, and its start-up time.

Resident memory (VmRSS) of a process that has imported ``agent.daemon`` and done nothing else; then of
``dpagent run`` as installed, connected to a real broker (Mosquitto where it is installed, else the
embedded one) on loopback and idle for three seconds, with a digits shard of 287 records. It is compared
with a budget of 64 MiB. The start-up time is from the start of the process to the broker's
acceptance, median of 3. The import of ``agent.ledger``, which loads the accounting and
numpy, is timed in fresh processes (median of 5).

Limits: VmRSS includes shared pages; training adds to it, see the peak of ``demo_mnist`` and
``frameworks``. A board's processor is slower than this one.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.figures import BenchmarkError, Figure
from benchmarks.programs import ROOT, environment, memory_mib, python, run_json, stop
from benchmarks.simulation import digits_settings
from simulation.data.shards import prepare_data
from simulation.layout import Layout
from simulation.programs.broker import BrokerChild, choose_broker, wait_until_ready
from simulation.programs.configurations import write_configurations
from simulation.programs.ledgers import begin_ledgers
from simulation.programs.supervisor import Supervisor
from simulation.request import BrokerRequest

_BUDGET_MIB = 64.0
_STARTS = 3
_IDLE_S = 3.0
_CONNECT_S = 30.0
# By itself, so that nothing of the benchmarks is weighed.
_IMPORT = """
import agent.daemon
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmRSS"].split()[0]) / 1024)
"""
_IMPORT_LEDGER = """
import json, time
start = time.perf_counter()
import agent.ledger
taken = time.perf_counter() - start
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([taken, int(status["VmRSS"].split()[0]) / 1024]))
"""
_IMPORTS = 5


def run() -> list[Figure]:
    """Import, then run an agent three times against a broker."""
    imported = float(run_json(python("-c", _IMPORT), timeout_s=60))
    ledger = [run_json(python("-c", _IMPORT_LEDGER), timeout_s=60) for _ in range(_IMPORTS)]
    taken, weight = (statistics.median(column) for column in zip(*ledger, strict=True))
    with tempfile.TemporaryDirectory(prefix="dpagent-bench-") as name:
        starts, idle = _run_agents(Path(name))
    return [
        Figure("resident after `import agent.daemon`", imported, "MiB", *_against_budget(imported)),
        Figure("resident, `dpagent run` connected and idle", idle, "MiB", *_against_budget(idle)),
        Figure("time of `import agent.ledger`", taken, "s"),
        Figure("resident after `import agent.ledger`", weight, "MiB"),
        Figure("start of `dpagent run` until the broker has accepted it", starts, "s"),
    ]


def _against_budget(mib: float) -> tuple[str, float]:
    return f"budget: {_BUDGET_MIB:g} MiB", mib / _BUDGET_MIB


def _run_agents(directory: Path) -> tuple[float, float]:
    """Median seconds until the connection, and median resident memory once idle."""
    settings = digits_settings(1.0)
    layout = Layout(directory)
    prepare_data(settings, layout)
    with (
        choose_broker(BrokerRequest(), directory / "broker") as broker,
        Supervisor(layout.logs) as supervisor,
    ):
        assert isinstance(broker, BrokerChild)  # `auto` starts one
        write_configurations(settings, layout, broker.address)
        begin_ledgers(layout, _STARTS)
        supervisor.start("broker", broker.command)
        wait_until_ready(broker.address)
        measured = [_run_agent(layout.agent_file(number), directory) for number in range(1, _STARTS + 1)]
    starts, idle = zip(*measured, strict=True)
    return statistics.median(starts), statistics.median(idle)


def _run_agent(configuration: Path, directory: Path) -> tuple[float, float]:
    log = directory / "agent.log"
    started_at = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            python("-m", "cli.main", "run", "--config", str(configuration)),
            cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        while "connected to" not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > started_at + _CONNECT_S:
                raise BenchmarkError(f"The agent did not connect; it said: {log.read_text(errors='replace')}")
            time.sleep(0.002)
        connected_s = time.monotonic() - started_at
        time.sleep(_IDLE_S)
        if process.poll() is not None:
            name = signal.Signals(-process.returncode).name if process.returncode < 0 else process.returncode
            raise BenchmarkError(f"The agent ended while it was idle ({name}).")
        return connected_s, memory_mib("VmRSS", process.pid)
    finally:
        stop(process)
