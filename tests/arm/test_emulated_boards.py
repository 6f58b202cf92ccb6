"""The agent on emulated 64-bit ARM boards: jobs of every method with coordinator and broker on this machine,
and the tests of engines, samplers and ledger on each processor.

They need the root that `make arm-root` makes, and are skipped without it. Nothing about time, power or memory
follows from an emulator.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker
from children import Child
from fleets import run_coordinator, write_agent, write_fleet

from agent.audit import verify
from agent.heads import second_head_beside
from coordinator.keys import load_signer

HERE = Path(__file__).parents[2]
ROOT = Path(os.environ.get("ARM_ROOT", HERE / "build" / "arm64"))
ENTER = HERE / "packaging" / "arm" / "enter"
CPUS = ("cortex-a53", "cortex-a72", "cortex-a76")
TESTS = ("tests/learning/training", "tests/privacy/noise", "tests/agent/test_ledger.py")
MEMORY = "not memory and not mib and not bytes and not small"
"""Tests that measure memory find QEMU's too."""
JOB_S = 900.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3_600),
    pytest.mark.skipif(not (ROOT / "opt/dpagent/bin/dpagent").exists(), reason="no root: make arm-root"),
]

METHODS: dict[str, dict[str, Any]] = {
    "dp-sgd": {"privacy": {"method": "dp-sgd"}},
    "incrementing": {"privacy": {"method": "incrementing", "schedule": {"kind": "incrementing"}}},
    "ldp-fl": {
        "privacy": {"method": "ldp-fl", "epsilon": 30.0, "sampling_rate": 0.5}, "cap": {"kind": "none"},
        "optimiser": {"learning_rate": 1.0, "momentum": 0.0},
    },
    "central": {"privacy": {"method": "central"}, "cap": {"kind": "none"}},
}  # fmt: skip


def on_board(cpu: str, *command: str | Path) -> list[str]:
    """A command on the emulated board."""
    return ["env", f"QEMU_CPU={cpu}", str(ENTER), str(ROOT), *map(str, command)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cpu", CPUS)
def test_a_job_of_each_method_ends_well_on_each_processor(
    tmp_path: Path, mosquitto: Broker, cpu: str, method: str
) -> None:
    fleet = f"arm-{method}-{cpu[-3:]}"
    changes = METHODS[method]
    file = write_fleet(
        tmp_path / "coordinator", mosquitto, fleet=fleet, devices=1, rounds=2,
        **{**changes, "round": {"deadline_s": 600.0, "compute_slot_s": 5.0, "jitter_window_s": 0.5}},
    )  # fmt: skip
    key = load_signer(tmp_path / "coordinator" / "keys", fleet).public_key
    trusting = {} if method != "central" else {
        "budget": {"coordinator": {"epsilon": 40.0, "delta": 1e-3}},
        "limits": {"methods": ["central"], "trust": ["coordinator"]},
    }  # fmt: skip
    board = write_agent(
        tmp_path / "board", mosquitto, key, fleet=fleet, profile="auto",
        **{"budget": {"epsilon": 40.0}, **trusting},
    )  # fmt: skip
    command = on_board(cpu, "/opt/dpagent/bin/dpagent", "run", "--config", board)
    with run_coordinator(file) as coordinator, Child(command, board.with_suffix(".log")) as agent:
        assert coordinator.wait(JOB_S) == 0, coordinator.said()[-2_000:] + agent.said()[-2_000:]
        said = agent.said()
        agent.stop()
    assert "board profile generic-arm64" in said
    state = board.with_name("state")
    assert verify(state, second_head_beside(state)).charges == 2
    status = (tmp_path / "coordinator" / "state" / "jobs" / "first" / "model.onnx").stat()
    assert status.st_size > 0


@pytest.mark.parametrize("cpu", CPUS)
def test_engines_samplers_and_ledger_keep_their_promises_on_each_processor(cpu: str) -> None:
    command = on_board(
        cpu, "/bin/sh", "-c",
        "cd /opt/source && exec /opt/dpagent/bin/python -m pytest -q -p no:cacheprovider --timeout 1800 "
        f"-k '{MEMORY}' {' '.join(TESTS)}",
    )  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3_500, check=False)
    assert ended.returncode == 0, ended.stdout[-4_000:] + ended.stderr[-1_000:]


def test_the_board_is_seen_as_what_it_is() -> None:
    found = subprocess.run(
        on_board("cortex-a72", "/opt/dpagent/bin/dpagent", "profiles", "detect"),
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "architecture  aarch64" in found.stdout
    assert "generic-arm64" in found.stdout
