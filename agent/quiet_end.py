"""An end of the agent that its broker has caused, at a time that tells nothing of the records.

A broker that refuses the agent ends it whenever it likes, also in the midst of a look at the data. The
service is started again so long after the last process of it has ended, and one that decodes a large picture
takes a second to let go of its memory. So the agent ends a whole number of periods after the refusal, when
all is gone that it has started; and its next start counts from when the program began, however long loading
it took.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dpagent.clock import Clock

PERIOD_S: Final = 5.0
_IDLE_S: Final = 0.5
_MOST_PERIODS: Final = 6
"""Within TimeoutStopSec of the service."""
_START_TIME: Final = 19
"""Of the fields of /proc/PID/stat that follow the name of the program (proc_pid_stat(5))."""


def wait_to_end(since: float, groups: Sequence[int], clock: Clock, stop: threading.Event) -> None:
    """Wait until process groups are gone, and a whole number of periods is over.

    Args:
        since: when the broker refused the agent (monotonic).
        groups: ids of the groups that may be ending.
        clock: the program's.
        stop: ends the wait.
    """
    begun = max(1, math.ceil((clock.monotonic() - since) / PERIOD_S))  # It may have closed for longer.
    for number in range(begun, max(begun, _MOST_PERIODS) + 1):
        while (left_s := since + number * PERIOD_S - clock.monotonic()) > 0 and not stop.is_set():
            stop.wait(min(left_s, _IDLE_S))
        if stop.is_set() or not any(map(_goes_on, groups)):
            return


def _goes_on(group: int) -> bool:
    """Whether there is a process of a group yet."""
    with contextlib.suppress(ChildProcessError):  # None is this program's.
        while os.waitpid(-group, os.WNOHANG) != (0, 0):
            pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # Another user's.
    return True


def program_age_s() -> float:
    """For how long this program has run, the time included that loading it took."""
    fields = Path("/proc/self/stat").read_bytes().rsplit(b")", 1)[1].split()
    began_s = int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
