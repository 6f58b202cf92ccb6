"""The layers of a configuration: where the file is, what stands over it, and the ledger's rules for both."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from children import PATIENCE_S
from commands import Result, command_line, dpagent
from fleets import agent_values, fleet_values

import cli.configurations
from agent.audit import audit
from dpagent.errors import ExitCode
from dpagent.protocol.signing import Signer

KEY = Signer(bytes(range(32)), "testers").public_key


def written(file: Path, values: dict[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, beside an empty place of the system's configuration."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(cli.configurations, "ETC", tmp_path / "etc")
    return tmp_path / "here"


@pytest.fixture
def etc(here: Path) -> Path:
    return here.parent / "etc"


# --- where the file is ---

_OF_A_BOARD = [
    ("run",), ("budget", "init"), ("budget", "raise"), ("budget", "restored"), ("budget", "show"),
    ("budget", "verify"), ("budget", "export"), ("budget", "backup", "copy"), ("data", "decode"),
]  # fmt: skip
_OF_ANY = [("doctor", "--no-broker"), ("config", "show"), ("config", "check"), ("service", "install")]


@pytest.mark.parametrize("command", [*_OF_A_BOARD, *_OF_ANY])
def test_a_board_without_a_file_hears_both_places_and_what_writes_one(
    here: Path, etc: Path, command: tuple[str, ...]
) -> None:
    result = dpagent(*command)
    said = result.stdout + result.stderr
    assert result.returncode == ExitCode.CONFIGURATION, said
    for words in (f"{here}/agent.yaml", f"{etc}/agent.yaml", "DPAGENT_CONFIG", "`dpagent init`"):
        assert words in said


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("coordinator", "run"), "fleet.yaml"), (("coordinator", "key"), "fleet.yaml"),
        (("coordinator", "status"), "fleet.yaml"), (("mixer", "run"), "mixer.yaml"),
        (("mixer", "key"), "mixer.yaml"),
    ],
)  # fmt: skip
def test_other_daemons_look_for_their_own_file(
    here: Path, etc: Path, command: tuple[str, ...], name: str
) -> None:
    written(here / "agent.yaml", agent_values(None, KEY))
    result = dpagent(*command)
    assert result.returncode == ExitCode.CONFIGURATION
    assert f"{here}/{name}, {etc}/{name}" in result.stderr


def test_here_comes_before_the_system_and_a_variable_and_an_option_before_both(here: Path, etc: Path) -> None:
    def fleet(*arguments: str | Path, **environment: str) -> str:
        result = dpagent("config", "show", "--json", "-", *arguments, **environment)
        assert result.returncode == 0, result.stderr
        return str(json.loads(result.stdout)["fleet"]["value"])

    written(etc / "agent.yaml", agent_values(None, KEY, fleet="etc"))
    assert fleet() == "etc"
    written(here / "agent.yaml", agent_values(None, KEY, fleet="here"))
    assert fleet() == "here"
    named = written(here / "other.yaml", agent_values(None, KEY, fleet="variable"))
    assert fleet(DPAGENT_CONFIG=str(named)) == "variable"
    given = written(here / "given.yaml", agent_values(None, KEY, fleet="option"))
    assert fleet("--config", given, DPAGENT_CONFIG=str(named)) == "option"


def test_commands_about_any_daemon_take_what_is_here(here: Path, etc: Path) -> None:
    written(etc / "agent.yaml", agent_values(None, KEY))
    written(here / "fleet.yaml", fleet_values(None))
    assert "fleet.yaml: nothing is wrong with this configuration of a coordinator" in (
        dpagent("config", "check").stdout
    )


def test_a_file_that_may_not_be_read_is_named_and_none_else_is_taken(here: Path, etc: Path) -> None:
    (here / "agent.yaml").mkdir()
    written(etc / "agent.yaml", agent_values(None, KEY))
    result = dpagent("budget", "show")
    assert result.returncode == ExitCode.CONFIGURATION
    assert "agent.yaml: Is a directory" in result.stderr


def test_the_help_of_commands_says_where_they_look() -> None:
    for command in (*_OF_A_BOARD, *_OF_ANY, ("coordinator", "run"), ("mixer", "run")):
        words = [word for word in command if not word.startswith("--") and word != "copy"]
        text = " ".join(dpagent(*words, "--help", COLUMNS="200").stdout.split())
        assert "DPAGENT_CONFIG" in text
        assert "/etc/dpagent" in text


# --- where a value is from ---


def test_show_names_the_layer_of_each_value(here: Path) -> None:
    values = agent_values(None, KEY, profile="raspberry-pi-4", limits={"messages_per_second": 3.0})
    del values["limits"]["minimum_fragments"]
    file = written(here / "agent.yaml", values)
    lines = file.read_text().splitlines()
    result = dpagent(
        "config", "show", "--json", "-", "--set", "data.max_records=70", "--set", "budget.delta=1e-7",
        "--set", "model.command=[touch, /tmp/x]",
        DPAGENT_MQTT="{keepalive_s: 60, url: mqtt://one}", DPAGENT_MQTT__URL="mqtt://two",
        DPAGENT_BUDGET__DELTA="1e-6", DPAGENT_LIMITS__METHODS="[dp-sgd, central]",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    shown = {key: (each["value"], each["from"]) for key, each in json.loads(result.stdout).items()}
    line = next(number for number, text in enumerate(lines, 1) if "messages_per_second" in text)
    assert shown["limits.messages_per_second"] == (3.0, f"agent.yaml:{line}")
    assert shown["mqtt.url"] == ("mqtt://two", "DPAGENT_MQTT__URL")
    assert shown["mqtt.keepalive_s"] == (60, "DPAGENT_MQTT")
    assert shown["mqtt.protocol"] == ("auto", "default")
    assert shown["budget.delta"] == (1e-7, "--set budget.delta")
    assert shown["limits.methods"] == (["dp-sgd", "central"], "DPAGENT_LIMITS__METHODS")
    assert shown["model.command"] == (["touch", "/tmp/x"], "--set model.command")
    assert shown["data.max_records"] == (70, "--set data.max_records")
    assert shown["limits.maximum_model_mib"][1].startswith("profile ")


def test_a_profile_that_a_variable_names_is_the_one_that_holds(here: Path) -> None:
    written(here / "station.yaml", {"extends": "generic-arm64", "max_records": 77})
    values = agent_values(None, KEY)
    del values["data"]["max_records"]
    written(here / "agent.yaml", values)
    shown = json.loads(dpagent("config", "show", "--json", "-", DPAGENT_PROFILE="station.yaml").stdout)
    assert shown["data.max_records"] == {"value": 77, "from": "profile station.yaml"}


def test_check_looks_at_the_whole(here: Path) -> None:
    written(here / "fleet.yaml", fleet_values(None))
    fine = dpagent("config", "check", "--set", "rounds=3", DPAGENT_DEVICES="4")
    assert fine.returncode == 0, fine.stderr
    assert fine.stdout.startswith("fleet.yaml, DPAGENT_DEVICES, --set rounds: nothing is wrong")
    wrong = dpagent("config", "check", "--set", "round.minimum_devices=5", DPAGENT_DEVICES="4")
    assert wrong.returncode == ExitCode.CONFIGURATION
    assert "with DPAGENT_DEVICES, --set round.minimum_devices: round.minimum_devices is 5" in wrong.stderr
    assert dpagent("config", "check", "--set", "rounds").returncode == ExitCode.USAGE


def test_doctor_says_which_configuration_it_looked_at(board: Path) -> None:
    found = dpagent("doctor", "--no-broker", DPAGENT_DATA__MAX_RECORDS="70")
    assert found.stdout.splitlines()[0].split(maxsplit=2) == [
        "ok", "configuration", "agent.yaml, DPAGENT_DATA__MAX_RECORDS",
    ]  # fmt: skip
    wrong = dpagent("doctor", "--no-broker", DPAGENT_MQTT__PASSWORD="geheim")
    assert wrong.returncode == ExitCode.CONFIGURATION
    assert "Did you mean DPAGENT_MQTT__PASSWORD_FILE?" in wrong.stdout
    assert "geheim" not in wrong.stdout


def test_a_plan_is_priced_for_what_the_coordinator_would_take(here: Path) -> None:
    written(here / "fleet.yaml", fleet_values(None))

    def epsilon(**variables: str) -> float:
        words = ("plan", "--config", "fleet.yaml", "--rounds", "2", "--json", "-")
        result = dpagent(*words, **variables)
        assert result.returncode == 0, result.stderr
        return float(json.loads(result.stdout)["epsilon_target"])

    assert epsilon(DPAGENT_PRIVACY__EPSILON="3.5") == 3.5 != epsilon()


def test_what_a_file_leaves_to_variables_tells_what_it_is(here: Path) -> None:
    values = agent_values(None, KEY)
    data, budget = values.pop("data"), values.pop("budget")
    written(here / "agent.yaml", values)
    result = dpagent(
        "config", "check", DPAGENT_DATA=yaml.safe_dump(data), DPAGENT_BUDGET=yaml.safe_dump(budget)
    )
    assert (result.returncode, "of a board" in result.stdout) == (0, True), result.stderr


# --- daemons ---


@pytest.mark.heavy
@pytest.mark.parametrize("daemon", ["agent", "coordinator"])
def test_a_daemon_runs_with_what_stands_over_its_file_and_says_so(here: Path, daemon: str) -> None:
    save_data(here)
    written(here / "agent.yaml", agent_values(None, KEY, mqtt={"url": "mqtt://192.0.2.1:9"}))
    written(here / "fleet.yaml", fleet_values(None))
    assert dpagent("budget", "init").returncode == 0
    name, words = ("agent.yaml", ["run"]) if daemon == "agent" else ("fleet.yaml", ["coordinator", "run"])
    child = subprocess.Popen(
        [*command_line(*words), "--set", "mqtt.url=mqtt://127.0.0.1:1"], stderr=subprocess.PIPE, text=True,
        env=environment(DPAGENT_MQTT__KEEPALIVE_S="17", DPAGENT_MQTT__URL="mqtt://192.0.2.1:8"),
    )  # fmt: skip
    assert child.stderr is not None
    said = ""
    while "no broker answers" not in said:
        line = child.stderr.readline()
        assert line, said
        said += line
    child.send_signal(signal.SIGTERM)
    _, rest = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0, said + rest
    assert f"configuration {name}, DPAGENT_MQTT__KEEPALIVE_S, DPAGENT_MQTT__URL, --set mqtt.url" in said
    assert "127.0.0.1:1" in said


def environment(**variables: str) -> dict[str, str]:
    root = Path(cli.configurations.__file__).parents[1]
    return os.environ | {"PYTHONPATH": str(root)} | variables


def save_data(directory: Path) -> None:
    np.savez(directory / "data.npz", inputs=np.ones((20, 8, 8, 1), np.float32), labels=np.arange(20) % 10)


def test_a_service_is_not_installed_with_what_it_would_not_have(here: Path) -> None:
    written(here / "agent.yaml", agent_values(None, KEY))
    result = dpagent(
        "service", "install", "--root", here / "root", DPAGENT_STATE_DIR="/var/lib/dpagent/state"
    )
    assert result.returncode == ExitCode.USAGE
    assert "DPAGENT_STATE_DIR: set here, and not where systemd starts the service" in result.stderr
    assert not (here / "root").exists()


def test_init_begins_the_ledger_that_the_agent_will_open(here: Path) -> None:
    np.savez(here / "data.npz", inputs=np.ones((60, 4), np.float32), labels=np.arange(60) % 3)
    answers = {"fleet": "meadow", "key": KEY, "broker": "mqtt://b", "data": "data.npz", "epsilon": "6"}
    words = ["init", *(word for name, value in answers.items() for word in (f"--{name}", value))]
    wrong = dpagent(*words, DPAGENT_STATE="books")
    assert (wrong.returncode, list(here.iterdir())) == (ExitCode.USAGE, [here / "data.npz"])
    begun = dpagent(*words, DPAGENT_STATE_DIR="books", DPAGENT_CONFIG="board.yaml")
    assert begun.returncode == 0, begun.stderr
    assert (here / "board.yaml").exists()
    assert [entry.record.dataset for entry in audit(here / "books").entries] == ["my-records"]
    assert not (here / "state").exists()
    assert "DPAGENT_MQTT__URL" in (here / "board.yaml").read_text()


# --- the ledger ---


@pytest.fixture
def board(here: Path) -> Path:
    """A board whose ledger has begun, with ε = 1 for its records."""
    save_data(here)
    values = agent_values(
        None, KEY, budget={"epsilon": 1.0, "delta": 1e-5}, mqtt={"url": "mqtt://127.0.0.1:1"}
    )
    written(here / "agent.yaml", values)
    assert dpagent("budget", "init").returncode == 0
    return here


def state_of(board: Path) -> dict[str, Any]:
    """What the ledger says, and what lies in the working directory, but for room that the agent takes."""
    shown = dpagent("budget", "show", "--json", "--state-dir", board / "state")
    assert shown.returncode == 0, shown.stderr
    places = sorted(place.name for place in board.iterdir() if not place.name.endswith(".spare"))
    return {"ledger": json.loads(shown.stdout), "places": places}


def both_ways(key: str, value: str) -> list[Any]:
    """A setting by a variable, and by an option."""
    variable = "DPAGENT_" + key.upper().replace(".", "__")
    return [
        pytest.param({variable: value}, (), id=f"{variable}={value}"),
        pytest.param({}, ("--set", f"{key}={value}"), id=f"{key}={value}"),
    ]


@pytest.mark.parametrize(
    ("variables", "options", "words"),
    [
        pytest.param(*case.values, words, id=case.id)
        for key, value, words in [
            ("budget.epsilon", "1.5", "the ledger has ε = 1, δ = 1e-5. A budget grows only by"),
            ("budget.delta", "2e-5", "A budget grows only by `dpagent budget raise`"),
            ("data.name", "others", "One more name is one more budget"),
            ("budget.coordinator", "{epsilon: 1, delta: 1e-6}", "One more name is one more budget"),
            ("state_dir", "elsewhere", "dpagent budget init"),
            ("ledger.second_head", "other.head", "other.head"),
        ]
        for case in both_ways(key, value)
    ],
)
def test_what_would_refund_a_budget_stops_the_agent_wherever_it_is_set(
    board: Path, variables: dict[str, str], options: tuple[str, ...], words: str
) -> None:
    before = state_of(board)
    result = dpagent("run", *options, **variables)
    assert result.returncode == ExitCode.LEDGER, result.stderr
    assert words in result.stderr
    assert state_of(board) == before


@pytest.mark.parametrize(
    ("variables", "options"), [*both_ways("ledger.second_head", "state/head"), *both_ways("state_dir", ".")]
)
def test_a_ledger_that_a_copy_would_take_back_is_refused_wherever_it_is_set(
    board: Path, variables: dict[str, str], options: tuple[str, ...]
) -> None:
    before = state_of(board)
    result = dpagent("run", *options, **variables)
    assert result.returncode == ExitCode.CONFIGURATION, result.stderr
    (name,) = [*variables, *(option.partition("=")[0] for option in options[1:])]
    assert name in result.stderr.partition(": ledger.second_head: ")[0]
    assert state_of(board) == before


def test_a_budget_of_a_variable_is_raised_by_the_explicit_command_alone(board: Path) -> None:
    larger = {"DPAGENT_BUDGET__EPSILON": "1.5"}
    assert dpagent("run", **larger).returncode == ExitCode.LEDGER
    raised = dpagent("budget", "raise", **larger)
    assert raised.returncode == 0, raised.stderr
    assert "was ε = 1, δ = 1e-5 and is ε = 1.5, δ = 1e-5" in raised.stdout
    found = {name: each["epsilon_budget"] for name, each in state_of(board)["ledger"]["datasets"].items()}
    assert set(found.values()) == {1.5}
    assert dpagent("budget", "raise", **larger).returncode == ExitCode.LEDGER, "nothing to raise"


def test_the_same_ledger_is_opened_from_wherever_a_command_is_run(
    board: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (board / "below").mkdir()
    monkeypatch.chdir(board / "below")
    variables = {"DPAGENT_CONFIG": str(board / "agent.yaml"), "DPAGENT_STATE_DIR": "state"}
    shown = dpagent("budget", "show", "--json", **variables)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout) == state_of(board)["ledger"]
    assert list((board / "below").iterdir()) == []


def test_an_older_ledger_in_a_place_of_a_variable_is_noticed(board: Path) -> None:
    shutil.copytree(board / "state", board / "copy")
    assert dpagent("budget", "raise", DPAGENT_BUDGET__EPSILON="2").returncode == 0
    over = {"DPAGENT_STATE_DIR": "copy", "DPAGENT_LEDGER__SECOND_HEAD": "state.head"}
    result = dpagent("run", **over)
    assert result.returncode == ExitCode.LEDGER, result.stderr
    verified: Result = dpagent("budget", "verify", **over)
    assert verified.returncode == ExitCode.LEDGER
    assert dpagent("budget", "verify").returncode == 0
