"""One vocabulary of logs: what real programs say as JSON, and the table that documents it."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any, get_type_hints

from brokers import Broker, reserved_port, wait_until
from fleets import Program, write_agent, write_fleet
from mixers import write_mixer

from coordinator.keys import load_signer
from coordinator.settings import load_fleet_settings
from dpagent.structured_log import COMMON, Event, Fields, JsonFormatter, about

DOCUMENT = Path(__file__).parents[1] / "docs" / "operating.md"
KEYS = set(COMMON) | set(get_type_hints(Fields))
TYPES: dict[str, type] = {
    name: str if kind is Event else kind for name, kind in get_type_hints(Fields).items()
}


def lines_of(program: Program, name: str) -> list[dict[str, Any]]:
    """All that a program said, which is nothing but lines of the vocabulary."""
    found = [json.loads(line) for line in program.said().splitlines()]
    for line in found:
        assert set(line) <= KEYS, line
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", line["at"])
        assert (line["program"], bool(line["message"])) == (name, True)
        for key in set(line) - set(COMMON):
            assert isinstance(line[key], TYPES[key]), line
    return found


def test_programs_of_a_fleet_speak_of_the_same_things_by_the_same_keys(
    tmp_path: Path, mosquitto: Broker
) -> None:
    file = write_fleet(tmp_path / "fleet", mosquitto, fleet="loggers", devices=1, rounds=1)
    settings = load_fleet_settings(file)
    key = load_signer(settings.keys_dir, settings.fleet).public_key
    board = write_agent(tmp_path / "board", mosquitto, key, 1, fleet="loggers")
    mixer = write_mixer(tmp_path / "mixer", mosquitto, "loggers", key)
    shape = ("--log-format", "json")
    with (
        reserved_port() as port,
        Program("coordinator", "run", "--config", file, *shape, log=tmp_path / "coordinator.log") as runs,
        Program("run", "--config", board, *shape, log=tmp_path / "agent.log") as agent,
        Program("mixer", "run", "--config", mixer, *shape, log=tmp_path / "mixer.log") as mixing,
        Program(
            "coordinator", "serve", "--config", file, *shape, "--set", f"page.port={port.getsockname()[1]}",
            log=tmp_path / "page.log",
        ) as page,
    ):  # fmt: skip
        wait_until(lambda: '"job over"' in runs.said() and '"job over"' in agent.said(), "the end of the job")
        wait_until(lambda: '"connected"' in mixing.said() and '"started"' in page.said(), "the others")
        said = {
            name: lines_of(program, name)
            for name, program in (
                ("coordinator", runs), ("agent", agent), ("mixer", mixing), ("page", page)
            )
        }  # fmt: skip
    events = {
        name: {line["event"]: line for line in lines if "event" in line} for name, lines in said.items()
    }
    for name, each in events.items():
        assert each[Event.STARTED]["fleet"] == "loggers", name
    brokers = {events[name][Event.CONNECTED]["broker"] for name in ("coordinator", "agent", "mixer")}
    assert len(brokers) == 1
    closed, charged = events["coordinator"][Event.ROUND_CLOSED], events["agent"][Event.ROUND_CHARGED]
    for key_ in ("job", "round", "rounds"):
        assert closed[key_] == charged[key_], key_
    assert events["coordinator"][Event.JOB_BEGUN]["job"] == events["agent"][Event.JOB_OVER]["job"]
    assert any(line.get("private") for line in said["agent"]), "the owner's lines are marked"
    assert not any("private" in line for line in said["coordinator"])


def test_the_table_has_every_key_and_every_event() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    code = "".join(
        file.read_text(encoding="utf-8")
        for room in ("agent", "coordinator", "mixer")
        for file in (DOCUMENT.parents[1] / room).rglob("*.py")
    )
    assert {each for each in Event if f"Event.{each.name}" not in code} == set()
    assert {each for each in get_type_hints(Fields) if not re.search(rf"\b{each}=|\"{each}\"", code)} == set()
    table = text.partition("<!-- keys of logs -->")[2].partition("<!-- end -->")[0]
    keys = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(keys) == sorted(KEYS)
    events = text.partition("<!-- events of logs -->")[2].partition("<!-- end -->")[0]
    assert sorted(re.findall(r"`([a-z ]+)`", events)) == sorted(Event)


def test_a_line_stays_one_line_and_has_a_trace_of_an_error() -> None:
    record = logging.LogRecord("coordinator.cycle", logging.ERROR, "", 0, "a\n%s", ("\u2028b",), None)
    record.__dict__ |= about(event=Event.ROUND_CLOSED, round=3)
    text = JsonFormatter("coordinator").format(record)
    assert len(text.splitlines()) == 1
    assert json.loads(text)["message"] == "a\n\u2028b"
    assert (json.loads(text)["event"], json.loads(text)["round"]) == ("round closed", 3)
    try:
        raise ValueError("no")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    assert "ValueError: no" in json.loads(JsonFormatter("page").format(record))["trace"]
