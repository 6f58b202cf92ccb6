"""What a piece of work executes: the steps of the interpreter, and the calls of compiled functions.

Unlike its time, they are the same on every run, however busy the machine is.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


def executed(work: Callable[[], object]) -> Counter[str]:
    """How many steps each function takes, in this thread, and how often each compiled one is called."""
    counts: Counter[str] = Counter()

    def step(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            counts[frame.f_code.co_qualname] += 1
        return step

    def call(_: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            counts[f"{function.__qualname__}()"] += 1

    before = sys.gettrace(), sys.getprofile()
    gc.disable()  # It calls what the work has not to do with.
    sys.settrace(step)
    sys.setprofile(call)
    try:
        work()
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])
        gc.enable()
    return counts
