"""An engine in several processes: its sums, and what becomes of its processes."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import pytest
from children import PATIENCE_S
from hypothesis import given, settings
from hypothesis import strategies as st
from learning.engines import onnx_engine
from learning.small_models import records

from dpagent.errors import DataError, ParameterError
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.engine import ClippedSum, Engine
from dpagent.learning.training.lots import AT_ONCE
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.parallel_engine import ParallelEngine, _Fork

DIGITS = built_in("digits")
MICROBATCH = 4


def single(**options: Any) -> NumpyEngine:
    return NumpyEngine(DIGITS, microbatch=MICROBATCH, products="stacked", **options)


@pytest.fixture(scope="module")
def three() -> Iterator[ParallelEngine]:
    engine = ParallelEngine(single(), 3)
    yield engine
    engine.close()


def assert_alike(found: ClippedSum, expected: ClippedSum) -> None:
    """To the rounding of float64, whose order of additions differs."""
    scale = np.abs(expected.total).max()
    np.testing.assert_allclose(found.total, expected.total, rtol=0, atol=1e-14 * scale)
    assert found.within.tolist() == expected.within.tolist()
    assert found.excluded == expected.excluded


def processes_of(parent: int) -> list[int]:
    """Its children that are not zombies."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            state, owner = (directory / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(owner) == parent and state != "Z":
            found.append(int(directory.name))
    return found


def until_gone(process: int) -> None:
    for _ in range(500):
        if not Path(f"/proc/{process}").exists():
            return
        time.sleep(0.02)
    pytest.fail(f"process {process} is still there")


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 120),
    is_bytes=st.booleans(),
    per_layer=st.booleans(),
    broken=st.sets(st.integers(0, 119), max_size=3),
)
def test_the_sum_is_that_of_one_process(
    three: ParallelEngine, count: int, is_bytes: bool, per_layer: bool, broken: set[int]
) -> None:
    """Also of none, of fewer microbatches than processes, and of more than are shared out at once."""
    weights, inputs, labels = records(DIGITS, max(count, 1))
    inputs, labels = inputs[:count], labels[:count]
    for place in broken:
        inputs[place : place + 1] = np.nan
    if is_bytes:
        inputs = (np.nan_to_num(inputs) * 255).astype(np.uint8)
    norms = [0.2] * len(DIGITS.layer_sizes) if per_layer else [0.5]
    expected = single().clipped_sum(weights, inputs, labels, norms)
    assert_alike(three.clipped_sum(weights, inputs, labels, norms), expected)


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_views_are_shared_out_too(processes: int) -> None:
    weights, inputs, labels = records(DIGITS, 46)
    views = inputs[: 2 * 23].reshape(23, 2, *DIGITS.input_shape)
    engine = ParallelEngine(single(views=2), processes)
    expected = single(views=2).clipped_sum(weights, views, labels[:23], [0.5])
    assert_alike(engine.clipped_sum(weights, views, labels[:23], [0.5]), expected)
    assert engine.processes == processes
    engine.close()


def test_onnx_runtime_computes_in_forks_as_well() -> None:
    weights, inputs, labels = records(DIGITS, 61)
    alone = onnx_engine(DIGITS, microbatch=8)
    expected = alone.clipped_sum(weights, inputs, labels, [0.5])
    engine = ParallelEngine(onnx_engine(DIGITS, microbatch=8), 3)
    for _ in range(3):
        assert_alike(engine.clipped_sum(weights, inputs, labels, [0.5]), expected)
    assert engine.elsewhere_s > 0
    engine.close()


def test_where_a_process_ends_the_sum_is_the_same() -> None:
    engine = ParallelEngine(single(), 3)
    weights, inputs, labels = records(DIGITS, 61)
    expected = single().clipped_sum(weights, inputs, labels, [0.5])
    assert engine.is_whole
    first, second = engine.forks
    os.kill(first, signal.SIGKILL)
    for _ in range(2):
        assert_alike(engine.clipped_sum(weights, inputs, labels, [0.5]), expected)
        assert not engine.is_whole
    os.kill(second, signal.SIGKILL)
    until_whole_is_false = time.monotonic() + 10
    while engine._forks[1].is_there() and time.monotonic() < until_whole_is_false:
        time.sleep(0.01)
    assert not engine._forks[1].is_there(), "noticed without a question"
    assert_alike(engine.clipped_sum(weights, inputs, labels, [0.5]), expected)
    for process in (first, second):
        until_gone(process)
    engine.close()


class FailsElsewhere:
    """Computes in the process that it was made in only."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._home = engine, os.getpid()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def clipped_sum(self, *arguments: Any) -> ClippedSum:
        if os.getpid() != self._home:
            raise MemoryError
        return self._engine.clipped_sum(*arguments)


def test_where_a_process_stands_still_for_good_the_sum_is_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Its parent waited for it as long, and with it a round that was charged."""
    engine = ParallelEngine(single(), 3, microbatch_s=0.5)
    try:
        weights, inputs, labels = records(DIGITS, 40)
        expected = single().clipped_sum(weights, inputs, labels, [1.0])
        os.kill(engine.forks[0], signal.SIGSTOP)
        for _ in range(2):
            assert_alike(engine.clipped_sum(weights, inputs, labels, [1.0]), expected)
        assert not engine.is_whole, "the next round gets an engine with all its processes"
        until_gone(engine.forks[0])
    finally:
        engine.close()
    (said,) = caplog.messages
    assert f"process {engine.forks[0]} of training has not answered for 2 s" in said, "four microbatches"


def test_a_share_that_fails_elsewhere_is_computed_here() -> None:
    engine = ParallelEngine(FailsElsewhere(single()), 3)  # type: ignore[arg-type]
    weights, inputs, labels = records(DIGITS, 61)
    expected = single().clipped_sum(weights, inputs, labels, [0.5])
    for _ in range(2):
        assert_alike(engine.clipped_sum(weights, inputs, labels, [0.5]), expected)
    assert engine.is_whole
    engine.close()


class SlowElsewhere(NumpyEngine):
    """Takes its time in other processes than the one it was made in, and notes what it computes there."""

    def __init__(self) -> None:
        super().__init__(DIGITS, microbatch=MICROBATCH, products="stacked")
        self._home = os.getpid()
        self.computed: list[int] = []

    def clipped_sum(self, *arguments: Any) -> ClippedSum:
        *rest, microbatches = arguments
        return super().clipped_sum(*rest, self._noted(microbatches))

    def _noted(self, microbatches: Iterable[int]) -> Iterator[int]:
        for number in microbatches:
            yield number
            self.computed.append(number)
            if os.getpid() != self._home:
                time.sleep(0.5)


def test_a_process_on_a_busy_core_computes_what_is_its_own_and_little_else() -> None:
    """Of equal parts, all waited for the slowest."""
    engine = SlowElsewhere()
    three = ParallelEngine(engine, 3)
    weights, inputs, labels = records(DIGITS, AT_ONCE * MICROBATCH)
    expected = single().clipped_sum(weights, inputs, labels, [0.5])
    assert_alike(three.clipped_sum(weights, inputs, labels, [0.5]), expected)
    three.close()
    assert not {1, 2} & {*engine.computed}, "so that any trial shows what memory a process takes"
    assert len(engine.computed) > AT_ONCE // 2


def test_what_fails_here_leaves_no_answer_for_the_next_question(three: ParallelEngine) -> None:
    weights, inputs, labels = records(DIGITS, 61)
    with pytest.raises(ParameterError, match="clip norm"):
        three.clipped_sum(weights, inputs, labels, [-1.0])
    expected = single().clipped_sum(weights, inputs, labels, [0.5])
    assert_alike(three.clipped_sum(weights, inputs, labels, [0.5]), expected)


class FailsHere(NumpyEngine):
    """Fails at its first microbatch in the process that it was made in; others take their time."""

    def __init__(self) -> None:
        super().__init__(DIGITS, microbatch=MICROBATCH, products="stacked")
        self._home, self.elsewhere = os.getpid(), mmap.mmap(-1, 1)

    def clipped_sum(self, *arguments: Any) -> ClippedSum:
        for _ in arguments[-1]:
            if os.getpid() == self._home:
                raise DataError("here")
            time.sleep(0.2)
            self.elsewhere[0] += 1
        return super().clipped_sum(*arguments[:-1], [])


def test_where_this_process_fails_the_others_begin_no_further_microbatch() -> None:
    """They computed the whole batch for nothing, for which a trial of each record alone had to wait."""
    engine = FailsHere()
    two = ParallelEngine(engine, 2)
    weights, inputs, labels = records(DIGITS, AT_ONCE * MICROBATCH)
    with pytest.raises(DataError, match="here"):
        two.clipped_sum(weights, inputs, labels, [0.5])
    assert engine.elsewhere[0] < AT_ONCE - 1
    assert two.is_whole
    two.close()


def test_the_processes_end_with_the_engine_and_keep_no_connection_open() -> None:
    ours, theirs = socket.socketpair()
    engine = ParallelEngine(single(), 3)
    added = engine.forks
    assert set(added) <= set(processes_of(os.getpid()))
    ours.close()
    theirs.settimeout(PATIENCE_S)
    assert theirs.recv(1) == b"", "a fork holds the other end"
    theirs.close()
    engine.close()
    for process in added:
        until_gone(process)
    engine = ParallelEngine(single(), 2)
    (added,) = engine.forks
    del engine
    until_gone(added)


PARENT = """
import os, signal, sys, time
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.parallel_engine import ParallelEngine

signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background job ignores it.
engine = ParallelEngine(NumpyEngine(built_in("digits"), microbatch=4, products="stacked"), 3)
print("made", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_processes_end_with_their_parent_however_it_ends(number: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"made\n"
    forks = processes_of(parent.pid)
    assert len(forks) == 2
    parent.send_signal(number)
    parent.communicate(timeout=PATIENCE_S)
    for process in forks:
        until_gone(process)


@pytest.mark.parametrize("processes", [0, 1, 65])
def test_a_number_of_processes_out_of_range_is_named(processes: int) -> None:
    with pytest.raises(ParameterError, match=f"processes is {processes}"):
        ParallelEngine(single(), processes)


USED_AGAIN = """
import os
import numpy as np
from pathlib import Path
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.parallel_engine import ParallelEngine

def pss_mib(processes):
    texts = [Path(f"/proc/{each}/smaps_rollup").read_text() for each in processes]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("Pss:")]
    return sum(int(line.split()[1]) for line in lines) / 1024

spec = built_in("digits")
engine = NumpyEngine(spec, microbatch=4, products="stacked")
used = np.ones(96 << 20, np.uint8)
above = np.ones(1 << 20, np.uint8)
del used
parallel = ParallelEngine(engine, 3)
count = 4 * 8
inputs, labels = np.zeros((count, *spec.input_shape), np.float32), np.zeros(count, np.int64)
parallel.clipped_sum(spec.initial_weights(0), inputs, labels, [1.0])
processes = [os.getpid(), *parallel.forks]
before = pss_mib(processes)
again = np.ones(64 << 20, np.uint8)
print(pss_mib(processes) - before)
"""


def test_what_this_process_keeps_for_itself_is_not_taken_anew_for_its_forks() -> None:
    """It was copied from what the forks held too: how much of it training uses may be a matter of records.

    The settings of the C library are those of the training process."""
    kept = {
        "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "PYTHONMALLOC": "malloc",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", USED_AGAIN], env=os.environ | kept, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 8.0, "of 64 MiB"


class Interrupted:
    """Interrupts at the nth line of some functions that is run; a line that is run again counts once."""

    def __init__(self, functions: Sequence[FunctionType], number: int) -> None:
        self._codes, self._number = [function.__code__ for function in functions], number
        self._lines: set[int] = set()

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._traced)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _traced(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code not in self._codes:
            return None
        if event == "line" and frame.f_lineno not in self._lines:
            self._lines.add(frame.f_lineno)
            if len(self._lines) == self._number:
                raise KeyboardInterrupt
        return self._traced


def test_an_answer_that_nobody_took_is_none_to_the_next_question() -> None:
    """A sum of records of before passed for that of others, where something came between question and answer:
    no memory, say."""
    weights, inputs, labels = records(DIGITS, 5 * MICROBATCH)
    others = inputs[::-1].copy(), labels[::-1].copy()
    expected = single().clipped_sum(weights, *others, [0.5])
    later = single().clipped_sum(weights, inputs[1:], labels[1:], [0.5])
    functions = [ParallelEngine._in_shares, _Fork.ask, _Fork.answer]
    engine = ParallelEngine(single(), 2)
    for line in count(1):
        try:
            with Interrupted(functions, line):
                engine.clipped_sum(weights, inputs, labels, [0.5])
        except KeyboardInterrupt:
            assert_alike(engine.clipped_sum(weights, *others, [0.5]), expected)
            assert_alike(engine.clipped_sum(weights, inputs[1:], labels[1:], [0.5]), later)
        else:
            break
        if not engine.is_whole:
            engine = ParallelEngine(single(), 2)
    engine.close()
    assert line > 20
