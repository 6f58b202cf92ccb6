"""Files of records (NPZ, CIFAR) that somebody writes to while an agent looks at them, or trains."""

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
from dpagent.learning.data import opening, stored
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.npz_file import Member, NpzFile
from dpagent.learning.data.stored import RawFile


class Files:
    """Records that each hold one number, which is their label, in files written in their place."""

    def __init__(self, folder: Path, kind: str, **declared: Any) -> None:
        self.kind, self.root = kind, folder / "data"
        values: dict[str, Any] = {"kind": kind.split()[-1], "classes": 10, "max_records": 40, **declared}
        if self.kind == "cifar":
            values |= {"cifar": {"layout": "cifar-10"}}
        else:
            values |= {"shape": [8, 8, 1], "dtype": "uint8", "path": self.root / "data.npz"}
        self.board = Board(folder, **values)

    def put(self, *values: int, number: int = 1) -> Path:
        """Write these records in the place of what is there."""
        match self.kind:
            case "cifar":
                file = self.root / f"data_batch_{number}.bin"
                _write(file, b"".join(bytes([value]) * 3073 for value in values))
            case _:
                pixels = np.repeat(np.array(values, np.uint8), 64).reshape(-1, 8, 8, 1)
                file = self.root / "data.npz"
                save = np.savez if self.kind == "npz" else np.savez_compressed
                with file.open("wb") as stream:
                    save(stream, inputs=pixels, labels=np.array(values, np.int64))
        return file

    def look(self, *, at_once: bool = False) -> list[tuple[int, int]]:
        """What counts after a look."""
        return labelled(self.board.look(at_once=at_once))

    def newest(self) -> list[tuple[int, int]]:
        return labelled(self.board.newest())


def _write(file: Path, data: bytes) -> Path:
    with file.open("wb") as stream:
        stream.write(data)
    return file


def labelled(dataset: Dataset) -> list[tuple[int, int]]:
    """The first number of each record, and its label, in the order of these."""
    return sorted(
        (int(record.flat[0]), int(label))
        for inputs, labels in dataset.readable_batches()
        for record, label in zip(inputs, labels, strict=True)
    )


def own(*values: int) -> list[tuple[int, int]]:
    return sorted((value, value) for value in values)


@pytest.fixture(params=["npz", "packed npz", "cifar"])
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
    records = Records(files.board.settings, files.board.state)

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


@pytest.mark.parametrize("kind", ["npz", "cifar"])
@pytest.mark.parametrize("values", [(5, 4, 3, 2, 1, 0), (9, *range(6)), (1, 2)])
def test_labels_and_values_are_of_one_file_whoever_writes_it_while_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, values: Sequence[int]
) -> None:
    """Whether somebody had written to it was seen by its times and its name, and both can be set back."""
    files = Files(tmp_path, kind)
    files.put(*range(6))
    files.look(at_once=True)
    files.put(*range(7))
    real, listed = decoding.list_declared, []

    def written_afterwards(*arguments: Any, **others: Any) -> Dataset:
        dataset = real(*arguments, **others)
        time.sleep(0.02)  # Some kernels give files times of a few milliseconds.
        files.put(*values)
        listed.append(dataset)
        return dataset

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "list_declared", written_afterwards)
        assert set(files.look()) <= set(own(*range(7)))
    assert 1 <= len(listed) <= decoding._TRIES
    assert files.look() == own(*values)


@pytest.mark.parametrize("kind", ["npz", "cifar"])
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
    assert found == own(*(value for value in values if value < 6)), "what stands elsewhere is found again"
    assert bool(files.board.newest().origin.left_out) == (len(values) < 6)
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


def test_a_file_of_several_that_goes_while_a_look_opens_them_costs_itself_alone(
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


def test_a_part_of_a_record_that_is_left_at_an_end_displaces_what_is_appended_to_that_file_alone(
    tmp_path: Path,
) -> None:
    """The threat model has it as open: nothing in a file tells where its records begin."""
    files = Files(tmp_path, "cifar")
    file = files.put(0, 1)
    files.put(2, number=2)
    files.look(at_once=True)
    _append(file, bytes([9]) * 1000)  # Its writer ends here.
    _append(file, bytes([4]) * 3073 + bytes([5]) * 3073)
    # The part with the beginning of the next one, and the rest of that with the beginning of the one after.
    assert files.look() == [(0, 0), (1, 1), (2, 2), (4, 4), (9, 9)]
    files.put(0, 1, 4, 5)  # What its owner writes anew is whole again.
    assert files.look() == own(0, 1, 2, 4, 5)


def _append(file: Path, data: bytes) -> None:
    with file.open("ab") as stream:
        stream.write(data)


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


@pytest.mark.parametrize("at_once", [False, True])
def test_a_record_that_the_disk_cannot_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """It had the stamp of a record of zeros, so that one of that label was another record than before."""
    files = Files(tmp_path, "cifar")
    real = RawFile.read_into

    def unreadable(self: RawFile, target: Any, place: int) -> None:
        if self.path.suffix == ".bin" and place <= 3 * 3073 < place + target.nbytes:
            raise DataError(f"Cannot read {self.path}: Input/output error.")
        real(self, target, place)

    files.put(5, 6, 0, 0)
    before = rows_by_value(files.board.look(at_once=True))
    files.put(5, 6, 0, 0, 8)
    with monkeypatch.context() as patch:
        patch.setattr(RawFile, "read_into", unreadable)
        assert files.look(at_once=at_once) == own(0, 5, 6, 8)
    rows = files.board.newest()
    assert any("record 3: Cannot read" in text for text in rows.origin.left_out)
    assert rows_by_value(rows)[5] == before[5]
    assert files.look() == own(5, 6, 0, 0, 8)


def test_of_far_more_records_than_declared_a_board_looks_at_the_first(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a look at them takes more time and memory than one has, and takes in nothing."""
    files.put(*range(6))
    files.look(at_once=True)
    monkeypatch.setattr(formats, "_FEW_RECORDS", -155)  # 4·40 − 155
    files.put(5, 4, 3, 2, 1, 0)
    assert files.look() == own(1, 2, 3, 4, 5)


def test_of_more_records_than_any_data_have_a_board_looks_at_the_first(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one more than 2²³ a look failed, and what came with it did not count."""
    files.put(*range(6))
    files.look(at_once=True)
    for module in (formats, opening):
        monkeypatch.setattr(module, "MAX_RECORDS", 6)
    files.put(*range(7))
    assert files.look() == own(*range(7))


def test_of_large_records_a_board_looks_at_as_many_as_it_has_room_for(tmp_path: Path) -> None:
    """100,160 records of a mebibyte take a look hours."""
    source = formats.Source(tmp_path, declared_records=40)
    assert [source.most_listed(size) for size in (1, 335, 3072, 1 << 20, 1 << 26)] == [
        100_160, 100_160, 11_082, 192, 160,
    ]  # fmt: skip


@pytest.mark.parametrize("share", [0.3, 0.5, 0.85])
@pytest.mark.parametrize("kind", ["npz", "packed npz"])
@pytest.mark.parametrize("looks_at", [360, 5])
def test_an_npz_that_is_overwritten_in_its_place_is_left_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, share: float, looks_at: int
) -> None:
    """Half of the values were of one file, and all labels of another: 60 clip norms."""
    monkeypatch.setattr(formats, "_FEW_RECORDS", looks_at - 1600)
    files = Files(tmp_path, kind, max_records=400)
    old, new = [*range(9), *range(9)] * 20, [9, *reversed(range(9)), *range(1, 9)] * 20
    whole = files.put(*new).read_bytes()
    file = files.put(*old)
    files.look(at_once=True)
    with file.open("r+b") as stream:
        stream.write(whole[: int(share * len(whole))])
    with pytest.raises(DataError, match=f"{file}"):
        files.look()
    assert files.newest() == own(*old[:looks_at])
    files.put(*new)
    assert files.look() == own(*new[:looks_at])


@pytest.mark.parametrize("kind", ["npz", "cifar"])
def test_a_write_that_a_rename_and_a_time_set_back_hide_gives_no_record_anothers_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    files, values = Files(tmp_path, kind), [*range(9)]
    files.put(9)
    files.look(at_once=True)
    file = files.put(*values)
    real = decoding.list_declared

    def rewritten_afterwards(*arguments: Any, **others: Any) -> Dataset:
        listed, known = real(*arguments, **others), file.stat()
        files.put(*reversed(values))
        os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))
        _write(files.root / "other", file.read_bytes()).replace(file)
        return listed

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "list_declared", rewritten_afterwards)
        assert set(files.look()) <= set(own(*values))
    assert files.look() == own(*values)


@pytest.mark.parametrize("classes", [10, 100])
def test_a_file_of_the_other_cifar_is_none_of_these_data(tmp_path: Path, classes: int) -> None:
    """Which of the two they were was taken from the names in the folder: one file more, and all were gone."""
    values: dict[str, Any] = {"kind": "cifar", "classes": classes, "max_records": 40}
    board = Board(tmp_path, **values, cifar={"layout": f"cifar-{classes}"})
    ten, hundred = board.root / "data_batch_1.bin", board.root / "train.bin"
    _write(ten, bytes([3]) * 3073) if classes == 10 else _write(hundred, bytes([3]) * 3074)
    assert labelled(board.look(at_once=True)) == own(3)
    _write(hundred, bytes([4]) * 3074) if classes == 10 else _write(ten, bytes([4]) * 3073)
    assert labelled(board.look()) == own(3)


@pytest.mark.parametrize("entry", ["dangling link", "link to itself", "folder", "pipe", "empty file"])
def test_an_entry_that_is_no_file_keeps_no_record_of_another_out(tmp_path: Path, entry: str) -> None:
    files = Files(tmp_path, "cifar")
    files.put(1)
    files.look(at_once=True)
    odd = files.root / "data_batch_2.bin"
    match entry:
        case "dangling link":
            odd.symlink_to("nowhere")
        case "link to itself":
            odd.symlink_to(odd)
        case "folder":
            odd.mkdir()
        case "pipe":
            os.mkfifo(odd)
        case _:
            odd.touch()
    files.put(1, 2, 3)
    files.put(4, number=3)
    for _ in range(2):
        assert files.look() == own(1, 2, 3, 4)
    assert any(str(odd) in text for text in files.board.newest().origin.left_out) == (entry != "empty file")


def test_a_record_that_is_appended_in_pieces_keeps_none_of_another_file_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was written to since it was listed made the whole look begin again, and fail."""
    files = Files(tmp_path, "cifar")
    file = files.put(1)
    files.look(at_once=True)
    files.put(2, 3, number=2)
    real, left = decoding.list_declared, [1000, 1000, 1073]

    def appended_afterwards(*arguments: Any, **others: Any) -> Dataset:
        listed = real(*arguments, **others)
        with file.open("ab") as stream:
            stream.write(bytes([9]) * left.pop(0))
        return listed

    monkeypatch.setattr(decoding, "list_declared", appended_afterwards)
    assert files.look() == own(1, 2, 3)
    files.look()
    files.look()
    monkeypatch.undo()
    assert files.look() == own(1, 2, 3, 9)
