"""The choice of an engine: the faster one, and never one that the guarantee would not hold with."""

from __future__ import annotations

from typing import Any

import pytest

from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training import engine_choice as calibration
from dpagent.learning.training.engine_choice import Bench, UnsuitableEngineError, choose_engine
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.onnx_engine import OnnxEngine
from dpagent.learning.training.onnx_graph.build import build_training_graph
from dpagent.learning.training.parallel_engine import ParallelEngine
from dpagent.norm import Norm

DIGITS = built_in("digits")


def bench(**changes: Any) -> Bench:
    return Bench(**{"spec": DIGITS, "graph": build_training_graph(DIGITS), "microbatch": 8} | changes)


def test_both_engines_are_tried_and_the_faster_one_taken() -> None:
    engine, trials = choose_engine(bench())
    speeds = {trial.kind: trial.examples_per_s for trial in trials}
    assert min(speeds.values()) > 0
    kinds = {"numpy": NumpyEngine, "onnx": OnnxEngine}
    assert isinstance(engine, kinds[max(speeds, key=speeds.__getitem__)])
    assert engine.microbatch == 8


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
    monkeypatch.setattr(calibration._Trial, "seconds", lambda lot, engine: seconds[engine.processes])
    closed = []
    close = ParallelEngine.close
    monkeypatch.setattr(ParallelEngine, "close", lambda self: closed.append(self.processes) or close(self))
    engine, trials = choose_engine(bench(processes=4), ["numpy"])
    assert (engine.processes, [trial.processes for trial in trials]) == (processes, [processes])
    assert sorted([*closed, processes]) == sorted({2, 4, processes})
    if isinstance(engine, ParallelEngine):
        assert engine.is_whole
        engine.close()


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
