"""``dpagent mixer`` as a command: its key, bad settings, Ctrl-C, a second start."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from brokers import wait_until
from children import PATIENCE_S
from commands import command_line, dpagent
from mixers import key_of, write_mixer

from dpagent.protocol.signing import Signer, new_signing_secret

KEY = Signer(new_signing_secret(), "test").public_key


def test_the_key_is_the_same_each_time(tmp_path: Path) -> None:
    file = write_mixer(tmp_path, None, "test", KEY)
    first, second = (dpagent("mixer", "key", "--config", str(file)) for _ in range(2))
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout == key_of(file) + "\n"
    assert (tmp_path / "mixer-keys" / "mixer.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"coordinator_key": "abc"}, "coordinator_key"),
        ({"batch": 3}, "least"),
        ({"colour": "green"}, "colour"),
        ({"least": 1}, "least"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    result = dpagent("mixer", "run", "--config", str(write_mixer(tmp_path, None, "test", KEY, **changes)))
    assert result.returncode == 3
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_damaged_key_is_named(tmp_path: Path) -> None:
    file = write_mixer(tmp_path, None, "test", KEY)
    key_of(file)
    (tmp_path / "mixer-keys" / "mixer.key").write_bytes(b"short")
    result = dpagent("mixer", "key", "--config", str(file))
    assert result.returncode == 8
    assert "mixer.key" in result.stderr


@pytest.mark.heavy
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_without_a_broker_it_waits_and_ends_by_a_signal(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    file = write_mixer(tmp_path, None, "test", KEY, mqtt={"url": "mqtt://127.0.0.1:1"})
    log = tmp_path / "log"
    with log.open("w") as out:
        command = command_line("mixer", "run", "--config", str(file))
        with subprocess.Popen(command, stderr=out, stdout=out) as process:
            wait_until(lambda: "reconnecting" in log.read_text(), "an attempt to connect")
            second = dpagent("mixer", "run", "--config", str(file))
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == code
    assert second.returncode == 7
    assert "in use" in second.stderr
