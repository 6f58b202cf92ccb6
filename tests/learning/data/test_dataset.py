"""What every dataset promises: records in the order asked for, in the form that was announced."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpagent.errors import DataError, ParameterError
from dpagent.learning.data.checking import count_non_finite
from dpagent.learning.data.dataset import ArrayDataset, to_float32
from dpagent.learning.data.derived import Reshaped, Subset


def numbered(count: int = 23, *, classes: int = 5, dtype: type = np.uint8) -> ArrayDataset:
    """Records that hold their own number, with labels in turn."""
    inputs = np.arange(count)[:, np.newaxis].astype(dtype) * np.ones(3, dtype)
    return ArrayDataset(inputs, np.arange(count, dtype=np.int64) % classes, classes)


@given(st.lists(st.integers(0, 22), max_size=30), st.integers(1, 40))
def test_a_batch_has_the_order_of_its_indices_and_so_have_pieces(wanted: list[int], size: int) -> None:
    data, indices = numbered(), np.array(wanted, np.int64)
    inputs, labels = data.batch(indices)
    assert inputs.shape == (len(wanted), 3)
    assert inputs[:, 1].tolist() == wanted
    assert labels.tolist() == [number % 5 for number in wanted]
    pieces = list(data.batches(indices, size=size))
    assert [len(part) for part, _ in pieces[:-1]] == [size] * max(0, len(pieces) - 1)
    assert [number for part, _ in pieces for number in part[:, 0]] == wanted
    assert [label for _, part in pieces for label in part] == labels.tolist()


def test_without_indices_pieces_are_everything_in_order() -> None:
    assert [int(x) for inputs, _ in numbered().batches(size=7) for x in inputs[:, 0]] == list(range(23))
    (piece,) = numbered().batches()
    assert len(piece[0]) == 23
    with pytest.raises(ParameterError, match="size is 0"):
        list(numbered().batches(size=0))


@pytest.mark.parametrize("dtype", ["u1", "u8", "i2", "i8"])
def test_indices_may_be_whole_numbers_of_any_kind(dtype: str) -> None:
    records = ArrayDataset(np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(3), 3)
    for numbers in ([2, 0], []):
        assert records.batch(np.array(numbers, dtype))[1].tolist() == numbers
    for empty in (records, ArrayDataset(records.inputs[:0], records.labels[:0], 3)):
        with pytest.raises(IndexError):
            empty.batch(np.array([len(empty)], dtype))
        assert len(empty.batch(np.array([], dtype))[1]) == 0


@pytest.mark.parametrize("wrong", [[-1], [23], [0, 22, 99]])
def test_an_index_out_of_range_is_a_programmers_error(wrong: list[int]) -> None:
    with pytest.raises(IndexError, match="for 23 records"):
        numbered().batch(np.array(wrong))


@given(st.lists(st.integers(0, 22), min_size=1), st.data())
def test_a_subset_is_read_through_the_whole(chosen: list[int], data: st.DataObject) -> None:
    part = Subset(numbered(), np.array(chosen))
    inner = data.draw(st.lists(st.integers(0, len(chosen) - 1)))
    inputs, labels = part.batch(np.array(inner, np.int64))
    assert inputs[:, 0].tolist() == [chosen[number] for number in inner]
    assert np.array_equal(labels, part.labels[np.array(inner, np.int64)])
    assert part.classes == 5


def test_another_shape_holds_the_same_values_in_the_same_order() -> None:
    inputs = np.arange(24, dtype=np.float32).reshape(2, 12)
    data = ArrayDataset(inputs, np.zeros(2, np.int64), 2)
    shaped = Reshaped(data, [2, 3, 2])
    assert shaped.shape == (2, 3, 2)
    assert np.array_equal(shaped.batch(np.array([1]))[0], inputs[[1]].reshape(1, 2, 3, 2))
    with pytest.raises(DataError, match=r"shape \(12,\), 12 values; shape \(5, 2\) needs 10"):
        Reshaped(data, [5, 2])


def test_uint8_becomes_float32_in_0_to_1_and_floats_stay() -> None:
    pixels = np.array([[0, 51, 255]], np.uint8)
    assert to_float32(pixels).dtype == np.float32
    assert np.array_equal(to_float32(pixels), pixels / np.float32(255))
    floats = np.array([[-3.5, np.inf]], np.float32)
    assert np.array_equal(to_float32(floats), floats)


def test_records_that_are_not_finite_are_counted() -> None:
    data = numbered(dtype=np.float32)
    assert count_non_finite(data) == 0
    data.inputs[3, 1], data.inputs[3, 2], data.inputs[20, 0] = np.nan, np.inf, -np.inf
    assert count_non_finite(data) == 2
    assert count_non_finite(numbered()) == 0


@pytest.mark.parametrize(
    ("inputs", "labels", "classes", "names", "text"),
    [
        (np.zeros((2, 3)), [0, 1], 2, (), "float64 of shape"),
        (np.zeros((2, 1, 1, 1, 1), np.uint8), [0, 1], 2, (), "expected uint8 or float32 of shape"),
        (np.zeros((3, 2), np.uint8), [0, 1], 2, (), "3 inputs and 2 labels"),
        (np.zeros((2, 2), np.uint8), [0, 2], 2, (), r"A label is 2 \(record 1\).*0 to 1"),
        (np.zeros((2, 2), np.uint8), [0, -3], 2, (), r"A label is -3 \(record 1\)"),
        (np.zeros((2, 2), np.uint8), [0, 0], 1, (), "only one class; expected at least 2"),
        (np.zeros((2, 2), np.uint8), [0, 1], 2, ("a",), "1 names for 2 classes"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    inputs: np.ndarray, labels: list[int], classes: int, names: tuple[str, ...], text: str
) -> None:
    with pytest.raises(DataError, match=text):
        ArrayDataset(inputs, np.array(labels, np.int64), classes, names)


def test_importing_the_package_loads_numpy_and_the_standard_library_only() -> None:
    program = "import sys, dpagent.learning.data; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    roots = {name.partition(".")[0] for name in loaded.split()}
    assert not roots & {"PIL", "yaml", "pandas", "scipy", "onnx", "onnxruntime", "matplotlib"}
