"""A record that cannot be read adds nothing to a lot, whatever it is stored in, and makes nothing fail."""

from __future__ import annotations

import gzip
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pictures import damaged_inside, encoded, folder_of, noise, write, zip_of

from dpagent.learning.data.checking import count_non_finite, examine
from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.data.derived import Reshaped, Subset, Unfailing
from dpagent.learning.data.formats.images.decoding import looks_whole
from dpagent.learning.data.opening import open_dataset
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.augmentation import Augmentation
from dpagent.learning.training.lots import sum_over_lot
from dpagent.learning.training.numpy_engine.engine import NumpyEngine

DIGITS = built_in("digits")
CIFAR = built_in("cifar-cnn")
PIXELS = {"width": 8, "height": 8, "channels": 1}


def pictures(folder: Path) -> tuple[Dataset, list[int]]:
    names = [f"{number % 10}/{number:02}.png" for number in range(45)]
    folder_of(folder, *names, **PIXELS)
    for number in (3, 17, 40):
        broken = damaged_inside(encoded(noise(number, **PIXELS)))
        assert looks_whole(broken[:16], broken[-16:])
        write(folder / names[number], broken)
    return open_dataset(DatasetSettings(path=folder)), sorted(
        sorted(names).index(names[number]) for number in (3, 17, 40)
    )


def archive(folder: Path) -> tuple[Dataset, list[int]]:
    files = {f"{number % 10}/{number:02}.png": encoded(noise(number, **PIXELS)) for number in range(45)}
    files["4/04.png"] = damaged_inside(files["4/04.png"])
    return open_dataset(DatasetSettings(path=zip_of(folder / "x.zip", files))), [
        sorted(files).index("4/04.png")
    ]


def idx(folder: Path) -> tuple[Dataset, list[int]]:
    values = np.random.default_rng(0).integers(0, 256, (45, 8, 8), np.uint8)
    file = folder / "train-images-idx3-ubyte"
    file.write_bytes(struct.pack(">HBBIII", 0, 8, 3, *values.shape) + values.tobytes())
    labels = struct.pack(">HBBI", 0, 8, 1, 45) + bytes(number % 10 for number in range(45))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    data = open_dataset(DatasetSettings(path=folder))
    os.truncate(file, 16 + 40 * 64 + 5)
    return data, [40, 41, 42, 43, 44]


def table(folder: Path) -> tuple[Dataset, list[int]]:
    values = np.random.default_rng(0).random((45, 64)).round(3)
    for number, part in enumerate(np.split(values, 3)):
        rows = [",".join([*map(str, row), str(place % 10)]) for place, row in enumerate(part)]
        header = ",".join([*map(str, range(64)), "label"])
        write(folder / f"{number}.csv", "\n".join([header, *rows, ""]).encode())
    data = open_dataset(DatasetSettings(path=folder, shape=[8, 8, 1]))
    write(folder / "new", b"another file").replace(folder / "1.csv")
    return data, list(range(15, 30))


def cifar(folder: Path) -> tuple[Dataset, list[int]]:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3072), np.uint8)
    file = folder / "data_batch_1.bin"
    file.write_bytes(b"".join(bytes([number]) + row.tobytes() for number, row in enumerate(pixels)))
    data = open_dataset(DatasetSettings(path=folder))
    os.truncate(file, 4 * 3073 + 100)
    return data, [4, 5]


def npz(folder: Path) -> tuple[Dataset, list[int]]:
    """Stored, and too large to be kept in memory."""
    count = (32 << 20) // 3072 + 3
    path = folder / "x.npz"
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), np.uint8)
    np.savez(path, inputs=pixels, labels=np.arange(count) % 10)
    with zipfile.ZipFile(path) as opened:
        start = opened.getinfo("inputs.npy").header_offset
    data = Subset(open_dataset(DatasetSettings(path=path)), np.array([0, 1, 5_000, 5_001, count - 1]))
    os.truncate(path, start + 5_000 * 3072)
    return data, [2, 3, 4]


KINDS: list[tuple[Callable[[Path], tuple[Dataset, list[int]]], ModelSpec]] = [
    (pictures, DIGITS), (archive, DIGITS), (idx, DIGITS), (table, DIGITS), (cifar, CIFAR), (npz, CIFAR),
]  # fmt: skip


@pytest.mark.parametrize(("make", "model"), KINDS)
def test_the_sum_over_a_lot_is_that_of_the_records_that_can_be_read(
    tmp_path: Path, make: Callable[[Path], tuple[Dataset, list[int]]], model: ModelSpec
) -> None:
    """To the last bit: the microbatches are those of the lot with nobody in their places."""
    data, bad = make(tmp_path)
    engine, weights = NumpyEngine(model, microbatch=2, products="stacked"), model.initial_weights(0)
    lot = np.random.default_rng(5).permutation(len(data))
    rest = lot[~np.isin(lot, bad)]
    alone = Subset(data, rest)
    inputs, labels = alone.batch(np.arange(len(rest)))
    places = np.full(len(lot), len(rest))
    places[~np.isin(lot, bad)] = np.arange(len(rest))
    expected = sum_over_lot(engine, weights, ArrayDataset(inputs, labels, 10), places, [0.5])
    assert expected.excluded == len(bad)
    for each in (
        data,
        Unfailing(data, lambda _: None),
        Reshaped(data, data.shape),
        Subset(data, np.arange(len(data))),
    ):
        found = sum_over_lot(engine, weights, each, lot, [0.5])
        assert np.array_equal(found.total, expected.total)
        assert np.any(found.total)
        assert found.within.tolist() == expected.within.tolist()
        assert found.excluded == len(bad)
    nothing = sum_over_lot(engine, weights, data, np.array(bad), [0.5])
    assert (nothing.excluded, nothing.within.sum(), np.any(nothing.total)) == (len(bad), 0, False)


def test_views_are_made_of_what_can_be_read(tmp_path: Path) -> None:
    data, bad = pictures(tmp_path)
    engine = NumpyEngine(DIGITS, microbatch=2, views=2, products="stacked")
    found = sum_over_lot(
        engine, DIGITS.initial_weights(0), data, np.arange(len(data)), [0.5], Augmentation(2, shift=1)
    )
    assert found.excluded == len(bad)


@pytest.mark.parametrize("size", [1, 4, 44, 45, None])
def test_every_batch_but_the_last_is_full(tmp_path: Path, size: int | None) -> None:
    data, bad = pictures(tmp_path)
    pieces = list(data.readable_batches(size=size))
    assert [len(labels) for _, labels in pieces[:-1]] == [size] * (len(pieces) - 1)
    good = np.delete(np.arange(45), bad)
    assert np.array_equal(np.concatenate([inputs for inputs, _ in pieces]), data.batch(good)[0])
    assert np.array_equal(np.concatenate([labels for _, labels in pieces]), data.labels[good])


def test_who_needs_each_record_in_its_place_gets_nan(tmp_path: Path) -> None:
    data, bad = pictures(tmp_path)
    told: list[str] = []
    unfailing = Unfailing(data, told.append)
    inputs, labels = unfailing.batch(np.arange(45))
    good = np.delete(np.arange(45), bad)
    assert inputs.dtype == np.float32
    assert np.isnan(inputs[bad]).all()
    assert np.array_equal(inputs[good], data.batch(good)[0] / np.float32(255))
    assert np.array_equal(labels, data.labels)
    assert len(told) == len(bad)
    assert all(".png: " in sentence for sentence in told)
    assert unfailing.batch(good)[0].dtype == np.uint8


def test_what_is_counted_as_not_finite_is_readable(tmp_path: Path) -> None:
    data, bad = table(tmp_path)
    assert count_non_finite(data) == 0
    findings = examine(data)
    assert (findings.records, findings.non_finite, len(findings.unreadable)) == (45, 0, len(bad))
    assert "1.csv ends at byte" in findings.unreadable[0]
