"""Training on this board: the records, their features and the engine, kept from round to round.

A round has two parts, with its charge between them. :meth:`Trainer.prepare` tries everything that can be
tried without a record: it builds the model, loads the graphs, runs them on made-up records and takes their
time, takes room on the disk for the features of the most records that there may be. It may decline.
:meth:`Trainer.noisy_update` reads the records, and always gives an update:

* what one record causes costs that record alone. One that cannot be read, is not what was declared, is not
  finite, or makes a front end or an engine fail, counts as if it did not exist;
* what no record can cause (the disk as a whole, memory for the board's own reasons, a lot larger than its
  bound, which chance makes with a probability that δ pays for) leaves an update of noise alone, or of zeros
  where the coordinator adds the noise, and the reason stays on the device.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from agent.board_engine import BoardEngine
from agent.declined import Declined
from agent.device_update import device_update
from agent.effort import Effort, MadeUp
from agent.look_messages import LookResult
from agent.noisy_sums import clipped_sum, sum_of_moments
from agent.published_state import PublishedStateFile
from agent.records import Nobodys, Records
from agent.row_files import CACHED_BYTES
from agent.row_index import Header
from agent.training_messages import Update
from agent.training_settings import TrainingSettings
from dpagent.errors import said
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.declared import DType
from dpagent.learning.front_end.features import FeatureSet, FrontEnd, has_features, require_room
from dpagent.learning.models.stages import FrozenNetwork
from dpagent.learning.training.engine import MAX_LOT_MICROBATCHES, Engine, accumulation_slack
from dpagent.privacy.covariance import MAX_LOT
from dpagent.privacy.sampling import largest_lot
from dpagent.protocol.fragments import cut
from dpagent.protocol.messages import Plan
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.reports import Reports
from dpagent.protocol.task import Release, RoundTask
from dpagent.protocol.update_size import values_of
from dpagent.protocol.updates import Updates
from dpagent.wording import counted

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class _Attempt(Protocol):
    """Computes something of the records, or gives something else."""

    def __call__(self, compute: Callable[[Dataset], ResultT], otherwise: ResultT) -> ResultT: ...


_SMALL: Final = (1 << 16, 16)
"""Bytes of a piece, and pieces, for all that is small."""
_OF_ROWS: Final = (30, 4)
"""The same of each record, in the index of rows, while it is read beside the one before."""
_OF_FEATURES: Final = (20, 4)
"""Of each, in the index of features."""
_VECTORS: Final = 8
"""Of the update's size, that a step has at a time."""
_VECTORS_OF_MOMENTS: Final = 10
"""The same in a round of second moments: the sum, and that of a batch, are as large."""


@dataclass(frozen=True, slots=True)
class Work:
    """A round that this board can run, as far as can be tried without a record.

    Attributes:
        task: of the round.
        weights: (parameters,) the global model.
        front_end: that makes features of records, or None.
        engine: that computes gradients; None for a round of second moments.
        effort: that makes the work the same for every lot; None where no record is read.
        failure: why this board cannot run the round after all, once it is charged; or None.
        is_rehearsal: whether it is done without a record, and for nothing.
        nobodys: what is read in place of records if it is; else None.
        longest_s: seconds that training takes with the largest lot, by a trial. Public.
    """

    task: RoundTask
    weights: NDArray[np.float32]
    front_end: FrontEnd | None
    engine: Engine | None
    effort: Effort | None
    failure: str | None = None
    is_rehearsal: bool = False
    nobodys: Nobodys | None = None
    longest_s: float = 0.0


class NoisyUpdate(NamedTuple):
    """What a round makes of the records, of which all but ``failure`` may leave.

    Attributes:
        values: the noisy sum in wire units, shape (dimension,).
        failure: why it is noise alone, or None. Only for the owner of the device.
    """

    values: NDArray[np.int64]
    failure: str | None

    def as_sent(self, plan: Plan) -> Update:
        """The same in fragments.

        Args:
            plan: the round's.
        """
        return Update(tuple(cut(self.values, plan)), self.failure)


class _Attempts:
    """What a round computes of records; zeros, or the weights as they are, where that fails. See
    :class:`~agent.device_update.OnRecords`.

    Each step tries anew: what fails in one costs no other.
    """

    def __init__(self, trainer: Trainer, work: Work, attempt: _Attempt) -> None:
        self._trainer, self._work, self._attempt = trainer, work, attempt

    def lot_sum(self, release: NoisySum, local: NDArray[np.float32]) -> NDArray[np.float64]:
        """As of ``OnRecords``."""
        return self._attempt(
            lambda records: self._trainer.lot_sum_of(self._work, release, records, local),
            np.zeros(release.dimension),
        )

    def trained(self, release: Reports | Updates) -> NDArray[np.float32]:
        """As of ``OnRecords``."""
        return self._attempt(
            lambda records: self._trainer.trained_on(self._work, release, records), self._work.weights
        )


class Trainer:
    """The device's work in a round.

    Args:
        settings: of training on this board.
    """

    def __init__(self, settings: TrainingSettings) -> None:
        self._settings = settings
        assert settings.data.max_records is not None  # without it the agent had not started
        self._max_records = settings.data.max_records
        self._engine = BoardEngine(settings)
        self._taken_bytes = 0
        """The most memory that was taken at once for a round. Public."""
        self._tried = ("", 0)
        """For which engine or moments, and with how many records, the memory was tried last."""
        self._tried_engine: Engine | None = None
        """The engine that it was tried with."""
        self._front_end: FrontEnd | None = None
        self._features: FeatureSet | None = None
        """Of the records below, by the front end."""
        self._features_are_of: Dataset | None = None

    @cached_property
    def records(self) -> Records:
        """The device's records, opened when they are first needed, which is after a charge.

        The agent has seen at its start that they can be.

        Raises:
            ConfigurationError, DataError: They cannot be opened.
        """
        return Records(self._settings.data, self._settings.state_dir)

    def prepare(
        self,
        task: RoundTask,
        assets: Mapping[str, bytes],
        weights: NDArray[np.float32],
        *,
        failure: str | None = None,
        is_rehearsal: bool = False,
        adopts: bool = False,
    ) -> Work:
        """See that this board can run a round. Reads no record, and does not ask how many there are.

        Args:
            task: of the round.
            assets: of its model, by role.
            weights: (parameters,) the global model.
            failure: why the update shall be noise alone, which this board can always run; or None.
            is_rehearsal: whether the work shall be done without a record.
            adopts: whether what a look at the data found counts from this round on.

        Raises:
            Declined: It cannot, as the guarantee requires.
            ConfigurationError: It has not the engine that it was told to use, or an asset is wrong.
            ParameterError: The weights do not fit the model.
            StorageError: The disk has no room for features, or fails.
            UsedProcessError: An engine is to be tried, and this process may not.
        """
        if failure is not None:
            return Work(task, weights, None, None, None, failure=failure, is_rehearsal=is_rehearsal)
        task.spec.require_weights(weights)
        if task.spec.front_end:
            require_room(task.spec, self._max_records, self._settings.data.features_mib)
        front_end = self._front_end_for(task, assets)
        engine: Engine | None = None
        if not _sums_moments(task.release):
            engine = self._engine.of(task, assets.get("training-graph"))
            if engine is not self._tried_engine:
                # Its processes are new: what they share with this one is to be written to before the charge.
                self._tried_engine, self._tried, self._taken_bytes = engine, ("", 0), 0
        if isinstance(task.release, NoisySum):
            self._require_bounded(task.release, engine)
        effort = Effort(
            task, weights, engine, self._max_records,
            front_end=front_end, new_records=self._most_new_records(front_end, adopts=adopts),
            disk_reads=self._disk_reads(task),
            dtype="float32" if front_end else self._dtype,
        )  # fmt: skip
        work = self._engine.purpose if engine else f"{values_of(task.plan)} moments"
        if (tried := (work, effort.largest)) != self._tried:
            effort.try_memory()
            self._tried = tried
        longest_s = effort.longest_s()
        self._take_memory(task)
        nobodys = self._nobodys(task, front_end) if is_rehearsal else None
        return Work(
            task, weights, front_end, engine, effort,
            is_rehearsal=is_rehearsal, nobodys=nobodys, longest_s=longest_s,
        )  # fmt: skip

    def noisy_update(self, work: Work, found: LookResult | None = None) -> NoisyUpdate:
        """The round's noisy sum over the usable records, or noise alone.

        Args:
            work: that was prepared.
            found: of a look, where what it found counts from this round on.

        Raises:
            Exception: No noise can be drawn on this board; nothing may leave.
        """
        failures = [] if work.failure is None else [work.failure]
        if found is not None and not work.is_rehearsal:
            try:
                self.records.adopt(found)
            except Exception as error:  # They cannot be opened; the attempt below says so.
                log.debug("the details: %s", said(error), exc_info=True)

        def attempt(compute: Callable[[Dataset], ResultT], otherwise: ResultT) -> ResultT:
            if work.failure is None:
                try:
                    if work.nobodys is not None:
                        return work.nobodys.attempt(compute)
                    return self.records.attempt(compute)
                except Exception as error:
                    log.debug("the details", exc_info=True)
                    failures.append(said(error))
                    self._features_are_of = None  # computed again the next time
            return otherwise

        release, kept, state = work.task.release, None, None
        if isinstance(release, NoisySum) and (cap := release.published_cap) is not None:
            kept = PublishedStateFile(self._settings.state_dir)
            state = kept.before(work.task.plan, cap)
        made = device_update(
            release, work.weights, _Attempts(self, work, attempt), state=state, entropy=os.urandom
        )
        if kept is not None and state is not None and made.state is not None:
            kept.save(work.task.plan, state if work.is_rehearsal else made.state)
        return NoisyUpdate(made.values, failures[0] if failures else None)

    def try_no_engines(self) -> None:
        """From now on, another model is prepared in another process (:class:`BoardEngine`)."""
        self._engine.may_try = False

    @property
    def elsewhere_s(self) -> float:
        """Processor time that the engine's other processes have spent so far, in seconds."""
        return 0.0 if self._tried_engine is None else self._tried_engine.elsewhere_s

    def _most_new_records(self, front_end: FrontEnd | None, *, adopts: bool) -> int:
        """Of how many records a round may have to compute features first. Public."""
        if front_end is None:
            return 0
        if not has_features(self._settings.state_dir, front_end):
            return self._max_records
        if not adopts:
            return 0
        from agent.decoding import most_new  # with which come all formats of data

        return min(self._max_records, most_new(self._settings.data))

    def _nobodys(self, task: RoundTask, front_end: FrontEnd | None) -> Nobodys:
        """What the records would be if there were none. Reads nothing of them."""
        shape, classes = task.spec.input_shape, task.spec.classes
        header = Header(of="", key="", shape=shape, dtype=self._dtype, classes=classes)
        features = None
        if front_end is not None:
            features = MadeUp(0, front_end.output_shape, "float32", are_features=True)
        return Nobodys(header, self._max_records, features)

    @property
    def _dtype(self) -> DType:
        """Of the records, as they are declared."""
        if self._settings.data.dtype:
            return self._settings.data.dtype
        from dpagent.learning.data.opening import require_declared  # with which come all formats of data

        return require_declared(self._settings.data).dtype or "float32"

    def _take_memory(self, task: RoundTask) -> None:
        """Have the memory that the round takes besides that of a batch, which is tried: for the tables
        of records, and for vectors of the model's size. What is freed stays with this process
        (:mod:`agent.child_programs`), so it is taken only if no round before has taken as much: it might
        not be there in such pieces any more, and that is a matter of records. Public.

        Raises:
            MemoryError: There is none.
        """
        release, parameters = task.release, task.spec.parameter_count
        vectors = _VECTORS_OF_MOMENTS if _sums_moments(release) else _VECTORS
        pieces = [
            _SMALL,
            (8 * (release.dimension if isinstance(release, NoisySum) else parameters), vectors),
            *((each * self._max_records, count) for each, count in _tables_of(task)),
        ]
        taken = sum(size * count for size, count in pieces)
        if taken > self._taken_bytes:
            # Written to, not just promised.
            _ = [np.ones(size, np.uint8) for size, count in pieces for _ in range(count)]
            self._taken_bytes = taken

    def _disk_reads(self, task: RoundTask) -> int:
        """How many files may be read from the disk for each record, and not from memory. Public."""
        record_bytes = math.prod(task.spec.input_shape) * np.dtype(np.float32).itemsize
        sizes = [self._max_records * record_bytes]
        if task.spec.front_end:
            sizes.append(self._settings.data.features_mib << 20)
        return sum(size > CACHED_BYTES for size in sizes)

    def lot_sum_of(
        self, work: Work, release: NoisySum, records: Dataset, local: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """The sum over a fresh lot of these records, (dimension,). Private."""
        assert work.effort is not None
        inputs = self._inputs_of(records, work)
        if work.engine is None:
            return sum_of_moments(release, inputs, work.effort.filling, entropy=os.urandom)
        return clipped_sum(release, local, inputs, work.engine, work.effort.filling, entropy=os.urandom)

    def trained_on(self, work: Work, release: Reports | Updates, records: Dataset) -> NDArray[np.float32]:
        """Weights after local training on these records, (parameters,). Private."""
        assert work.effort is not None
        assert work.engine is not None
        inputs = self._inputs_of(records, work)
        return release.training.train(
            work.engine, work.weights, inputs, work.effort.filling, entropy=os.urandom
        )

    def _require_bounded(self, release: NoisySum, engine: Engine | None) -> None:
        """Decline where sums on this board could leave the bounds that the noise allows for.

        Raises:
            Declined: They could.
        """
        if engine is None:
            self._require_lots(release, MAX_LOT)
            return
        slack, allowed = accumulation_slack(engine.microbatch), release.terms.clipping.accumulation_slack
        if slack > allowed:
            raise Declined(
                f"microbatches of {engine.microbatch} can add {slack:.3g} to a record's influence; the "
                f"plan's noise allows for {allowed:.3g}"
            )
        # The greatest L with L·⌈L/m⌉ within the bound is no less than this.
        self._require_lots(release, math.isqrt(MAX_LOT_MICROBATCHES * engine.microbatch) - engine.microbatch)

    def _require_lots(self, release: NoisySum, most: int) -> None:
        """Decline where a lot of the most records that there may be could be too large.

        Raises:
            Declined: It could.
        """
        records, rate = self._max_records, release.sampling.rate
        largest = largest_lot(records, rate)
        if largest > most:
            raise Declined(
                f"at a sampling rate of {rate:g}, a lot of {counted(records, 'record')} (data.max_records)"
                f" can have {largest:,}; this board adds up at most {most:,}"
            )

    def _inputs_of(self, records: Dataset, work: Work) -> Dataset:
        """The engine's inputs: the records, or their features."""
        front_end, effort = work.front_end, work.effort
        assert effort is not None
        if front_end is None:
            return records
        if work.nobodys is not None:
            effort.fill_up_features(0)
            assert work.nobodys.features is not None
            return work.nobodys.features
        # Also where no record has come in, which must not show, not even after a power cut in the middle.
        if self._features is None or self._features_are_of is not records or effort.new_records:
            if self._features is not None:
                self._features.close()
                self._features = None
            fill_up = effort.fill_up_features if effort.new_records else None
            self._features = FeatureSet(records, front_end, self._settings.state_dir, fill_up)
            if computed := self._features.computed:
                log.info("computed features of %s", counted(computed, "record"))
            self._features_are_of = records
            if unusable := self._features.unusable:
                # Only for the owner of the device: the number is private.
                total = counted(len(records), "record")
                log.warning(
                    "%d of %s have no finite features and do not count; `dpagent data decode`, with the agent"
                    " stopped, has them tried again", unusable, total,
                )  # fmt: skip
        return self._features

    def _front_end_for(self, task: RoundTask, assets: Mapping[str, bytes]) -> FrontEnd | None:
        spec = task.spec
        if not spec.front_end:
            return None
        for stage in spec.front_end:
            if isinstance(stage, FrozenNetwork) and stage.digest not in self._settings.trusted_graphs:
                raise Declined(
                    f"the model {spec.name} has a frozen network with the SHA-256 {stage.digest}, which is"
                    " not in trusted_graphs of agent.yaml; look at the model file with `dpagent model show`,"
                    " which checks the network and prints its digest, and add it if you trust it"
                )
        needed = {role: data for role, data in assets.items() if role != "training-graph"}
        front_end = FrontEnd(spec, needed, before_projection=_sums_moments(task.release))
        if self._front_end is None or self._front_end.key != front_end.key:
            self._front_end, self._features_are_of = front_end, None
            front_end(np.zeros((1, *front_end.input_shape), np.float32))
        return self._front_end


def _tables_of(task: RoundTask) -> list[tuple[int, int]]:
    """Bytes of each record in a piece, and pieces."""
    return [_OF_ROWS, _OF_FEATURES] if task.spec.front_end else [_OF_ROWS]


def _sums_moments(release: Release) -> bool:
    return isinstance(release, NoisySum) and release.second_moments is not None
