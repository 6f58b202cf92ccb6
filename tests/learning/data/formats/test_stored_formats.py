"""NPZ and IDX files: what loads, and one sentence for everything that does not."""

from __future__ import annotations

import gzip
import hashlib
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats import open_as

from dpagent.errors import DataError, StorageError
from dpagent.learning.data import format as format_module
from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.data.formats import npz
from dpagent.learning.data.formats.npz import open_npz, save_npz
from dpagent.learning.data.opening import list_declared, open_dataset, open_inferred
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.fitting import check_fits
from dpagent.learning.models.built_ins import built_in

MNIST = Path(__file__).parents[5] / "shared" / "data" / "mnist"
# MD5 of the values in the uncompressed IDX files, from the README beside the data.
MNIST_MD5 = {
    ("train", "images"): "6bbc9ace898e44ae57da46a324031adb",
    ("train", "labels"): "a25bea736e30d166cdddb491f175f624",
    ("test", "images"): "2646ac647ad5339dbf082846283269ea",
    ("test", "labels"): "27ae3e4e09519cfbb04c329615203637",
}


def dataset(count: int = 12, *, dtype: type = np.uint8) -> ArrayDataset:
    generator = np.random.default_rng(0)
    inputs = generator.integers(0, 256, (count, 8, 8, 1)).astype(np.uint8)
    labels = np.arange(count, dtype=np.int64) % 10
    return ArrayDataset(inputs if dtype is np.uint8 else inputs.astype(dtype) / dtype(255), labels, 10)


def all_of(data: Dataset) -> Any:
    return data.batch(np.arange(len(data)))[0]


def same(one: Dataset, other: Dataset) -> bool:
    return (
        one.dtype == other.dtype
        and np.array_equal(all_of(one), all_of(other), equal_nan=one.dtype.kind == "f")
        and np.array_equal(one.labels, other.labels)
        and (one.classes, one.class_names) == (other.classes, other.class_names)
    )


@pytest.fixture(params=["in memory", "in the file"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which records are kept, whatever their size."""
    limit = 1 << 30 if request.param == "in memory" else 0
    for module in (format_module, npz):
        monkeypatch.setattr(module, "IN_MEMORY_BYTES", limit)
    return str(request.param)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_npz_round_trip(memory: str, tmp_path: Path, dtype: type) -> None:
    path = tmp_path / "data.bin"
    save_npz(path, dataset(dtype=dtype))
    assert same(open_npz(path), dataset(dtype=dtype))


def test_plain_npz_of_other_types_is_converted(memory: str, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, inputs=np.full((3, 4, 5), 0.5), labels=np.array([0, 1, 6], np.uint16))
    loaded = open_npz(path)
    assert loaded.dtype == all_of(loaded).dtype == np.float32
    assert loaded.shape == (4, 5)
    assert np.array_equal(all_of(loaded), np.full((3, 4, 5), 0.5, np.float32))
    assert loaded.labels.dtype == np.int64
    assert loaded.classes == 7


def images(count: int = 2) -> np.ndarray[Any, Any]:
    return np.zeros((count, 8, 8, 1), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"inputs": images()}, "lacks the array 'labels'.*found: inputs"),
        ({"x": images(), "y": np.zeros(2, int)}, "lacks the array 'inputs'.*found: x, y"),
        ({"inputs": images(), "labels": np.zeros(3, int)}, "2 inputs and 3 labels"),
        ({"inputs": images(), "labels": np.array([0, 1]), "classes": np.array([1, 2])}, "'classes' is"),
        ({"inputs": images(), "labels": np.array([0j, 1])}, "labels are complex128"),
        ({"inputs": images(), "labels": np.array([0, 2**63 + 1], np.uint64)}, "label is 9223372036854775809"),
        ({"inputs": images(), "labels": np.zeros((2, 1), int)}, r"labels are int64 of shape \(2, 1\)"),
        ({"inputs": np.zeros(2, np.uint8), "labels": np.zeros(2, int)}, r"uint8 of shape \(records\)"),
        ({"inputs": np.zeros((2, 0), np.uint8), "labels": np.zeros(2, int)}, r"A record has shape \(0,\)"),
        ({"inputs": np.float32(1), "labels": np.zeros(2, int)}, "no inputs and 2 labels"),
        ({"inputs": np.asfortranarray(np.ones((2, 3))), "labels": np.zeros(2, int)}, "Fortran order"),
        ({"inputs": images(), "labels": np.zeros(2, int), "class_names": np.zeros(2)}, "'class_names' is"),
        ({"inputs": images().astype(np.int32), "labels": np.zeros(2, int)}, "inputs are int32"),
        ({"inputs": np.array([object()]), "labels": np.zeros(1, int)}, "Object arrays cannot be loaded"),
    ],
)
def test_a_bad_npz_is_refused(memory: str, tmp_path: Path, arrays: dict[str, Any], text: str) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=text) as caught:
        open_npz(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "kept"),
    [
        (np.array([0, -1, 2]), [0, 2]),
        (np.array([0, 1, 5]), [0, 1]),
        (np.array([np.nan, 1, 2]), [1, 2]),
        (np.array([0.5, 1, -np.inf]), [1]),
        (np.array([9, 9, 9]), []),
        (np.zeros(0, int), []),
    ],
)
def test_a_record_whose_label_is_no_class_is_left_out_alone(
    memory: str, tmp_path: Path, labels: np.ndarray[Any, Any], kept: list[int]
) -> None:
    path = tmp_path / "x.npz"
    inputs = np.arange(3 * len(labels), dtype=np.uint8).reshape(-1, 3)
    np.savez(path, inputs=inputs, labels=labels)
    data = open_as("npz", path, classes=4)
    places = [place for place, label in enumerate(labels) if label in kept]
    assert data.labels.tolist() == kept
    assert np.array_equal(all_of(data), inputs[places])
    assert len(data.origin.left_out) == len(labels) - len(kept)


def test_what_is_no_npz_is_refused(memory: str, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    with pytest.raises(DataError, match="There is no file or directory"):
        open_npz(path)
    with pytest.raises(DataError, match="Cannot read"):
        open_npz(tmp_path)
    for content in (b"", b"hello", b"\x93NUMPY" + bytes(100)):
        path.write_bytes(content)
        with pytest.raises(DataError, match="not an NPZ"):
            open_npz(path)
    save_npz(path, dataset())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged"):
        open_npz(path)
    flipped = bytearray(whole)
    flipped[120] ^= 0xFF
    path.write_bytes(flipped)
    with pytest.raises(DataError):
        open_npz(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inputs.npy", b"not an array")
        archive.writestr("labels.npy", b"")
    with pytest.raises(DataError):
        open_npz(path)


def test_a_file_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Cannot write"):
        save_npz(tmp_path / "missing" / "data.npz", dataset())


def write_idx(folder: Path, *, suffix: str = "", count: int = 3) -> None:
    pixels = struct.pack(">BBBBIII", 0, 0, 8, 3, count, 4, 5) + bytes(range(20)) * count
    labels = struct.pack(">BBBBI", 0, 0, 8, 1, count) + bytes(range(count))
    for name, content in (("train-images-idx3-ubyte", pixels), ("train-labels-idx1-ubyte", labels)):
        (folder / f"{name}{suffix}").write_bytes(gzip.compress(content) if suffix else content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_is_read_plain_and_compressed(memory: str, tmp_path: Path, suffix: str) -> None:
    write_idx(tmp_path, suffix=suffix)
    data = open_as("idx", tmp_path, "train")
    assert (len(data), data.shape, data.dtype) == (3, (4, 5, 1), np.uint8)
    assert all_of(data)[1].ravel().tolist() == list(range(20))
    assert data.labels.tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=r"neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte\.gz"):
        open_as("idx", tmp_path, "test")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_bad_idx_is_refused(memory: str, tmp_path: Path, suffix: str) -> None:
    write_idx(tmp_path, suffix=suffix)
    path = tmp_path / f"train-images-idx3-ubyte{suffix}"
    whole = gzip.decompress(path.read_bytes()) if suffix else path.read_bytes()
    huge = struct.pack(">BBBBIII", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1)
    for content, text in (
        (whole[:-1], "holds only 59 bytes of values; its header says 60"),
        (whole + b"x", "as many as 61 bytes of values; its header says 60"),
        (whole[:10], "ends within its header"),
        (b"\x00\x00\x0c\x03" + whole[4:], "begins with 00000c03; expected 0000, a type"),
        (b"", "begins with nothing;"),
        (huge, "only 0 bytes"),
    ):
        path.write_bytes(gzip.compress(content) if suffix else content)
        with pytest.raises(DataError, match=text):
            open_as("idx", tmp_path, "train")
    if suffix:
        path.write_bytes(gzip.compress(whole)[:-12])
        with pytest.raises(DataError, match="Cannot read"):
            open_as("idx", tmp_path, "train")
        path.write_bytes(whole)
        with pytest.raises(DataError, match="Cannot read"):
            open_as("idx", tmp_path, "train")
    write_idx(tmp_path, suffix=suffix)
    (tmp_path / f"train-labels-idx1-ubyte{suffix}").unlink()
    with pytest.raises(DataError, match="neither train-labels-idx1-ubyte"):
        open_as("idx", tmp_path, "train")


@pytest.mark.skipif(not MNIST.is_dir(), reason="MNIST is not beside the project")
@pytest.mark.parametrize(("split", "count"), [("train", 60_000), ("test", 10_000)])
def test_mnist_is_what_its_checksums_say(split: Any, count: int) -> None:
    data = open_as("idx", MNIST, split)
    assert len(data) == count
    assert data.classes == 10
    check_fits(data, built_in("mnist-cnn"))
    pixels = struct.pack(">IIII", 0x803, count, 28, 28) + all_of(data).tobytes()
    labels = struct.pack(">II", 0x801, count) + data.labels.astype(np.uint8).tobytes()
    assert hashlib.md5(pixels, usedforsecurity=False).hexdigest() == MNIST_MD5[split, "images"]
    assert hashlib.md5(labels, usedforsecurity=False).hexdigest() == MNIST_MD5[split, "labels"]


def test_a_board_unpacks_nothing_onto_its_disk(tmp_path: Path) -> None:
    """Whether there is room would tell how many records there are. It is settled at the start, by what is
    declared: not by how many there are."""
    plain, packed = tmp_path / "plain.npz", tmp_path / "packed.npz"
    arrays = {"inputs": np.ones((3, 1024), np.float32), "labels": np.arange(3)}
    np.savez(plain, **arrays)
    np.savez_compressed(packed, **arrays)
    declared = {"kind": "npz", "classes": 3, "shape": [1024], "dtype": "float32"}

    def on_board(path: Path, most: int) -> Dataset:
        settings = DatasetSettings.checked({"path": path, "max_records": most} | declared)
        return list_declared(settings, growing=False)

    kept = 8_192  # 4 KiB each
    for path, most in ((plain, kept), (packed, kept), (plain, kept + 1)):
        assert np.array_equal(all_of(on_board(path, most)), arrays["inputs"])
    with pytest.raises(DataError, match=r"packed\.npz is compressed, and 8,193 records .*savez"):
        on_board(packed, kept + 1)


@pytest.mark.parametrize("growing", [False, True])
def test_a_board_takes_no_idx_files(tmp_path: Path, growing: bool) -> None:
    """Between the moments at which its labels and its images were replaced, one record more swapped the
    labels of all others: 60.7 clip norms."""
    write_idx(tmp_path)
    data, declared = open_inferred(DatasetSettings(path=tmp_path))
    (warning,) = (text for text in data.origin.warnings if "board" in text)
    with pytest.raises(DataError, match="one NPZ file") as caught:
        list_declared(declared, growing=growing)
    assert warning in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    save_npz(tmp_path / "data.npz", data)
    _, declared = open_inferred(DatasetSettings(path=tmp_path / "data.npz"))
    assert same(list_declared(declared, growing=growing), data)


@pytest.mark.parametrize("dtype", ["<f2", "<f8", "longdouble", ">f4"])
def test_a_board_takes_numbers_of_any_size_and_byte_order(tmp_path: Path, dtype: str) -> None:
    """Each is converted once, when it is decoded."""
    values = np.arange(12).reshape(3, 4) / 4
    np.savez(file := tmp_path / "data.npz", inputs=values.astype(dtype), labels=np.arange(3))
    declared = {"path": file, "kind": "npz", "classes": 3, "shape": [4], "dtype": "float32", "max_records": 3}
    found = all_of(list_declared(DatasetSettings.checked(declared), growing=False))
    assert found.dtype == np.float32
    assert np.array_equal(found, values)


def test_the_bytes_of_idx_files_are_swapped(tmp_path: Path) -> None:
    values = np.ones((2, 2, 2), ">f4")
    (tmp_path / "train-images-idx3-float").write_bytes(
        struct.pack(">IIII", 0xD03, 2, 2, 2) + values.tobytes()
    )
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 2) + bytes([0, 1]))
    assert np.array_equal(all_of(open_dataset(DatasetSettings(path=tmp_path))), values[..., None])
