"""From the labels that data carry, names or whole numbers, to the numbers that a model trains on.

All devices of a fleet must number the classes alike. The public list ``classes`` says how. Without it,
whole numbers stand for themselves, and names are numbered in sorted order: fine for a demonstration, but a
board that lacks a class would number them otherwise, and nobody would notice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.dataset import MAX_CLASSES, Dataset
from dpagent.wording import counted, named

_FEW_CLASSES: Final = 10
_FEW_RECORDS: Final = 2
_FRACTION: Final = re.compile(r"[+-]?\d*[.,]\d*[1-9]\d*(e[+-]?\d+)?", re.IGNORECASE)
_LONGEST: Final = 9  # digits of a whole number that could be a class


def unlisted() -> str:
    """A warning about classes that nothing lists."""
    return (
        "The classes were numbered in sorted order of what is here. A board that lacks one would number them"
        f" otherwise: list them in {named('classes')}, alike on all boards."
    )


class ClassTable:
    """The number of each label.

    Args:
        found: every label that occurs, as text; they may repeat.
        listed: the public list, or None.

    Attributes:
        count: number of classes, at least 2.
        names: the name of each, or empty where labels are numbers.
        is_listed: whether the fleet's list was used.

    Raises:
        DataError: the labels cannot be classes.
    """

    def __init__(self, found: Iterable[str], listed: Sequence[str] | None) -> None:
        labels = sorted(set(found))
        self.is_listed = listed is not None
        if listed is not None:
            self.names = tuple(listed)
            self._numbers = {name: number for number, name in enumerate(listed)}
            self.count = len(listed)
        elif labels and all(label.isascii() and label.isdigit() for label in labels):
            longest = max(labels, key=len)
            if len(longest) > _LONGEST or int(max(labels, key=int)) >= MAX_CLASSES:
                raise DataError(
                    f"A label is {longest[:40]}; expected whole numbers below {MAX_CLASSES:,}, or names. Is"
                    " it the label column?"
                )
            self._numbers = {label: int(label) for label in labels}
            self.names, self.count = (), max(2, 1 + max(self._numbers.values()))
        else:
            if len(labels) > MAX_CLASSES:
                raise DataError(
                    f"There are {counted(len(labels), 'different label')}; expected at most "
                    f"{MAX_CLASSES:,}. Is it the label column?"
                )
            self.names, self.count = tuple(labels), len(labels)
            self._numbers = {name: number for number, name in enumerate(labels)}

    def number(self, label: str) -> int | None:
        """The class that ``label`` stands for, or None."""
        known = self._numbers.get(label)
        if (
            known is None
            and not self.names
            and label.isascii()
            and label.isdigit()
            and len(label) <= _LONGEST
        ):
            return int(label) if int(label) < self.count else None
        return known

    def expected(self) -> str:
        """The choices, as an error lists them."""
        if not self.names:
            return f"a whole number from 0 to {self.count - 1}"
        shown = ", ".join(self.names[:12]) + (", …" if len(self.names) > 12 else "")
        return f"one of {shown}"


def named_classes(labels: NDArray[np.int64], listed: Sequence[str] | None) -> tuple[int, tuple[str, ...]]:
    """The number of classes and their names, for labels that are stored as numbers."""
    if listed is not None:
        return len(listed), tuple(listed)
    return max(2, int(labels.max(initial=0)) + 1), ()


def doubt_about_labels(dataset: Dataset) -> str:
    """A sentence on why the labels may be no classes, or nothing. Listed classes are not doubted."""
    if dataset.class_names and unlisted() not in dataset.origin.warnings:
        return ""
    column = dataset.origin.label_column
    what = "The labels" if column is None else f"The labels, from the column {column!r},"
    advice = (
        " Are they classes?"
        if column is None
        else f" Is it the label column? Name the right one in {named('label')}, or list the classes in"
        f" {named('classes')}."
    )  # fmt: skip
    fractions = [name for name in dataset.class_names if _FRACTION.fullmatch(name)]
    if 2 * len(fractions) > len(dataset.class_names):
        return f"{what} are decimal fractions, such as {', '.join(fractions[:3])}.{advice}"
    few = int(np.count_nonzero(dataset.class_counts() <= _FEW_RECORDS))
    if dataset.classes > _FEW_CLASSES and 2 * few > dataset.classes:
        return (
            f"{what} give {counted(dataset.classes, 'class')}, {few:,} of them with no more than "
            f"{_FEW_RECORDS} records.{advice}"
        )
    return ""
