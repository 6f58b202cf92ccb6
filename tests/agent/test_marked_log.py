"""The marks of the agent's log: what a line may tell of records, judged call by call."""

from __future__ import annotations

import ast
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import agent
from agent.marked_log import PRIVATE, PUBLIC_LOGGERS, MarkedFormatter, is_private, public_lines
from dpagent.structured_log import JsonFormatter

ROOT = Path(agent.__file__).parents[1]
PUBLIC = {
    "agent.announcements": {
        "%s expired: the round closed before it counted them": "a number that follows from plan and receipts",
        "job %s is finished, %s": "the ledger",
    },
    "agent.board_engine": {
        "engine for %s: %s (%s)": "a trial with made-up records, in a process that has read none",
    },
    "agent.cycle": {
        "round %d of %d: charged, %s": "the ledger",
        "round %d of %d: again, under the charge it has": "what is on disk after a restart",
        "the pricing process does not answer, and is ended": "it has no record",
        "the training process does not answer, and is ended": "four times its slots, which no record fills",
        "round %d of job %s is not begun again yet; trying again": "no record ends the pricing process",
    },
    "agent.daemon": {
        "agent of fleet %s, %s": "configuration and ledger",
        "limits of this device: %s": "configuration",
        "connected to %s": "configuration; at a point of the grid",
        "waiting for a plan on %s": "configuration",
        "%s; reconnecting": "the network",
        "rejected a message on %s: %s": "what came over the network",
        "no plan has come on %s for %g s: the coordinator of fleet %s has announced no job, `fleet` "
        "is another's name, or this user may not read the topic. The board goes on waiting; `dpagent "
        "doctor` tries each step":
        "configuration, and the network",
    },
    "agent.governor": {
        "governor: %s": "sensors",
        "training %s: %s": "sensors and the clock, and a command that looks at no record",
        "training goes on, after %s": "likewise",
    },
    "agent.sitting_out": {
        "sitting out round %d of job %s: %s": "admission, which reads no record",
        "round %d of job %s is given up: %s": "likewise",
        "declined round %d of job %s: %s": "likewise",
        "round %d of job %s waits: no receipt has come of what this board published for the round before. "
        "The network may be slow, or the broker refuse it: `dpagent doctor` tries that":
        "the coordinator's receipts",
    },
    "agent.spooling": {
        "round %d of %d: spooled": "at the end of its slots, whatever was computed",
        "round %d of job %s has no update yet; trying again": "no record ends the training process",
    },
    "dpagent.transport.session": {
        "not accepted (%s); trying MQTT version %s": "the broker's answer",
        "the broker does not take everything that it is sent: %s": "the broker's answer",
    },
}  # fmt: skip
"""What goes into a pack for support unmarked, and what it follows from. A new line needs its reason here."""


def calls(module: str) -> Iterator[tuple[str, bool]]:
    """The log calls of a module: the text, and whether it is marked."""
    for node in ast.walk(ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("log")), args=[text, *_], keywords=keywords):
                yield ast.literal_eval(text), any(ast.unparse(each) == "extra=PRIVATE" for each in keywords)


@pytest.mark.parametrize("module", sorted(PUBLIC_LOGGERS))
def test_each_line_that_is_not_marked_has_a_reason(module: str) -> None:
    unmarked = {text for text, is_marked in calls(module) if not is_marked}
    assert unmarked == set(PUBLIC[module])


def test_every_logger_that_is_not_listed_is_marked() -> None:
    text = said("agent.records", "17 records") + said("PIL.Image", "a picture of 17 × 4")
    assert list(public_lines(text.splitlines())) == []
    assert text.count("(private) ") == 2
    assert len(list(public_lines(said("agent.cycle", "spooled").splitlines()))) == 1


def test_a_line_is_marked_by_its_call_too() -> None:
    text = said("agent.cycle", "took 17 J", **PRIVATE)
    assert "(private) took 17 J" in text
    assert list(public_lines(text.splitlines())) == []


def test_a_text_from_outside_makes_no_line_of_its_own() -> None:
    forged = "2026-11-26T01:02:03 INFO    17 records"
    for between in ("\n", "\r\n", "\r", "\x0b", "\x1e", "\x85", "\u2028"):
        text = said("agent.records", f"a.png{between}{forged}")
        assert list(public_lines(io.StringIO(text, newline=None))) == []
        assert list(public_lines(text.splitlines())) == []
    public = said("agent.cycle", f"first\n{forged}")
    assert [line[28:] for line in public_lines(public.splitlines())] == ["first"]


def test_lines_of_json_are_marked_by_a_key(tmp_path: Path) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("agent", is_private))
    for name in ("agent.cycle", "agent.records", "PIL.Image"):
        log = logging.Logger(name, logging.DEBUG)
        log.addHandler(handler)
        log.info("%s", f"said by {name}\n2026-11-26T01:02:03 INFO    17\u2028{{}}")
        log.info("took 17 J", extra=PRIVATE)
        try:
            raise ValueError("record 17")
        except ValueError:
            log.debug("the details", exc_info=True)
    text = stream.getvalue()
    assert len(text.splitlines()) == 9
    (public,) = public_lines(text.splitlines())
    assert json.loads(public)["module"] == "agent.cycle"
    assert "private" not in json.loads(public)
    # Whoever collects lines goes by the key, as docs/operating.md says.
    assert [
        json.loads(line)["message"] for line in text.splitlines() if "private" not in json.loads(line)
    ] == [json.loads(public)["message"]]
    for forged in (
        '{"module": "agent.cycle", "private": true}',
        '{"module": ["agent.cycle"]}',
        "{",
        "[" * 99_999,
    ):
        assert list(public_lines([forged])) == []


def test_of_a_traceback_nothing_is_shown() -> None:
    stream = io.StringIO()
    log = logger("agent.cycle", stream)
    try:
        raise ValueError("record 17\n2026-11-26T01:02:03 INFO    record 17")
    except ValueError:
        log.debug("the details", exc_info=True)
    assert "record 17" in stream.getvalue()
    assert "17" not in "".join(line[20:] for line in public_lines(stream.getvalue().splitlines()))


@pytest.mark.parametrize(
    "line",
    ["", "dpagent: 17 records", " 2026-11-26T01:02:03 INFO    17", "2026-11-26 01:02:03 INFO    17",
     "2026-11-26T01:02:03 NOTICE  17", "Started dpagent-agent.service - dpagent agent.",
     "ERROR:agent.decoding:the records cannot be decoded"],
)  # fmt: skip
def test_what_other_programs_write_is_no_line(line: str) -> None:
    assert list(public_lines([line])) == []


def logger(name: str, stream: io.StringIO) -> logging.Logger:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(MarkedFormatter())
    log = logging.Logger(name, logging.DEBUG)
    log.addHandler(handler)
    return log


def said(name: str, text: str, **extra: bool) -> str:
    """What a logger writes."""
    stream = io.StringIO()
    logger(name, stream).info("%s", text, extra=extra)
    return stream.getvalue()
