"""Datasets that are read through another: some records, another shape, none that fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.dataset import Dataset, Indices, to_float32
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

    def _read(self, indices: Indices) -> NDArray[Any]:
        return self._dataset.batch(self._indices[indices])[0]

    def try_read(self, indices: Indices) -> tuple[NDArray[Any], dict[int, str]]:
        """As of :meth:`Dataset.try_read`."""
        return self._dataset.try_read(self._indices[indices])


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

    def stamps(self, key: bytes) -> NDArray[np.uint64]:
        """As of :meth:`Dataset.stamps`."""
        return self._dataset.stamps(key)

    @property
    def unfinished(self) -> Indices:
        """As of :attr:`Dataset.unfinished`."""
        return self._dataset.unfinished

    @property
    def unlisted(self) -> frozenset[int]:
        """As of :attr:`Dataset.unlisted`."""
        return self._dataset.unlisted

    @property
    def files(self) -> Sequence[str]:
        """As of :attr:`Dataset.files`."""
        return self._dataset.files

    @property
    def unread(self) -> Sequence[str]:
        """As of :attr:`Dataset.unread`."""
        return self._dataset.unread

    @property
    def file_numbers(self) -> Indices:
        """As of :attr:`Dataset.file_numbers`."""
        return self._dataset.file_numbers

    def place_of(self, number: int) -> str:
        """As of :meth:`Dataset.place_of`."""
        return self._dataset.place_of(number)


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

    @property
    def places(self) -> NDArray[np.int64]:
        """As of :attr:`Dataset.places`."""
        return self._dataset.places

    def digests(self) -> NDArray[np.uint8]:
        """As of :meth:`Dataset.digests`."""
        return self._dataset.digests()

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
