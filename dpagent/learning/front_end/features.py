"""The features of a front end: computed once, kept on disk, read like any other data set.

**Batch invariance.** The features of a record take its place in training, so they too must be a
function of that record alone, bit for bit (:mod:`dpagent.learning.training.engine`). Hence every record goes
through the front end by itself.

The features lie in one file of float32 rows in the device's state directory, readable by its owner only.
Beside it stand the front end that made them and a digest of each run of records they were computed from, so
that a set that grows, or changes, is computed anew only where it did. A digest is removed before its rows are
overwritten: what is left after a crash is computed again.

Features may not fill the disk that the ledger needs, and whether a device takes part may not depend on what
else fills it, such as records. So a device takes the room that its owner declares when it starts
(:func:`reserve`), and judges plans by that number (:func:`require_room`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ConfigurationError, DataError, StorageError
from dpagent.learning.data.dataset import Dataset, to_float32
from dpagent.learning.front_end.random_layers import RandomFeatures
from dpagent.learning.front_end.transforms import (
    Transform,
    frozen_network,
    projection,
    scattering,
)
from dpagent.learning.models.costs import features_mib
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import FrozenNetwork, Projection, RandomLayers, Scattering
from dpagent.storage import disk_errors, take_room, write_atomically

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]

_RUN: Final = 64
"""Records whose features stand or fall together."""


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
        that it is excluded.
        """
        features = np.empty((len(inputs), *self.output_shape), np.float32)
        # A record may hold anything; its gradient is excluded if it is not finite.
        with np.errstate(all="ignore"):
            for record, after in zip(inputs, features, strict=True):
                values = (to_float32(record) - self._offset) / self._scale
                if not np.isfinite(values).all():
                    after[...] = np.nan
                    continue
                for transform in self._transforms:
                    values = transform(values)
                after[...] = values
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


def reserve(directory: Path, size: int) -> None:
    """Give the file of features a size, on blocks of the disk that are its own; 0 removes it.

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
            known.first(there // known.row_bytes // _RUN).save(digests)
        take_room(
            file, size, holds="features",
            remedy="Free space, put state_dir on a larger disk, or lower data.features_mib.",
        )  # fmt: skip
        os.truncate(file, size)


def has_features(directory: Path, front_end: FrontEnd) -> bool:
    """Whether features of a front end have been computed there."""
    known = _Computed.load(_files(directory)[1])
    return known is not None and known.front_end == front_end.key


@dataclass(frozen=True, slots=True)
class _Computed:
    """What the file of features holds.

    Attributes:
        front_end: the key of the front end that made them.
        row_bytes: of the features of a record.
        runs: the digest of each run of records, or nothing where some of it is to be tried again.
    """

    front_end: str
    row_bytes: int
    runs: list[str]

    @classmethod
    def load(cls, file: Path) -> _Computed | None:
        """What was saved; None where there is nothing, or something else."""
        try:
            values = json.loads(file.read_bytes())
            known = cls(values["front_end"], values["row_bytes"], values["runs"])
        except (OSError, ValueError, RecursionError, LookupError, TypeError):
            return None
        is_valid = isinstance(known.runs, list) and isinstance(known.row_bytes, int) and known.row_bytes > 0
        return known if is_valid else None

    def save(self, file: Path) -> None:
        """Replace what was saved.

        Raises:
            StorageError: it cannot be written.
        """
        write_atomically(file, json.dumps(asdict(self)).encode(), mode=0o600)

    def first(self, runs: int) -> _Computed:
        """The same, of the first runs alone."""
        return replace(self, runs=self.runs[:runs])


def _files(directory: Path) -> tuple[Path, Path]:
    """Of the features, and of what they were computed from."""
    return directory / "features.f32", directory / "features.json"


class FeatureSet(Dataset):
    """The features of another set, from a file.

    Args:
        dataset: the records; its labels, classes and names are those of the features.
        front_end: of the features.
        directory: the directory of the file; see :func:`reserve`.

    Attributes:
        unusable: how many of the records computed just now have features that are not finite. Private.

    Raises:
        DataError: the records do not have the front end's shape, or one cannot be read.
        StorageError: the disk has no room for the features, or the file cannot be written.
    """

    def __init__(self, dataset: Dataset, front_end: FrontEnd, directory: Path) -> None:
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
        self._make_room(len(dataset) * self._row_bytes)
        with disk_errors(self._file):
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
        self._closing = weakref.finalize(self, os.close, self._descriptor)
        self.unusable = 0
        self._fill(dataset, front_end)

    def close(self) -> None:
        """Close the file."""
        self._closing()

    def _make_room(self, size: int) -> None:
        """Have room for the features, where nobody has reserved it."""
        with disk_errors(self._file):
            if not self._file.exists() or self._file.stat().st_size < size:
                reserve(self._file.parent, max(size, 1))

    def _fill(self, dataset: Dataset, front_end: FrontEnd) -> None:
        """Compute the features that the file does not hold yet."""
        on_disk = _Computed.load(self._digests)
        made = _Computed(front_end.key, self._row_bytes, [])
        if on_disk is None or (on_disk.front_end, on_disk.row_bytes) != (made.front_end, made.row_bytes):
            on_disk = made.first(0)
            on_disk.save(self._digests)
        known, digests = on_disk.runs, made.runs
        for number, (inputs, _) in enumerate(dataset.batches(size=_RUN)):
            digest = hashlib.sha256(inputs.tobytes()).hexdigest()
            if digest not in known[number : number + 1]:
                if len(on_disk.runs) > number:
                    on_disk = made.first(number)
                    on_disk.save(self._digests)
                features, failed = _features_of(front_end, inputs)
                if failed:
                    digest = ""  # Of no record: they are tried again the next time.
                finite = np.isfinite(features).all(axis=tuple(range(1, features.ndim)))
                self.unusable += len(features) - int(np.count_nonzero(finite))
                self._write(features.tobytes(), number * _RUN * self._row_bytes)
            digests.append(digest)
        with disk_errors(self._file):
            os.fsync(self._descriptor)
        if made != on_disk:
            made.save(self._digests)

    def _write(self, data: bytes, offset: int) -> None:
        rest = memoryview(data)
        with disk_errors(self._file):
            while rest:
                written = os.pwrite(self._descriptor, rest, offset)
                rest, offset = rest[written:], offset + written

    def _read(self, indices: NDArray[np.integer[Any]]) -> Floats:
        rows = np.empty((len(indices), *self.shape), np.float32)
        with disk_errors(self._file):
            for index, row in zip(indices.tolist(), rows, strict=True):
                data = os.pread(self._descriptor, self._row_bytes, index * self._row_bytes)
                if len(data) != self._row_bytes:
                    # No DataError: that is a record's, which would be left out without a word.
                    raise StorageError(f"{self._file} was cut short while in use; it is made again.")
                row[...] = np.frombuffer(data, np.float32).reshape(self.shape)
        return rows


def _features_of(front_end: FrontEnd, inputs: NDArray[Any]) -> tuple[Floats, int]:
    """The features of a run of records, NaN for each with which the front end fails, and how many those
    are."""
    try:
        return front_end(inputs), 0
    except Exception:
        log.debug("a front end failed with one of %d records", len(inputs), exc_info=True)
    features, failed = np.full((len(inputs), *front_end.output_shape), np.nan, np.float32), 0
    for place in range(len(inputs)):
        try:
            features[place] = front_end(inputs[place : place + 1])[0]
        except Exception:  # noqa: BLE001 - whatever a record does to a front end, it costs that record alone
            failed += 1
    return features, failed


def _asset(where: str, assets: Mapping[str, bytes] | None, role: str) -> bytes:
    if assets is None or role not in assets:
        raise ConfigurationError(f"{where}: its {role} is missing.")
    return assets[role]
