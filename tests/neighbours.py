"""Two data sets of which one has one record more, and what of their records differs."""

from __future__ import annotations

import resource
import tempfile
import zlib
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import wait_until

import agent.decoding
from agent.bounded_decoding import Limits, Outcome
from agent.data_settings import DataSettings
from agent.decoding import bring_up_to_date
from agent.look_messages import LookOrder, LookResult
from agent.looks import Looks
from agent.records import Records
from dpagent.learning.data.dataset import Dataset
from dpagent.storage import overwrite


def opened_by_a_board(path: Path, kind: str, **declared: Any) -> Records:
    """The records at a path, as an agent opens them that is told what they are and knows no rows."""
    values = {"name": "mine", "path": path, "kind": kind, "max_records": 1_000} | declared
    state = Path(tempfile.mkdtemp(prefix="rows-", dir=path.parent))
    settings = DataSettings.checked(values)
    decode_here(settings, state)
    return Records(settings, state)


def decode_here(settings: DataSettings, state: Path) -> None:
    """What an agent's other process does at its first start, in this one: starts of Python add up."""
    with pytest.MonkeyPatch.context() as patch:
        if settings.path.suffix == ".npz":  # Whose records fail no decoder.
            patch.setattr(agent.decoding, "decode_apart", _decode_in_here)
        bring_up_to_date(LookOrder(settings, state, at_once=True))


def _decode_in_here(
    dataset: Dataset,
    numbers: Sequence[int],
    rows: Sequence[int],
    descriptor: int,
    _limits: Limits,
    _patience: float,
) -> Generator[Outcome, None, None]:
    """As a fork does it: to fork this process, whose memory is large, takes longer than to decode."""
    for number, row in zip(numbers, rows, strict=True):
        data = np.ascontiguousarray(dataset.batch(np.array([number]))[0]).tobytes()
        overwrite(descriptor, data, row * len(data))
        yield Outcome(zlib.crc32(data))


def look_again(records: Records) -> None:
    """Let an agent's records be brought up to date, as after a round, and take them."""
    records.adopt(look_only(records._store._settings, records._state_dir))


def look_only(settings: DataSettings, state: Path) -> LookResult:
    """Let an agent's records be brought up to date, as after a round, for whoever takes them."""
    looks = Looks(settings, state, niceness=0)
    looks.counts_after_s = 0.0
    looks.begin()
    wait_until(lambda: not is_looking(looks), "a look at the records")
    return looks.result()


def is_looking(looks: Looks) -> bool:
    """Whether another process is decoding."""
    return looks._look is not None and looks._look.goes_on()


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


def children_s() -> float:
    """Processor time of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
