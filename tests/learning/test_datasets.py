"""Datasets: what loads, and one sentence for everything that does not."""

from __future__ import annotations

import gzip
import hashlib
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpagent.errors import DataError, ParameterError, StorageError
from dpagent.learning import Dataset, built_in, check_fits, load_idx, load_npz, save_npz, split_iid

MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist"
# MD5 of the values in the uncompressed IDX files, from the README beside the data.
MNIST_MD5 = {
    ("train", "images"): "6bbc9ace898e44ae57da46a324031adb",
    ("train", "labels"): "a25bea736e30d166cdddb491f175f624",
    ("test", "images"): "2646ac647ad5339dbf082846283269ea",
    ("test", "labels"): "27ae3e4e09519cfbb04c329615203637",
}


def dataset(count: int = 12, *, dtype: type = np.uint8) -> Dataset:
    generator = np.random.default_rng(0)
    inputs = generator.integers(0, 256, (count, 8, 8, 1)).astype(np.uint8)
    labels = np.arange(count, dtype=np.int64) % 10
    return Dataset(inputs if dtype is np.uint8 else inputs.astype(dtype) / dtype(255), labels, 10)


def same(one: Dataset, other: Dataset) -> bool:
    return (
        one.inputs.dtype == other.inputs.dtype
        and np.array_equal(one.inputs, other.inputs, equal_nan=one.inputs.dtype.kind == "f")
        and np.array_equal(one.labels, other.labels)
        and one.classes == other.classes
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_npz_round_trip(tmp_path: Path, dtype: type) -> None:
    path = tmp_path / "data.bin"
    save_npz(path, dataset(dtype=dtype))
    assert same(load_npz(path), dataset(dtype=dtype))


def test_plain_npz_of_other_types_is_converted(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, inputs=np.full((3, 4, 5), 0.5), labels=np.array([0, 1, 6], np.uint16))
    loaded = load_npz(path)
    assert loaded.inputs.dtype == np.float32
    assert loaded.inputs.shape == (3, 4, 5, 1)
    assert loaded.labels.dtype == np.int64
    assert loaded.classes == 7


def test_a_batch_is_scaled_only_when_taken() -> None:
    data = dataset()
    inputs, labels = data.batch(np.array([3, 1]))
    assert data.inputs.dtype == np.uint8
    assert inputs.dtype == np.float32
    assert np.array_equal(inputs, data.inputs[[3, 1]].astype(np.float32) / np.float32(255))
    assert labels.tolist() == [3, 1]
    floats = dataset(dtype=np.float32)
    assert np.array_equal(floats.batch(np.array([2]))[0], floats.inputs[[2]])


def test_records_with_nan_or_infinity_load_and_are_counted(tmp_path: Path) -> None:
    data = dataset(dtype=np.float32)
    data.inputs[2, 1, 1, 0] = np.nan
    data.inputs[5, 0, 0, 0] = np.inf
    path = tmp_path / "data.npz"
    save_npz(path, data)
    assert load_npz(path).non_finite_records == 2
    assert dataset().non_finite_records == 0


def images(count: int = 2) -> np.ndarray[Any, Any]:
    return np.zeros((count, 8, 8, 1), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"inputs": images()}, "lacks the array 'labels'.*found: inputs"),
        ({"x": images(), "y": np.zeros(2, int)}, "lacks the array 'inputs'.*found: x, y"),
        ({"inputs": images(), "labels": np.zeros(3, int)}, "2 inputs and 3 labels"),
        ({"inputs": images(0), "labels": np.zeros(0, int)}, "no records"),
        ({"inputs": images(), "labels": np.array([0, -1])}, "A label is -1"),
        ({"inputs": images(), "labels": np.array([0, 5]), "classes": np.int64(4)}, "A label is 5.*0 to 3"),
        ({"inputs": images(), "labels": np.array([0, 1]), "classes": np.array([1, 2])}, "'classes' is"),
        ({"inputs": images(), "labels": np.array([0.0, 1.0])}, "labels are float64"),
        ({"inputs": images(), "labels": np.array([0, 2**63 + 1], np.uint64)}, "label is 9223372036854775809"),
        ({"inputs": images(), "labels": np.zeros((2, 1), int)}, r"labels are int64 of shape \(2, 1\)"),
        ({"inputs": np.zeros((2, 64), np.uint8), "labels": np.zeros(2, int)}, r"uint8 of shape \(2, 64\)"),
        ({"inputs": images().astype(np.int32), "labels": np.zeros(2, int)}, "inputs are int32"),
        ({"inputs": np.array([object()]), "labels": np.zeros(1, int)}, "Object arrays cannot be loaded"),
    ],
)
def test_a_bad_npz_is_refused(tmp_path: Path, arrays: dict[str, Any], text: str) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=text) as caught:
        load_npz(path)
    assert str(path) in str(caught.value)


def test_what_is_no_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    with pytest.raises(DataError, match="There is no file"):
        load_npz(path)
    with pytest.raises(DataError, match="Cannot read"):
        load_npz(tmp_path)
    for content in (b"", b"hello", b"\x93NUMPY" + bytes(100)):
        path.write_bytes(content)
        with pytest.raises(DataError, match="not an NPZ"):
            load_npz(path)
    save_npz(path, dataset())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged"):
        load_npz(path)
    flipped = bytearray(whole)
    flipped[120] ^= 0xFF
    path.write_bytes(flipped)
    with pytest.raises(DataError):
        load_npz(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inputs.npy", b"not an array")
        archive.writestr("labels.npy", b"")
    with pytest.raises(DataError):
        load_npz(path)


def test_a_file_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Cannot write"):
        save_npz(tmp_path / "missing" / "data.npz", dataset())


def write_idx(folder: Path, *, suffix: str = "", count: int = 3) -> None:
    pixels = struct.pack(">BBBBIII", 0, 0, 8, 3, count, 4, 5) + bytes(range(20)) * count
    labels = struct.pack(">BBBBI", 0, 0, 8, 1, count) + bytes(range(count))
    for name, content in (("train-images-idx3-ubyte", pixels), ("train-labels-idx1-ubyte", labels)):
        (folder / f"{name}{suffix}").write_bytes(gzip.compress(content) if suffix else content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_is_read_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    write_idx(tmp_path, suffix=suffix)
    data = load_idx(tmp_path, "train")
    assert data.inputs.shape == (3, 4, 5, 1)
    assert data.inputs[1].ravel().tolist() == list(range(20))
    assert data.labels.tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=r"neither t10k-images-idx3-ubyte nor t10k-images-idx3-ubyte\.gz"):
        load_idx(tmp_path, "test")
    with pytest.raises(DataError, match="'validation'; expected 'train' or 'test'"):
        load_idx(tmp_path, "validation")  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_bad_idx_is_refused(tmp_path: Path, suffix: str) -> None:
    write_idx(tmp_path, suffix=suffix)
    path = tmp_path / f"train-images-idx3-ubyte{suffix}"
    whole = gzip.decompress(path.read_bytes()) if suffix else path.read_bytes()
    huge = struct.pack(">BBBBIII", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1)
    for content, text in (
        (whole[:-1], "only 59 bytes of values; its header says 60"),
        (whole + b"x", "more than 60 bytes"),
        (whole[:10], "ends within its header"),
        (b"\x00\x00\x0d\x03" + whole[4:], "begins with 00000d03; expected 00000803"),
        (b"", "begins with ;"),
        (huge, "only 0 bytes"),
    ):
        path.write_bytes(gzip.compress(content) if suffix else content)
        with pytest.raises(DataError, match=text):
            load_idx(tmp_path, "train")
    if suffix:
        path.write_bytes(gzip.compress(whole)[:-12])
        with pytest.raises(DataError, match="Cannot read"):
            load_idx(tmp_path, "train")
        path.write_bytes(whole)
        with pytest.raises(DataError, match="Cannot read"):
            load_idx(tmp_path, "train")
    write_idx(tmp_path, suffix=suffix)
    (tmp_path / f"train-labels-idx1-ubyte{suffix}").unlink()
    with pytest.raises(DataError, match="neither train-labels-idx1-ubyte"):
        load_idx(tmp_path, "train")


@pytest.mark.skipif(not MNIST.is_dir(), reason="MNIST is not beside the project")
@pytest.mark.parametrize(("split", "count"), [("train", 60_000), ("test", 10_000)])
def test_mnist_is_what_its_checksums_say(split: Any, count: int) -> None:
    data = load_idx(MNIST, split)
    assert len(data) == count
    assert data.classes == 10
    check_fits(data, built_in("mnist-cnn"))
    pixels = struct.pack(">IIII", 0x803, count, 28, 28) + data.inputs.tobytes()
    labels = struct.pack(">II", 0x801, count) + data.labels.astype(np.uint8).tobytes()
    assert hashlib.md5(pixels, usedforsecurity=False).hexdigest() == MNIST_MD5[split, "images"]
    assert hashlib.md5(labels, usedforsecurity=False).hexdigest() == MNIST_MD5[split, "labels"]


def test_check_fits_names_both_sides() -> None:
    check_fits(dataset(), built_in("digits"))
    with pytest.raises(DataError, match=r"shape \(8, 8, 1\).*'mnist-cnn' expects \(28, 28, 1\)"):
        check_fits(dataset(), built_in("mnist-cnn"))
    labels = np.array([0, 11], np.int64)
    with pytest.raises(DataError, match="label is 11; model 'digits' has 10 classes"):
        check_fits(Dataset(images(), labels, 12), built_in("digits"))


def test_split_deals_every_record_once() -> None:
    data = Dataset(np.arange(23, dtype=np.float32).reshape(23, 1, 1, 1), np.arange(23, dtype=np.int64), 23)
    parts = split_iid(data, 5, seed=1)
    assert sorted(len(part) for part in parts) == [4, 4, 5, 5, 5]
    assert sorted(np.concatenate([part.labels for part in parts])) == list(range(23))
    assert all(np.array_equal(part.inputs.ravel(), part.labels) for part in parts)
    assert all(same(one, two) for one, two in zip(parts, split_iid(data, 5, seed=1), strict=True))
    assert not all(same(one, two) for one, two in zip(parts, split_iid(data, 5, seed=2), strict=True))
    with pytest.raises(DataError, match="23 records cannot be split into 24 parts"):
        split_iid(data, 24, seed=1)
    with pytest.raises(ParameterError, match="parts is 0"):
        split_iid(data, 0, seed=1)
