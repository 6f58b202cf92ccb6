"""Files of records (NPZ, IDX, CIFAR) that somebody writes to while an agent looks at them, or trains."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neighbours import look_again
from row_boards import Board

from agent import decoding
from agent.records import Records
from agent.rows import Rows
from dpagent.errors import DataError
from dpagent.learning.data import format as formats
from dpagent.learning.data import stored
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.npz_file import Member, NpzFile
from dpagent.learning.data.stored import RawFile


class Files:
    """Records that each hold one number, which is their label, in files written in their place."""

    def __init__(self, folder: Path, kind: str, **declared: Any) -> None:
        self.kind, self.root = kind, folder / "data"
        values: dict[str, Any] = {"kind": kind.split()[-1], "classes": 10, "max_records": 40, **declared}
        if self.kind != "cifar":
            values |= {"shape": [8, 8, 1], "dtype": "uint8"}
        if self.kind.endswith("npz"):
            values["path"] = self.root / "data.npz"
        self.board = Board(folder, **values)

    def put(self, *values: int, number: int = 1) -> Path:
        """Write these records in the place of what is there."""
        match self.kind:
            case "cifar":
                file = self.root / f"data_batch_{number}.bin"
                _write(file, b"".join(bytes([value]) * 3073 for value in values))
            case "idx":
                file = self.put_images(*values)
                self.put_labels(*values)
            case _:
                pixels = np.repeat(np.array(values, np.uint8), 64).reshape(-1, 8, 8, 1)
                file = self.root / "data.npz"
                save = np.savez if self.kind == "npz" else np.savez_compressed
                with file.open("wb") as stream:
                    save(stream, inputs=pixels, labels=np.array(values, np.int64))
        return file

    def put_images(self, *values: int) -> Path:
        pixels = b"".join(bytes([value]) * 64 for value in values)
        return _write(self.root / "train-images-idx3-ubyte", _idx_head(3, len(values), 8, 8) + pixels)

    def put_labels(self, *values: int) -> Path:
        return _write(self.root / "train-labels-idx1-ubyte", _idx_head(1, len(values)) + bytes(values))

    def look(self, *, at_once: bool = False) -> list[tuple[int, int]]:
        """What counts after a look."""
        return labelled(self.board.look(at_once=at_once))

    def newest(self) -> list[tuple[int, int]]:
        return labelled(self.board.newest())


def _write(file: Path, data: bytes) -> Path:
    with file.open("wb") as stream:
        stream.write(data)
    return file


def _idx_head(dimensions: int, *shape: int) -> bytes:
    return bytes([0, 0, 8, dimensions]) + b"".join(size.to_bytes(4, "big") for size in shape)


def labelled(dataset: Dataset) -> list[tuple[int, int]]:
    """The first number of each record, and its label, in the order of these."""
    return sorted(
        (int(record.flat[0]), int(label))
        for inputs, labels in dataset.readable_batches()
        for record, label in zip(inputs, labels, strict=True)
    )


def own(*values: int) -> list[tuple[int, int]]:
    return sorted((value, value) for value in values)


@pytest.fixture(params=["npz", "packed npz", "idx", "cifar"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return Files(tmp_path, request.param)


def test_a_file_that_is_written_anew_in_its_place_counts_as_it_stands_there(files: Files) -> None:
    """Its values were read by number, and its labels were those of the file of before."""
    files.put(*range(6))
    assert files.look(at_once=True) == own(*range(6))
    for values in ((9, *range(6)), (1, 2, 3), (3, 2, 1), (7, 7, 7, 8)):
        files.put(*values)
        assert files.look() == own(*values)


def test_one_record_more_leaves_the_others_in_their_rows(files: Files) -> None:
    files.put(*range(6))
    before = rows_by_value(files.board.look(at_once=True))
    files.put(9, *range(6))
    after = rows_by_value(files.board.look())
    assert after.pop(9) not in before.values()
    assert after == before


def rows_by_value(rows: Rows) -> dict[int, int]:
    return dict(zip(rows.labels.tolist(), rows.places.tolist(), strict=True))


def test_files_that_did_not_change_are_not_read(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    file = files.put(1, 2)
    for each in files.root.iterdir():
        os.utime(each, (1e9, 1e9))
    files.look(at_once=True)
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "list_declared", None)
        assert files.look() == own(1, 2)
    os.utime(file, (1e9, 1e9))
    monkeypatch.setattr(decoding, "list_declared", None)
    with pytest.raises(TypeError):
        files.look()


def test_a_round_reads_no_file(files: Files) -> None:
    """One that was written anew while a round read it made noise alone of the round."""
    files.put(*range(6))
    files.look(at_once=True)
    records = Records(files.board.settings, files.board.state, decoded=True)

    def read_beside_a_writer(dataset: Dataset) -> list[tuple[int, int]]:
        files.put(8, 8, 8, 8)
        return labelled(dataset)

    assert records.attempt(read_beside_a_writer) == own(*range(6))
    assert records.attempt(labelled) == own(*range(6))
    look_again(records)
    assert records.attempt(labelled) == own(8, 8, 8, 8)


def test_a_file_that_is_half_written_leaves_the_records_as_they_are(files: Files) -> None:
    """A look at CIFAR takes the records that are whole: nothing says how many there are to be."""
    whole = files.put(*range(6)).read_bytes()
    files.look(at_once=True)
    for share in (0.0, 0.3, 0.7):
        file = files.put(*range(6))
        os.truncate(file, int(share * len(whole)))
        if files.kind == "cifar":
            assert files.look() == own(*range(int(share * 6)))
            continue
        with pytest.raises(DataError, match=str(file)):
            files.look()
        assert files.newest() == own(*range(6))
    files.put(*range(7))
    assert files.look() == own(*range(7))


def test_halves_that_disagree_leave_the_records_as_they_are(tmp_path: Path) -> None:
    """IDX: images are written anew, and then labels, with a look in between."""
    files = Files(tmp_path, "idx")
    files.put(0, 1, 2, 3)
    files.look(at_once=True)
    files.put_images(9, 0, 1, 2, 3)
    with pytest.raises(DataError, match="expected one label a record"):
        files.look()
    (files.root / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="has neither train-labels"):
        files.look()
    assert files.newest() == own(0, 1, 2, 3)
    files.put_labels(9, 0, 1, 2, 3)
    assert files.look() == own(0, 1, 2, 3, 9)


def test_what_its_owner_takes_away_counts_no_more_and_is_erased(files: Files) -> None:
    files.put(1, 2, 3)
    assert files.look(at_once=True) == own(1, 2, 3)
    for each in [*files.root.iterdir()]:
        each.unlink()
    for _ in range(2):
        assert files.look() == []
    assert not any(files.board.store.rows_file.read_bytes())
    files.put(1, 2, 3)
    assert files.look() == own(1, 2, 3)


@pytest.mark.parametrize("kind", ["npz", "idx", "cifar"])
@pytest.mark.parametrize("values", [(5, 4, 3, 2, 1, 0), (9, *range(6)), (1, 2)])
def test_labels_and_values_are_of_one_file_whoever_writes_it_while_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, values: Sequence[int]
) -> None:
    """Values are read after labels: it is listed again."""
    files = Files(tmp_path, kind)
    files.put(*range(6))
    files.look(at_once=True)
    files.put(*range(7))
    real, listed = decoding.list_declared, []

    def written_afterwards(*arguments: Any, **others: Any) -> Dataset:
        dataset = real(*arguments, **others)
        if not listed:
            time.sleep(0.02)  # Some kernels give files times of a few milliseconds.
            files.put(*values)
        listed.append(dataset)
        return dataset

    monkeypatch.setattr(decoding, "list_declared", written_afterwards)
    assert files.look() == own(*values)
    assert len(listed) == 2


@pytest.mark.parametrize("kind", ["npz", "idx", "cifar"])
@pytest.mark.parametrize("values", [(5, 4, 3, 2, 1, 0), (0, 1)])
def test_a_file_that_is_written_to_while_it_is_decoded_costs_what_is_not_there_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, values: Sequence[int]
) -> None:
    """No record gets another's label, and none is unusable for good."""
    files = Files(tmp_path, kind)
    files.put(*range(6))
    real = decoding.decode_apart

    def written_before(*arguments: Any) -> Any:
        files.put(*values)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "decode_apart", written_before)
        found = files.look()
    assert set(found) <= set(own(*range(6)))
    assert files.board.newest().origin.left_out
    assert files.look() == own(*values)
    assert files.board.newest().origin.left_out == ()


def test_a_record_at_the_end_of_a_file_that_is_not_the_last_moves_none_of_the_others(tmp_path: Path) -> None:
    """It shifted those of the next files, so that the round became noise alone: 220 clip norms."""
    files = Files(tmp_path, "cifar")
    files.put(0, 1)
    files.put(2, 3, number=2)
    before = rows_by_value(files.board.look(at_once=True))
    files.put(0, 1, 9)
    assert files.look() == own(0, 1, 2, 3, 9)
    assert before.items() <= rows_by_value(files.board.newest()).items()


def test_a_file_of_several_that_goes_while_the_folder_is_listed_costs_nothing_but_a_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it taken for a folder that is gone, all records would be left out."""
    files = Files(tmp_path, "cifar")
    files.put(0, 1)
    second = files.put(2, 3, number=2)
    files.look(at_once=True)
    files.put(0, 1, 4)
    real = stored.require_readable

    def gone_by_then(path: Path) -> None:
        if path == second:
            second.unlink(missing_ok=True)
        real(path)

    monkeypatch.setattr(stored, "require_readable", gone_by_then)
    assert files.look() == own(0, 1, 4)


def test_a_record_that_is_being_written_counts_when_it_is_whole(tmp_path: Path) -> None:
    """What a writer's buffer left of it made noise alone of every round, as long as it lay there."""
    files = Files(tmp_path, "cifar")
    file = files.put(0, 1)
    files.put(2, number=2)
    files.look(at_once=True)
    with file.open("ab") as stream:
        stream.write(bytes([9]) * 1000)
    assert files.look() == own(0, 1, 2)
    assert any("1,000 bytes of a record" in text for text in files.board.newest().origin.left_out)
    with file.open("ab") as stream:
        stream.write(bytes([9]) * 2073)
    assert files.look() == own(0, 1, 2, 9)


def test_a_correction_in_its_place_shows_though_the_time_of_change_is_set_back(files: Files) -> None:
    """Else it came in with the next record: one record brought the labels of all others."""
    for values in ((1, 2, 3), (4, 5, 6)):
        files.put(*values)
        for each in files.root.iterdir():
            os.utime(each, ns=(10**18, 10**18))
        assert files.look() == own(*values)


def test_a_file_whose_name_goes_to_another_is_read_as_it_was_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, other = Files(tmp_path, "cifar"), tmp_path / "new"
    files.put(1, 2, 3)
    real = decoding.decode_apart

    def renamed_before(*arguments: Any) -> Any:
        _write(other, bytes([7]) * 3073).replace(files.root / "data_batch_1.bin")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "decode_apart", renamed_before)
        assert files.look() == own(1, 2, 3)
    assert files.look() == own(7)


def test_labels_and_values_of_an_npz_are_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path was opened twice: labels were those of one file, and values of the one in its place."""
    files, raw = Files(tmp_path, "npz"), NpzFile.raw
    (tmp_path / "new").mkdir()
    other = Files(tmp_path / "new", "npz")

    def replaced_before(self: NpzFile, member: Member) -> RawFile:
        other.put(3, 0, 1, 2).replace(files.root / "data.npz")
        return raw(self, member)

    files.put(0, 1, 2, 3)
    monkeypatch.setattr(NpzFile, "raw", replaced_before)
    assert files.look() == own(0, 1, 2, 3)


@pytest.mark.parametrize(("kind", "size"), [("npz", 64), ("idx", 64), ("cifar", 3073)])
def test_a_record_that_the_disk_cannot_read_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, size: int
) -> None:
    files = Files(tmp_path, kind)
    files.put(*range(6))
    real = RawFile.read_into

    def unreadable(self: RawFile, target: Any, place: int) -> None:
        if target.nbytes % size == 0 and place <= 3 * size < place + target.nbytes and self.size > 6 * 3:
            raise DataError(f"Cannot read {self.path}: Input/output error.")
        real(self, target, place)

    files.look(at_once=True)
    files.put(*range(7))
    with monkeypatch.context() as patch:
        patch.setattr("dpagent.learning.data.formats.cifar._labels", lambda *_: np.arange(7))
        patch.setattr(RawFile, "read_into", unreadable)
        assert files.look() == own(0, 1, 2, 4, 5, 6)
    assert files.look() == own(*range(7))


def test_of_far_more_records_than_declared_a_board_looks_at_the_first(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a look at them takes more time and memory than one has, and takes in nothing."""
    files.put(*range(6))
    files.look(at_once=True)
    monkeypatch.setattr(formats, "_FEW_RECORDS", -155)  # 4·40 − 155
    files.put(5, 4, 3, 2, 1, 0)
    assert files.look() == own(1, 2, 3, 4, 5)
