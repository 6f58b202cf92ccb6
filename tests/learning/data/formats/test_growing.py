"""A folder that changes while the agent runs: what is whole comes in, the rest waits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats import open_images, open_table
from pictures import aged, encoded, folder_of, noise, write

from dpagent.errors import DataError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.derived import Reshaped
from dpagent.learning.data.formats.images.dataset import ImageDataset
from dpagent.learning.data.formats.tables.settings import CsvSettings


def names(data: Dataset) -> list[str]:
    assert isinstance(data, ImageDataset)
    return list(data.names)


def settle(root: Path) -> None:
    """All folders were last changed a minute ago."""
    for folder, _, _ in os.walk(root):
        aged(Path(folder), 60)


def test_nothing_new_gives_the_same_object_without_looking_at_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(tmp_path, "a/1.png", "b/2.png")
    settle(tmp_path)
    data = open_images(tmp_path)
    monkeypatch.setattr("dpagent.learning.data.formats.images.dataset.list_folder", None)
    assert data.refresh() is data


def test_new_pictures_are_taken_in_and_the_old_dataset_stays_as_it_was(tmp_path: Path) -> None:
    old = folder_of(tmp_path, "a/2.png", "b/2.png")
    data = open_images(tmp_path)
    write(tmp_path / "a" / "1.png", encoded(noise(77)))
    now = data.refresh()
    assert names(now) == ["a/1.png", "a/2.png", "b/2.png"]
    assert np.array_equal(now.batch(np.arange(3))[0], np.stack([noise(77), *old]))
    assert now.labels.tolist() == [0, 0, 1]
    assert names(data) == ["a/2.png", "b/2.png"]
    assert np.array_equal(data.batch(np.arange(2))[0], np.stack(old))
    assert now.refresh() is now


def test_a_change_right_after_the_look_is_not_missed(tmp_path: Path) -> None:
    """The time of a folder is coarse: a file may come without changing it."""
    folder_of(tmp_path, "a/1.png", "b/2.png")
    data = open_images(tmp_path)
    stamps = {folder: (tmp_path / folder).stat() for folder in ("a", "b", ".")}
    write(tmp_path / "a" / "3.png", encoded(noise(3)))
    for folder, known in stamps.items():
        os.utime(tmp_path / folder, ns=(known.st_atime_ns, known.st_mtime_ns))
    assert names(data.refresh()) == ["a/1.png", "a/3.png", "b/2.png"]


def test_a_picture_that_is_being_written_waits(tmp_path: Path) -> None:
    folder_of(tmp_path, "a/1.png", "b/2.png", width=64, height=64)
    data = open_images(tmp_path)
    whole = encoded(noise(3, 64, 64))
    # Whole, and touched a moment ago.
    young = write(tmp_path / "a" / "young.png", whole, age_s=0)
    # Old enough, and not whole: a copy over a slow network.
    part = write(tmp_path / "b" / "part.jpg", encoded(noise(4, 64, 64), "JPEG")[:-500])
    settle(tmp_path)
    now = data.refresh()
    assert names(now) == ["a/1.png", "b/2.png"]
    sentences = " ".join(now.origin.left_out)
    assert "a/young.png: it was written to a moment ago" in sentences
    assert "b/part.jpg: " in sentences
    aged(young, 60)
    write(part, encoded(noise(4, 64, 64), "JPEG"))
    settle(tmp_path)  # the folders do not show that a file in them went on
    later = now.refresh()
    assert names(later) == ["a/1.png", "a/young.png", "b/2.png", "b/part.jpg"]
    assert later.origin.left_out == ()


def test_at_the_start_a_whole_picture_is_trusted_however_young(tmp_path: Path) -> None:
    folder_of(tmp_path, "a/1.png", "b/2.png")
    write(tmp_path / "a" / "3.png", encoded(noise(3)), age_s=0)
    assert len(open_images(tmp_path)) == 3


def test_a_vanished_picture_is_an_error_that_names_it_and_gone_after_a_refresh(tmp_path: Path) -> None:
    saved = folder_of(tmp_path, "a/1.png", "a/2.png", "b/3.png")
    data = open_images(tmp_path)
    (tmp_path / "a" / "2.png").unlink()
    with pytest.raises(DataError, match=r"a/2\.png: it has vanished since the folder was read"):
        data.batch(np.arange(3))
    assert np.array_equal(data.batch(np.array([2, 0]))[0], np.stack([saved[2], saved[0]]))
    assert names(data.refresh()) == ["a/1.png", "b/3.png"]


def test_a_picture_damaged_later_stays_and_counts_again_when_it_is_whole(tmp_path: Path) -> None:
    saved = folder_of(tmp_path, "a/1.png", "a/2.png", "b/3.png")
    settle(tmp_path)
    data = open_images(tmp_path)
    whole = (tmp_path / "a" / "2.png").read_bytes()
    os.truncate(tmp_path / "a" / "2.png", 40)
    with pytest.raises(DataError, match=r"a/2\.png: "):
        data.batch(np.array([1]))
    assert data.refresh() is data
    ((inputs, labels),) = data.readable_batches()
    assert np.array_equal(inputs, np.stack([saved[0], saved[2]]))
    assert labels.tolist() == [0, 1]
    (tmp_path / "a" / "2.png").write_bytes(whole)
    assert np.array_equal(data.batch(np.arange(3))[0], np.stack(saved))


def test_classes_and_size_stay_what_they_are_declared_to_be(tmp_path: Path) -> None:
    folder_of(tmp_path, "b/1.png", "c/2.png")
    data = open_images(tmp_path)
    folder_of(tmp_path, "a/new.png")
    write(tmp_path / "b" / "large.png", encoded(noise(5, 30, 30)))
    now = data.refresh()
    assert names(now) == ["b/1.png", "b/large.png", "c/2.png"]
    assert (now.class_names, now.shape) == (("b", "c"), (8, 12, 3))
    (sentence,) = now.origin.left_out
    assert sentence == "1 file: in the folder 'a', which is no class; expected one of b, c"


def test_when_all_is_gone_there_are_no_records_and_without_the_folder_the_last_known_cannot_be_read(
    tmp_path: Path,
) -> None:
    root = tmp_path / "data"
    folder_of(root, "a/1.png", "b/2.png")
    data = open_images(root)
    shutil.rmtree(root / "a")
    shutil.rmtree(root / "b")
    now = data.refresh()
    assert (len(now), now.shape, now.classes) == (0, data.shape, 2)
    root.rmdir()
    for each in (data, now):
        assert each.refresh() is each
        assert "no file" in " ".join(each.origin.left_out)
        assert list(each.readable_batches()) == [] or not len(next(each.readable_batches())[1])


def table(path: Path, *rows: str, header: str = "x,label", end: str = "\n") -> Path:
    return write(path, ("\n".join([header, *rows]) + end).encode())


def inputs_of(data: Dataset) -> Any:
    return data.batch(np.arange(len(data)))[0].ravel().tolist()


def test_tables_grow_by_files_and_by_rows(tmp_path: Path) -> None:
    table(tmp_path / "1.csv", "1,a", "2,b")
    data = open_table(tmp_path)
    assert data.refresh() is data
    table(tmp_path / "0.csv", "9,b")
    now = data.refresh()
    assert inputs_of(now) == [9, 1, 2]
    assert now.labels.tolist() == [1, 0, 1]
    with (tmp_path / "1.csv").open("a") as file:
        file.write("3,a\n4,")
    # The old one's places still hold: the file grew at its end.
    assert inputs_of(now) == [9, 1, 2]
    third = now.refresh()
    assert inputs_of(third) == [9, 1, 2, 3]
    with (tmp_path / "1.csv").open("a") as file:
        file.write("b\n")
    assert inputs_of(third.refresh()) == [9, 1, 2, 3, 4]
    (tmp_path / "0.csv").unlink()
    assert inputs_of(third.refresh()) == [1, 2, 3, 4]
    reshaped = Reshaped(data, [1, 1])
    assert reshaped.refresh().shape == (1, 1)
    assert len(reshaped.refresh()) == 4


def test_a_last_line_without_an_end_is_taken_once_it_is_old(tmp_path: Path) -> None:
    file = table(tmp_path / "1.csv", "1,a", "2,b")
    data = open_table(tmp_path)
    file.write_text("x,label\n1,a\n2,b\n3,a")
    young = data.refresh()
    assert inputs_of(young) == [1, 2]
    aged(file, 60)
    assert inputs_of(young.refresh()) == [1, 2, 3]


def test_tables_that_do_not_fit_are_left_out_and_said(tmp_path: Path) -> None:
    table(tmp_path / "1.csv", "1,a", "2,b")
    data = open_table(tmp_path)
    table(tmp_path / "2.csv", "5,c")
    table(tmp_path / "3.csv", "5,a", header="y,label")
    table(tmp_path / "4.csv", "five,a")
    table(tmp_path / "5.csv", "6,a")
    now = data.refresh()
    assert inputs_of(now) == [1, 2, 6]
    three, two, four = now.origin.left_out
    assert "2.csv:2: the label is 'c'; expected one of a, b" in two
    assert "3.csv has no column 'x'" in three
    assert "4.csv:2: the column 'x' holds 'five'" in four
    assert now.refresh() is now


def test_a_row_that_does_not_fit_takes_no_other_with_it_when_a_table_grows(tmp_path: Path) -> None:
    table(tmp_path / "1.csv", *(f"{number},a" for number in range(100)))
    table(tmp_path / "2.csv", "777,b", "888,b")
    data = open_table(tmp_path)
    with (tmp_path / "1.csv").open("a") as file:
        file.write('oops,a\n100,a\n101\n"102,a\n103,c\n104,b\n')
    now = data.refresh()
    assert inputs_of(now) == [*range(101), 104, 777, 888]
    assert now.labels.tolist() == [0] * 101 + [1] * 3
    assert [sentence.partition(": ")[0] for sentence in now.origin.left_out] == [
        f"{tmp_path}/1.csv:{line}" for line in (102, 104, 105, 106)
    ]
    assert now.refresh() is now
    # The next start finds the same records.
    again = open_table(tmp_path, classes=["a", "b"])
    assert inputs_of(again) == inputs_of(now)


def test_decimal_commas_and_a_first_column_without_a_name_hold_for_rows_that_come(tmp_path: Path) -> None:
    file = table(tmp_path / "1.csv", "r1;1,5;a", "r2;2,5;b", header="x;label")
    data = open_table(tmp_path, CsvSettings(delimiter=";", decimal=",", first_column="id"))
    with file.open("a") as stream:
        stream.write("r3;3,5;a\nr4;4,5;a;oops\nr5;5.5;b\n")
    table(tmp_path / "2.csv", "6,5;b", header="x;label")
    now = data.refresh()
    assert inputs_of(now) == [1.5, 2.5, 3.5]
    assert len(now.origin.left_out) == 3


def test_an_open_quote_before_an_unfinished_line_waits_with_it(tmp_path: Path) -> None:
    file = table(tmp_path / "1.csv", "1,a", "2,b")
    data = open_table(tmp_path)
    file.write_text('x,label\n1,a\n2,b\n"3,a\n4,')
    young = data.refresh()
    assert inputs_of(young) == [1, 2]
    aged(file, 60)
    file.write_text('x,label\n1,a\n2,b\n"3,a\n4,a\n')
    assert inputs_of(young.refresh()) == [1, 2, 4]
    file.write_text('x,label\n1,a\n2,b\n"3,a')
    young = data.refresh()
    assert inputs_of(young) == [1, 2]
    assert young.origin.left_out == ()
    aged(file, 60)
    assert "1.csv:4: not valid CSV" in " ".join(young.refresh().origin.left_out)


def test_a_table_that_was_replaced_is_not_read_at_the_old_places(tmp_path: Path) -> None:
    file = table(tmp_path / "1.csv", "1,a", "2,b")
    data = open_table(tmp_path)
    table(tmp_path / "new", "77,a", "88,b").replace(file)
    with pytest.raises(DataError, match=r"1\.csv was replaced since it was read"):
        inputs_of(data)
    assert inputs_of(data.refresh()) == [77, 88]
    file.write_text("x,label\n")
    with pytest.raises(DataError, match=r"1\.csv was replaced"):
        inputs_of(data)
    file.unlink()
    with pytest.raises(DataError, match="no file"):
        inputs_of(data)
    now = data.refresh()
    assert (len(now), now.shape) == (0, data.shape)
