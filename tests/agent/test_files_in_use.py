"""Files of records that somebody writes to while an agent has them open."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from neighbours import opened_by_a_board

from dpagent.errors import StorageError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.npz_file import Member, NpzFile
from dpagent.learning.data.stored import RawFile


def batches(folder: Path, *values: int, number: int = 1) -> Path:
    """A file of records that each hold one number, which is their label, written in its place."""
    folder.mkdir(exist_ok=True)
    file = folder / f"data_batch_{number}.bin"
    with file.open("wb") as stream:
        stream.write(b"".join(bytes([value]) * 3073 for value in values))
    return file


def labelled(dataset: Dataset) -> list[tuple[int, int]]:
    return [
        (int(record.flat[0]), int(label))
        for inputs, labels in dataset.readable_batches()
        for record, label in zip(inputs, labels, strict=True)
    ]


def test_a_file_that_is_written_anew_in_its_place_is_opened_anew(tmp_path: Path) -> None:
    """Its values were read by number, and its labels were those of the file of before."""
    batches(tmp_path / "data", *range(6))
    records = opened_by_a_board(tmp_path / "data", "cifar", classes=10)
    assert records.attempt(labelled) == [(value, value) for value in range(6)]
    for values in ((9, *range(6)), (1, 2, 3), (3, 2, 1)):
        batches(tmp_path / "data", *values)
        assert records.attempt(labelled) == [(value, value) for value in values]
    (state,) = tmp_path.glob("rows-*")
    assert list(state.iterdir()) == []


@pytest.mark.parametrize(("values", "counts"), [((*range(6), 7), True), ((7, *range(6)), False)])
def test_what_is_read_of_a_file_that_is_written_to_counts_if_it_has_just_grown(
    tmp_path: Path, values: tuple[int, ...], counts: bool
) -> None:
    """A record that is appended while a round reads must not make noise alone of it."""
    batches(tmp_path / "data", *range(6))
    records = opened_by_a_board(tmp_path / "data", "cifar", classes=10)

    def read_beside_a_writer(dataset: Dataset) -> list[tuple[int, int]]:
        batches(tmp_path / "data", *values)
        return labelled(dataset)

    if counts:
        assert records.attempt(read_beside_a_writer) == [(value, value) for value in range(6)]
    else:
        with pytest.raises(StorageError, match="was written anew while its records were read"):
            records.attempt(read_beside_a_writer)
    assert len(records.attempt(labelled)) == 7


def test_labels_of_their_own_file_are_watched_too(tmp_path: Path) -> None:
    """IDX: images were written anew, and then labels, with a round in between."""
    data = tmp_path / "data"
    data.mkdir()
    images, labels = data / "train-images-idx3-ubyte", data / "train-labels-idx1-ubyte"

    def put(file: Path, *shape: int, values: list[int]) -> None:
        head = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
        size = int(np.prod(shape[1:], dtype=int))
        with file.open("wb") as stream:
            stream.write(head + b"".join(bytes([value]) * size for value in values))

    put(images, 4, 8, 8, values=[0, 1, 2, 3])
    put(labels, 4, values=[0, 1, 2, 3])
    records = opened_by_a_board(data, "idx", classes=4, shape=[8, 8, 1], dtype="uint8")
    put(images, 4, 8, 8, values=[3, 0, 1, 2])
    records.attempt(labelled)
    put(labels, 4, values=[3, 0, 1, 2])
    assert records.attempt(labelled) == [(3, 3), (0, 0), (1, 1), (2, 2)]


def test_a_record_at_the_end_of_a_file_that_is_not_the_last_moves_none_of_the_others(tmp_path: Path) -> None:
    """It shifted those of the next files, so that the round became noise alone: 220 clip norms."""
    batches(tmp_path / "data", 0, 1)
    batches(tmp_path / "data", 2, 3, number=2)
    records = opened_by_a_board(tmp_path / "data", "cifar", classes=10)

    def read_beside_a_writer(dataset: Dataset) -> list[tuple[int, int]]:
        batches(tmp_path / "data", 0, 1, 9)
        return labelled(dataset)

    assert records.attempt(read_beside_a_writer) == [(value, value) for value in (0, 1, 2, 3)]
    assert records.attempt(labelled) == [(value, value) for value in (0, 1, 9, 2, 3)]


def test_a_record_that_is_being_written_counts_when_it_is_whole(tmp_path: Path) -> None:
    """What a writer's buffer left of it made noise alone of every round, as long as it lay there."""
    file = batches(tmp_path / "data", 0, 1)
    batches(tmp_path / "data", 2, number=2)
    records = opened_by_a_board(tmp_path / "data", "cifar", classes=10)

    def read_beside_a_writer(dataset: Dataset) -> list[tuple[int, int]]:
        with file.open("ab") as stream:
            stream.write(bytes([9]) * 1000)
        return labelled(dataset)

    for work in (read_beside_a_writer, labelled):
        assert records.attempt(work) == [(value, value) for value in (0, 1, 2)]
    assert any("1,000 bytes of a record" in sentence for sentence in records.dataset.origin.left_out)
    again = opened_by_a_board(tmp_path / "data", "cifar", classes=10)
    assert again.attempt(labelled) == [(value, value) for value in (0, 1, 2)]
    with file.open("ab") as stream:
        stream.write(bytes([9]) * 2073)
    assert records.attempt(labelled) == [(value, value) for value in (0, 1, 9, 2)]


def test_a_file_that_is_cut_off_keeps_its_whole_records(tmp_path: Path) -> None:
    file = batches(tmp_path / "data", *range(6))
    records = opened_by_a_board(tmp_path / "data", "cifar", classes=10)
    os.truncate(file, 4 * 3073 + 1000)
    assert records.attempt(labelled) == [(value, value) for value in range(4)]
    batches(tmp_path / "data", *range(6))
    assert len(records.attempt(labelled)) == 6


def test_a_correction_in_its_place_shows_though_the_time_of_change_is_set_back(tmp_path: Path) -> None:
    """Else it came in with the next record: one record brought the labels of all others."""
    file = batches(tmp_path / "data", 1, 2, 3)
    os.utime(file, ns=(10**18, 10**18))
    records = opened_by_a_board(tmp_path / "data", "cifar", classes=10)
    assert records.attempt(labelled) == [(1, 1), (2, 2), (3, 3)]
    batches(tmp_path / "data", 4, 5, 6)
    os.utime(file, ns=(10**18, 10**18))
    assert records.attempt(labelled) == [(4, 4), (5, 5), (6, 6)]


def test_a_file_whose_name_goes_to_another_stays_open_as_it_is(tmp_path: Path) -> None:
    file = batches(tmp_path / "data", 1, 2, 3)
    records = opened_by_a_board(tmp_path / "data", "cifar", classes=10)

    def read_beside_a_rename(dataset: Dataset) -> list[tuple[int, int]]:
        batches(tmp_path / "new", 7, 8, 9).replace(file)
        return labelled(dataset)

    assert records.attempt(read_beside_a_rename) == [(1, 1), (2, 2), (3, 3)]


def test_labels_and_values_of_an_npz_are_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path was opened twice: labels were those of one file, and values of the one in its place."""
    file, raw = tmp_path / "data.npz", NpzFile.raw

    def put(path: Path, values: list[int]) -> None:
        pixels = np.repeat(np.array(values, np.uint8), 64).reshape(-1, 8, 8, 1)
        np.savez(path, inputs=pixels, labels=np.array(values))

    def replaced_before(self: NpzFile, member: Member) -> RawFile:
        put(tmp_path / "new.npz", [3, 0, 1, 2])
        (tmp_path / "new.npz").replace(file)
        return raw(self, member)

    put(file, [0, 1, 2, 3])
    monkeypatch.setattr(NpzFile, "raw", replaced_before)
    declared = {"classes": 4, "shape": [8, 8, 1], "dtype": "uint8", "max_records": 600_000}
    records = opened_by_a_board(file, "npz", **declared)
    assert records.attempt(labelled) == [(value, value) for value in range(4)]
