"""No more records than declared: settled at the start, and first come, first used while the agent runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from formats import open_images
from hypothesis import given
from hypothesis import strategies as st
from neighbours import contents, difference, opened_by_a_board
from pictures import aged, encoded, folder_of, noise, write

from dpagent.errors import DataError
from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.data.derived import Bounded


class Growing(ArrayDataset):
    """Records that are their own keys, of which ``later`` are those after a refresh."""

    def __init__(self, *stages: list[int]) -> None:
        self._later = stages[1:]
        values = np.array(stages[0], np.float32).reshape(-1, 1)
        super().__init__(values, np.zeros(len(values), np.int64), 2)

    @property
    def keys(self) -> np.ndarray:
        return self.inputs[:, 0].astype(np.int64)

    def refresh(self) -> Dataset:
        return Growing(*self._later) if self._later else self


def used(data: Dataset) -> set[int]:
    return {int(value) for value in data.batch(np.arange(len(data)))[0].ravel()}


def test_a_record_that_is_used_stays_and_a_free_place_goes_to_the_first_that_waits() -> None:
    data: Dataset = Bounded(Growing([5, 6], [1, 5, 6], [1, 2, 5, 6, 7], [1, 2, 6, 7], [2]), 3)
    seen = []
    for _ in range(5):
        seen.append(used(data))
        data = data.refresh()
    assert seen == [{5, 6}, {1, 5, 6}, {1, 5, 6}, {1, 2, 6}, {2}]


def test_what_is_not_used_is_told(tmp_path: Path) -> None:
    data = Bounded(Growing([1], [1, 2, 3, 4]), 2).refresh()
    assert data.origin.left_out == (
        "2 records beyond `max_records: 2` are not used. Raise it, or remove records.",
    )
    assert data.refresh() is data


@given(
    st.lists(st.sets(st.integers(0, 12), max_size=6), min_size=1, max_size=4),
    st.integers(2, 8),
    st.integers(20, 30),
    st.integers(0, 3),
)
def test_one_record_more_changes_itself_alone_and_at_the_bound_one_other(
    stages: list[set[int]], most: int, newcomer: int, begins: int
) -> None:
    """Sets that grow only, as folders and tables do: each stage adds to those before."""
    grown = [sorted(set().union(*stages[: stage + 1])) for stage in range(len(stages))]
    more = [sorted({*each, newcomer}) if stage >= begins else each for stage, each in enumerate(grown)]
    one: Dataset = Bounded(Growing(*grown), most)
    other: Dataset = Bounded(Growing(*more), most)
    for each in more:
        assert len(used(one) ^ used(other)) <= (1 if len(each) <= most else 2)
        assert max(len(one), len(other)) <= most
        one, other = one.refresh(), other.refresh()


def test_with_more_than_declared_a_board_does_not_start(tmp_path: Path) -> None:
    folder_of(tmp_path, *(f"0/{number}.png" for number in range(4)))
    section = {"size": [12, 8], "mode": "rgb", "folder": "."}
    for most in (3, 4):
        if most == 4:
            records = opened_by_a_board(tmp_path, "images", classes=2, images=section, max_records=most)
            continue
        with pytest.raises(DataError, match=r"holds 4 records; expected at most 3\. Raise `max_records`"):
            opened_by_a_board(tmp_path, "images", classes=2, images=section, max_records=most)
    before = contents(records.dataset)
    write(tmp_path / "0" / "!.png", encoded(noise(77)))
    records.refresh()
    assert contents(records.dataset) == before
    (tmp_path / "0" / "2.png").unlink()
    records.refresh()
    assert (before - contents(records.dataset)).total() == 1
    assert len(records.dataset) == 4


def test_rows_beyond_are_not_used_wherever_they_come(tmp_path: Path) -> None:
    file = write(tmp_path / "5.csv", b"x,label\n1,0\n2,1\n")
    declared = {"classes": 2, "max_records": 3, "csv": {"features": ["x"]}}
    records = opened_by_a_board(tmp_path, "csv", **declared)
    write(tmp_path / "1.csv", b"x,label\n7,0\n8,1\n")
    records.refresh()
    assert used(records.dataset) == {1, 2, 7}
    with file.open("a") as stream:
        stream.write("3,1\n")
    aged(file, 60)
    records.refresh()
    assert used(records.dataset) == {1, 2, 7}
    with pytest.raises(DataError, match="holds 5 records; expected at most 3"):
        opened_by_a_board(tmp_path, "csv", **declared)
    more = opened_by_a_board(tmp_path, "csv", **(declared | {"max_records": 5}))
    assert difference(records.dataset, more.dataset) == 2


def test_keys_stay_with_their_records(tmp_path: Path) -> None:
    folder_of(tmp_path, "a/1.png", "b/2.png")
    data = open_images(tmp_path)
    before = dict(zip(data.names, data.keys.tolist(), strict=True))
    write(tmp_path / "a" / "0.png", encoded(noise(5)))
    now = data.refresh()
    assert {
        name: key for name, key in zip(now.names, now.keys.tolist(), strict=True) if name in before
    } == before
    assert len(set(now.keys.tolist())) == 3
