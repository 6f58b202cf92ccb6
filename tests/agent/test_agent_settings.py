"""``agent.yaml`` and the profiles of boards: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from fleets import agent_values

from agent.profile import load_profile, profile_names
from agent.settings import load_agent_settings, on_board
from dpagent.errors import ConfigurationError
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.transport.settings import MqttSettings

KEY = Signer(new_signing_secret(), "testers").public_key


def agent_file(tmp_path: Path, **changes: Any) -> Path:
    file = tmp_path / "agent.yaml"
    file.write_text(yaml.safe_dump(agent_values(None, KEY, **changes), sort_keys=False))
    return file


def problem(file: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_agent_settings(file)
    return str(caught.value)


def test_an_agent_file_is_read_with_paths_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("pw\n")
    mqtt = {
        "url": "mqtts://broker.example",
        "username": "u",
        "password_file": "password",
        "ca_file": "/ca.pem",
    }
    settings = load_agent_settings(agent_file(tmp_path, mqtt=mqtt))
    assert settings.state_dir == tmp_path / "state"
    assert settings.data.path == tmp_path / "data.npz"
    assert settings.mqtt.password_file == tmp_path / "password"
    assert settings.mqtt.ca_file == Path("/ca.pem")
    assert (settings.mqtt.host, settings.mqtt.port, settings.mqtt.tls) == ("broker.example", 8883, True)
    assert settings.mqtt.password() == "pw"


def test_a_profile_of_ones_own_is_relative_to_the_agent_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "board.yaml").write_text("extends: generic-arm64\nmicrobatch: 2\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    settings = load_agent_settings(agent_file(tmp_path, profile="board.yaml"))
    assert load_profile(settings.profile).microbatch == 2


def test_the_shortest_agent_file_has_defaults(tmp_path: Path) -> None:
    values = agent_values(None, KEY)
    for key in ("state_dir", "limits"):
        del values[key]
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(values))
    settings = load_agent_settings(tmp_path / "agent.yaml")
    assert settings.state_dir == tmp_path / "state"
    assert settings.mqtt == MqttSettings()
    assert settings.limits.messages_per_second == 10


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"coordinator_key": "abc"}, "coordinator_key", "base64"),
        ({"coordinator_key": KEY[:-4]}, "coordinator_key", "base64"),
        ({"coordinator_key": "AAAA"}, "coordinator_key", "32 bytes"),
        ({"fleet": "a/b"}, "fleet", "pattern"),
        ({"fleet": ""}, "fleet", "pattern"),
        ({"mqtt": {"url": "mqtt://u:p@host"}}, "mqtt.url", "credentials do not belong in the URL"),
        ({"mqtt": {"url": "http://host"}}, "mqtt.url", "mqtt://host"),
        ({"mqtt": {"url": "mqtt://"}}, "mqtt.url", "mqtt://host"),
        ({"mqtt": {"url": "host:1883"}}, "mqtt.url", "mqtt://host"),
        ({"mqtt": {"url": "mqtt://host:99999"}}, "mqtt.url", "Port"),
        ({"mqtt": {"url": "mqtt://host:x"}}, "mqtt.url", "Port"),
        ({"mqtt": {"url": "mqtt://host/path"}}, "mqtt.url", "without a path"),
        ({"mqtt": {"protocol": "4"}}, "mqtt.protocol", "'auto', '5' or '3.1.1'"),
        ({"mqtt": {"keepalive_s": 1}}, "mqtt.keepalive_s", "a number of at least 5"),
        ({"budget": {"epsilon": 0}}, "budget.epsilon", "a number above 0"),
        ({"budget": {"delta": 1}}, "budget.delta", "a number below 1"),
        ({"data": {"kind": "tar"}}, "data.kind", "'images' or 'csv'"),
        ({"data": {"name": ""}}, "data.name", "at least 1 character"),
        ({"limits": {"messages_per_second": 0}}, "limits.messages_per_second", "a number above 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_an_agent_file_is_named(
    tmp_path: Path, changes: dict[str, Any], key: str, words: str
) -> None:
    file = agent_file(tmp_path, **changes)
    text = problem(file)
    line = next(
        n for n, row in enumerate(file.read_text().splitlines(), 1) if f"{key.split('.')[-1]}:" in row
    )
    if key == "data.name":
        line = file.read_text().splitlines().index("  name: ''") + 1
    assert text.startswith(f"{file}:{line}: {key}: ")
    assert words in text
    assert "\n" not in text


def test_a_budget_cannot_be_left_out(tmp_path: Path) -> None:
    values = agent_values(None, KEY)
    del values["budget"]
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(values))
    assert problem(tmp_path / "agent.yaml").endswith("agent.yaml:1: budget: this key is missing.")


# --- profiles ---


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_is_valid(name: str) -> None:
    assert load_profile(name).microbatch >= 1


def test_an_unknown_profile_names_those_that_exist() -> None:
    with pytest.raises(ConfigurationError, match="generic-x86-64"):
        load_profile("toaster")


# --- the second head ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({}, "state.head"),
        ({"state_dir": "a/b/"}, "a/b.head"),
        ({"state_dir": "a/../b"}, "b.head"),
        ({"ledger": {"second_head": "heads/device"}}, "heads/device"),
        ({"ledger": {"second_head": "/boot/device.head"}}, "/boot/device.head"),
        ({"ledger": {"second_head": "state.elsewhere"}}, "state.elsewhere"),
    ],
)
def test_the_second_head_is_outside_the_state_directory(
    tmp_path: Path, changes: dict[str, Any], place: str
) -> None:
    files = load_agent_settings(agent_file(tmp_path, **changes)).ledger_files
    assert files.second_head == tmp_path.resolve() / place
    assert not files.second_head.is_relative_to(files.state_dir.resolve())


@pytest.mark.parametrize("place", ["state/second.head", "state", "other/../state/x", "link/x"])
def test_a_second_head_in_the_state_directory_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "state")
    said = problem(agent_file(tmp_path, ledger={"second_head": place}))
    assert "ledger.second_head" in said
    assert str(tmp_path / place) in said


def test_a_boards_profile_limits_what_the_device_leaves_open(tmp_path: Path) -> None:
    board = tmp_path / "board.yaml"
    board.write_text(
        "extends: generic-armv7\nmax_records: 700\nlimits: {maximum_training_s: 60, minimum_fragments: 9}\n"
    )
    limits = {"minimum_fragments": 2, "minimum_compute_slot_s": 1.0}
    for declared, expected, engine in ({"max_records": 50}, 50, "auto"), ({}, 700, "numpy"):
        values = agent_values(None, KEY, limits=limits, data=declared)
        if not declared:
            del values["data"]["max_records"], values["engine"]
        else:
            values["engine"] = engine
        file = tmp_path / "agent.yaml"
        file.write_text(yaml.safe_dump(values))
        settings = on_board(load_agent_settings(file), load_profile(str(board)))
        assert (settings.data.max_records, settings.engine) == (expected, engine)
        assert settings.limits.maximum_training_s == 60
        assert settings.limits.minimum_fragments == 2, "agent.yaml comes first"
        assert settings.limits.minimum_compute_slot_s == 1.0
        assert settings.limits.messages_per_second == 200
        assert settings.limits.minimum_jitter_window_s == 0.0
