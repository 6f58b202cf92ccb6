"""No file takes more memory than is stated, whatever it holds, and none but its own records are lost.

Each file is opened and read as a board does, in a process with a limit on its address space. What counts is
the peak of the memory that the process held, because a decoder that runs into the limit is a record left out,
and would hide what it asked for.
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import hostile_files as hostile
import numpy as np
import pytest
from peaks import read_all
from pictures import write, zip_of

pytestmark = pytest.mark.heavy

MEBIBYTE = 1 << 20
PICTURE_MIB = 160
"""20 bytes for each of 8 Mi pixels, the file included."""
TABLE_MIB = 64
ARRAY_MIB = 140
"""32 MiB of values in memory as they come, again as float32, and the labels."""


def pictures(path: Path, **section: Any) -> dict[str, Any]:
    images = {"size": [8, 8], "mode": "rgb", "folder": "."} | section
    return {"path": str(path), "kind": "images", "classes": ["a", "b"], "images": images}


@pytest.mark.slow
def test_a_picture_takes_what_the_bound_on_its_pixels_allows_and_costs_itself_alone(tmp_path: Path) -> None:
    for name, make in hostile.PICTURES.items():
        for number in range(3):
            write(tmp_path / name / "a" / f"{number}.png", hostile.small_png())
        write(tmp_path / name / "b" / name, make())
    found = dict(
        zip(hostile.PICTURES, read_all(*(pictures(tmp_path / n) for n in hostile.PICTURES)), strict=True)
    )
    for name, one in found.items():
        assert one["read"] == 4 - (name in REFUSED), name
        assert one["peak"] < PICTURE_MIB, (name, one)


REFUSED = {
    "progressive.jpg", "huge.png", "beyond-the-bound.webp", "canvas.webp", "screen.gif", "directory.png",
    "cut.png", "cut.jpg", "nothing-but-zeros.jpg",
}  # fmt: skip


@pytest.mark.slow
def test_an_archive_of_pictures_takes_no_more_than_a_folder(tmp_path: Path) -> None:
    good = {f"a/{number}.png": hostile.small_png() for number in range(3)}
    bomb = zip_of(tmp_path / "bomb.zip", good | {"b/x.png": bytes(40 * MEBIBYTE)}, zipfile.ZIP_DEFLATED)
    large = zip_of(tmp_path / "large.zip", good | {"b/x.jpg": hostile.progressive()})
    # The list says that a small member takes nearly all of the file.
    padded = bytearray(zip_of(tmp_path / "padded.zip", good | {"b/x.png": bytes(30 * MEBIBYTE)}).read_bytes())
    entry = padded.rindex(b"PK\x01\x02")
    struct.pack_into("<H", padded, entry + 10, zipfile.ZIP_DEFLATED)
    struct.pack_into("<I", padded, entry + 24, 100)
    (tmp_path / "padded.zip").write_bytes(padded)
    allowed = hostile.long_list(tmp_path / "allowed.zip", 150_000)
    refused = hostile.long_list(tmp_path / "refused.zip", 300_000)
    found = read_all(*(pictures(path) for path in (bomb, large, tmp_path / "padded.zip", allowed, refused)))
    assert [one.get("read") for one in found[:3]] == [3, 3, 3]
    assert "whose list of files takes" in found[4]["refused"]
    assert max(one["peak"] for one in found) < PICTURE_MIB, found


def csv(path: Path, **section: Any) -> dict[str, Any]:
    return {"path": str(path), "kind": "csv", "classes": ["a", "b"], "csv": {"features": ["x"]} | section}


@pytest.mark.slow
def test_a_table_takes_what_its_longest_row_may(tmp_path: Path) -> None:
    begin, end = b"x,label\n1,a\n", b"\n2,b\n"
    rows = "3," + "a" * 1_000_000
    cases = [
        csv(hostile.gigabyte(tmp_path / "line.csv", begin, end)),
        csv(hostile.gigabyte(tmp_path / "field.csv", begin + b'"', end)),
        csv(write(tmp_path / "commas.csv", begin + b"," * 1_000_000 + end)),
        csv(write(tmp_path / "quotes.csv", begin + b'"' + b"9\n" * 10_000 + end)),
        csv(write(tmp_path / "wide.csv", begin + ("\N{GRINNING FACE}," * 200_000).encode() + end)),
        csv(write(tmp_path / "long.csv", begin + b'"' + "\n".join([rows] * 40).encode() + b'"' + end)),
        csv(write(tmp_path / "latin.csv", begin + b"\xff\xfe" * 1_000 + end)),
        csv(write(tmp_path / "digits.csv", begin + b"9" * 100_000 + b",a" + end)),
        csv(write(tmp_path / "blank.csv", begin + b"\n" * (3 * MEBIBYTE) + b"2,b\n"), window=2),
        csv(hostile.gzip_bomb(tmp_path / "packed.csv.gz", begin, 64)),
    ]
    found = read_all(*cases)
    assert [one["read"] for one in found] == [2, 2, 2, 2, 2, 2, 2, 3, 0, 1]
    assert max(one["peak"] for one in found) < TABLE_MIB, found
    (header,) = read_all(csv(hostile.gigabyte(tmp_path / "header.csv")))
    assert "a line has more than" in header["refused"]
    assert header["peak"] < TABLE_MIB


def npz(path: Path) -> dict[str, Any]:
    return {"path": str(path), "kind": "npz", "classes": 2, "shape": [4], "dtype": "uint8"}


def test_arrays_are_refused_by_their_headers(tmp_path: Path) -> None:
    def archive(name: str, inputs: Any, labels: Any, method: int = zipfile.ZIP_DEFLATED) -> dict[str, Any]:
        members = {"inputs": iter(inputs), "labels": iter(labels)}
        return npz(hostile.npz_of(tmp_path / f"{name}.npz", members, method))

    labels = [hostile.header_of((3,), "<i8"), bytes(24)]
    inputs = [hostile.header_of((3, 4), "|u1"), bytes(12)]
    many = 1 << 27  # bytes, of which one who reads them shows more than what is allowed
    header = b"\x93NUMPY\2\0" + struct.pack("<I", many)
    np.savez(tmp_path / "objects.npz", inputs=np.array([object()] * 3), labels=np.zeros(3, int))
    cases = [
        archive("values", hostile.zeros(hostile.header_of((many, 1), "|u1"), many), labels),
        archive("labels", inputs, hostile.zeros(hostile.header_of((many >> 3,), "<i8"), many)),
        archive("records", hostile.zeros(hostile.header_of((3, many), "|u1"), 0), labels),
        archive("wide", hostile.zeros(hostile.header_of((3, 64 << 20), "|u1"), 192 << 20), labels),
        archive("header", hostile.zeros(header, many), labels),
        archive("nested", [b"\x93NUMPY\1\0" + struct.pack("<H", 9_000) + b"(" * 9_000], labels),
        archive("lzma", inputs, labels, zipfile.ZIP_LZMA),
        archive("bzip2", inputs, labels, zipfile.ZIP_BZIP2),
        npz(tmp_path / "objects.npz"),
        npz(hostile.long_list(tmp_path / "list.npz", 2_000)),
    ]
    for case, one in zip(cases, read_all(*cases), strict=True):
        assert case["path"] in one["refused"]
        assert one["peak"] < 8, (case["path"], one)


def test_values_take_what_is_declared(tmp_path: Path) -> None:
    count = (32 * MEBIBYTE) // 4_096
    members = {
        "inputs": hostile.zeros(hostile.header_of((count, 512), "<f8"), count * 4_096),
        "labels": iter([hostile.header_of((count,), "<i8"), bytes(count * 8)]),
    }
    path = hostile.npz_of(tmp_path / "x.npz", members)
    settings = npz(path) | {"shape": [512], "dtype": "float32", "max_records": count}
    images, labels = tmp_path / "train-images-idx3-ubyte.gz", tmp_path / "train-labels-idx1-ubyte"
    hostile.gzip_bomb(images, struct.pack(">BBBBIII", 0, 0, 8, 3, 2, 2, 2), 512)
    write(labels, struct.pack(">BBBBI", 0, 0, 8, 1, 2) + bytes(2))
    idx = {"path": str(tmp_path), "kind": "idx", "classes": 2, "shape": [2, 2, 1], "dtype": "uint8"}
    file = hostile.gigabyte(tmp_path / "data_batch_1.bin", end=bytes(3073 - (1 << 30) % 3073))
    cifar = {"path": str(file), "kind": "cifar", "classes": 10, "cifar": {"layout": "cifar-10"}}
    found = read_all(settings, idx, cifar)
    assert found[0]["read"] == count
    assert "bytes of values; its header says 8" in found[1]["refused"]
    assert "expected at most 1,000" in found[2]["refused"]
    assert max(one["peak"] for one in found) < ARRAY_MIB, found
