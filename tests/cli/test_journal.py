"""The log in systemd's journal: a datagram for each message, whatever it holds, and none that is lost."""

from __future__ import annotations

import io
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.marked_log import PRIVATE, MarkedFormatter, is_private, public_lines
from cli.journal import JournalHandler, writes_to_journal
from dpagent.structured_log import Event, about

JOURNALD = Path("/lib/systemd/systemd-journald")
REAL = f"""
mount -t tmpfs none /run
mkdir -p /run/systemd/journal /run/log/journal
{JOURNALD} 2>/dev/null & journald=$!
trap 'kill $journald' EXIT
until [ -S /run/systemd/journal/socket ]; do sleep 0.05; done
"$1" -c "$2"
journalctl --sync
journalctl --quiet --output=cat DPAGENT_MODULE=agent.cycle PRIORITY=4 DPAGENT_PRIVATE=false DPAGENT_ROUND=3
"""
SAY = """
import logging
from agent.marked_log import is_private
from cli.journal import JournalHandler
from dpagent.structured_log import about
log = logging.getLogger("agent.cycle")
log.addHandler(JournalHandler("agent", is_private))
log.warning("of the journal\\n  in two lines", extra=about(round=3))
log.warning("of another round", extra=about(round=33))
log.error("of another priority")
"""


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.bind(str(tmp_path / "journal"))
        link.settimeout(5)
        yield link


def entry(data: bytes) -> dict[str, str]:
    """The fields of an entry, read as the protocol says."""
    found: dict[str, str] = {}
    stream = io.BytesIO(data)
    while line := stream.readline():
        name, is_short, value = line[:-1].partition(b"=")
        if not is_short:
            value = stream.read(int.from_bytes(stream.read(8), "little"))
            assert stream.read(1) == b"\n"
        assert name.decode() not in found
        found[name.decode()] = value.decode()
    return found


def logger_to(handler: logging.Handler, name: str) -> logging.Logger:
    handler.setFormatter(MarkedFormatter())
    logger = logging.Logger(name, logging.DEBUG)
    logger.addHandler(handler)
    return logger


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.DEBUG, "7"), (logging.INFO, "6"), (logging.WARNING, "4"), (logging.ERROR, "3"), (50, "2")],
)
def test_an_entry_says_how_urgent_it_is_and_who_may_see_it(
    journal: socket.socket, level: int, priority: str
) -> None:
    log = logger_to(JournalHandler("agent", is_private, journal.getsockname()), "agent.cycle")
    log.log(level, "round %d: charged", 1, extra=about(event=Event.ROUND_CHARGED, round=1))
    log.log(level, "%d records", 17, extra=PRIVATE)
    shown, hidden = entry(journal.recv(65536)), entry(journal.recv(65536))
    assert shown["PRIORITY"] == hidden["PRIORITY"] == priority
    assert (shown["DPAGENT_PROGRAM"], shown["DPAGENT_MODULE"]) == ("agent", "agent.cycle")
    assert (shown["DPAGENT_EVENT"], shown["DPAGENT_ROUND"]) == ("round charged", "1")
    assert (shown["DPAGENT_PRIVATE"], hidden["DPAGENT_PRIVATE"]) == ("false", "true")
    assert hidden["MESSAGE"].endswith("(private) 17 records")
    assert len(list(public_lines([shown["MESSAGE"], hidden["MESSAGE"]]))) == 1


def test_an_entry_with_a_traceback_is_the_owners(journal: socket.socket) -> None:
    log = logger_to(JournalHandler("agent", is_private, journal.getsockname()), "agent.cycle")
    try:
        raise ValueError("record 17")
    except ValueError:
        log.debug("the details", exc_info=True)
    found = entry(journal.recv(65536))
    assert found["DPAGENT_PRIVATE"] == "true"
    assert [line[28:] for line in public_lines(found["MESSAGE"].splitlines())] == ["the details"]


def test_no_text_from_outside_makes_a_field(journal: socket.socket) -> None:
    log = logger_to(JournalHandler("agent", is_private, journal.getsockname()), "agent.cycle")
    log.warning("topic %s", "a\nPRIORITY=0\nDPAGENT_PRIVATE=false\ud800", extra=PRIVATE)
    found = entry(journal.recv(65536))
    assert found["PRIORITY"] == "4"
    assert found["DPAGENT_PRIVATE"] == "true"
    assert "PRIORITY=0" in found["MESSAGE"]


def test_what_the_journal_does_not_take_goes_to_standard_error(
    journal: socket.socket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    too_long = "x" * (8 << 20)
    logger_to(JournalHandler("mixer", address=journal.getsockname()), "cli").info(too_long)
    assert too_long in capsys.readouterr().err
    logger_to(JournalHandler("mixer", address=str(tmp_path / "absent")), "cli").info("still said")
    assert "still said" in capsys.readouterr().err


def test_a_line_that_cannot_be_made_ends_no_program(
    journal: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logger_to(JournalHandler("agent", is_private, journal.getsockname()), "agent.cycle")
    log.info("%d records", "seventeen")
    assert "Logging error" in capsys.readouterr().err
    log.info("spooled")
    assert entry(journal.recv(65536))["MESSAGE"].endswith("spooled")


def test_the_journal_is_known_by_its_stream_and_not_by_the_variable_alone(tmp_path: Path) -> None:
    script = "import sys; from cli.journal import writes_to_journal; sys.exit(not writes_to_journal())"
    with (tmp_path / "stream").open("w") as stream:
        status = os.fstat(stream.fileno())
        environment = os.environ | {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        command = [sys.executable, "-c", script]
        assert subprocess.run(command, env=environment, stderr=stream, check=False).returncode == 0
        assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 1
    assert not writes_to_journal({})


@pytest.mark.skipif(os.geteuid() != 0 or not JOURNALD.exists(), reason="needs root, and systemd-journald")
def test_the_real_journal_selects_by_the_fields() -> None:
    """A journal of its own, in a name space where /run is another."""
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-euc", REAL, "sh", sys.executable, SAY],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "of the journal\n  in two lines\n"
