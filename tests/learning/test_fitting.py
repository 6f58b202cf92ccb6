"""Data and models that go together, and sentences for those that do not."""

from __future__ import annotations

import numpy as np
import pytest

from dpagent.errors import DataError
from dpagent.learning.data.dataset import ArrayDataset, Dataset, Origin
from dpagent.learning.data.opening import advice_on_shape
from dpagent.learning.fitting import check_fits
from dpagent.learning.models.built_ins import built_in


def of_shape(*shape: int, classes: int = 10, names: tuple[str, ...] = (), kind: str = "arrays") -> Dataset:
    inputs, labels = np.zeros((2, *shape), np.uint8), np.zeros(2, np.int64)
    return ArrayDataset(inputs, labels, classes, names, origin=Origin(kind))


def test_data_that_do_not_fit_a_model_are_told_so_with_both_sides() -> None:
    digits = built_in("digits")
    check_fits(of_shape(8, 8, 1), digits)
    check_fits(of_shape(8, 8, 1, classes=4), digits)
    check_fits(of_shape(8, 8, 1, names=tuple("abcdefghij")), digits)
    with pytest.raises(DataError, match=r"shape \(8, 8, 3\); model 'digits' expects \(8, 8, 1\)"):
        check_fits(of_shape(8, 8, 3), digits)
    with pytest.raises(DataError, match=r"shape \(8, 8\).*set `shape: \[8, 8, 1\]`"):
        check_fits(of_shape(8, 8), digits)
    with pytest.raises(DataError, match="12 classes, 0 to 11; model 'digits' has 10, 0 to 9"):
        check_fits(of_shape(8, 8, 1, classes=12), digits)
    # Fewer names than the model has outputs: a class is missing here, and the numbers may be wrong.
    with pytest.raises(DataError, match=r"3 classes \(x, y, z\); model 'digits' has 10"):
        check_fits(of_shape(8, 8, 1, classes=3, names=("x", "y", "z")), digits)


def test_the_format_of_the_data_says_how_to_read_them_in_the_models_shape() -> None:
    with pytest.raises(DataError, match=r"`size: \[8, 8\]` and `mode: grey`, or choose"):
        check_fits(of_shape(9, 9, 1, kind="images"), built_in("digits"), advise=advice_on_shape)
    with pytest.raises(DataError, match="Resize the records or choose another model"):
        check_fits(of_shape(9, 9, 1, kind="idx"), built_in("digits"), advise=advice_on_shape)
