"""Where the disk fails at the place of one record's features, that record is left out, alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from failing_disks import Fault, fails_at
from numpy.typing import NDArray

from dpagent.errors import StorageError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.front_end.features import FeatureSet, FrontEnd, forget_features, has_features, reserve
from dpagent.learning.models.layers import Dense, Tanh
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import RandomLayers

SPEC = ModelSpec("small", (4, 4, 1), 3, (Dense(3),), 0.0, 1.0, (RandomLayers((Tanh(),), 1),))
ROW_BYTES = 64
BAD, COUNT = 7, 10


def features_of(data: ArrayDataset, directory: Path) -> tuple[NDArray[np.float32], int]:
    """The features of all records, and how many were computed."""
    made = FeatureSet(data, FrontEnd(SPEC), directory, fill_up=lambda _: None)
    rows = made.batch(np.arange(len(data)))[0]
    made.close()
    return rows, made.computed


@pytest.mark.parametrize("fault", ["write", "flush", "read"])
def test_a_place_that_fails_costs_the_record_there_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """Before, that record made an update of noise alone, and of all others where it was not in the lot; and
    features never counted as computed, so that the slots of all later rounds told that it is there."""
    inputs = np.random.default_rng(0).random((COUNT, 4, 4, 1), np.float32)
    data, front_end = ArrayDataset(inputs, np.arange(COUNT) % 3, 3), FrontEnd(SPEC)
    others = np.arange(COUNT) != BAD
    with monkeypatch.context() as patch:
        fails_at(patch, "features.f32", BAD * ROW_BYTES, fault)
        rows, computed = features_of(data, tmp_path)
        assert computed == COUNT
        assert (rows[others] == front_end(inputs[others])).all()
        assert np.isnan(rows[BAD]).all() or fault == "flush"  # From memory it may be read.
        assert has_features(tmp_path, front_end)
        rows, computed = features_of(data, tmp_path)
        assert computed == 0
        assert (rows[others] == front_end(inputs[others])).all()
        assert np.isnan(rows[BAD]).all()
    forget_features(tmp_path, all_of_them=True)
    rows, computed = features_of(data, tmp_path)
    assert computed == COUNT
    assert (rows == front_end(inputs)).all()


def test_a_place_that_cannot_be_read_costs_none_that_the_system_reads_at_once_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = np.random.default_rng(0).random((COUNT, 4, 4, 1), np.float32)
    data = ArrayDataset(inputs, np.arange(COUNT) % 3, 3)
    features_of(data, tmp_path)
    fails_at(monkeypatch, "features.f32", BAD * ROW_BYTES, "read", read_at_once=64 << 10)
    rows, _ = features_of(data, tmp_path)
    assert np.flatnonzero(np.isnan(rows).any(axis=(1, 2, 3))).tolist() == [BAD]


@pytest.mark.parametrize("fault", ["write", "flush"])
def test_a_place_of_the_index_that_fails_is_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """Before, as much of the index was written as there are records: with one more, that came to the block
    which fails, so that none counted, and without it all did."""
    front_end, first_beyond = FrontEnd(SPEC), 4_096 + COUNT * 16
    reserve(tmp_path, 1 << 20, 10 * COUNT)
    fails_at(monkeypatch, "features.index", first_beyond, fault)
    outcomes = []
    for count in (COUNT, COUNT + 1):
        inputs = np.random.default_rng(0).random((count, 4, 4, 1), np.float32)
        try:
            rows, _ = features_of(ArrayDataset(inputs, np.arange(count) % 3, 3), tmp_path)
            outcomes.append(bool((rows == front_end(inputs)).all()))
        except StorageError:
            outcomes.append(False)
    assert len(set(outcomes)) == 1, outcomes
