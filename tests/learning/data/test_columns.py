"""Ranges of a table's columns, and which of them only grow."""

from __future__ import annotations

import numpy as np
import pytest

from dpagent.learning.data.checking import examine
from dpagent.learning.data.classes import doubt_about_labels, uncounted, unlisted
from dpagent.learning.data.columns import ColumnTally, hint_of_growth
from dpagent.learning.data.dataset import ArrayDataset, Origin

NAMES = ("time", "heart", "constant", "falls once", "restarts", "gaps")


def table(rows: int = 30) -> np.ndarray:
    """Columns as their names say; the 15th row begins another file."""
    number = np.arange(rows, dtype=np.float32)
    falls = number.copy()
    falls[20] = 3
    gaps = number.copy()
    gaps[4] = np.nan
    return np.stack([number, np.sin(number), np.ones(rows), falls, number % 15, gaps], 1).astype(np.float32)


@pytest.mark.parametrize("piece", [1, 7, 30])
def test_what_never_falls_within_a_file_only_grows(piece: int) -> None:
    values, files = table(), np.repeat([0, 1], 15)
    tally = ColumnTally(NAMES)
    for start in range(0, 30, piece):
        tally.add(values[start : start + piece], files[start : start + piece])
    tally.add(values[:0], files[:0])
    ranges = tally.ranges()
    assert [column.name for column in ranges if column.only_grows] == ["time", "restarts", "gaps"]
    assert (ranges[0].minimum, ranges[0].maximum) == (0, 29)
    assert (ranges[4].minimum, ranges[4].maximum) == (0, 14)
    assert hint_of_growth(ranges).startswith(
        "Columns that only grow are taken as input: time, restarts, gaps."
    )
    assert hint_of_growth(ranges[1:4]) == ""


def test_windows_are_looked_at_within_and_one_after_the_other() -> None:
    grows = np.arange(24, dtype=np.float32)
    # Each window falls inside; the firsts of all windows grow.
    saw = grows + np.tile([0, -1.5], 12).astype(np.float32)
    tally = ColumnTally(["grows", "saw"])
    tally.add(np.stack([grows, saw], 1).reshape(12, 2, 2), np.zeros(12, np.int64))
    assert [column.only_grows for column in tally.ranges()] == [True, False]


def test_a_column_without_a_finite_value_has_no_range() -> None:
    tally = ColumnTally(["empty"])
    tally.add(np.full((9, 1), np.nan, np.float32), np.zeros(9, np.int64))
    (column,) = tally.ranges()
    assert (column.minimum, column.maximum, column.only_grows) == (None, None, False)


def labelled(names: list[str], each: int, *, listed: bool = False) -> ArrayDataset:
    labels = np.repeat(np.arange(len(names)), each)
    origin = Origin("csv", "x.csv", warnings=() if listed else (unlisted(),), label_column="price")
    inputs = np.zeros((len(labels), 1), np.float32)
    return ArrayDataset(inputs, labels, len(names), names, origin=origin)


@pytest.mark.parametrize(
    ("names", "each", "doubt"),
    [
        ([f"id-{n}" for n in range(11)], 2, "give 11 classes, 11 of them with no more than 2 records"),
        ([f"id-{n}" for n in range(11)], 3, ""),
        ([f"id-{n}" for n in range(10)], 1, ""),
        (["0.25", "1.75", "-3e-4", "2.5e-3"], 9, "are decimal fractions, such as 0.25, 1.75"),
        (["0.0", "1.0", "2.0"], 9, ""),
        (["v1.5", "v1.6"], 9, ""),
    ],
)
def test_labels_that_may_be_no_classes_are_doubted(names: list[str], each: int, doubt: str) -> None:
    said = doubt_about_labels(labelled(names, each))
    assert said == "" if not doubt else doubt in said and "'price'" in said and "`label`" in said
    assert doubt_about_labels(labelled(names, each, listed=True)) == ""
    warnings = examine(labelled(names, each)).warnings
    assert any(doubt in sentence for sentence in warnings) or not doubt
    assert any("'price'" in sentence for sentence in warnings) == bool(doubt)


def test_whole_numbers_that_leave_most_classes_empty_are_doubted() -> None:
    labels = np.repeat(np.array([3, 900, 1000]), 9)
    inferred = Origin(warnings=(uncounted(1001),))
    dataset = ArrayDataset(np.zeros((27, 1), np.float32), labels, 1001, origin=inferred)
    assert "1,001 classes, 998 of them" in doubt_about_labels(dataset)
    declared = ArrayDataset(np.zeros((27, 1), np.float32), labels, 1001)
    assert doubt_about_labels(declared) == ""
