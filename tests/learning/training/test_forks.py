"""Forks of the training process: real ones, and their end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from brokers import wait_until

HANGS = """
import os, signal, socket, time
from dpagent.learning.training.forks import forked
ours, theirs = socket.socketpair()
print(forked(lambda: time.sleep(600), theirs.fileno()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_fork_that_hangs_ends_with_its_parent() -> None:
    """The system may end the parent for want of memory, and then nobody is left who would end the fork."""
    parent = subprocess.run([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, check=False, timeout=60)
    fork = int(parent.stdout)
    wait_until(lambda: not _runs(fork), "the end of the fork")


def _runs(process: int) -> bool:
    """A zombie that nobody waits for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
