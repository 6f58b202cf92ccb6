"""``dpagent init``: from a few answers to a board that starts; ``dpagent config``: what its file says."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import TIMEOUT_S, Result, dpagent
from fleets import agent_values, fleet_values

from agent.audit import audit
from agent.settings import load_agent_settings
from dpagent.errors import ExitCode
from dpagent.protocol.signing import Signer

KEY = Signer(bytes(range(32)), "testers").public_key


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.npz"
    np.savez(file, inputs=np.ones((60, 4), np.float32), labels=np.arange(60) % 3)
    return file


def begun(config: Path, data: Path, **options: str) -> Result:
    given = {"fleet": "meadow", "key": KEY, "broker": "mqtts://broker.example", "epsilon": "6"} | options
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    return dpagent("init", "--config", config, "--data", data, *words)


def test_the_answers_become_a_file_that_the_agent_takes_and_a_ledger(tmp_path: Path, data: Path) -> None:
    config = tmp_path / "board" / "agent.yaml"
    config.parent.mkdir()
    result = begun(config, data, username="board", password_file=str(tmp_path / "password"))
    assert (result.returncode, result.stderr) == (0, "")
    assert f"dpagent doctor --config {config}" in result.stdout
    settings = load_agent_settings(config)
    assert (settings.fleet, settings.coordinator_key, settings.mqtt.username) == ("meadow", KEY, "board")
    assert (settings.data.classes, settings.data.shape, settings.data.max_records) == (3, [4], 200)
    assert (settings.budget.epsilon, settings.budget.delta) == (6.0, 1e-5)
    assert settings.state_dir == config.parent / "state"
    assert [entry.record.dataset for entry in audit(settings.state_dir).entries] == ["my-records"]
    assert config.read_text().count("\n# ") >= 6, "each part says what it is"
    found = dpagent("doctor", "--config", config, "--no-broker")
    assert (found.returncode, found.stdout.splitlines()[-1]) == (0, "Nothing is wrong.")


def test_below_etc_the_state_is_where_the_service_may_write() -> None:
    from cli.board_file import default_state

    assert default_state(Path("/etc/dpagent/agent.yaml")) == Path("/var/lib/dpagent/state")
    assert default_state(Path("agent.yaml")) == Path("state")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key": "AAAA"}, "coordinator_key"),
        ({"broker": "broker.example"}, "mqtt.url"),
        ({"epsilon": "-1"}, "--epsilon"),
        ({"fleet": "a/b"}, "fleet"),
        ({"profile": "cray-1"}, "profile is 'cray-1'"),
        ({"delta": "2"}, "--delta"),
    ],
)
def test_an_answer_that_cannot_be_used_is_named_and_nothing_is_written(
    tmp_path: Path, data: Path, options: dict[str, str], words: str
) -> None:
    result = begun(tmp_path / "agent.yaml", data, **options)
    assert result.returncode in (ExitCode.USAGE, ExitCode.CONFIGURATION, ExitCode.PLAN)
    assert words in result.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["data.npz"]


def test_answers_and_variables_that_do_not_go_together_are_said(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPAGENT_LIMITS__TRUST", "[coordinator]")
    result = begun(tmp_path / "agent.yaml", data)
    said = "dpagent: limits.trust has coordinator, and budget.coordinator is not set"
    assert (result.returncode, result.stderr.startswith(said)) == (ExitCode.USAGE, True), result.stderr
    assert list(tmp_path.iterdir()) == [data]


def test_data_that_cannot_be_read_leave_nothing_behind(tmp_path: Path) -> None:
    result = begun(tmp_path / "agent.yaml", tmp_path / "nothing")
    assert result.returncode == ExitCode.DATA
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_never_touched(tmp_path: Path, data: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text("mine\n")
    assert begun(config, data).returncode == ExitCode.USAGE
    assert config.read_text() == "mine\n"
    config.unlink()
    assert begun(config, data).returncode == 0
    config.unlink()
    again = begun(config, data)
    assert again.returncode == ExitCode.LEDGER, "the ledger of these records"


def test_without_a_terminal_what_is_missing_is_named(tmp_path: Path, data: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "cli.main", "init", "--config", tmp_path / "agent.yaml", "--data", data],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert result.returncode == ExitCode.USAGE
    assert "Missing: --fleet, --key, --broker, --epsilon" in result.stderr


def test_on_a_terminal_what_is_missing_is_asked_for(tmp_path: Path, data: Path) -> None:
    here, there = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "init", "--config", tmp_path / "agent.yaml", "--data", data],
        stdin=there, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    os.close(there)
    os.write(here, f"meadow\n{KEY}\nmqtts://broker.example\n6\n".encode())
    said, _ = process.communicate(timeout=TIMEOUT_S)
    os.close(here)
    assert process.returncode == 0, said.decode()
    assert b"Name of the fleet" in said
    assert load_agent_settings(tmp_path / "agent.yaml").fleet == "meadow"


# --- config ---


def written(file: Path, values: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def test_every_value_is_shown_with_where_it_is_from(tmp_path: Path) -> None:
    written(tmp_path / "station.yaml", {"extends": "raspberry-pi-cm4", "limits": {"minimum_fragments": 9}})
    values = agent_values(None, KEY, profile="station.yaml", limits={"messages_per_second": 3.0})
    values["governor"] = {"temperature_drop_c": 3.0}
    del values["limits"]["minimum_fragments"]
    file = written(tmp_path / "agent.yaml", values)
    lines = file.read_text().splitlines()
    shown = json.loads(dpagent("config", "show", "--config", file, "--json", "-").stdout)

    def line(words: str) -> str:
        return f"agent.yaml:{next(number for number, text in enumerate(lines, 1) if words in text)}"

    assert shown["fleet"] == {"value": "testers", "from": line("fleet:")}
    assert shown["limits.messages_per_second"] == {"value": 3.0, "from": line("messages_per_second")}
    assert shown["governor.temperature_drop_c"] == {"value": 3.0, "from": line("temperature_drop_c")}
    assert shown["governor.highest_temperature_c"] == {"value": 75.0, "from": "profile raspberry-pi-4"}
    assert shown["limits.minimum_fragments"] == {"value": 9, "from": f"profile {tmp_path}/station.yaml"}
    assert shown["limits.maximum_model_mib"] == {"value": 128, "from": "profile raspberry-pi-4"}
    assert shown["mqtt.keepalive_s"] == {"value": 30, "from": "default"}
    assert shown["data.shape"]["from"].startswith("agent.yaml:")
    text = dpagent("config", "show", "--config", file).stdout
    assert f"profile {tmp_path}/station.yaml" in text


def test_a_file_is_checked_without_starting_anything(tmp_path: Path) -> None:
    file = written(tmp_path / "fleet.yaml", fleet_values(None))
    checked = dpagent("config", "check", "--config", file)
    assert (checked.returncode, "of a coordinator" in checked.stdout) == (0, True)
    written(file, fleet_values(None, devices=0, rounds=0))
    refused = dpagent("config", "check", "--config", file)
    assert refused.returncode == ExitCode.CONFIGURATION
    assert "fleet.yaml:2: devices" in refused.stderr
    assert "rounds" in refused.stderr
    written(file, {"fleet": "meadow"})
    assert "is no agent.yaml" in dpagent("config", "check", "--config", file).stderr


@pytest.mark.parametrize("kind", ["agent", "fleet", "mixer", "profile"])
def test_each_file_has_a_schema_for_editors(kind: str) -> None:
    schema = json.loads(dpagent("config", "schema", kind).stdout)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert ("microbatch" if kind == "profile" else "fleet") in schema["properties"]
    assert schema["additionalProperties"] is False
