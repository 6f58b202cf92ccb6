"""The place of a program behind the board's others: for the processor, the disk, and memory."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

ResultT = TypeVar("ResultT")

_IOPRIO_SET: Final = {"x86_64": 251, "i686": 289, "aarch64": 30, "riscv64": 30, "armv7l": 314, "armv6l": 314}
"""Numbers of the system call ioprio_set(2), which the C library has no function for."""
_WHO_PROCESS: Final = 1
_CLASS_IDLE: Final = 3 << 13
_NICEST: Final = 19
_ENDS_BY: Final = Path("/proc/self/oom_score_adj")
"""From the program's value, in thousandths of the memory there is, and what it takes of it, follows which one
the system ends where memory runs out (proc_pid_oom_score_adj(5)). Forks have that of their parent."""
_FIRST: Final = 1_000
TRAINING_ENDS_BEFORE: Final = 50
"""The agent, which keeps the books, and takes less memory: but training begins with little."""
ERRANDS_END_BEFORE: Final = 300
"""The agent, and so training where that does not take a quarter of the memory more; and a look at the data
takes less than it may before this ends in its place."""


def give_way(niceness: int) -> None:
    """Run, read and write behind the board's other programs: at this niceness, and in the idle class of the
    disk's queue, as do the threads and forks that are made later.

    Which schedulers of disks heed the class is in ionice(1). Where the system refuses it, or this program is
    of 32 bits on a processor of 64, the class stays as it is.

    Args:
        niceness: at least this.
    """
    os.nice(max(0, min(_NICEST, niceness) - os.nice(0)))
    machine = os.uname().machine
    if (number := _IOPRIO_SET.get(machine)) is not None and _is_of_kernel():
        ctypes.CDLL(None, use_errno=True).syscall(number, _WHO_PROCESS, 0, _CLASS_IDLE)


def end_first() -> None:
    """Let the system end this program and its forks before any other where memory runs out.

    Of a program that reads records: else one that takes much memory, such as a large picture, could end the
    training process, and so make a round late.
    """
    with contextlib.suppress(OSError):
        _ENDS_BY.write_text(str(_FIRST))


def end_before_parent(thousandths: int) -> None:
    """Let the system end this program and its forks before the one that has started it, where memory runs
    out, and after those that have called :func:`end_first`.

    Args:
        thousandths: of the memory there is, that the other one may take more.
    """
    with contextlib.suppress(OSError, ValueError):
        parents = int(_ENDS_BY.read_text())
        _ENDS_BY.write_text(str(max(parents, min(parents + thousandths, _FIRST - 1))))


def give_way_to_all() -> None:
    """Run only where nothing else wants a core, behind training too, and end first where memory runs out.

    So a program of the board's owner that reads its records, and takes as long and as much memory as they
    make it take, makes no round late.
    """
    end_first()
    give_way(_NICEST)
    with contextlib.suppress(OSError):  # A sandbox may forbid it.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def behind_all(work: Callable[[], ResultT]) -> ResultT:
    """What ``work`` gives, which has given way to all others meanwhile; the program has its place again then.

    Args:
        work: reads records. Another thread does it: a program cannot take back what it has given way.

    Raises:
        Exception: whatever ``work`` raises.
    """
    from concurrent.futures import Future  # which most programs do not need

    answer: Future[ResultT] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        give_way_to_all()
        try:
            answer.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - it is raised below
            answer.set_exception(error)

    before = _ENDS_BY.read_text() if _ENDS_BY.exists() else ""
    try:
        threading.Thread(target=run, name="behind all", daemon=True).start()
        return answer.result()
    finally:
        with contextlib.suppress(OSError):
            _ENDS_BY.write_text(before)


def _is_of_kernel() -> bool:
    """Whether this program has as many bits as its kernel: system calls of others have other numbers."""
    return (ctypes.sizeof(ctypes.c_void_p) == 8) == (os.uname().machine.endswith("64"))
