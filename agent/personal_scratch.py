"""Where ``dpagent personalise`` has features of records while it runs; what one left that was killed goes.

It is killed where an owner's command has had its time, which may be each time: the features would lie there
after the records that they are of, and take room that records decide.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dpagent.storage import disk_errors, open_private

_SCRATCH: Final = "personalise-"
_LOCK: Final = "personalise.lock"


@contextmanager
def scratch_in(state_dir: Path) -> Iterator[Path]:
    """A private directory for one program at a time, gone after it; what was left goes before.

    Args:
        state_dir: the agent's.
    """
    import tempfile  # which a look at the data needs not

    with disk_errors(state_dir):
        lock = open_private(state_dir / _LOCK, "a")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _forget(state_dir)
        with tempfile.TemporaryDirectory(dir=state_dir, prefix=_SCRATCH) as scratch:
            yield Path(scratch)


def forget_left(state_dir: Path) -> None:
    """Let go what was left there, unless a program has it. Nothing that fails here ends anything.

    Args:
        state_dir: the agent's.
    """
    if not any(state_dir.glob(f"{_SCRATCH}*")):
        return
    with suppress(OSError), (state_dir / _LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _forget(state_dir)


def _forget(state_dir: Path) -> None:
    import shutil  # which mostly nobody needs

    for left in state_dir.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
