"""What the check counts is what there is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from formats import open_images
from hypothesis import given
from hypothesis import strategies as st
from pictures import encoded, folder_of, noise, zip_of

from dpagent.learning.data.checking import examine
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.formats.npz import open_npz, save_npz


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=40))
def test_duplicates_and_contradictions_are_those_of_a_plain_set(records: list[tuple[int, int]]) -> None:
    inputs = np.array([[value, 7] for value, _ in records], np.uint8)
    findings = examine(ArrayDataset(inputs, np.array([label for _, label in records], np.int64), 3))
    values = {value for value, _ in records}
    assert findings.duplicates == len(records) - len(values)
    assert findings.contradictions == len(set(records)) - len(values)
    assert findings.minimum == min(*values, 7)
    assert findings.maximum == 7
    counts = {str(label): sum(1 for _, other in records if other == label) for label in range(3)}
    assert dict(findings.classes) == counts


def test_what_is_not_finite_is_counted_and_left_out_of_the_range() -> None:
    inputs = np.array([[1, 2], [np.nan, 500], [-3, np.inf], [np.nan, np.nan]], np.float32)
    findings = examine(ArrayDataset(inputs, np.zeros(4, np.int64), 2, ("a", "b")))
    assert findings.non_finite == 3
    assert (findings.minimum, findings.maximum) == (-3, 500)
    text = " ".join(findings.warnings)
    assert "3 records hold NaN" in text
    assert "Values go from -3 to 500" in text
    assert "No records of 1 of 2 classes: b" in text
    nothing = examine(ArrayDataset(np.full((2, 1), np.nan, np.float32), np.zeros(2, np.int64), 2))
    assert (nothing.minimum, nothing.maximum, nothing.non_finite) == (None, None, 2)


def test_sound_data_raise_no_warning(tmp_path: Path) -> None:
    folder_of(tmp_path, "a/1.png", "b/2.png")
    findings = examine(open_images(tmp_path, classes=["a", "b"], size=(12, 8), mode="rgb"))
    assert findings.warnings == findings.left_out == findings.unreadable == ()
    assert findings.memory_bytes == 2 * 12 * 8 * 3


def test_each_unreadable_record_is_named_and_the_others_are_counted(tmp_path: Path) -> None:
    files = {f"a/{number:02}.png": encoded(noise(number)) for number in range(20)}
    files |= {"b/bad.png": b"no picture", "a/07.png": files["a/07.png"][:50], "a/11.png": files["a/10.png"]}
    findings = examine(open_images(zip_of(tmp_path / "x.zip", files), size=(12, 8)))
    assert findings.records == 21
    assert len(findings.unreadable) == 2
    assert "a/07.png" in findings.unreadable[0]
    assert "b/bad.png" in findings.unreadable[1]
    assert findings.duplicates == 1


def test_names_of_classes_survive_in_npz(tmp_path: Path) -> None:
    data = ArrayDataset(np.zeros((2, 3), np.uint8), np.array([0, 2], np.int64), 3, ("größe", "x y", "z"))
    save_npz(tmp_path / "x.npz", data)
    assert open_npz(tmp_path / "x.npz").class_names == ("größe", "x y", "z")
