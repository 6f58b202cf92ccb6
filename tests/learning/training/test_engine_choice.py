"""The choice of an engine: one that is worth its memory, and never one that the guarantee would not hold
with."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training import engine_choice as calibration
from dpagent.learning.training.engine_choice import (
    Bench,
    Trial,
    UnsuitableEngineError,
    choose_engine,
    preferred,
    try_engines,
)
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.onnx_engine import OnnxEngine
from dpagent.learning.training.onnx_graph.build import build_training_graph
from dpagent.learning.training.parallel_engine import ParallelEngine
from dpagent.norm import Norm

pytestmark = pytest.mark.usefixtures("brief_trials")
DIGITS = built_in("digits")
SENSORS: dict[str, Any] = {"spec": built_in("sensor-cnn"), "graph": None, "microbatch": 32}


def bench(**changes: Any) -> Bench:
    return Bench(**{"spec": DIGITS, "graph": build_training_graph(DIGITS), "microbatch": 8} | changes)


def test_both_engines_are_tried() -> None:
    engine, trials = choose_engine(bench())
    speeds = {trial.kind: trial.examples_per_s for trial in trials}
    assert min(speeds.values()) > 0
    kinds = {"numpy": NumpyEngine, "onnx": OnnxEngine}
    assert isinstance(engine, kinds["onnx" if speeds["onnx"] > 1.5 * speeds["numpy"] else "numpy"])
    assert engine.microbatch == 8


def test_engines_are_tried_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes tens of MiB, in several processes more."""
    alive: list[str] = []
    together: set[int] = set()

    def timings(_: Bench, kind: str, counts: list[int]) -> Iterator[dict[int, float]]:
        alive.append(kind)
        try:
            while True:
                together.add(len(alive))
                yield dict.fromkeys(counts, 0.01)
        finally:
            alive.remove(kind)

    monkeypatch.setattr(calibration, "_timings_elsewhere", timings)
    assert [trial.kind for trial in calibration.try_engines(bench())] == ["numpy", "onnx"]
    assert (together, alive) == ({1}, [])


@pytest.mark.parametrize(
    ("numpy", "onnx", "kind"),
    [(100, 149, "numpy"), (100, 151, "onnx"), (100, 0, "numpy"), (0, 1, "onnx"), (151, 100, "numpy")],
)
def test_a_package_of_its_own_has_to_pay(numpy: float, onnx: float, kind: str) -> None:
    """ONNX Runtime takes 45 MiB."""
    assert preferred([Trial("numpy", numpy), Trial("onnx", onnx)]).kind == kind


@pytest.mark.parametrize(
    ("seconds", "processes"),
    [
        ({1: 1.0, 2: 0.55, 4: 0.3}, 4),
        ({1: 1.0, 2: 0.55, 4: 0.52}, 2),  # what more of them gain is not worth their memory
        ({1: 1.0, 2: 0.95, 4: 0.93}, 1),
        ({1: 1.0, 2: 1.2, 4: 0.5}, 4),
    ],
)
def test_as_many_processes_are_taken_as_pay(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], processes: int
) -> None:
    monkeypatch.setattr(calibration._Lot, "seconds", lambda lot, engine: seconds[engine.processes])
    before = children()
    engine, trials = choose_engine(bench(processes=4), ["numpy"])
    assert (engine.processes, [trial.processes for trial in trials]) == (processes, [processes])
    assert len(children() - before) == processes - 1, "those of the trial have ended"
    if isinstance(engine, ParallelEngine):
        assert engine.is_whole
        engine.close()
    assert children() == before


def test_no_more_processes_are_taken_than_fit_into_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each takes depends on what this process has in memory: some 28, 43 and 63 MiB for this model."""
    monkeypatch.setattr(calibration._Lot, "seconds", _as_if_more_paid(calibration._Lot.seconds))
    # The rest of a trial, and two thirds of its time: other tests have it.
    monkeypatch.setattr(NumpyEngine, "is_batch_invariant", lambda self, seed=None: True)
    before, reasons = children(), set()

    def chosen(limit: int | None, processes: int = 3) -> int:
        try:
            given = bench(**SENSORS, processes=processes, memory_mib=limit)
            engine, (trial,) = choose_engine(given, ["numpy"])
        except UnsuitableEngineError as error:
            reasons.add(str(error).rpartition("; ")[2])
            return 0
        assert engine.processes == trial.processes
        if isinstance(engine, ParallelEngine):
            engine.close()
        return engine.processes

    assert chosen(None) == 3
    assert chosen(1_000, processes=1) == 1
    found = {1: chosen(1), 12: chosen(12), 96: chosen(96), 1_000: chosen(1_000)}
    assert list(found.values()) == [0, 0, 3, 3]
    # Between two limits whose numbers differ by more than one, the others are found.
    while gaps := [(low, high) for low, high in pairwise(sorted(found)) if found[high] - found[low] > 1]:
        for low, high in gaps:
            assert high - low > 1, found
            found[(low + high) // 2] = chosen((low + high) // 2)
    numbers = [found[limit] for limit in sorted(found)]
    assert set(numbers) == {0, 1, 2, 3}
    assert numbers == sorted(numbers)
    assert "engine_memory_mib of the profile is 1" in reasons
    assert children() == before


def _as_if_more_paid(measured: Any) -> Any:
    """Compute a lot once, and say that more processes are faster, whatever this machine is busy with."""
    known: set[int] = set()

    def seconds(lot: Any, engine: Any) -> float:
        if engine.processes not in known:
            known.add(engine.processes)
            measured(lot, engine)
        return 1.0 / engine.processes

    return seconds


def test_an_engine_that_takes_more_memory_than_it_may_is_not_taken() -> None:
    # A small model, which a slow board tries in its time as well.
    with pytest.raises(UnsuitableEngineError, match=r"takes \d+ MiB; engine_memory_mib of the profile is 1$"):
        choose_engine(bench(memory_mib=1), ["numpy"])


def test_where_the_system_tells_no_memory_one_process_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def untold(*_: int) -> float:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(calibration, "own_mib", untold)
    monkeypatch.setattr(calibration._Lot, "seconds", _as_if_more_paid(calibration._Lot.seconds))
    assert choose_engine(bench(processes=3, memory_mib=1_000), ["numpy"])[0].processes == 1


def children() -> set[int]:
    """The processes that this one has started and that run."""
    files = Path("/proc/self/task").glob("*/children")
    return {int(process) for file in files for process in file.read_text().split()}


def test_a_trial_leaves_no_package_in_the_training_process() -> None:
    program = """
import sys
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.engine_choice import Bench, try_engines
spec, graph = built_in("digits"), open(sys.argv[1], "rb").read()
assert all(trial.examples_per_s > 0 for trial in try_engines(Bench(spec, graph)))
assert "onnxruntime" not in sys.modules
"""
    with tempfile.NamedTemporaryFile() as file:
        file.write(build_training_graph(DIGITS))
        file.flush()
        subprocess.run([sys.executable, "-c", program, file.name], check=True)


def test_a_package_that_ends_its_process_ends_the_trial_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def illegal_instruction(*_: object) -> bool:
        os.kill(os.getpid(), signal.SIGILL)
        raise AssertionError

    monkeypatch.setattr(OnnxEngine, "is_batch_invariant", illegal_instruction)
    engine, trials = choose_engine(bench())
    assert isinstance(engine, NumpyEngine)
    assert [trial.why_not for trial in trials if "onnxruntime ended its process" in trial.why_not]


def test_a_trial_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_TRIAL_S", 2.0)
    monkeypatch.setattr(OnnxEngine, "is_batch_invariant", lambda self, seed=0: time.sleep(600))
    # Alone: on a slow board, numpy's trial takes more than 2 s.
    with pytest.raises(UnsuitableEngineError, match="onnxruntime did not end within 2 s"):
        choose_engine(bench(), ["onnx"])


@pytest.mark.parametrize(("share", "kept"), [(1.0, False), (0.05, True)])
def test_a_trial_has_as_long_as_its_processes_run(
    monkeypatch: pytest.MonkeyPatch, share: float, kept: bool
) -> None:
    """`processor_share` stretched it by the clock, and an engine that was fast enough was given up."""
    monkeypatch.setattr(calibration, "_TRIAL_S", 3.0)
    monkeypatch.setattr(OnnxEngine, "is_batch_invariant", lambda self, seed=0: not time.sleep(5.0))
    given_up = pytest.raises(UnsuitableEngineError, match="onnxruntime did not end within 3 s")
    with contextlib.nullcontext() if kept else given_up:
        try_engines(bench(processor_share=share), ["onnx"])


def test_where_no_process_can_be_started_one_trains(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("os.fork", refused)
    assert bench().make("numpy", 3).processes == 1
    assert "no other can be started" in caplog.text
    engine, (trial,) = choose_engine(bench(processes=3), ["numpy"])
    assert (engine.processes, trial.processes) == (1, 1), "and what is kept says so"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"graph": None}, "sent no training graph"),
        ({"graph": b"rubbish"}, "trusted_graphs"),
        ({"views": 2}, "made for 1 views and 1 clip norms; the plan has 2 and 1"),
        ({"groups": 3}, "made for 1 views and 1 clip norms; the plan has 1 and 3"),
        ({"norm": Norm.L1}, "clip records in L2; the plan's mechanism needs L1"),
    ],
)
def test_without_a_graph_that_fits_numpy_is_left(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsuitableEngineError, match=text):
        bench(**changes).make("onnx")
    engine, trials = choose_engine(bench(**changes))
    assert isinstance(engine, NumpyEngine)
    assert (engine.views, engine.norm) == (changes.get("views", 1), changes.get("norm", Norm.L2))
    assert [trial.kind for trial in trials if trial.why_not] == ["onnx"]


def test_an_engine_whose_records_depend_on_each_other_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumpyEngine, "is_batch_invariant", lambda self, seed=0: False)
    engine, _ = choose_engine(bench())
    assert isinstance(engine, OnnxEngine)
    with pytest.raises(UnsuitableEngineError, match=r"depend on its neighbours.*another build of numpy"):
        choose_engine(bench(graph=None))


def test_a_board_without_onnxruntime_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "find_spec", lambda name: None)
    with pytest.raises(UnsuitableEngineError, match="onnxruntime is not installed"):
        bench().make("onnx")
    assert isinstance(choose_engine(bench())[0], NumpyEngine)
