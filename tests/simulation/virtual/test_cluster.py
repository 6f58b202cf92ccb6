"""``dpagent simulate --address`` on a cluster of two nodes, one of which is killed in a round."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from simulation.virtual.checkpoint import Checkpoint
from simulation.virtual.fleet import VirtualFleet
from simulation.virtual.settings import VirtualRequest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

DEVICES, ROUNDS, SEED = 120, 3, 77


def environment() -> dict[str, str]:
    paths = os.pathsep.join(sys.path)
    return os.environ | {
        "PYTHONPATH": paths,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


@pytest.fixture
def cluster() -> Iterator[tuple[subprocess.Popen[str], str, dict[str, str]]]:
    variables = environment()
    process = subprocess.Popen(
        [sys.executable, "-m", "ray_cluster"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables,
    )  # fmt: skip
    assert process.stdout is not None
    address = next(line for line in process.stdout if line.startswith("127.0.0.1:")).strip()
    yield process, address, variables
    process.communicate(timeout=60)


def test_a_node_that_is_killed_in_a_round_changes_no_bit(
    tmp_path: Path, cluster: tuple[subprocess.Popen[str], str, dict[str, str]]
) -> None:
    process, address, variables = cluster
    options = {"devices": DEVICES, "rounds": ROUNDS, "method": "central", "insecure_noise_seed": SEED}
    fleet = VirtualFleet(VirtualRequest.checked(options), tmp_path / "here")
    here = fleet.run_here()
    words = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    simulation = subprocess.Popen(
        [
            sys.executable, "-P", "-m", "cli.main", "simulate", *words, "--address", address,
            "--state-dir", str(tmp_path / "there"), "--json", str(tmp_path / "there.json"),
        ],
        stderr=subprocess.PIPE, text=True, env=variables,
    )  # fmt: skip
    assert simulation.stderr is not None
    assert process.stdin is not None
    assert process.stdout is not None
    said = []
    for line in simulation.stderr:
        said.append(line)
        if line.startswith("round 1/"):
            time.sleep(0.3)  # Round 2 is under way.
            process.stdin.write("kill\n")
            process.stdin.flush()
            assert process.stdout.readline() == "killed\n"
    simulation.stderr.close()
    assert simulation.wait(120) == 0, "".join(said)
    assert any("2 cores of 2 nodes" in line for line in said)
    there = Checkpoint.load(tmp_path / "there")
    assert there is not None
    assert fleet.checkpoint is not None
    assert there.model.weights.tobytes() == fleet.checkpoint.model.weights.tobytes()
    assert tuple(each.accuracy for each in there.rounds) == here.accuracy_history


def test_an_address_where_no_cluster_is_has_a_sentence(tmp_path: Path) -> None:
    found = subprocess.run(
        [
            sys.executable, "-P", "-m", "cli.main", "simulate", "--address", "127.0.0.1:9",
            "--state-dir", str(tmp_path / "run"),
        ],
        capture_output=True, text=True, env=environment(), timeout=120, check=False,
    )  # fmt: skip
    assert found.returncode == 11, found.stderr
    assert "--address 127.0.0.1:9: nothing answers there. Expected HOST:PORT" in found.stderr
    assert "Traceback" not in found.stderr
