"""Values that options do not take: one exit code for each kind, a sentence of ours, and nothing is begun."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import dpagent

from cli.main import app
from cli.options.forms import COUNT, NUMBER, ROWS, SIZE
from cli.options.rows import DATA

OF_THE_LIBRARY = re.compile(r"Value error|Input should|valid (number|integer)|unable to parse|validation|_")
"""What typer says of values."""

WITH = {
    ("demo",): ["--data-dir", "nowhere", "--state-dir", "none"],
    ("simulate",): ["--data-dir", "nowhere", "--state-dir", "none"],
    ("sweep", "run"): ["nowhere.yaml"],
    ("sweep", "job"): ["nowhere", "--output", "job.yaml"],
    ("predict",): ["model.onnx", "nowhere"],
    ("data", "check"): ["nowhere"],
    ("model", "show"): ["digits"],
    ("model", "graph"): ["digits"],
    ("bench",): ["digits"],
    ("coordinator", "broker-config"): ["mosquitto"],
    ("personalise",): ["--config", "nowhere.yaml"],
}
"""What a command needs besides, none of which exists."""


def commands_of(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands below ``command``, with what is typed for each."""
    if not hasattr(command, "list_commands"):
        yield path, command
        return
    for name in command.list_commands(None):
        one = command.get_command(None, name)
        yield from commands_of(one, (*path, name))


def options() -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Each option of each command: what is typed, its name, and what it stands for."""
    for path, command in commands_of(typer.main.get_command(app)):
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.opts[0] != "--help":
                yield path, parameter.opts[0], parameter.type_descriptor.annotation


IN_TEXT = {row.option for row in DATA.rows if row.form in (ROWS, SIZE)}
"""Options of numbers that typer reads as text."""
NUMBERS = [(path, name) for path, name, kind in options() if kind in (int, float) or name in IN_TEXT]
WORDS = [
    (path, name)
    for path, name, kind in options()
    if getattr(kind, "__name__", "") in ("LogLevel", "EngineChoice") or "Literal" in str(kind)
]


def refused(path: tuple[str, ...], name: str, value: str, folder: Path) -> tuple[int, str]:
    """The exit code and the sentence, after checks of what every refusal has."""
    result = dpagent(*path, *WITH.get(path, []), *_required(path), f"{name}={value}")
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert name in result.stderr
    assert not OF_THE_LIBRARY.search(result.stderr), result.stderr
    assert list(folder.iterdir()) == [], "nothing is begun"
    return result.returncode, result.stderr


def _required(path: tuple[str, ...]) -> list[str]:
    if path[0] == "sweep":
        return []
    return ["--config", "nowhere.yaml"] if path[-1] in ("run", "key", "status") else []


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_tables_were_found() -> None:
    assert len(NUMBERS) >= 40
    assert {row.option for row in DATA.rows if row.form in (COUNT, NUMBER)} <= {name for _, name in NUMBERS}
    assert (("bench",), "--lot") in NUMBERS
    assert (("run",), "--log-level") in WORDS


@pytest.mark.parametrize(("path", "name"), NUMBERS)
def test_what_is_no_number_is_a_usage_error(path: tuple[str, ...], name: str, tmp_path: Path) -> None:
    code, sentence = refused(path, name, "four", tmp_path)
    assert code == 2
    assert "'four'" in sentence
    assert "expected" in sentence


@pytest.mark.parametrize(("path", "name"), [each for each in NUMBERS if each[1] not in ("--size",)])
def test_a_number_out_of_range_has_one_code_everywhere(
    path: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    code, sentence = refused(path, name, "-1", tmp_path)
    assert code == 9
    assert re.search(r"got '?-1(\.0)?'?; expected a number (above|of at least) ", sentence)


@pytest.mark.parametrize(("path", "name"), WORDS)
def test_an_unknown_word_is_a_usage_error_that_lists_the_known(
    path: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    code, sentence = refused(path, name, "cifa", tmp_path)
    assert code == 2
    assert re.search(r"'cifa'.*'\S+', '\S+'", sentence)


@pytest.mark.parametrize("value", ["nats", "mqtt://", "nats://host", "mqtt://host:99999", "mqtt://host/path"])
def test_an_unknown_broker_is_refused_before_anything_is_done(value: str, tmp_path: Path) -> None:
    code, sentence = refused(("demo",), "--broker", value, tmp_path)
    assert code == 2
    assert value in sentence


def test_every_wrong_option_of_a_run_is_named() -> None:
    result = dpagent("demo", "--epsilon", "0", "--delta", "2", "--state-dir", "none")
    assert result.returncode == 9
    for expected in ("`--epsilon`: got 0.0", "`--delta`: got 2.0"):
        assert expected in result.stderr


@pytest.mark.parametrize("option", ["--state-dir", "--report"])
def test_a_directory_that_cannot_be_made_is_refused_before_anything_is_done(
    option: str, tmp_path: Path
) -> None:
    result = dpagent("demo", option, "/proc/none/such", *(["--state-dir", "x"] * (option == "--report")))
    assert (result.returncode, result.stdout) == (3, "")
    assert option in result.stderr
    assert "/proc/none/such" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_options_of_data_need_data() -> None:
    result = dpagent("demo", "--window", "3", "--label", "y", "--state-dir", "none")
    assert (result.returncode, result.stdout) == (2, "")
    for option in ("--window", "--label", "--data-dir"):
        assert option in result.stderr
