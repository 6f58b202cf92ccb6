"""The agent's log, which a thread of its own writes."""

import fcntl
import os
import re
import subprocess
import sys

_PROGRAM = """
import logging, os
from cli.daemons import LogFormat, LogLevel, start_logging

start_logging(LogLevel.INFO, LogFormat.TEXT, "agent", waits=False)
for number in range(300):
    logging.info("line %d", number)
if not os.fork():
    os._exit(0)
os.wait()
"""
_UNREAD = """
import logging
from cli.daemons import LogFormat, LogLevel, start_logging

start_logging(LogLevel.INFO, LogFormat.TEXT, "agent", waits=False)
for number in range(3_000):
    logging.info("line %d", number)
print("going on", flush=True)
input()
logging.info("late")
"""


def test_all_lines_are_there_at_the_end_in_their_order_and_a_fork_adds_none() -> None:
    """Before, the handler had no lock: a fork said so, and with Python 3.13 no agent started."""
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    said = [line.split(maxsplit=2)[-1] for line in ended.stderr.splitlines()]
    assert said == [f"line {number}" for number in range(300)]


def test_how_many_lines_were_lost_is_said_where_they_would_stand() -> None:
    """Before, that sentence was itself lost, and the one that followed told of that one alone."""
    log, full = os.pipe()
    fcntl.fcntl(full, fcntl.F_SETPIPE_SZ, 4_096)
    with subprocess.Popen(
        [sys.executable, "-c", _UNREAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=full, text=True
    ) as program:
        os.close(full)
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stdout.readline() == "going on\n"
        with open(log) as lines:  # noqa: PTH123 - a descriptor
            said = [next(lines) for _ in range(1_024)]  # As many as wait at most.
            program.stdin.write("\n")
            program.stdin.flush()
            said += lines
    following = 0
    for line in said[:-1]:
        if found := re.search(r" ([\d,]+) lines? lost", line):
            following += int(found[1].replace(",", ""))
        else:
            assert line.endswith(f"line {following}\n")
            following += 1
    assert following == 3_000 > len(said)
    assert said[-1].endswith("late\n")
