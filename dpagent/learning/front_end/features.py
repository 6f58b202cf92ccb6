"""The features of a front end: computed once, kept on disk, read like any other data set.

**Batch invariance.** The features of a record take its place in training, so they too must be a
function of that record alone, bit for bit (:mod:`dpagent.learning.training.engine`). Hence every record goes
through the front end by itself.

The features lie in one file of float32 rows in the device's state directory, readable by its owner only.
Beside it stand the front end that made them and a digest of each record they were computed from, so that a
set that grows, or changes, is computed anew only where it did. A digest is removed before its row is
overwritten: what is left after a crash is computed again.

Both files are overwritten in place, in room that was taken before: on a full disk, the one record that is new
would decide whether the round counts any.

Features may not fill the disk that the ledger needs, and whether a device takes part may not depend on what
else fills it, such as records. So a device takes the room that its owner declares when it starts
(:func:`reserve`), and judges plans by that number (:func:`require_room`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.blank_rows import blank_all_but
from dpagent.errors import ConfigurationError, DataError, StorageError
from dpagent.learning.data.dataset import DIGEST_BYTES, Dataset, to_float32
from dpagent.learning.data.stored import AWAY
from dpagent.learning.models.costs import features_mib
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import FrozenNetwork, Projection, RandomLayers, Scattering
from dpagent.patient_reads import PatientReads
from dpagent.storage import disk_errors, overwrite, take_room

if TYPE_CHECKING:
    from dpagent.learning.front_end.transforms import Transform

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]

_READ_BYTES: Final = 1 << 20
_HEAD_BYTES: Final = 4096
"""Of the file of digests, before them."""
_LOST: Final = 255
"""Each byte of a digest at a place that the disk does not take, which a record's own digest never is: what is
there counts as not finite until all features are computed again."""
_NAN_BITS: Final = np.float32(np.nan).view(np.int32)
"""Set in a number of any kind, they make it NaN."""
_RUN: Final = 4
"""Records read together: no more than a device tries before the charge (:mod:`agent.effort`)."""


class FrontEnd:
    """The frozen stages of one model.

    Args:
        spec: with at least one stage.
        assets: bytes by role, of the stages that need any (``frozen-network``, ``projection``).
        before_projection: leave the projection out, whose directions are not known yet.

    Raises:
        ConfigurationError: an asset is missing or does not fit its stage.
    """

    def __init__(
        self, spec: ModelSpec, assets: Mapping[str, bytes] | None = None, *, before_projection: bool = False
    ) -> None:
        # Which training of models without any never loads.
        from dpagent.learning.front_end.random_layers import RandomFeatures
        from dpagent.learning.front_end.transforms import Transform, frozen_network, projection, scattering

        self.input_shape = spec.input_shape
        stages = spec.front_end[:-1] if before_projection else spec.front_end
        what = spec.digest() + bytes([before_projection]) + b"".join(sorted((assets or {}).values()))
        self.key = hashlib.sha256(what).hexdigest()[:32]
        self._offset = np.asarray(spec.input_offset, np.float32)
        self._scale = np.asarray(spec.input_scale, np.float32)
        self._transforms: list[Transform] = []
        shape = spec.input_shape
        for index, stage in enumerate(stages):
            where = f"Model {spec.name!r}, front end, stage {index} {stage.kind}"
            match stage:
                case Scattering():
                    transform = scattering(stage, shape)
                case RandomLayers():
                    transform = Transform(stage.shape_after(shape), RandomFeatures(stage, shape))
                case FrozenNetwork():
                    transform = frozen_network(where, stage, shape, _asset(where, assets, "frozen-network"))
                case Projection():
                    transform = projection(where, stage, shape, _asset(where, assets, "projection"))
            self._transforms.append(transform)
            shape = transform.output_shape
        self.output_shape = shape

    def __call__(self, inputs: NDArray[Any]) -> Floats:
        """The features ``(n, *output_shape)`` float32 of inputs ``(n, *input_shape)``, uint8 or float32.

        If a record is not finite, all its features are NaN, even where a stage would make finite ones, so
        that it is excluded. It takes as much work as any other: a blank one is computed in its stead.
        """
        features = np.empty((len(inputs), *self.output_shape), np.float32)
        # A record may hold anything; its gradient is excluded if it is not finite.
        with np.errstate(all="ignore"):
            for record, after in zip(inputs, features, strict=True):
                values = (to_float32(record) - self._offset) / self._scale
                is_finite = np.array([np.count_nonzero(np.isfinite(values)) == values.size])
                blank_all_but(is_finite, values[np.newaxis])
                for transform in self._transforms:
                    values = transform(values)
                after[...] = values
                after.view(np.int32)[...] |= np.where(is_finite, 0, _NAN_BITS)
        return features


def require_room(spec: ModelSpec, records: int, room_mib: int) -> None:
    """See that the features of so many records have room, by public numbers alone.

    Raises:
        ConfigurationError: they need more than ``room_mib`` MiB.
    """
    needed = features_mib(spec, records)
    if needed > room_mib:
        raise ConfigurationError(
            f"the features of {records:,} records (data.max_records) of the model {spec.name} take"
            f" {needed:,} MiB; data.features_mib in agent.yaml is {room_mib:,}. Set it to at least"
            f" {needed:,} and start the agent again."
        )


def reserve(directory: Path, size: int, records: int) -> None:
    """Give the file of features a size, on blocks of the disk that are its own, and as well the file that
    tells of so many records; a size of 0 removes both.

    Raises:
        StorageError: there is no such room, or the file cannot be written.
    """
    file, digests = _files(directory)
    with disk_errors(file):
        if not size:
            for each in (digests, file):
                each.unlink(missing_ok=True)
            return
        there = file.stat().st_size if file.exists() else 0
        if there < size and (known := _Computed.load(digests)) is not None:
            # What is not there yet is allocated as zeros: no digest may stand for it.
            known.without(np.arange(there // known.row_bytes, len(known.digests))).save(digests)
        for each, needed in ((file, size), (digests, _HEAD_BYTES + records * DIGEST_BYTES)):
            take_room(
                each, needed, holds="features",
                remedy="Free space, put state_dir on a larger disk, or lower data.features_mib.",
            )  # fmt: skip
        os.truncate(file, size)


def keep_in_memory(directory: Path) -> None:
    """Read the file of features, if there is one, so that the system has it in memory.

    Raises:
        StorageError: it cannot be read.
    """
    file, _ = _files(directory)
    with disk_errors(file):
        if not file.exists():
            return
        with file.open("rb", buffering=0) as opened:
            for start in range(0, file.stat().st_size, _READ_BYTES):
                # What cannot be read may be one record's: that keeps no agent from its start.
                with contextlib.suppress(OSError):
                    os.pread(opened.fileno(), _READ_BYTES, start)


def has_features(directory: Path, front_end: FrontEnd) -> bool:
    """Whether features of a front end have been computed there, of all records that there were."""
    known = _Computed.load(_files(directory)[1])
    return known is not None and known.is_whole and known.front_end == front_end.key


def forget_features(directory: Path, *, all_of_them: bool = False) -> None:
    """Let it count as unknown of how many records there are features there; those stay where they are.

    Args:
        directory: of the files.
        all_of_them: whether those of all records are computed again, which takes the next round no longer: it
            counts with as many. So records are tried again with which a front end failed.

    Raises:
        StorageError: that cannot be written.
    """
    digests = _files(directory)[1]
    if (known := _Computed.load(digests)) is not None:
        gone = np.arange(len(known.digests) if all_of_them else 0)
        known.without(gone).save(digests)


@dataclass(frozen=True, slots=True)
class _Computed:
    """What the file of features holds.

    Attributes:
        front_end: the key of the front end that made them.
        row_bytes: of the features of a record.
        digests: (places, 16) uint8: of the record whose features each row holds; zeros for none.
        is_whole: whether those of all records were tried. If a crash came before that, any number of them may
            have to be computed yet.
    """

    front_end: str
    row_bytes: int
    digests: NDArray[np.uint8]
    is_whole: bool = False

    @classmethod
    def load(cls, file: Path) -> _Computed | None:
        """What was saved; None where there is nothing, or something else."""
        try:
            content = file.read_bytes()
            values = json.loads(content[:_HEAD_BYTES].decode())  # Of bytes, it would look for an encoding.
            places = int(values["places"])
            body = np.frombuffer(content, np.uint8, places * DIGEST_BYTES, _HEAD_BYTES)
            digests = body.reshape(places, DIGEST_BYTES)
            known = cls(
                str(values["front_end"]), int(values["row_bytes"]), digests, values["is_whole"] is True
            )
        except (OSError, ValueError, RecursionError, LookupError, TypeError):
            return None
        return known if known.row_bytes > 0 else None

    def save(self, file: Path) -> None:
        """Replace what was saved, in place. A crash leaves that, all of this, or nothing.

        Raises:
            StorageError: it cannot be written.
        """
        values = {
            "front_end": self.front_end, "row_bytes": self.row_bytes, "is_whole": self.is_whole,
            "places": len(self.digests),
        }  # fmt: skip
        with disk_errors(file):
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # All that was taken for the most records that there may be: else a place that fails would be
                # written to, and all features be lost, from one record on.
                room = max(os.fstat(descriptor).st_size - _HEAD_BYTES, 0)
                for data, offset in (
                    (b"", 0),  # Until both are there, nothing counts.
                    (self.digests.tobytes().ljust(room, b"\0"), _HEAD_BYTES),
                    (json.dumps(values).encode(), 0),
                ):
                    overwrite(descriptor, data.ljust(_HEAD_BYTES) if not offset else data, offset)
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def without(self, places: NDArray[np.integer[Any]]) -> _Computed:
        """The same, with no features at some places."""
        digests = self.digests.copy()
        digests[places] = 0
        return replace(self, digests=digests, is_whole=False)

    def of_size(self, places: int) -> _Computed:
        """The same, with so many places."""
        digests = np.zeros((places, DIGEST_BYTES), np.uint8)
        kept = min(places, len(self.digests))
        digests[:kept] = self.digests[:kept]
        return replace(self, digests=digests)


def _files(directory: Path) -> tuple[Path, Path]:
    """Of the features, and of what they were computed from."""
    return directory / "features.f32", directory / "features.index"


class FeatureRows:
    """Rows of features in an open file.

    Args:
        file: for what is said of it.
        descriptor: of the file; whoever opened it closes it.
        shape: of the features of a record.
        places: how many rows there are.

    Attributes:
        lost: ``(places,)``: rows that the disk does not write, or read.
    """

    def __init__(self, file: Path, descriptor: int, shape: tuple[int, ...], places: int) -> None:
        self._file, self._descriptor, self._shape = file, descriptor, shape
        self._row_bytes = 4 * math.prod(shape)
        self.lost: NDArray[np.bool_] = np.zeros(places, np.bool_)
        self._reads = PatientReads()

    def at(self, places: NDArray[np.integer[Any]]) -> Floats:
        """The features there, ``(n, *shape)``; NaN for a row that is lost.

        Raises:
            StorageError: the file has become shorter.
        """
        rows = np.full((len(places), *self._shape), np.nan, np.float32)
        starts = (places * self._row_bytes + AWAY).tolist()
        for start, row, is_lost in zip(starts, rows, self.lost[places].tolist(), strict=True):
            if not is_lost:
                self._read(start - AWAY, row)
        return rows

    def try_at(self, places: NDArray[np.integer[Any]]) -> tuple[Floats, dict[int, str]]:
        """The same, and a sentence for each place in them whose row is lost. Nothing is read of that, which
        takes less time: training reads a made-up one in its stead."""
        rows = self.at(places)
        return rows, dict.fromkeys(np.flatnonzero(self.lost[places]).tolist(), "its features are lost")

    def lose(self, place: int, error: OSError | None) -> None:
        """Let a row count as lost, and tell the owner why."""
        self.lost[place] = True
        why = "it is not read" if error is None else error.strerror
        log.error("%s, row %d: %s; its record does not count. Check the disk.", self._file, place, why)

    def _read(self, start: int, row: Floats) -> None:
        why: OSError | None = None
        try:
            if self._reads.read(self._descriptor, row.data, start) == self._row_bytes:
                return
        except OSError as error:
            why = error
        if os.fstat(self._descriptor).st_size < start + self._row_bytes:
            raise StorageError(f"{self._file} was cut short while in use; it is made again.")
        row[...] = np.nan
        self.lose(start // self._row_bytes, why)


class FeatureSet(Dataset):
    """The features of another set, from a file.

    Args:
        dataset: the records; its labels, classes and names are those of the features.
        front_end: of the features.
        directory: the directory of the file; see :func:`reserve`.
        fill_up: what is done before all features count as computed, with how many of them were: so that
            whoever sees after a crash whether they did count sees when ``fill_up`` was over, and not when the
            records were. Nothing by default, for records that are nobody's.

    Attributes:
        computed: how many records' features were computed just now. Private.
        unusable: how many of them are not finite. Private.

    Raises:
        DataError: the records do not have the front end's shape, or one cannot be read.
        StorageError: the disk has no room for the features, or the file cannot be written.
    """

    def __init__(
        self,
        dataset: Dataset,
        front_end: FrontEnd,
        directory: Path,
        fill_up: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(
            dataset.labels, dataset.classes, shape=front_end.output_shape, dtype=np.dtype(np.float32),
            class_names=dataset.class_names, groups=dataset.groups, origin=dataset.origin,
        )  # fmt: skip
        if dataset.shape != front_end.input_shape:
            raise DataError(
                f"The records have shape {dataset.shape}; the front end expects {front_end.input_shape}."
            )
        self._file, self._digests = _files(directory)
        self._row_bytes = 4 * math.prod(front_end.output_shape)
        self._places = dataset.places
        self._room = int(self._places.max(initial=-1)) + 1
        self._make_room(self._room * self._row_bytes)
        with disk_errors(self._file):
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
        self._closing = weakref.finalize(self, os.close, self._descriptor)
        self._rows = FeatureRows(self._file, self._descriptor, self.shape, self._room)
        self.computed = self.unusable = 0
        self._fill(dataset, front_end, fill_up)

    def close(self) -> None:
        """Close the file."""
        self._closing()

    def _make_room(self, size: int) -> None:
        """Have room for the features, where nobody has reserved it."""
        with disk_errors(self._file):
            if not self._file.exists() or self._file.stat().st_size < size:
                reserve(self._file.parent, max(size, 1), self._room)

    def _fill(self, dataset: Dataset, front_end: FrontEnd, fill_up: Callable[[int], None] | None) -> None:
        """Compute the features that the file does not hold yet."""
        known = _Computed.load(self._digests)
        if known is None or (known.front_end, known.row_bytes) != (front_end.key, self._row_bytes):
            known = _Computed(front_end.key, self._row_bytes, np.zeros((0, DIGEST_BYTES), np.uint8))
        known = known.of_size(max(self._room, len(known.digests)))
        digests, self._rows.lost = dataset.digests(), (known.digests == _LOST).all(axis=1)
        is_known = (known.digests[self._places] == digests).all(axis=1) | self._rows.lost[self._places]
        new = np.flatnonzero(~is_known)
        if not len(new) and known.is_whole and fill_up is None:
            return  # Of no records, too, it has to be noted that they have been computed.
        known.without(self._places[new]).save(self._digests)
        made = known.of_size(len(known.digests))
        for start in range(0, len(new), _RUN):
            some = new[start : start + _RUN]
            features = _features_of(front_end, dataset.batch(some)[0])
            finite = np.isfinite(features).all(axis=tuple(range(1, features.ndim)))
            self.unusable += len(features) - int(np.count_nonzero(finite))
            for place, row in zip(self._places[some].tolist(), features, strict=True):
                self._write(place, row)
            # Also of those with which the front end fails: how many there are would else show in each round
            # for which they were tried again.
            made.digests[self._places[some]] = digests[some]
        self.computed = len(new)
        self._make_durable(self._places[new])
        made.digests[self._rows.lost] = _LOST
        if fill_up is not None:
            fill_up(self.computed)
        replace(made, is_whole=True).save(self._digests)

    # A place that the disk does not write, or read, costs the record whose features are there, and no other.

    def _write(self, place: int, row: Floats) -> None:
        try:
            overwrite(self._descriptor, row.tobytes(), place * self._row_bytes)
        except OSError as error:
            self._rows.lose(place, error)

    def _make_durable(self, places: NDArray[np.integer[Any]]) -> None:
        try:
            os.fsync(self._descriptor)
            return
        except OSError as error:  # It does not say of which.
            log.error("%s: %s. Check the disk.", self._file, error.strerror)
        for place, row in zip(places.tolist(), self._rows.at(places), strict=True):
            try:
                overwrite(self._descriptor, row.tobytes(), place * self._row_bytes)
                os.fsync(self._descriptor)
            except OSError as error:
                self._rows.lose(place, error)

    def _read(self, indices: NDArray[np.integer[Any]]) -> Floats:
        return self._rows.at(self._places[indices])

    def try_read(self, indices: NDArray[np.integer[Any]]) -> tuple[Floats, dict[int, str]]:
        """As of :meth:`Dataset.try_read`."""
        return self._rows.try_at(self._places[self._require_in_range(indices)])


def _features_of(front_end: FrontEnd, inputs: NDArray[Any]) -> Floats:
    """The features of some records, NaN for each with which the front end fails."""
    features = np.full((len(inputs), *front_end.output_shape), np.nan, np.float32)
    for place in range(len(inputs)):  # Each once: a failure makes no work for the others.
        try:
            features[place] = front_end(inputs[place : place + 1])[0]
        except Exception:  # Whatever a record does to a front end, it costs that record alone.
            log.debug("a front end failed with a record", exc_info=True)
    return features


def _asset(where: str, assets: Mapping[str, bytes] | None, role: str) -> bytes:
    if assets is None or role not in assets:
        raise ConfigurationError(f"{where}: its {role} is missing.")
    return assets[role]
