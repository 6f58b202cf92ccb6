"""Two data sets of which one has one record more, and what of their records differs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from agent.records import Records
from agent.settings import DataSettings
from dpagent.learning.data.dataset import Dataset


def opened_by_a_board(path: Path, kind: str, **declared: Any) -> Records:
    """The records at a path, as an agent opens them that is told what they are."""
    values = {"name": "mine", "path": path, "kind": kind, "max_records": 1_000} | declared
    return Records(DataSettings.model_validate(values))


def contents(dataset: Dataset) -> Counter[tuple[bytes, int]]:
    """Every record that can be read: its values and its label, in no order."""
    found: Counter[tuple[bytes, int]] = Counter()
    for inputs, labels in dataset.readable_batches():
        found.update(zip((np.asarray(one).tobytes() for one in inputs), labels.tolist(), strict=True))
    return found


def difference(one: Dataset, other: Dataset) -> int:
    """How many records are in one of them only."""
    assert (one.shape, one.dtype, one.classes) == (other.shape, other.dtype, other.classes)
    first, second = contents(one), contents(other)
    return (first - second).total() + (second - first).total()
