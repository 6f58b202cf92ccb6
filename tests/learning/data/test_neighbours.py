"""Data sets that differ in one record are read alike but for that record, in every format, and open."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from neighbours import difference
from pictures import encoded, noise, write

from dpagent.learning.data.opening import list_declared, open_declared
from dpagent.learning.data.registry import FORMATS
from dpagent.learning.data.settings import DatasetSettings

Item = tuple[int, int, bytes]
"""A record: a value, a label that may be no class, and bytes that may stand for it whatever they are."""

ITEMS = st.tuples(
    st.integers(0, 255), st.sampled_from([-1, 0, 0, 1, 1, 2, 3, 9, 200]), st.binary(max_size=40)
)
SETS = st.tuples(st.lists(ITEMS, max_size=6), ITEMS, st.integers(0, 6))


def npz(folder: Path, items: list[Item]) -> tuple[Path, dict[str, Any]]:
    inputs = np.array([[value] * 3 for value, _, _ in items], np.uint8).reshape(-1, 3)
    np.savez(folder / "x.npz", inputs=inputs, labels=np.array([label for _, label, _ in items], np.int64))
    return folder / "x.npz", {"shape": [3], "dtype": "uint8"}


def idx(folder: Path, items: list[Item]) -> tuple[Path, dict[str, Any]]:
    count = len(items)
    pixels = b"".join(bytes([value]) * 4 for value, _, _ in items)
    labels = b"".join(struct.pack(">i", label) for _, label, _ in items)
    write(folder / "train-images-idx3-ubyte", struct.pack(">BBBBIII", 0, 0, 8, 3, count, 2, 2) + pixels)
    write(folder / "train-labels-idx1-ubyte", struct.pack(">BBBBI", 0, 0, 12, 1, count) + labels)
    return folder, {"shape": [2, 2, 1], "dtype": "uint8"}


def cifar(folder: Path, items: list[Item]) -> tuple[Path, dict[str, Any]]:
    records = (bytes([label % 256]) + bytes([value]) * 3072 for value, label, _ in items)
    return write(folder / "data_batch_1.bin", b"".join(records)), {"cifar": {"layout": "cifar-10"}}


def picture(item: Item, number: int) -> tuple[str, bytes]:
    """Grey or in colours, of any size, or no picture at all; in a folder of any name."""
    value, label, raw = item
    folder = "test/0" if label == 9 else str(label)
    form = {"width": 1 + value % 5, "height": 1 + value % 3, "channels": 1 if value % 2 else 3}
    return f"{folder}/{value}-{number}.png", encoded(noise(value, **form)) if len(raw) < 20 else raw


def images(folder: Path, items: list[Item]) -> tuple[Path, dict[str, Any]]:
    for item in items:
        name, data = picture(item, items.index(item))
        write(folder / "p" / name, data)
    (folder / "p").mkdir(exist_ok=True)
    return folder / "p", {"images": {"size": [3, 3], "mode": "rgb", "folder": "."}}


def row(item: Item) -> bytes:
    value, label, raw = item
    if len(raw) < 20:
        return f"{value},{label}".encode()
    return raw.replace(b"\n", b" ").replace(b"\r", b" ")


def csv(folder: Path, items: list[Item]) -> tuple[Path, dict[str, Any]]:
    path = write(folder / "x.csv", b"".join(line + b"\n" for line in (b"x,label", *map(row, items))))
    return path, {"csv": {"features": ["x"]}}


def csv_without_header(folder: Path, items: list[Item]) -> tuple[Path, dict[str, Any]]:
    path = write(folder / "x.csv", b"".join(row(item) + b"\n" for item in items))
    return path, {"csv": {"features": ["1"], "label": "2", "header": False, "width": 2}}


def csv_of_windows(folder: Path, items: list[Item]) -> tuple[Path, dict[str, Any]]:
    """A record is two rows with a group of their own."""
    rows = (row(item) + f",{items.index(item)}\n".encode() for item in items for _ in range(2))
    path = write(folder / "x.csv", b"x,label,who\n" + b"".join(rows))
    return path, {"csv": {"features": ["x"], "window": 2, "group": "who"}}


MAKERS: dict[str, list[Callable[[Path, list[Item]], tuple[Path, dict[str, Any]]]]] = {
    "npz": [npz],
    "idx": [idx],
    "cifar": [cifar],
    "images": [images],
    "csv": [csv, csv_without_header, csv_of_windows],
}


def test_no_format_is_left_out() -> None:
    assert list(MAKERS) == list(FORMATS)


@pytest.mark.parametrize(
    ("kind", "make"), [(kind, make) for kind, makers in MAKERS.items() for make in makers]
)
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(sets=SETS)
def test_one_record_more_changes_that_record_alone(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    make: Callable[[Path, list[Item]], tuple[Path, dict[str, Any]]],
    sets: tuple[list[Item], Item, int],
) -> None:
    items, more, place = sets
    # A picture has its name from itself, and no two may have one.
    items = [item for item in dict.fromkeys(items) if item != more]
    opened = []
    for each in (items, [*items[:place], more, *items[place:]]):
        path, declared = make(tmp_path_factory.mktemp(kind), each)
        values = {"path": path, "kind": kind, "classes": 3, "max_records": 1_000} | declared
        opened.append(DatasetSettings.checked(values))
    for ways in (open_declared, partial(list_declared, growing=False))[: 1 if kind == "idx" else 2]:
        one, other = map(ways, opened)
        assert difference(one, other) <= 1
        assert len(one) <= len(items)
        # Who is known again by a stamp is the same record: no other has it.
        stamps = [set(each.stamps(b"key").tolist()) for each in (one, other)]
        assert [len(each) for each in stamps] == [len(one), len(other)]
