"""What a board finds in a folder that changes while it looks: what is whole, and known again."""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import aged, encoded, folder_of, noise, write

from dpagent.errors import DataError
from dpagent.learning.data import stamp
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.formats.images.dataset import ImageDataset
from dpagent.learning.data.formats.images.files import Listing
from dpagent.learning.data.opening import glance_declared, list_declared, open_declared
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.data.stamp import Stamp
from dpagent.learning.data.stored import AbsentError, ChangedError

KEY = b"a key"


def settings(path: Path, **given: Any) -> DatasetSettings:
    return DatasetSettings.checked({"path": path, "max_records": 1_000} | given)


def pictures(path: Path) -> DatasetSettings:
    section = {"size": [12, 8], "mode": "rgb", "folder": "."}
    return settings(path, kind="images", classes=["a", "b"], images=section)


def tables(path: Path, **section: Any) -> DatasetSettings:
    return settings(path, kind="csv", classes=["a", "b"], csv={"features": ["x"]} | section)


def look(data: DatasetSettings) -> Dataset:
    return list_declared(data, growing=True)


def names(data: Dataset) -> list[str]:
    assert isinstance(data, ImageDataset)
    return list(data.names)


def known(data: Dataset) -> dict[str, int]:
    return dict(zip(names(data), data.stamps(KEY).tolist(), strict=True))


def test_pictures_are_known_again_by_name_size_and_time(tmp_path: Path) -> None:
    folder_of(tmp_path, "a/1.png", "b/2.png", "b/3.png")
    before = known(look(pictures(tmp_path)))
    assert len(set(before.values())) == 3
    write(tmp_path / "a" / "0.png", encoded(noise(77)))
    aged(tmp_path / "b" / "2.png", 30)
    (tmp_path / "b" / "3.png").unlink()
    now = known(look(pictures(tmp_path)))
    assert list(now) == ["a/0.png", "a/1.png", "b/2.png"]
    assert now["a/1.png"] == before["a/1.png"]
    assert now["b/2.png"] != before["b/2.png"]


def test_nobody_makes_two_records_with_one_stamp_without_the_key(tmp_path: Path) -> None:
    folder_of(tmp_path, "a/1.png", "b/2.png")
    data = look(pictures(tmp_path))
    assert not set(data.stamps(b"one").tolist()) & set(data.stamps(b"other").tolist())


def test_a_picture_that_is_being_written_waits_and_at_the_start_is_not_known_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stamp, "REST_S", 0.0)
    folder_of(tmp_path, "a/1.png")
    young = write(tmp_path / "b" / "young.png", encoded(noise(3)), age_s=0)
    now = look(pictures(tmp_path))
    assert [names(now)[number] for number in now.unfinished] == ["b/young.png"]
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda _seconds: write(young, encoded(noise(3)), age_s=0))
        one = known(list_declared(pictures(tmp_path), growing=False))
    other, again = (known(list_declared(pictures(tmp_path), growing=False)) for _ in range(2))
    assert one["a/1.png"] == other["a/1.png"]
    assert one["b/young.png"] != other["b/young.png"]
    assert again == other, "it is not written to any more"
    aged(young, 60)
    now = look(pictures(tmp_path))
    assert (names(now), len(now.unfinished)) == (["a/1.png", "b/young.png"], 0)
    aged(young, -3_600)
    assert len(look(pictures(tmp_path)).unfinished) == 0, "a time that is to come"


def test_a_look_opens_no_picture(tmp_path: Path) -> None:
    """What is broken shows when it is decoded; where the owner looks, at the end of the file."""
    folder_of(tmp_path, "a/1.png")
    write(tmp_path / "b" / "part.jpg", encoded(noise(4, 64, 64), "JPEG")[:-500])
    write(tmp_path / "b" / "x.png", b"no picture")
    assert names(look(pictures(tmp_path))) == ["a/1.png", "b/part.jpg", "b/x.png"]
    opened = open_declared(pictures(tmp_path))
    assert names(opened) == ["a/1.png"]
    assert len(opened.origin.left_out) == 2


def test_classes_and_size_stay_what_they_are_declared_to_be(tmp_path: Path) -> None:
    folder_of(tmp_path, "b/1.png", "c/new.png")
    write(tmp_path / "b" / "large.png", encoded(noise(5, 30, 30)))
    now = look(pictures(tmp_path))
    assert names(now) == ["b/1.png", "b/large.png"]
    assert (now.class_names, now.shape) == (("a", "b"), (8, 12, 3))
    (sentence,) = now.origin.left_out
    assert sentence == "1 file: in the folder 'c', which is no class; expected one of a, b"


def test_a_picture_that_vanishes_after_the_look_is_named(tmp_path: Path) -> None:
    saved = folder_of(tmp_path, "a/1.png", "a/2.png", "b/3.png")
    data = look(pictures(tmp_path))
    (tmp_path / "a" / "2.png").unlink()
    with pytest.raises(DataError, match=r"a/2\.png: it has vanished since the folder was read"):
        data.batch(np.arange(3))
    assert np.array_equal(data.batch(np.array([2, 0]))[0], np.stack([saved[2], saved[0]]))


@pytest.mark.parametrize("declared", [pictures, tables])
def test_what_is_not_there_is_told_from_what_cannot_be_read(tmp_path: Path, declared: Any) -> None:
    with pytest.raises(AbsentError, match="There is no file or directory"):
        look(declared(tmp_path / "none"))


def table(path: Path, *rows: str, header: str = "x,label", end: str = "\n") -> Path:
    return write(path, ("\n".join([header, *rows]) + end).encode())


def inputs_of(data: Dataset) -> Any:
    return data.batch(np.arange(len(data)))[0].ravel().tolist()


def stamped(data: Dataset) -> dict[float, int]:
    return dict(zip(inputs_of(data), data.stamps(KEY).tolist(), strict=True))


def test_rows_are_known_again_by_what_they_hold_wherever_they_stand(tmp_path: Path) -> None:
    table(tmp_path / "1.csv", "1,a", "2,b", "3,b")
    before = stamped(look(tables(tmp_path)))
    table(tmp_path / "0.csv", "9,b")
    table(tmp_path / "1.csv", "1,a", "7,a", "2,a", "3,b", "4,")
    now = stamped(look(tables(tmp_path)))
    assert list(now) == [9, 1, 7, 2, 3]
    assert [now[value] == before[value] for value in (1.0, 2.0, 3.0)] == [True, False, True]
    # In other columns the same bytes mean another record.
    table(tmp_path / "1.csv", "3,b", header="label,x")
    table(tmp_path / "0.csv", "1,a", "1,a")
    one, other = look(tables(tmp_path)).stamps(KEY).tolist()
    assert one == before[1.0] != other


def test_a_last_line_without_an_end_is_taken_once_it_is_old(tmp_path: Path) -> None:
    file = table(tmp_path / "1.csv", "1,a", "2,b")
    for text, old in (("3,a", [1, 2, 3]), ('"3,a', [1, 2])):
        file.write_text(f"x,label\n1,a\n2,b\n{text}")
        young = look(tables(tmp_path))
        assert (inputs_of(young), young.origin.left_out) == (old, ())
        assert young.unfinished.tolist() == [2][: len(old) - 2]
        aged(file, 60)
        assert inputs_of(look(tables(tmp_path))) == old
        assert look(tables(tmp_path)).unfinished.tolist() == []
    assert "1.csv:4: a quotation mark is open" in " ".join(look(tables(tmp_path)).origin.left_out)


def test_tables_that_do_not_fit_are_left_out_and_said(tmp_path: Path) -> None:
    table(tmp_path / "1.csv", "1,a", "2,b")
    table(tmp_path / "2.csv", "5,c")
    table(tmp_path / "4.csv", "five,a")
    table(tmp_path / "5.csv", "6,a")
    assert inputs_of(list_declared(tables(tmp_path), growing=False)) == [1, 2, 6]
    table(tmp_path / "3.csv", "5,a", header="y,label")
    now = look(tables(tmp_path))
    assert inputs_of(now) == [1, 2, 6]
    three, two, four = now.origin.left_out
    assert "2.csv:2: the label is 'c'; expected one of a, b" in two
    assert "3.csv has no column 'x'" in three
    assert "4.csv:2: the column 'x' holds 'five'" in four
    # At the start, a wrong header is the owner's to mend.
    with pytest.raises(DataError, match=r"3\.csv has no column 'x'"):
        list_declared(tables(tmp_path), growing=False)


def test_a_row_that_does_not_fit_takes_no_other_with_it_when_a_table_grows(tmp_path: Path) -> None:
    table(tmp_path / "1.csv", *(f"{number},a" for number in range(100)))
    table(tmp_path / "2.csv", "777,b", "888,b")
    with (tmp_path / "1.csv").open("a") as file:
        file.write('oops,a\n100,a\n101\n"102,a\n103,c\n104,b\n')
    now = look(tables(tmp_path))
    assert inputs_of(now) == [*range(101), 104, 777, 888]
    assert now.labels.tolist() == [0] * 101 + [1] * 3
    assert [sentence.partition(": ")[0] for sentence in now.origin.left_out] == [
        f"{tmp_path}/1.csv:{line}" for line in (102, 104, 105, 106)
    ]


def test_a_table_that_was_replaced_is_read_as_it_was_listed(tmp_path: Path) -> None:
    file = table(tmp_path / "1.csv", "1,a", "2,b")
    data = look(tables(tmp_path))
    table(tmp_path / "new", "77,a", "88,b").replace(file)
    assert inputs_of(data) == [1, 2]
    assert inputs_of(look(tables(tmp_path))) == [77, 88]
    file.unlink()
    assert inputs_of(data) == [1, 2]
    assert len(look(tables(tmp_path))) == 0


def test_of_very_many_tables_one_that_was_replaced_is_not_read_at_the_old_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpagent.learning.data.glance._MOST_OPEN", 0)
    file = table(tmp_path / "1.csv", "1,a", "2,b")
    data = look(tables(tmp_path))
    table(tmp_path / "new", "7,a", "8,b").replace(file)
    with pytest.raises(ChangedError, match=r"1\.csv: the rows at byte 8 are not what they were"):
        inputs_of(data)
    table(tmp_path / "new", "1,a", "2,b").replace(file)
    assert inputs_of(data) == [1, 2], "one that has the same rows there is as good"
    file.unlink()
    with pytest.raises(ChangedError, match="There is no file"):
        inputs_of(data)


@pytest.mark.parametrize("section", [{}, {"window": 2}, {"window": 2, "stride": 1}])
@pytest.mark.parametrize(
    "data", [b"x,label\r\n1,a\r\n2,b\r\n", b"\xef\xbb\xbfx,label\n\n\xef\xbb\xbf1,a\n\n\r\n2,b\n"]
)
def test_what_ends_a_line_and_a_byte_order_mark_are_no_part_of_a_row(
    tmp_path: Path, section: dict[str, Any], data: bytes
) -> None:
    """A row at the end of a table that lacked a line's end was another when one was appended to it."""
    file = table(tmp_path / "1.csv", "1,a", "2,b", end="")
    aged(file, 60)
    before = look(tables(tmp_path, **section))
    write(file, data)
    now = look(tables(tmp_path, **section))
    assert inputs_of(now) == [1, 2]
    assert now.stamps(KEY).tolist() == before.stamps(KEY).tolist()
    write(file, b"x,label\n1,a\n2 ,b\n")
    assert now.stamps(KEY).tolist() == before.stamps(KEY).tolist(), "it is what was listed"
    with pytest.raises(ChangedError):
        inputs_of(now)


def test_a_glance_tells_whether_tables_may_have_changed(tmp_path: Path) -> None:
    def glance() -> str | None:
        found = glance_declared(tables(tmp_path))
        return None if found is None else found.text

    file = table(tmp_path / "1.csv", "1,a")
    seen = [glance(), glance()]
    assert seen[0] == seen[1] is not None
    table(tmp_path / "2.csv", "2,b")
    seen.append(glance())
    aged(file, 30)
    seen.append(glance())
    assert len(set(seen)) == 3
    file.write_text("x,label\n")  # It may change once more, unseen.
    assert glance() is None


def test_a_packed_table_is_left_out_alone_unread(tmp_path: Path) -> None:
    """Listing took as long as its bytes, and what came with it did not count."""
    table(tmp_path / "1.csv", "1,a", "2,b")
    (tmp_path / "3.csv.gz").write_bytes(gzip.compress(b"x,label\n3,a\n"))
    now = look(tables(tmp_path))
    assert inputs_of(now) == [1, 2]
    (packed,) = now.origin.left_out
    assert "3.csv.gz is packed; a board unpacks no table. Unpack it: gunzip 3.csv.gz" in packed
    with pytest.raises(DataError, match="is packed"):
        list_declared(tables(tmp_path), growing=False)


@pytest.mark.parametrize("place", ["front", "middle", "end"])
@pytest.mark.parametrize("growing", [False, True])
def test_a_line_however_long_is_left_out_alone(tmp_path: Path, place: str, growing: bool) -> None:
    """A table of more bytes than declared rows have was left out whole: a line of 70 MiB took all along."""
    file = table(tmp_path / "1.csv", *(["1,a", "2,b"] if place != "front" else []))
    with file.open("ab") as stream:
        stream.truncate(file.stat().st_size + (70 << 20))
        stream.seek(0, os.SEEK_END)
        stream.write(b"\n" if place == "end" else b"\n3,a\n4,b\n")
    aged(file, 60)
    now = list_declared(tables(tmp_path), growing=growing)
    now.stamps(KEY)
    assert inputs_of(now) == {"front": [3, 4], "middle": [1, 2, 3, 4], "end": [1, 2]}[place]
    (said,) = now.origin.left_out
    assert "a line has more than 1,048,576 bytes" in said


@pytest.mark.parametrize("grows", ["before it is listed", "before its rows are read"])
def test_a_line_without_an_end_ends_its_table_and_no_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: str
) -> None:
    """A hole of any size, made while a look lists, was read to its end."""
    monkeypatch.setattr("dpagent.learning.data.formats.tables.format._EXCESS_BYTES", 8 << 20)
    file = table(tmp_path / "1.csv", "1,a", "2,b")
    table(tmp_path / "2.csv", "5,a")
    if grows == "before it is listed":
        os.truncate(file, 8 << 40)
    now = look(tables(tmp_path))
    os.truncate(file, 8 << 40)
    now.stamps(KEY)
    assert inputs_of(now) == [1, 2, 5]
    assert any("what follows line" in each for each in now.origin.left_out) == (
        grows == "before it is listed"
    )


def test_tables_of_a_folder_have_their_lines_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each had as many as one may have: of many tables, a look took more memory than it has."""
    monkeypatch.setattr("dpagent.learning.data.format._FEW_RECORDS", -tables(tmp_path).max_records * 4 + 7)
    for name in "1234":
        table(tmp_path / f"{name}.csv", f"{name},a", f"1{name},b")
    now = look(tables(tmp_path))
    assert inputs_of(now) == [1, 11, 2, 12]
    rest, cut = now.origin.left_out
    assert "3.csv: what follows line 1 is not read" in cut
    assert "4.csv: this and what follows (1 table) is not read" in rest


def test_what_was_written_to_a_moment_ago_is_young_where_times_are_cut_down() -> None:
    """FAT keeps times of two seconds: before, what was written to 0.1 s ago could look 2.1 s old, and so as
    known, whatever was written to it in the same two seconds."""
    now = time.time_ns()
    cut_down = now - 2_100_000_000
    assert Stamp(1, 1, cut_down, cut_down).is_young(now)
    assert Listing(signs=[(1, cut_down)], listed_at_ns=now).is_young(0)
    old = now - 4_100_000_000
    assert not Stamp(1, 1, old, old).is_young(now)
    assert not Listing(signs=[(1, old)], listed_at_ns=now).is_young(0)
