"""Inputs without known labels, for predictions, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from numpy.typing import NDArray

Say: TypeAlias = Callable[[str], None]
"""Takes a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Input:
    """One record, or why it cannot be read.

    Attributes:
        source: the file, or the path of the dataset.
        record: its number in ``source``, from 0; None where the file is the record.
        values: of the model's input shape, uint8 or float32; None if it cannot be read.
        label: the class it is known to have, or None.
        problem: why it cannot be read, or empty.
        scaled_from: width and height of a picture that was made to fit, or None.
        is_whole_path: whether it stands for all that is at ``source``, which cannot be read as inputs.
    """

    source: str
    record: int | None = None
    values: NDArray[Any] | None = None
    label: int | None = None
    problem: str = ""
    scaled_from: tuple[int, int] | None = None
    is_whole_path: bool = False

    @property
    def name(self) -> str:
        """The name of the record in messages."""
        return self.source if self.record is None else f"{self.source}#{self.record}"


@dataclass(frozen=True, slots=True)
class Target:
    """The model that inputs are read for.

    Attributes:
        model: its name.
        shape: of one input.
        classes: how many it tells apart.
        class_names: their names, or empty.
    """

    model: str
    shape: tuple[int, ...]
    classes: int
    class_names: tuple[str, ...] = ()
