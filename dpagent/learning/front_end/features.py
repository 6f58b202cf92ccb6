"""The features of a front end: computed once, kept on disk, read like any other data set.

**Batch invariance.** The features of a record take its place in training, so they too must be a
function of that record alone, bit for bit (:mod:`dpagent.learning.training.engine`). Hence every record goes
through the front end by itself.

The features lie in one file of float32 rows in the device's state directory, readable by its owner only.
Beside it stands a digest of each run of records they were computed from, so that a set that grows, or
changes, is computed anew only where it did. A digest is removed before its rows are overwritten: what
is left after a crash is computed again.

Features may not fill the disk that the ledger needs: they are not begun unless 256 MiB stay free. Whether
they fit depends on how many records there are, and on nothing in them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import weakref
from collections.abc import Mapping
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
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import FrozenNetwork, Projection, RandomLayers, Scattering
from dpagent.storage import disk_errors, write_atomically

Floats = NDArray[np.float32]

_RUN: Final = 64
"""Records whose features stand or fall together."""
_SPACE_LEFT: Final = 256 << 20
"""Bytes of the disk that features leave free."""


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

        No record makes it fail. If a record is not finite, all its features are NaN, even
        where a stage would make finite ones, so that it is excluded.
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


class FeatureSet(Dataset):
    """The features of another set, from a file.

    Args:
        dataset: the records; its labels, classes and names are those of the features.
        front_end: of the features.
        directory: where the file is kept; features of other front ends there are removed.

    Attributes:
        unusable: how many of the records computed just now have features that are not finite. Private.

    Raises:
        DataError: a record cannot be read, or does not fit the front end.
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
        self._file = directory / f"features-{front_end.key}.f32"
        self._digests = directory / f"features-{front_end.key}.json"
        self._row_bytes = 4 * math.prod(self.shape)
        with disk_errors(self._file):
            for stale in directory.glob("features-*"):
                if stale not in (self._file, self._digests):
                    stale.unlink(missing_ok=True)
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._closing = weakref.finalize(self, os.close, self._descriptor)
        self.unusable = 0
        self._fill(dataset, front_end)

    def close(self) -> None:
        """Close the file."""
        self._closing()

    def _fill(self, dataset: Dataset, front_end: FrontEnd) -> None:
        """Compute the features that the file does not hold yet."""
        self._require_space()
        known = on_disk = self._known_digests()
        digests: list[str] = []
        for number, (inputs, _) in enumerate(dataset.batches(size=_RUN)):
            digest = hashlib.sha256(inputs.tobytes()).hexdigest()
            if digest not in known[number : number + 1]:
                if len(on_disk) > number:
                    on_disk = digests.copy()
                    self._write_digests(on_disk)
                features = front_end(inputs)
                finite = np.isfinite(features).all(axis=tuple(range(1, features.ndim)))
                self.unusable += len(features) - int(np.count_nonzero(finite))
                self._write(features.tobytes(), number * _RUN * self._row_bytes)
            digests.append(digest)
        with disk_errors(self._file):
            os.fsync(self._descriptor)
        if digests != on_disk:
            self._write_digests(digests)

    def _require_space(self) -> None:
        """Refuse before anything is written, by the size of the whole file."""
        with disk_errors(self._file):
            space, there = os.fstatvfs(self._descriptor), os.fstat(self._descriptor)
        missing = len(self) * self._row_bytes - min(there.st_size, there.st_blocks * 512)
        free = space.f_bavail * space.f_frsize
        if missing > 0 and free < missing + _SPACE_LEFT:
            raise StorageError(
                f"{self._file}: the features of {len(self):,} records take {missing / 2**20:,.1f} MiB more,"
                f" and the disk has {free / 2**20:,.1f} MiB; expected {_SPACE_LEFT >> 20} MiB to stay free."
                " Free space, or put state_dir on a larger disk."
            )

    def _write(self, data: bytes, offset: int) -> None:
        rest = memoryview(data)
        with disk_errors(self._file):
            while rest:
                written = os.pwrite(self._descriptor, rest, offset)
                rest, offset = rest[written:], offset + written

    def _write_digests(self, digests: list[str]) -> None:
        write_atomically(self._digests, json.dumps(digests).encode(), mode=0o600)

    def _known_digests(self) -> list[str]:
        """Digests of the records behind the features in the file, as far as it is whole."""
        try:
            digests = json.loads(self._digests.read_bytes())
        except (OSError, ValueError, RecursionError):
            return []
        if not isinstance(digests, list):
            return []
        rows = os.fstat(self._descriptor).st_size // self._row_bytes
        return digests if rows >= len(self) else digests[: rows // _RUN]

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


def _asset(where: str, assets: Mapping[str, bytes] | None, role: str) -> bytes:
    if assets is None or role not in assets:
        raise ConfigurationError(f"{where}: its {role} is missing.")
    return assets[role]
