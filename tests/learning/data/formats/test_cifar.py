"""CIFAR in binary form: the bytes are where the format says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from formats import open_as

from dpagent.errors import DataError
from dpagent.learning.data.opening import open_dataset
from dpagent.learning.data.settings import DatasetSettings

GENERATOR = np.random.default_rng(0)


def cifar_10(folder: Path, *counts: int) -> tuple[np.ndarray, np.ndarray]:
    """Write batches; the images as (n, 32, 32, 3) and their labels."""
    images, labels = [], []
    for number, count in enumerate(counts, start=1):
        image = GENERATOR.integers(0, 256, (count, 32, 32, 3), np.uint8)
        label = GENERATOR.integers(0, 10, count).astype(np.uint8)
        with (folder / f"data_batch_{number}.bin").open("wb") as file:
            for one, name in zip(image, label, strict=True):
                # Plane by plane: red, green, blue.
                file.write(bytes([name]) + b"".join(one[:, :, channel].tobytes() for channel in range(3)))
        images.append(image)
        labels.append(label)
    return np.concatenate(images), np.concatenate(labels)


def test_batches_are_one_dataset_in_their_order(tmp_path: Path) -> None:
    images, labels = cifar_10(tmp_path, 5, 3, 4)
    (tmp_path / "batches.meta.txt").write_text("a b c d e f g h i j\n")
    data = open_dataset(DatasetSettings(path=tmp_path))
    assert (len(data), data.shape, data.classes, data.dtype) == (12, (32, 32, 3), 10, np.uint8)
    assert data.class_names == tuple("abcdefghij")
    order = GENERATOR.permutation(12)
    inputs, found = data.batch(order)
    assert np.array_equal(inputs, images[order])
    assert np.array_equal(found, labels[order])
    assert data.groups is not None
    assert data.groups.tolist() == [0] * 5 + [1] * 3 + [2] * 4


def test_a_single_batch_and_part_of_the_batches_are_shards(tmp_path: Path) -> None:
    images, _ = cifar_10(tmp_path, 5, 3)
    (tmp_path / "data_batch_1.bin").unlink()
    for path in (tmp_path, tmp_path / "data_batch_2.bin"):
        data = open_as("cifar", path, "train")
        assert np.array_equal(data.batch(np.arange(3))[0], images[5:])
        assert (data.classes, data.class_names) == (10, ())
    assert open_as("cifar", tmp_path, "train", [*"klmnopqrst"]).class_names == tuple("klmnopqrst")


def test_cifar_100_has_two_labels_of_which_the_fine_one_counts(tmp_path: Path) -> None:
    (tmp_path / "test.bin").write_bytes(bytes([7, 93]) + bytes(range(256)) * 12)
    data = open_as("cifar", tmp_path, "test")
    assert (len(data), data.classes, data.labels.tolist()) == (1, 100, [93])
    (image,), _ = data.batch(np.array([0]))
    assert image[0, :3, 0].tolist() == [0, 1, 2]
    assert image[1, 0].tolist() == [32, (1024 + 32) % 256, (2048 + 32) % 256]


def test_bad_files_are_named_with_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file of the train half.*data_batch_1\.bin.*Unpack the archive"):
        open_as("cifar", tmp_path, "train")
    file = tmp_path / "data_batch_1.bin"
    cifar_10(tmp_path, 2)
    whole = file.read_bytes()
    for content, text in (
        (whole[:-1], r"has 6,145 bytes; expected a whole number of records of 3,073 bytes"),
        (b"?", "has 1 byte;"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=text) as caught:
            open_as("cifar", tmp_path, "train")
        assert str(file) in str(caught.value)
    file.write_bytes(whole[:3073] + b"\x0a" + whole[3074:])
    data = open_as("cifar", tmp_path, "train")
    assert (len(data), data.origin.left_out) == (1, ("record 1: the label is 10; expected 0 to 9.",))


def test_a_file_cut_off_after_it_was_opened_is_a_sentence_and_no_crash(tmp_path: Path) -> None:
    """A mapped file would end the process with SIGBUS here."""
    images, _ = cifar_10(tmp_path, 4)
    data = open_as("cifar", tmp_path, "train")
    with (tmp_path / "data_batch_1.bin").open("r+b") as file:
        file.truncate(2 * 3073)
    assert np.array_equal(data.batch(np.array([1]))[0], images[[1]])
    with pytest.raises(DataError, match=r"data_batch_1\.bin ends at byte 6146; it was longer"):
        data.batch(np.array([1, 2]))
