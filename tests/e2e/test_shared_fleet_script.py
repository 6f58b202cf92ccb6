"""The script of docs/scale.md, as it stands there: a whole fleet on PostgreSQL and two brokers, and a leader
that is killed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokers import find_mosquitto, reserved_port

from benchmarks.postgresql_server import find_program

SCRIPT = Path(__file__).parents[2] / "docs" / "scale" / "fleet.sh"

pytestmark = pytest.mark.slow


@pytest.fixture
def directory() -> Iterator[Path]:
    """One that the database's user can reach."""
    made = Path(tempfile.mkdtemp(prefix="dpagent-scale-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def test_the_job_of_the_script_goes_on_when_its_leader_is_killed(directory: Path) -> None:
    if find_program("initdb") is None or find_mosquitto() is None:
        pytest.skip("PostgreSQL or Mosquitto is not installed")
    pytest.importorskip("psycopg")
    ports = [reserved_port() for _ in range(3)]
    command = directory / "dpagent"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m cli.main "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {
        "DPAGENT": str(command), "PYTHON": sys.executable, "BOARDS": "2", "ROUNDS": "3",
        "PYTHONPATH": str(SCRIPT.parents[2]), "DATABASE_PORT": str(ports[0].getsockname()[1]),
        "BROKER_PORT": str(ports[1].getsockname()[1]),
        "SECOND_BROKER_PORT": str(ports[2].getsockname()[1]),
    }  # fmt: skip
    result = subprocess.run(
        [SCRIPT, directory / "fleet"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    for port in ports:
        port.close()
    assert result.returncode == 0, result.stderr[-2_000:]
    assert "killed coordinator-1" in result.stdout
    assert "finished, 3 of 3 rounds started" in result.stdout
    rounds = [line.split() for line in result.stdout.splitlines() if line[:1].isdigit()]
    assert [line[3] for line in rounds] == ["32"] * 3, "each round has all fragments of both boards"
    counted = {name: int(number) for name, number in re.findall(r"(\w+) \((\d+) fragments\)", result.stdout)}
    assert counted["one"] + counted["two"] == counted["three"] + counted["four"] == 48, "half at each broker"
