"""The work of training: the same for every lot, and tried beforehand."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fleets import DIGITS, digits, make_task, model_section, report_plan, terms
from numpy.typing import NDArray

from agent.effort import Effort, MadeUp, _seconds
from agent.noisy_sums import MOMENTS_AT_ONCE, clipped_sum, sum_of_moments
from dpagent.errors import ParameterError
from dpagent.learning.data.dataset import ArrayDataset, Dataset, Indices, to_float32
from dpagent.learning.data.declared import DType
from dpagent.learning.data.derived import Unfailing
from dpagent.learning.front_end.features import FrontEnd
from dpagent.learning.models.description import from_description
from dpagent.learning.training.engine import ClippedSum
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.parallel_engine import ParallelEngine
from dpagent.privacy.covariance import SecondMoments
from dpagent.privacy.sampling import largest_lot
from dpagent.protocol.task import RoundTask

WEIGHTS = DIGITS.initial_weights(0)
MOST = 60


class Counting(NumpyEngine):
    """An engine that knows how many rows it computed, and in which pieces."""

    def __init__(self, **options: Any) -> None:
        super().__init__(DIGITS, microbatch=4, **options)
        self.pieces: list[int] = []
        self.excluded: list[int] = []

    def clipped_sum(
        self,
        weights: NDArray[np.float32],
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
        clip_norms: Sequence[float],
        *rest: Any,
    ) -> ClippedSum:
        self.pieces.append(len(inputs))
        found = super().clipped_sum(weights, inputs, labels, clip_norms, *rest)
        self.excluded.append(found.excluded)
        return found


class Gaps(Unfailing):
    """Records of which some cannot be read."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset, lambda _: None)

    def try_read(self, indices: Indices) -> tuple[NDArray[Any], dict[int, str]]:
        inputs, problems = super().try_read(indices)
        return inputs, problems | {place: "gone" for place, number in enumerate(indices) if number % 7 == 3}


def task_at(rate: float, **changes: Any) -> RoundTask:
    return make_task(**terms(rate=rate), **changes)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_made_up_records_are_stored_and_converted_as_real_ones_are(
    dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of uint8, a division each, which a small model shows by its time."""
    converted = list[tuple[str, int]]()

    def counting(inputs: NDArray[Any]) -> NDArray[np.float32]:
        converted.append((str(inputs.dtype), len(inputs)))
        return to_float32(inputs)

    monkeypatch.setattr("dpagent.learning.training.lots.to_float32", counting)
    values = np.zeros((20, 8, 8, 1), dtype)
    task, engine = task_at(1.0), Counting()
    for records in (0, 7, 20):
        converted.clear()
        data = ArrayDataset(values[:records], np.zeros(records, np.int64), 10)
        clipped_sum(
            task.release, WEIGHTS, data, engine, Effort(task, WEIGHTS, engine, 20, dtype=dtype).filling
        )
        assert {name for name, _ in converted} == {dtype}
        assert sum(count for _, count in converted) == 20


@pytest.mark.parametrize("are_features", [False, True])
@pytest.mark.parametrize("size", [1, 100, 5000])
def test_made_up_records_lie_where_most_real_ones_do(
    monkeypatch: pytest.MonkeyPatch, size: int, are_features: bool
) -> None:
    """At the first 256 bytes, a batch of 32 took 2,700 instructions less, of 660,000."""
    places = list[int]()

    def noted(descriptor: int, buffers: list[memoryview], place: int) -> int:
        places.append(place)
        return preadv(descriptor, buffers, place)

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", noted)
    made_up, _ = MadeUp(3, [size], "float32", are_features=are_features).try_read(np.arange(3))
    assert len(set(places)) == 1 < len(places)
    assert places[0] > 256
    assert (made_up == made_up[0]).all()
    assert made_up.any(axis=1).all()


@pytest.mark.parametrize("records", [0, 1, 17, 50, 60])
@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_each_lot_makes_the_work_of_the_largest(records: int, rate: float) -> None:
    engine, task = Counting(), task_at(rate)
    effort = Effort(task, WEIGHTS, engine, MOST)
    data = (
        digits(0, records)
        if records
        else ArrayDataset(np.zeros((0, 8, 8, 1), np.float32), np.zeros(0, np.int64), 10)
    )
    total = clipped_sum(task.release, WEIGHTS, data, engine, effort.filling)
    assert sum(engine.pieces) == effort.largest == largest_lot(MOST, rate)
    assert all(piece == 32 for piece in engine.pieces[:-1]), "in as many pieces"
    if rate == 1.0:
        # Shuffled in another order, hence off by rounding.
        alone = clipped_sum(task.release, WEIGHTS, data, Counting())
        np.testing.assert_allclose(total, alone, atol=1e-5 * max(1, records), err_msg="and nothing else")


def test_a_lot_with_unreadable_records_makes_as_much_work_but_for_them() -> None:
    engine, task = Counting(), task_at(1.0)
    effort = Effort(task, WEIGHTS, engine, MOST)
    inputs = digits(0, 50).inputs.astype(np.float32)
    inputs[7] = np.nan
    data = ArrayDataset(inputs, np.zeros(50, np.int64), 10)
    clipped_sum(task.release, WEIGHTS, data, engine, effort.filling)
    assert sum(engine.pieces) == MOST, "a record that is not finite is computed, and excluded"


def test_unreadable_records_are_made_up_for() -> None:
    engine, task = Counting(), task_at(1.0)
    data = Gaps(digits(0, 50))
    clipped_sum(task.release, WEIGHTS, data, engine, Effort(task, WEIGHTS, engine, MOST).filling)
    assert engine.pieces == [32, MOST - 32]


def test_views_are_filled_up_with_views() -> None:
    task = task_at(1.0, augmentation={"views": 3, "shift": 1, "flip": False})
    engine = Counting(views=3)
    effort = Effort(task, WEIGHTS, engine, MOST)
    clipped_sum(task.release, WEIGHTS, digits(0, 50), engine, effort.filling)
    assert sum(engine.pieces) == MOST
    assert effort.longest_s() > 0


def test_a_trial_that_fails_is_told() -> None:
    effort = Effort(task_at(1.0), np.zeros(3, np.float32), Counting(), MOST)
    with pytest.raises(ParameterError, match=r"\(3,\)"):
        effort.longest_s()


def test_the_trial_counts_steps_and_the_largest_lot(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock on which each trial takes a second."""
    monkeypatch.setattr("agent.effort._seconds", lambda work, *_: work() is None or 1.0)
    for steps, most in ((1, MOST), (3, MOST), (1, 600)):
        task = make_task(**terms(rate=1.0, local_steps=steps))
        effort = Effort(task, WEIGHTS, Counting(), most)
        # Two microbatches of four make a trial; a step adds noise and moves weights; a round ends once.
        assert effort.longest_s() == pytest.approx(1.5 * (steps * (most / 8 + 1) + 1))


def test_a_trial_takes_no_more_where_many_records_are_allowed() -> None:
    """A table of all that there may be was made for each try: with eight million, of a linear model, 10,000
    steps counted with 10 s in place of 6."""
    effort = Effort(RoundTask.of(report_plan()), WEIGHTS, Counting(), 1 << 22)
    effort.longest_s()
    tracemalloc.start()
    effort.longest_s()
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 1 << 20


@pytest.mark.parametrize(
    ("most", "turns", "turns_tried"),
    [
        (3, 1, 1),  # one microbatch of four
        (12, 1, 1),  # three, side by side
        (13, 2, 2),
        (32, 3, 2),  # a batch of eight: three turns of three processes
        (36, 4, 2),
        (64, 6, 2),
        (68, 7, 2),
    ],
)
def test_in_several_processes_a_lot_takes_as_long_as_the_one_with_the_most_of_it(
    monkeypatch: pytest.MonkeyPatch, most: int, turns: int, turns_tried: int
) -> None:
    """With a clock on which each trial takes a second."""
    monkeypatch.setattr("agent.effort._seconds", lambda work, *_: work() is None or 1.0)
    engine = ParallelEngine(Counting(), 3)
    effort = Effort(task_at(1.0), WEIGHTS, engine, most)
    assert effort.longest_s() == pytest.approx(1.5 * (turns / turns_tried + 1 + 1))
    engine.close()


def test_the_time_of_other_processes_counts_on_a_busy_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time is taken where it is less than what the clock says, with that of all processes."""
    clock, own, others = itertools.count(0, 100.0), itertools.count(0, 2.0), itertools.count(0, 5.0)
    monkeypatch.setattr("agent.effort.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("agent.effort.time.process_time", lambda: next(own))
    assert _seconds(lambda: None, lambda: next(others)) == 7.0


def test_new_features_are_counted_for_all_records_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.effort._seconds", lambda work, *_: work() is None or 1.0)
    stage = {"random": {"layers": [{"average_pool2d": {"kernel": 4, "stride": 4}}]}}
    spec = from_description(DIGITS.describe() | {"front_end": [stage], "layers": [{"dense": 10}]})
    without = Effort(task_at(1.0), WEIGHTS, Counting(), MOST)
    effort = Effort(task_at(1.0), WEIGHTS, Counting(), MOST, front_end=FrontEnd(spec), new_records=MOST)
    assert effort.longest_s() - without.longest_s() == pytest.approx(1.5 * MOST / 4)


@pytest.fixture
def moments_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many records second moments are computed together, each time."""
    seen: list[int] = []
    total = SecondMoments.total
    monkeypatch.setattr(
        SecondMoments, "total", lambda self, records: seen.append(len(records)) or total(self, records)
    )
    return seen


def moments_task() -> RoundTask:
    spec = from_description(DIGITS.describe() | {"front_end": [{"projection": 6}], "layers": [{"dense": 10}]})
    return make_task(
        model=model_section(spec), projection={"values": 64, "record_norm": 4.0},
        wire={"block": 500}, step=17, **terms(rate=1.0),
    )  # fmt: skip


def test_second_moments_are_filled_up_too(moments_of: list[int]) -> None:
    task, none = moments_task(), np.zeros(0, np.float32)
    effort = Effort(task, none, None, MOST)
    filled = sum_of_moments(task.release, digits(0, 50), effort.filling)
    assert moments_of == [MOST]
    np.testing.assert_allclose(filled, sum_of_moments(task.release, digits(0, 50)), rtol=1e-12)
    assert effort.longest_s() > 0


def test_no_lot_has_more_second_moments_in_memory_than_are_tried(moments_of: list[int]) -> None:
    task = moments_task()
    effort = Effort(task, np.zeros(0, np.float32), None, 1000)
    effort.try_memory()
    assert moments_of == [MOMENTS_AT_ONCE]
    sum_of_moments(task.release, digits(0, 1000))
    assert (max(moments_of), sum(moments_of)) == (MOMENTS_AT_ONCE, MOMENTS_AT_ONCE + 1000)


def test_where_a_disk_has_to_be_read_each_record_counts_with_a_read_of_a_slow_one() -> None:
    task = task_at(1.0)
    within, beyond = (Effort(task, WEIGHTS, Counting(), MOST, disk_reads=reads) for reads in (0, 2))
    assert beyond.longest_s() > within.longest_s() / 2 + 1.5 * 2 * 0.005 * MOST


def test_leaving_records_out_is_tried_with_as_many_as_any_lot_has() -> None:
    """The ``onnx`` engine does it in a branch of its graph that it runs then alone, in memory of its own."""
    engine = Counting()
    Effort(task_at(1.0), WEIGHTS, engine, MOST).try_memory()
    assert engine.excluded == [0, max(engine.pieces)]
