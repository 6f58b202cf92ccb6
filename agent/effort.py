"""The work of training: how long it takes at most, tried before the charge, and how it is made the same for
every lot.

The size of a lot is private, and training takes time in proportion to it. So the device settles beforehand
after how many slots it will publish, from public facts alone: it times made-up records, with the round's own
weights, norms and views, and counts with the largest lot that there may be (``largest_lot`` of
:mod:`dpagent.privacy.sampling`). And once the records of the real lot are done, it goes on with made-up ones
until the work is that of the largest lot, so that nothing it does meanwhile, such as how soon it acknowledges
a message, tells when the real ones were done.

A made-up record is read as a decoded one is (:mod:`agent.rows`), but from memory: of a small model, reading
is most of the work.

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
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.noisy_sums import MOMENTS_AT_ONCE
from dpagent.learning.data.stored import RawFile
from dpagent.learning.front_end.features import FrontEnd
from dpagent.learning.training.augmentation import Augmentation
from dpagent.learning.training.engine import Engine
from dpagent.privacy.covariance import SecondMoments
from dpagent.privacy.sampling import largest_lot, shuffled
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.reports import Reports
from dpagent.protocol.task import Release, RoundTask
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
_TRIED_NOISE: Final = 4096
_TRIED_FEATURES: Final = 4
_AT_ONCE: Final = 8
"""Microbatches of made-up records computed together, as many as of real ones."""
_MOMENTS: Final = MOMENTS_AT_ONCE // _AT_ONCE
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
        draw: draws a part of the noise, or clips an update.
        draws: how many such parts the round takes.
    """

    steps: int
    records: int
    norms: Sequence[float]
    augmentation: Augmentation | None
    moments: SecondMoments | None
    draw: Callable[[], object]
    draws: float

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
                sampler = release.mechanism.sampler()
                return cls(
                    sampling.local_steps, largest_lot(most_records, sampling.rate), release.clipping.norms,
                    release.augmentation, release.second_moments, lambda: sampler.sample(_TRIED_NOISE),
                    sampling.local_steps * release.dimension / _TRIED_NOISE,
                )  # fmt: skip
            case Reports(training=training):
                two_point = release.two_point(weights)
                return cls(
                    training.steps, training.batch, (training.largest_gradient,), None, None,
                    lambda: two_point.report(weights), 1,
                )  # fmt: skip
            case Updates(training=training):
                return cls(
                    training.steps, training.batch, (training.largest_gradient,), None, None,
                    lambda: release.update_of(weights, weights), 1,
                )  # fmt: skip


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
    ) -> None:
        self._task, self._load = task, Workload.of(task.release, weights, most_records)
        self._weights, self._engine = weights, engine
        self._front_end, self._new_records, self._disk_reads = front_end, new_records, disk_reads
        self.largest = self._load.records

    def longest_s(self) -> float:
        """Seconds that training takes with the largest lot, on this board, with something to spare.

        Raises:
            Exception: The made-up records cannot be computed.
        """
        tried = min(_TRIED_MICROBATCHES * self._microbatch, self.largest)
        records_s = _seconds(lambda: self._compute(self._weights, tried)) * self.largest / max(tried, 1)
        records_s += _DISK_READ_S * self._disk_reads * self.largest
        total_s = self._load.steps * records_s + self._load.draws * _seconds(self._load.draw)
        if self._new_records:
            total_s += _seconds(self._compute_features) * self._new_records / _TRIED_FEATURES
            total_s += _DISK_READ_S * self._disk_reads * self._new_records
        return _SPARE * total_s

    def try_memory(self) -> None:
        """Compute as many made-up records at once as any lot may have in memory together.

        If they do not, the plan is declined, or the process ends, before the charge. After it, a lot that is
        one record too large for the memory would be noise alone.

        Raises:
            Exception: They cannot be computed.
        """
        lot = shuffled(np.arange(self.largest, dtype=np.intp))
        self._compute(self._weights, min(len(lot), _AT_ONCE * self._microbatch))

    def fill_up_features(self, done: int) -> None:
        """Go on with made-up records until features of as many are computed as there may be new ones; once.

        Args:
            done: new records whose features are computed.
        """
        try:
            for start in range(done, self._new_records, _TRIED_FEATURES):
                self._compute_features(min(_TRIED_FEATURES, self._new_records - start))
        except Exception:
            log.warning("the time of features was not filled up", exc_info=True)
        self._new_records = 0  # The next local step has them.

    def fill_up(self, local: NDArray[np.float32], done: int) -> None:
        """Go on with made-up records until as many are done as the largest lot has.

        Args:
            local: (parameters,) the weights of the step.
            done: records of the lot.
        """
        try:
            while done < self.largest:
                records = min(self.largest - done, _AT_ONCE * self._microbatch)
                self._compute(local, records)
                done += records
        except Exception:
            # The sum of the lot is made, and does not depend on this.
            log.warning("the time of training was not filled up", exc_info=True)

    @property
    def _microbatch(self) -> int:
        return _MOMENTS if self._engine is None else self._engine.microbatch

    @cached_property
    def _inputs(self) -> NDArray[np.float32]:
        """Made-up records, (n, …), of the shape that the engine takes."""
        moments = self._load.moments
        shape = self._task.spec.head.input_shape if moments is None else (moments.values,)
        inputs: NDArray[Any] = np.random.default_rng(0).random(
            (_AT_ONCE * self._microbatch, *shape), np.float32
        )
        return inputs

    @cached_property
    def _record(self) -> RawFile:
        """A file in memory, of as many bytes as a record has at most."""
        descriptor = os.memfd_create("made up")
        os.write(descriptor, self._inputs[0].tobytes())
        return RawFile(Path("made up"), descriptor)

    def _read(self, records: int) -> NDArray[np.uint8]:
        raw = np.zeros((records, self._record.size), np.uint8)
        for row in raw:
            self._record.read_into(row, 0)
            zlib.crc32(row.data)
        return raw

    def _compute_features(self, records: int = _TRIED_FEATURES) -> None:
        assert self._front_end is not None
        shape = self._front_end.input_shape
        self._front_end(np.random.default_rng(0).random((records, *shape), np.float32))

    def _compute(self, weights: NDArray[np.float32], records: int) -> None:
        # Held beside what is made of them, and twice, as where one of them cannot be read.
        held = [self._read(records)]
        held.append(held[0].copy())
        inputs, load = self._inputs[:records], self._load
        if load.moments is not None:
            load.moments.total(inputs)
            return
        assert self._engine is not None
        if load.augmentation is not None:
            inputs = load.augmentation.views_of(inputs)
        self._engine.clipped_sum(weights, inputs, np.zeros(records, np.int64), load.norms)


def _seconds(work: Callable[[], object]) -> float:
    """The time that ``work`` takes: the least of a few tries, in time or in processor time.

    Processor time leaves out what other programs take, and counts what several threads take twice.
    """
    least = spent = 0.0
    for attempt in range(_TRIES):
        began, used = time.perf_counter(), time.process_time()
        work()
        took = time.perf_counter() - began
        least = min(took, time.process_time() - used, least if attempt else took)
        spent += took
        if spent > _TRIED_S:
            break
    return least
