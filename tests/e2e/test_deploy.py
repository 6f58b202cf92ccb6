"""The commands of docs/deploy.md, as they stand there: five boards, a sixth for a stolen one, another job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from brokers import find_mosquitto, reserved_port
from fleets import digits

from coordinator.brokers.registry import BROKERS
from dpagent.learning.data.formats.npz import save_npz

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy.md"
STOLEN = """
for board in ../board-?; do
  device=$(openssl x509 -in $board/identity/device.crt -noout -subject | tr -cd 0-9a-f | tail -c 32)
  outcome=refuses
  dpagent doctor --config $board/agent.yaml > $board/doctor || true
  if grep -q "^ok *login" $board/doctor; then outcome="lets in"; fi
  echo "$outcome: $device"
done
echo "stolen: $LOST"
"""
_GRACE_S = 3.0
SOFTWARE = ("mosquitto", "rabbitmq", "nats")


def blocks(software: str) -> list[str]:
    """The commands for a broker: those that start it in the place of others."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^```sh\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    start = {each: next(block for block in found if f"broker-config {each} " in block) for each in SOFTWARE}
    others = [each for name, each in start.items() if name != "mosquitto"]
    return [
        start[software] if block == start["mosquitto"] else block for block in found if block not in others
    ]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the records of five boards."""
    commands = tmp_path / "bin"
    commands.mkdir()
    if (mosquitto := find_mosquitto()) is not None:
        (commands / "mosquitto").symlink_to(mosquitto)
    (commands / "dpagent").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m cli.main "$@"\n')
    (commands / "dpagent").chmod(0o755)
    for number in range(1, 6):
        save_npz(tmp_path / f"records-{number}.npz", digits(60 * number, 60 * number + 60))
    return tmp_path


def run(script: str, place: Path) -> int:
    """The exit code of commands; what they started ends here, however they did."""
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    with (place / "output").open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=place, stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, "PATH": path, "HOST": "127.0.0.1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    try:
        return shell.wait(800)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):  # All have ended.
                os.killpg(shell.pid, number)
                time.sleep(_GRACE_S)
        shell.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("software", SOFTWARE)
def test_the_commands_lead_from_nothing_to_a_fleet_and_through_a_theft(place: Path, software: str) -> None:
    if BROKERS[software].find() is None and not (place / "bin" / software).exists():
        pytest.skip(f"{software} is not installed")
    # In the end, whom the broker lets in.
    script = "set -eu\n" + "\n".join([*blocks(software), STOLEN])
    with reserved_port() as broker, reserved_port() as endpoint:
        script = script.replace("8883", str(broker.getsockname()[1]))
        script = script.replace("8884", str(endpoint.getsockname()[1]))
        code = run(script, place)
    said = (place / "output").read_text()
    assert code == 0, said[-3_000:]
    assert said.count("Connected to mqtts://127.0.0.1") == 6
    assert "5 members" in said
    assert re.search(r"^Job first .* finished, 2 of 2 rounds started", said, flags=re.MULTILINE)
    assert re.search(r"^Job next .* finished, 2 of 2 rounds started", said, flags=re.MULTILINE)
    assert said.count("Round 2: 5 of 5 take part.") == 2, "all boards can afford a second job"
    assert "Replaced by" in said
    assert "6 devices, " in said
    assert "Not in these figures" not in said
    assert "each signed by its device; all figures follow from them" in said
    (stolen,) = re.findall(r"^stolen: (\w+)$", said, flags=re.MULTILINE)
    assert re.findall(r"^refuses: (\w+)$", said, flags=re.MULTILINE) == [stolen]
    assert len(re.findall(r"^lets in: (\w+)$", said, flags=re.MULTILINE)) == 5
    logs = [(place / f"board-{number}/log").read_text() for number in range(1, 7)]
    assert all("has its tokens" in log for log in logs)
    assert len((place / "fleet/codes").read_text().split()) == 5
