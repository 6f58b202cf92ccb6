"""Starts programs that kill themselves at a fault point; a process of its own: ``python -I launcher.py``.

It has all programs imported and forks for each start, which takes milliseconds instead of seconds. The fork
runs the ``dpagent`` command as its entry point would. Lines of JSON come in on standard input
(:class:`Start`) and go out on standard output: ``{"name", "pid"}`` at a start, ``{"name", "pid", "code"}`` at
an end, where a negative code is a signal. At the end of the input it kills all that still run.
SIGUSR1 makes a program write the stacks of its threads to its log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import select
import signal
import sys
import time
from typing import TypedDict

# Imported for the forks, which find them in memory.
import agent.daemon  # noqa: F401
import coordinator.daemon
import coordinator.database.postgresql
import coordinator.worker
import dpagent.learning.data.formats.npz  # noqa: F401
import mixer.daemon  # noqa: F401
from cli.main import main
from dpagent import faults
from dpagent.faults import FaultPoint

with contextlib.suppress(ImportError):
    import coordinator.database.postgresql  # noqa: F401


class Start(TypedDict):
    """A program to start."""

    name: str
    arguments: list[str]
    """Of ``dpagent``."""
    log: str
    point: str | None
    """Where it kills itself, or None."""
    times: int
    """At which time that it comes there, from 1."""
    delay_s: float
    """How long its other threads go on before the kill."""


def arm(point: FaultPoint, times: int, delay_s: float) -> None:
    """Let this process kill itself."""
    left = times

    def reached(at: FaultPoint) -> None:
        nonlocal left
        if at is point:
            left -= 1
            if left == 0:
                time.sleep(delay_s)
                os.kill(os.getpid(), signal.SIGKILL)

    faults.reached = reached


def run(start: Start) -> None:
    """The fork's part; does not return."""
    code = 1
    try:
        # A terminal's Ctrl-C is for the tests, which end the programs.
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(start["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, target)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        sys.argv = ["dpagent", *start["arguments"]]
        if start["point"] is not None:
            arm(FaultPoint(start["point"]), start["times"], start["delay_s"])
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def say(**message: object) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def serve() -> None:
    """Start programs and report their ends until the input ends."""
    running: dict[int, str] = {}
    gc.freeze()
    waiting = b""
    while True:
        if select.select([0], [], [], 0.01)[0]:
            data = os.read(0, 65_536)
            if not data:
                break
            *lines, waiting = (waiting + data).split(b"\n")
            for line in lines:
                start: Start = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    run(start)
                running[pid] = start["name"]
                say(name=start["name"], pid=pid)
        with contextlib.suppress(ChildProcessError):
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                say(name=running.pop(pid), pid=pid, code=os.waitstatus_to_exitcode(status))
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    say(ready=True)
    serve()
