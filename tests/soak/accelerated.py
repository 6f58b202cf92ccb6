"""``dpagent`` on a clock that runs faster, perhaps with a planted leak: what the soak starts its programs by.

``python -m soak.accelerated FACTOR LEAK ARGUMENTS…``: the programs are those of the package, in processes of
their own; slots, jitter, resends, deadlines and the days of the governor pass FACTOR times faster. What
computing takes is real. LEAK is ``none``, or what every round leaves behind, so that the soak can be seen to
fail: ``memory``, ``descriptors``, ``threads`` or ``disk``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LEAKED_BYTES = 128 << 10
_kept: list[Any] = []


def accelerate(factor: float) -> None:
    """Let the clock of all programs run faster from now on."""
    from dpagent.clock import SystemClock

    begun, began_unix = time.monotonic(), time.time()

    def passed(_: Any) -> float:
        return begun + factor * (time.monotonic() - begun)

    SystemClock.monotonic = passed  # type: ignore[method-assign]
    SystemClock.unix = lambda clock: began_unix + passed(clock) - begun  # type: ignore[method-assign]


def plant(leak: str) -> None:
    """Let every round that is charged leave something behind."""
    from agent.state import AgentState

    def descriptors(state: AgentState) -> None:
        _kept.append(state.files.database.open("rb"))

    def threads(_: AgentState) -> None:
        _kept.append(threading.Thread(target=threading.Event().wait, daemon=True))
        _kept[-1].start()

    def disk(state: AgentState) -> None:
        with Path(state.files.state_dir, "left").open("ab") as file:
            file.write(bytes(LEAKED_BYTES))

    leaks: dict[str, Callable[[AgentState], None]] = {
        "memory": lambda _: _kept.append(b"\1" * LEAKED_BYTES),
        "descriptors": descriptors, "threads": threads, "disk": disk,
    }  # fmt: skip
    leave, charge = leaks[leak], AgentState.charge

    def charge_and_leave(state: AgentState, *arguments: Any) -> None:
        charge(state, *arguments)
        leave(state)

    AgentState.charge = charge_and_leave  # type: ignore[method-assign]


def program_of(command: str) -> Callable[[], None]:
    """The program that a command goes on as: of ``run``, without what has read its options, and with a C
    library that gives memory back, as :mod:`cli.run` starts it. Its options are those of the soak."""
    if command != "run":
        from cli.main import main

        return main
    from agent.child_programs import LITTLE_MEMORY
    from cli.agent_program import main as run_agent

    if not LITTLE_MEMORY.keys() <= os.environ.keys():  # What is set already, stays.
        os.execve(sys.executable, sys.orig_argv, LITTLE_MEMORY | os.environ)
    sys.argv[1:] = [sys.argv[-1], "info", "text"]
    return run_agent


if __name__ == "__main__":
    factor, leak = sys.argv[1:3]
    del sys.argv[1:3]
    program = program_of(sys.argv[1])
    accelerate(float(factor))
    if leak != "none":
        plant(leak)
    program()
