"""Datasets that are read through another: some records, not too many, another shape, none that fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.dataset import Dataset, Indices, Origin, to_float32
from dpagent.wording import counted, named


class Subset(Dataset):
    """Some of the records of another set, read through it.

    Args:
        dataset: the other set.
        indices: ``(m,)`` which of its records, in the order they shall have here.
    """

    def __init__(self, dataset: Dataset, indices: Indices) -> None:
        self._dataset, self._indices = dataset, np.asarray(indices, np.int64)
        super().__init__(
            dataset.labels[indices], dataset.classes, shape=dataset.shape, dtype=dataset.dtype,
            class_names=dataset.class_names, origin=dataset.origin,
            groups=None if dataset.groups is None else dataset.groups[indices],
        )  # fmt: skip

    @property
    def keys(self) -> NDArray[np.int64]:
        """As of :attr:`Dataset.keys`."""
        return self._dataset.keys[self._indices]

    def _read(self, indices: Indices) -> NDArray[Any]:
        return self._dataset.batch(self._indices[indices])[0]

    def try_read(self, indices: Indices) -> tuple[NDArray[Any], dict[int, str]]:
        """As of :meth:`Dataset.try_read`."""
        return self._dataset.try_read(self._indices[indices])


class Bounded(Dataset):
    """At most ``most`` records of another set that may grow.

    A record that is used stays used until it is gone. A free place goes to the first record that waits, in
    the order of the other set. Up to the bound every record is used, so one record more or less changes that
    record alone. At the bound a record that comes earlier takes the place of one that comes later: the used
    sets differ in two records, never in more.

    No deterministic rule f does better. Let f use every set of ``most`` ≥ 2 records whole, and let S have one
    record more. Then f(S) would have to lie within one record of S without r, for each r of S. Only S itself
    does: S without p is two records from S without r, and S without p and q three. But S is above the bound.
    Hence ``most`` is to be chosen such that it is never reached (docs/data.md).

    Args:
        dataset: the other set.
        most: records.
        used: the keys of those that were used before.
    """

    def __init__(self, dataset: Dataset, most: int, used: NDArray[np.int64] | None = None) -> None:
        self._dataset, self._most = dataset, most
        self._chosen, self.columns = dataset, dataset.columns
        if len(dataset) > most:
            self._chosen = Subset(dataset, _first_come(dataset.keys, most, used))
        chosen = self._chosen
        super().__init__(
            chosen.labels, chosen.classes, shape=chosen.shape, dtype=chosen.dtype,
            class_names=chosen.class_names, groups=chosen.groups, origin=self._origin(),
        )  # fmt: skip

    @property
    def keys(self) -> NDArray[np.int64]:
        """As of :attr:`Dataset.keys`."""
        return self._chosen.keys

    def _read(self, indices: Indices) -> NDArray[Any]:
        return self._chosen.batch(indices)[0]

    def try_read(self, indices: Indices) -> tuple[NDArray[Any], dict[int, str]]:
        """As of :meth:`Dataset.try_read`."""
        return self._chosen.try_read(indices)

    def refresh(self) -> Dataset:
        """As of :meth:`Dataset.refresh`."""
        now = self._dataset.refresh()
        if now is self._dataset:
            self.origin = self._origin()
            return self
        # The keys are asked for only where not every record can be used.
        return Bounded(now, self._most, self.keys if len(now) > self._most else None)

    def _origin(self) -> Origin:
        origin, over = self._dataset.origin, len(self._dataset) - self._most
        if over <= 0:
            return origin
        sentence = (
            f"{counted(over, 'record')} beyond {named('max_records', self._most)} are not used. Raise it, or"
            " remove records."
        )
        return replace(origin, left_out=(*origin.left_out, sentence))


def _first_come(keys: NDArray[np.int64], most: int, used: NDArray[np.int64] | None) -> Indices:
    """The places of the records that are used: those of before, then the first of the others."""
    known = np.zeros(len(keys), np.bool_) if used is None else np.isin(keys, used)
    first = np.concatenate([np.flatnonzero(known), np.flatnonzero(~known)])[:most]
    return np.sort(first)


class Reshaped(Dataset):
    """The records of another set in another shape with as many values.

    Raises:
        DataError: the numbers of values differ.
    """

    def __init__(self, dataset: Dataset, shape: Sequence[int]) -> None:
        self._dataset = dataset
        require_as_many_values(dataset.shape, shape)
        super().__init__(
            dataset.labels, dataset.classes, shape=shape, dtype=dataset.dtype,
            class_names=dataset.class_names, groups=dataset.groups, origin=dataset.origin,
        )  # fmt: skip

    def _read(self, indices: Indices) -> NDArray[Any]:
        return self._dataset.batch(indices)[0].reshape(len(indices), *self.shape)

    def try_read(self, indices: Indices) -> tuple[NDArray[Any], dict[int, str]]:
        """As of :meth:`Dataset.try_read`."""
        inputs, problems = self._dataset.try_read(indices)
        return inputs.reshape(len(indices), *self.shape), problems

    def refresh(self) -> Dataset:
        """As of :meth:`Dataset.refresh`."""
        now = self._dataset.refresh()
        self.origin = now.origin
        return self if now is self._dataset else Reshaped(now, self.shape)


def require_as_many_values(stored: Sequence[int], shape: Sequence[int]) -> None:
    """Refuse records of the shape ``stored`` that cannot be given ``shape``.

    Raises:
        DataError: the numbers of values differ.
    """
    if math.prod(shape) != math.prod(stored):
        raise DataError(
            f"The records have shape {tuple(stored)}, {counted(math.prod(stored), 'value')}; shape"
            f" {tuple(shape)} needs {math.prod(shape)}. Correct {named('shape')}, or leave it out."
        )


class Unfailing(Dataset):
    """The records of another set for training: no record makes it fail.

    A record that cannot be read stands as NaN in :meth:`batch`, for callers that need each record in its
    place, so that it counts as little as one whose numbers are not finite; a uint8 batch that has one comes
    as float32. :meth:`readable_batches` leaves it out.

    Args:
        dataset: the other set.
        tell: is called with a sentence each time that a record cannot be read.
    """

    def __init__(self, dataset: Dataset, tell: Callable[[str], None]) -> None:
        self._dataset, self._tell = dataset, tell
        super().__init__(
            dataset.labels, dataset.classes, shape=dataset.shape, dtype=dataset.dtype,
            class_names=dataset.class_names, groups=dataset.groups, origin=dataset.origin,
        )  # fmt: skip

    def _read(self, indices: Indices) -> NDArray[Any]:
        inputs, problems = self.try_read(indices)
        if problems:
            inputs = to_float32(inputs)
            inputs[list(problems)] = np.nan
        return inputs

    def try_read(self, indices: Indices) -> tuple[NDArray[Any], dict[int, str]]:
        """As of :meth:`Dataset.try_read`, and tells."""
        inputs, problems = self._dataset.try_read(indices)
        for problem in problems.values():
            self._tell(problem)
        return inputs, problems

    def refresh(self) -> Dataset:
        """As of :meth:`Dataset.refresh`."""
        now = self._dataset.refresh()
        self.origin = now.origin
        return self if now is self._dataset else Unfailing(now, self._tell)
