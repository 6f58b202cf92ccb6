"""Two data sets of which one has one record more, and what of their records differs."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from brokers import wait_until

from agent.data_settings import DataSettings
from agent.records import Records
from dpagent.learning.data.dataset import Dataset


def opened_by_a_board(path: Path, kind: str, state: Path | None = None, **declared: Any) -> Records:
    """The records at a path, as an agent opens them that is told what they are.

    Args:
        path: of the data.
        kind: of the format.
        state: the directory of the rows; without it, a new one, so that nothing is known of before.
        declared: what else is.
    """
    values = {"name": "mine", "path": path, "kind": kind, "max_records": 1_000} | declared
    state = Path(tempfile.mkdtemp(prefix="rows-", dir=path.parent)) if state is None else state
    return Records(DataSettings.model_validate(values), state)


def look_again(records: Records) -> None:
    """Let an agent's records be brought up to date, as after a round, and take them."""
    records.counts_after_s = 0.0
    records.look()
    wait_until(lambda: not records.is_looking, "a look at the records")
    records.adopt()


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
