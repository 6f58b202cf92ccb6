"""The work of training: how long it takes at most, tried before the charge, and how it is made the same for
every lot.

The size of a lot is private, and training takes time in proportion to it. So the device settles beforehand
after how many slots it will publish, from public facts alone: it times made-up records, with the round's own
weights, norms and views, and counts with the largest lot that there may be (``largest_lot`` of
:mod:`dpagent.privacy.sampling`), and with all that a step does besides. And every lot is filled up to the
largest one (:class:`~dpagent.learning.training.lots.Filling`), so that nothing that the device does
meanwhile, such as how soon it acknowledges a message, tells when the real records were done. What is tried
runs through the same functions as what is charged: work that only one of them had could be told by its time.

A made-up record is read as a decoded one is (:mod:`agent.row_reads`), or as its features are, but from
memory: of a small model, reading is most of the work. Its gradient need not be taken, as a blank row of the
engine takes as long.

Where the files of the records, or of their features, are too large for the system to keep in memory, each
record of the largest lot counts with a read from a slow disk. What remains is what arithmetic itself takes,
since some processors are slower with numbers below 10⁻³⁸.
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.noisy_sums import MOMENTS_AT_ONCE, for_wire, moments_of, noisy_step, published_step
from agent.published_state import try_in_memory
from agent.row_reads import read_rows, rows_in
from dpagent.learning.data.dataset import Dataset, Indices
from dpagent.learning.data.declared import DType
from dpagent.learning.front_end.features import FeatureRows, FrontEnd
from dpagent.learning.training.augmentation import Augmentation
from dpagent.learning.training.engine import Engine
from dpagent.learning.training.lots import AT_ONCE, Filling, Room, total_of
from dpagent.learning.trial_numbers import TrialNumbers
from dpagent.privacy.covariance import SecondMoments
from dpagent.privacy.sampling import largest_lot, poisson_lot, shuffled
from dpagent.protocol.fragments import cut
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.reports import Reports
from dpagent.protocol.task import Release, RoundTask
from dpagent.protocol.update_size import values_of
from dpagent.protocol.updates import Updates

log = logging.getLogger(__name__)

_SPARE: Final = 1.5
"""Training is expected to take so many times longer than its trial: other programs want the board too."""
_DISK_READ_S: Final = 0.005
"""A read at a random place of a memory card: the slowest class made for programs (A1) takes 0.7 ms."""
_TRIES: Final = 2
_TRIED_S: Final = 0.2
"""A trial that took longer is not repeated."""
_TRIED_MICROBATCHES: Final = 2
_TRIED_FEATURES: Final = 4
_FAR: Final = 1 << 10
"""The byte of its file at which a made-up record begins, at least. Python has numbers up to 256 at hand, and
makes others anew: at the first bytes it would be read in fewer instructions than almost all real ones."""
_MOMENTS: Final = MOMENTS_AT_ONCE // AT_ONCE
"""Records of a microbatch where second moments are asked for."""


@dataclass(frozen=True, slots=True)
class Workload:
    """How much a round computes on this board at most. Public.

    Attributes:
        steps: each of which reads records.
        records: of a step, at most.
        norms: to which gradients are clipped.
        augmentation: views of each record, or None.
        moments: that are summed in place of gradients, or None.
        move: what a step does besides: it draws a lot, adds noise, and moves the local weights.
        finish: what follows the last step, before the update is cut into fragments.
    """

    steps: int
    records: int
    norms: Sequence[float]
    augmentation: Augmentation | None
    moments: SecondMoments | None
    move: Callable[[], object]
    finish: Callable[[], object]

    @classmethod
    def of(cls, release: Release, weights: NDArray[np.float32], most_records: int) -> Workload:
        """The work that a release asks for.

        Args:
            release: of the round.
            weights: (parameters,) the global model.
            most_records: that the device may have.
        """
        match release:
            case NoisySum(sampling=sampling):
                step, finish = _steps_of(release, weights)
                return cls(
                    sampling.local_steps, largest_lot(most_records, sampling.rate), release.clipping.norms,
                    release.augmentation, release.second_moments,
                    lambda: (
                        poisson_lot(most_records, sampling.rate), step()
                    ),
                    finish,
                )  # fmt: skip
            case Reports(training=training):
                return cls(
                    training.steps, training.batch, (training.largest_gradient,), None, None,
                    lambda: training.moved(weights, np.zeros(len(weights))),
                    lambda: release.update_of(weights + 1, weights),
                )  # fmt: skip
            case Updates(training=training):
                return cls(
                    training.steps, training.batch, (training.largest_gradient,), None, None,
                    lambda: training.moved(weights, np.zeros(len(weights))),
                    lambda: release.update_of(weights + 1, weights),
                )  # fmt: skip


def _steps_of(
    release: NoisySum, weights: NDArray[np.float32]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """What follows the sum of a step, and what follows the last step."""
    total = np.zeros(release.dimension)
    if (cap := release.published_cap) is not None:
        state = cap.start(release.dimension)
        return (
            lambda: published_step(release, weights, total, state),
            lambda: try_in_memory(release.plan, state),
        )
    return (
        lambda: noisy_step(release, weights.copy(), total),
        lambda: for_wire(release, total.astype(np.int64), weights),
    )


class MadeUp(Dataset):
    """Records that are none: each is read as a decoded one is, but from memory. Public.

    Args:
        records: how many.
        shape: of each, as the engine takes it.
        dtype: of each, as it is stored: uint8 or float32.
        are_features: whether each is read as the features of a record are.
    """

    def __init__(
        self, records: int, shape: Sequence[int], dtype: DType, *, are_features: bool = False
    ) -> None:
        super().__init__(np.zeros(records, np.int64), 2, shape=shape, dtype=np.dtype(dtype))
        file, descriptor = Path("made up"), os.memfd_create("made up")
        values = TrialNumbers(0).uniform(self.shape)
        record = (255 * values if dtype == "uint8" else values).astype(dtype).tobytes()
        row = -(-_FAR // len(record))
        os.pwrite(descriptor, record, row * len(record))
        self._record = rows_in(file, descriptor)
        self._rows = np.full(records, row, np.int64)
        self._checksums = np.full(records, zlib.crc32(record), np.uint32)
        self._features = FeatureRows(file, descriptor, self.shape, row + 1) if are_features else None

    def _read(self, indices: Indices) -> NDArray[Any]:
        return self.try_read(indices)[0]

    def try_read(self, indices: Indices) -> tuple[NDArray[Any], dict[int, str]]:
        """As of :meth:`Dataset.try_read`."""
        rows = self._rows[self._require_in_range(indices)]
        if self._features is not None:
            return self._features.try_at(rows)
        raw, problems = read_rows(self._record, rows, self._checksums[indices], self.record_bytes)
        return raw.view(self.dtype).reshape(len(indices), *self.shape), problems


class Effort:
    """The work of a round with the largest lot, on made-up records.

    Args:
        task: of the round.
        weights: (parameters,) the global model.
        engine: that computes gradients; None for a round of second moments.
        most_records: that the device may have.
        front_end: that makes features of records, or None.
        new_records: of which features have to be computed first, at most.
        disk_reads: how many files are read at a random place for each record, and may not be in memory.
        dtype: of the records as they are stored; of their features, float32.

    Attributes:
        new_records: of which features have to be computed yet, at most. Public.
    """

    def __init__(
        self,
        task: RoundTask,
        weights: NDArray[np.float32],
        engine: Engine | None,
        most_records: int,
        *,
        front_end: FrontEnd | None = None,
        new_records: int = 0,
        disk_reads: int = 0,
        dtype: DType = "float32",
    ) -> None:
        self._task, self._load = task, Workload.of(task.release, weights, most_records)
        self._weights, self._engine = weights, engine
        self._front_end, self.new_records, self._disk_reads = front_end, new_records, disk_reads
        self.largest, self._most_records, self._dtype = self._load.records, most_records, dtype

    def longest_s(self) -> float:
        """Seconds that training takes with the largest lot, on this board, with something to spare.

        Raises:
            Exception: The made-up records cannot be computed.
        """
        tried = min(_TRIED_MICROBATCHES * self._processes * self._microbatch, self.largest)
        step_s = self._seconds_of_sum(tried) * self._as_long_as(tried)
        step_s += _DISK_READ_S * self._disk_reads * self.largest + _seconds(self._load.move)
        total_s = self._load.steps * step_s + _seconds(self._finish)
        if self.new_records:
            total_s += _seconds(self._compute_features) * self.new_records / _TRIED_FEATURES
            total_s += _DISK_READ_S * self._disk_reads * self.new_records
        return _SPARE * total_s

    def try_memory(self) -> None:
        """Compute a batch of made-up records, as large as any lot has, in the memory that all lots use.

        Then once more with weights with which no gradient is finite: what an engine takes to leave a record
        out must be there before a record asks for it. And what follows a sum: that makes the tables of the
        noise, which are kept, so that the time of a step is tried without it.

        If that cannot be done, the plan is declined, or the process ends, before the charge.

        Raises:
            Exception: They cannot be computed.
        """
        shuffled(np.arange(self.largest, dtype=np.intp))
        rows = len(self.filling.room.labels)
        self._compute(rows, self._weights)
        if self._engine is not None:
            self._compute(rows, np.full_like(self._weights, np.nan))
        self._load.move()
        self._finish()

    def fill_up_features(self, done: int) -> None:
        """Go on with made-up records until features of as many are computed as there may be new ones; once.

        Args:
            done: new records whose features are computed.
        """
        try:
            for start in range(done, self.new_records, _TRIED_FEATURES):
                self._compute_features(min(_TRIED_FEATURES, self.new_records - start))
        except Exception:
            log.warning("the time of features was not filled up", exc_info=True)
        self.new_records = 0  # The next local step has them.

    def _seconds_of_sum(self, records: int) -> float:
        """What the sum over so many made-up records takes."""
        engine = self._engine
        if engine is None:
            return _seconds(lambda: self._compute(records, self._weights))
        return _seconds(lambda: self._compute(records, self._weights), lambda: engine.elsewhere_s)

    def _as_long_as(self, tried: int) -> float:
        """How many times as long the largest lot takes as the records that are tried."""
        # Records are read by one process, and computed by all.
        by_records = self.largest / max(tried, 1)
        return max(by_records, self._turns(self.largest) / max(self._turns(tried), 1))

    def _turns(self, records: int) -> int:
        """How many microbatches the process computes that has the most of them, if all are as fast: processes
        go on with the next batch together.

        Where a core is slower, each takes its next microbatch when it comes to it, so a trial with fewer of
        them may say too little: at all numbers of processes and lots that were computed, by up to a factor of
        1.23 where cores are half as fast as others, and 1.5 where a third. That is of what is spare.
        """
        batches, rest = divmod(-(-records // self._microbatch), AT_ONCE)
        return batches * -(-AT_ONCE // self._processes) + -(-rest // self._processes)

    def _finish(self) -> None:
        """What follows the last step; then the update is cut into fragments."""
        self._load.finish()
        plan = self._task.plan
        for _ in cut(np.zeros(values_of(plan), np.int64), plan):
            pass

    @property
    def _processes(self) -> int:
        return 1 if self._engine is None else self._engine.processes

    @property
    def _microbatch(self) -> int:
        return _MOMENTS if self._engine is None else self._engine.microbatch

    @cached_property
    def filling(self) -> Filling:
        """Made-up records, that fill up each lot to the largest, and the memory for them and for it."""
        load = self._load
        shape = self._task.spec.head.input_shape if load.moments is None else (load.moments.values,)
        rows = min(AT_ONCE * self._microbatch, max(self.largest, 1))
        room = Room(rows, shape, load.augmentation)
        made_up = MadeUp(rows, shape, self._dtype, are_features=self._front_end is not None)
        filling = Filling(self.largest, self._most_records, made_up, room)
        # Written to, not just promised: else a record that cannot be read would be the first to want it.
        filling.left_out[...] = False
        return filling

    def _compute_features(self, records: int = _TRIED_FEATURES) -> None:
        assert self._front_end is not None
        shape = self._front_end.input_shape
        self._front_end(TrialNumbers(0).uniform((records, *shape)))

    def _compute(self, records: int, weights: NDArray[np.float32]) -> None:
        """The sum over so many made-up records."""
        load, made_up, lot = self._load, self.filling.made_up, np.arange(records, dtype=np.intp)
        filling = replace(self.filling, records=records, population=records)
        if load.moments is not None:
            moments_of(load.moments, made_up, lot, filling)
            return
        assert self._engine is not None
        total_of(self._engine, weights, made_up, lot, load.norms, load.augmentation, filling)


def _seconds(work: Callable[[], object], elsewhere_s: Callable[[], float] = lambda: 0.0) -> float:
    """The time that ``work`` takes: the least of a few tries, in time or in processor time.

    Processor time leaves out what other programs take, and counts the times of several processes together.

    Args:
        work: that is tried.
        elsewhere_s: processor time that other processes have spent on it so far.
    """
    least = spent = 0.0
    for attempt in range(_TRIES):
        began, used = time.perf_counter(), time.process_time() + elsewhere_s()
        work()
        took = time.perf_counter() - began
        least = min(took, time.process_time() + elsewhere_s() - used, least if attempt else took)
        spent += took
        if spent > _TRIED_S:
            break
    return least
