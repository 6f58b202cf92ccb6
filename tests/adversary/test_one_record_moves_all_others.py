"""Attack: a record that changes how all others are read, or whether the board starts.

Claim: of two data sets that differ in one record, a board that is told what its records are reads arrays that
differ in at most that record, and opens both. So the sums differ by at most one clip norm, which is what the
noise is for.

Before, what was not set was inferred from the data: a label ``-1`` made names of all labels and shifted them,
one grey picture that sorted first made all pictures grey, one of another size or in another folder kept the
board from starting, one in a folder called ``train`` made all others vanish.

Power: there is no randomness. On the code of before these fail each time: a label that is none (of 12 and
13 records of a table 25 differ), a grey picture (of 6 and 7, 13), one in a folder ``train`` (7), and, because
the board does not start with it, a picture of another size, one in a folder ``test``, a link to itself, a
table beside pictures, and a short first row without a header. The folders, the link and the row did so
whatever was declared. Rows that do not fit were left out alone before, and are kept here. No case fails by
chance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neighbours import contents, difference, look_again, opened_by_a_board
from pictures import encoded, folder_of, noise, write

from dpagent.errors import ConfigurationError

ROWS = [f"{number}.5,{number % 3}" for number in range(12)]
GREY = {"width": 12, "height": 8, "channels": 1}


def table(folder: Path, *rows: str, header: str = "x,label") -> Path:
    return write(folder / "x.csv", "\n".join([header, *rows, ""]).encode())


@pytest.mark.parametrize("place", [0, 5, 12])
@pytest.mark.parametrize("row", ["7,-1", "7,9", "7,two", "seven,1", "x,label", "7", "7,1,1", '"7,1', ",,"])
def test_a_row_of_a_table(tmp_path: Path, row: str, place: int) -> None:
    declared: dict[str, Any] = {"classes": 3, "csv": {"features": ["x"]}}
    one = opened_by_a_board(table(tmp_path / "a", *ROWS), "csv", **declared)
    rows = [*ROWS[:place], row, *ROWS[place:]]
    other = opened_by_a_board(table(tmp_path / "b", *rows), "csv", **declared)
    assert len(one.dataset) == 12
    assert difference(one.dataset, other.dataset) == 0


@pytest.mark.parametrize("row", ["7", "7,1,1", "x,label", "7,-1"])
def test_the_first_row_of_a_table_without_a_header(tmp_path: Path, row: str) -> None:
    """It told how many cells a row has."""
    declared = {"classes": 3, "csv": {"features": ["1"], "label": "2", "header": False, "width": 2}}
    one = opened_by_a_board(table(tmp_path / "a", *ROWS[1:], header=ROWS[0]), "csv", **declared)
    other = opened_by_a_board(table(tmp_path / "b", *ROWS, header=row), "csv", **declared)
    assert len(one.dataset) == 12
    assert difference(one.dataset, other.dataset) == 0


def grey_that_sorts_first(root: Path) -> None:
    write(root / "0" / "!.png", encoded(noise(99, **GREY)))


def large_that_sorts_first(root: Path) -> None:
    write(root / "0" / "!.png", encoded(noise(99, 30, 40)))


def of_a_class_that_is_none(root: Path) -> None:
    write(root / "-1" / "x.png", encoded(noise(99)))


def in_a_folder_called_train(root: Path) -> None:
    write(root / "train" / "0" / "x.png", encoded(noise(99)))


def in_a_folder_called_test(root: Path) -> None:
    write(root / "test" / "0" / "x.png", encoded(noise(99)))


def a_link_to_itself(root: Path) -> None:
    (root / "9").symlink_to("9")


def a_table_beside(root: Path) -> None:
    table(root, *ROWS)


def many_folders_deep(root: Path) -> None:
    (root / "0" / "/".join("d" * 900)).mkdir(parents=True)


def damaged_and_first(root: Path) -> None:
    write(root / "0" / "!.png", b"no picture")


@pytest.mark.parametrize(
    "add",
    [
        grey_that_sorts_first, large_that_sorts_first, of_a_class_that_is_none, in_a_folder_called_train,
        in_a_folder_called_test, a_link_to_itself, a_table_beside, many_folders_deep, damaged_and_first,
    ],
)  # fmt: skip
@pytest.mark.parametrize("pictures", [0, 1, 6])
def test_a_picture(tmp_path: Path, add: Callable[[Path], None], pictures: int) -> None:
    """Also beside no other: whether the board starts does not tell that one is there."""
    section = {"size": [12, 8], "mode": "rgb", "folder": "."}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        folder_of(tmp_path / name, *(f"{number % 3}/{number}.png" for number in range(pictures)))
    add(tmp_path / "b")
    one, other = (
        opened_by_a_board(tmp_path / name, "images", classes=3, images=section) for name in ("a", "b")
    )
    assert len(one.dataset) == pictures
    assert difference(one.dataset, other.dataset) <= 1


@pytest.mark.parametrize("label", [-1, 3, 9, 300, 2**40])
def test_a_label_in_an_npz(tmp_path: Path, label: int) -> None:
    inputs = np.arange(52, dtype=np.float32).reshape(13, 4)
    labels = np.array([label, *(number % 3 for number in range(12))])
    np.savez(tmp_path / "a.npz", inputs=inputs[1:], labels=labels[1:])
    np.savez(tmp_path / "b.npz", inputs=inputs, labels=labels)
    declared: dict[str, Any] = {"classes": 3, "shape": [4], "dtype": "float32"}
    one, other = (opened_by_a_board(tmp_path / f"{name}.npz", "npz", **declared) for name in "ab")
    assert len(one.dataset) == 12
    assert difference(one.dataset, other.dataset) == 0


@pytest.mark.parametrize("label", [3, 9, 255])
def test_a_label_in_cifar(tmp_path: Path, label: int) -> None:
    for name, labels in (("a", [0, 1, 2]), ("b", [0, label, 1, 2])):
        write(tmp_path / name / "x.bin", b"".join(bytes([number]) * 3073 for number in labels))
    declared: dict[str, Any] = {"classes": 3, "cifar": {"layout": "cifar-10"}}
    one, other = (opened_by_a_board(tmp_path / name / "x.bin", "cifar", **declared).dataset for name in "ab")
    assert len(one) == 3
    assert difference(one, other) == 0


def test_nothing_is_inferred_on_a_board(tmp_path: Path) -> None:
    """Whatever is left out of the declaration keeps the board from starting, with any data."""
    folder_of(tmp_path, "0/1.png", "1/2.png")
    section = {"size": [12, 8], "mode": "rgb", "folder": "."}
    whole: dict[str, Any] = {"classes": 3, "max_records": 9}
    assert contents(opened_by_a_board(tmp_path, "images", images=section, **whole).dataset).total() == 2
    for missing, given in (
        ("classes", {"classes": None, "images": section}),
        ("max_records", {"max_records": None, "images": section}),
        *((f"images.{key}", {"images": section | {key: None}}) for key in section),
    ):
        with pytest.raises(ConfigurationError, match=rf"{missing} is missing.*`dpagent data check"):
            opened_by_a_board(tmp_path, "images", **(whole | given))
    with pytest.raises(ConfigurationError, match="kind, classes are missing"):
        opened_by_a_board(tmp_path, "auto", max_records=9)


def test_what_comes_later_moves_no_other_record_and_cannot_stop_the_agent(tmp_path: Path) -> None:
    """The same while the agent runs: each hostile record comes between two rounds."""
    folder_of(tmp_path, *(f"{number % 3}/{number}.png" for number in range(6)))
    section = {"size": [12, 8], "mode": "rgb", "folder": "."}
    records = opened_by_a_board(tmp_path, "images", classes=3, images=section)
    before = contents(records.dataset)
    for add in (
        grey_that_sorts_first, of_a_class_that_is_none, in_a_folder_called_test, a_link_to_itself,
        many_folders_deep,
    ):  # fmt: skip
        add(tmp_path)
        look_again(records)
        assert (before - contents(records.dataset)).total() == 0
    assert (contents(records.dataset) - before).total() == 1
    for picture in (tmp_path / "1").iterdir():
        picture.unlink()
    look_again(records)
    assert len(records.dataset) == 5
