"""The agent's log, which a thread of its own writes."""

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


def test_all_lines_are_there_at_the_end_in_their_order_and_a_fork_adds_none() -> None:
    """Before, the handler had no lock: a fork said so, and with Python 3.13 no agent started."""
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    said = [line.split(maxsplit=2)[-1] for line in ended.stderr.splitlines()]
    assert said == [f"line {number}" for number in range(300)]
