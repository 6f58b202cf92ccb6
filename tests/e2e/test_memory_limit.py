"""A board of 512 MiB: the agent and all that it starts run a job in 136 MiB, by the kernel's own limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from children import PATIENCE_S

from agent.audit import verify
from benchmarks.agent_memory import await_said, prepared_fleet, tls_broker, write_part
from benchmarks.demo import mnist_directory
from benchmarks.figures import Skipped
from coordinator.brokers.mosquitto import find_mosquitto
from simulation.programs.broker import wait_until_ready
from simulation.programs.supervisor import Supervisor, python_module

pytestmark = [pytest.mark.slow, pytest.mark.heavy]

LIMIT = 136 << 20
ROUNDS = 3
JOB_S = 600.0


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with the limit, of whichever version the system has."""
    root = Path("/sys/fs/cgroup")
    old = (root / "memory").is_dir()
    place = root / ("memory" if old else "") / f"dpagent-{os.getpid()}"
    try:
        place.mkdir()
        (place / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(LIMIT))
    except OSError as error:
        with contextlib.suppress(OSError):
            place.rmdir()
        pytest.skip(f"no memory can be limited here: {error.strerror}")
    yield place
    for process in map(int, (place / "cgroup.procs").read_text().split()):
        os.kill(process, signal.SIGKILL)
    place.rmdir()


def test_a_small_board_completes_a_job_under_a_real_limit(group: Path, disk: Path) -> None:
    """Where onnxruntime does not fit beside the rest, its trial ends, and nothing else."""
    if find_mosquitto() is None:
        pytest.skip("Mosquitto is not installed")
    try:
        write_part(mnist_directory(), disk / "mnist")
    except Skipped as error:
        pytest.skip(str(error))
    with tls_broker(disk / "broker") as (command, address), Supervisor(disk / "logs") as supervisor:
        layout = prepared_fleet(disk, disk / "mnist", "mnist-cnn", ROUNDS, address)
        file, log = layout.agent_file(1), disk / "agent.log"
        settings = yaml.safe_load(file.read_text()) | {"profile": "raspberry-pi-zero-2-w"}
        file.write_text(yaml.safe_dump(settings))
        supervisor.start("broker", command)
        wait_until_ready(address)
        inside = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        agent = [sys.executable, "-m", "cli.main", "run", "--config", str(file)]
        with log.open("wb") as stream:
            process = subprocess.Popen(["sh", "-c", inside, "sh", *agent], stdout=stream, stderr=stream)
        try:
            program = python_module("cli.main", "coordinator", "run", "--config", str(layout.fleet_file))
            supervisor.start("coordinator", program, may_end=True)
            await_said("is finished", log, process, JOB_S)
        finally:
            process.terminate()
            code = process.wait(PATIENCE_S)
    assert code == 0
    said = log.read_text()
    assert f"round {ROUNDS} of {ROUNDS}: spooled" in said
    assert "no record counts" not in said
    state = file.parent / "state"
    assert verify(state, Path(f"{state}.head")).charges == ROUNDS
