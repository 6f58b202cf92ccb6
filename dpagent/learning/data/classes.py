"""From the labels that data carry, names or whole numbers, to the numbers that a model trains on.

All devices of a fleet must number the classes alike, so ``classes`` declares them: how many there are, where
labels are whole numbers that stand for themselves, or the name of each in the order that numbers them. A
label outside them makes its record unreadable, and moves no other label.

Without a declaration, classes are inferred: fine for a demonstration, but a board that lacks a class would
number them otherwise, and a board with one label too many would move all others. A board infers nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.declared import MAX_CLASSES
from dpagent.wording import counted, named

Classes: TypeAlias = int | tuple[str, ...]
"""All classes: how many numbers, or the names in the order that numbers them."""

_FEW_CLASSES: Final = 10
_FEW_RECORDS: Final = 2
_FRACTION: Final = re.compile(r"[+-]?\d*[.,]\d*[1-9]\d*(e[+-]?\d+)?", re.IGNORECASE)
_LONGEST: Final = 9  # digits of a whole number that could be a class
_MOST_SAID: Final = 100


def unlisted() -> str:
    """A warning about classes that nothing lists."""
    return (
        "The classes were numbered in sorted order of what is here. A board that lacks one would number them"
        f" otherwise: list them in {named('classes')}, alike on all boards."
    )


def uncounted(classes: int) -> str:
    """A warning about classes whose number nothing says."""
    return (
        f"The classes are the whole numbers 0 to {classes - 1}, as far as the labels here go. Say in"
        f" {named('classes', classes)} how many there are, or name them."
    )


def warnings_about(inferred: Classes) -> tuple[str, ...]:
    """What to say of classes that were inferred from labels."""
    return (uncounted(inferred) if isinstance(inferred, int) else unlisted(),)


class ClassTable:
    """The number of each label.

    Args:
        classes: as declared, or inferred.

    Attributes:
        count: number of classes.
        names: the name of each, or empty where labels are numbers.
    """

    def __init__(self, classes: Classes) -> None:
        self.names = () if isinstance(classes, int) else classes
        self.count = classes if isinstance(classes, int) else len(classes)
        self._numbers = {name: number for number, name in enumerate(self.names)}

    @property
    def texts(self) -> tuple[str, ...]:
        """A label of each."""
        return self.names or tuple(map(str, range(self.count)))

    def number(self, label: str) -> int | None:
        """The class that ``label`` stands for, or None."""
        if self.names:
            return self._numbers.get(label)
        if not (label.isascii() and label.isdigit() and len(label) <= _LONGEST):
            return None
        return int(label) if int(label) < self.count else None

    def expected(self) -> str:
        """The choices, as an error lists them."""
        if not self.names:
            return f"a whole number from 0 to {self.count - 1}"
        shown = ", ".join(self.names[:12]) + (", …" if len(self.names) > 12 else "")
        return f"one of {shown}"


def classes_of_texts(found: Iterable[str]) -> Classes:
    """Infer the classes from labels as text: whole numbers stand for themselves, names are sorted.

    Raises:
        DataError: they cannot be classes, or there are not two.
    """
    labels = sorted(set(found))
    if labels and all(label.isascii() and label.isdigit() for label in labels):
        longest = max(labels, key=len)
        if len(longest) > _LONGEST or int(max(labels, key=int)) >= MAX_CLASSES:
            raise DataError(
                f"A label is {longest[:40]}; expected whole numbers below {MAX_CLASSES:,}, or names. Is"
                " it the label column?"
            )
        return max(2, 1 + int(max(labels, key=int)))
    if len(labels) > MAX_CLASSES:
        raise DataError(
            f"There are {counted(len(labels), 'different label')}; expected at most {MAX_CLASSES:,}. Is it"
            " the label column?"
        )
    if len(labels) == 1:
        raise DataError(
            f"there is only one class, {labels[0]!r}; expected at least 2, since a model learns to tell"
            " classes apart."
        )
    return tuple(labels)


def classes_of_numbers(labels: NDArray[Any]) -> int:
    """Infer how many classes there are from labels that are stored as numbers.

    Raises:
        DataError: the largest can be no class.
    """
    largest = labels[np.isfinite(labels)].max(initial=0)
    if not 0 <= largest < MAX_CLASSES:
        raise DataError(f"a label is {largest}; expected whole numbers from 0 to {MAX_CLASSES - 1:,}.")
    return max(2, int(largest) + 1)


def within(
    labels: NDArray[Any], count: int, numbers: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Which records have a label that is a class, for labels that are stored as numbers of any type.

    Args:
        labels: ``(n,)``.
        count: of the classes.
        numbers: of the records, for their owner; by default from 0.

    Returns:
        The places of these records, rising, and a sentence for each of the others, of many for the first.
        There is no other answer where it is all of them, so that the memory that opening takes does not tell.
    """
    is_class = (labels >= 0) & (labels < count)
    if labels.dtype.kind == "f":
        is_class &= labels == np.floor(labels)
    others = np.flatnonzero(~is_class)
    said = others if numbers is None else numbers[others]
    sentences = [
        f"record {number}: the label is {labels[place]}; expected 0 to {count - 1}."
        for number, place in zip(said[:_MOST_SAID], others, strict=False)
    ]
    if len(others) > _MOST_SAID:
        sentences.append(f"{counted(len(others) - _MOST_SAID, 'more record')} with a label that is no class.")
    return np.flatnonzero(is_class), tuple(sentences)


def doubt_about_labels(dataset: Dataset) -> str:
    """A sentence on why the labels may be no classes, or nothing. Listed classes are not doubted."""
    if {unlisted(), uncounted(dataset.classes)}.isdisjoint(dataset.origin.warnings):
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
