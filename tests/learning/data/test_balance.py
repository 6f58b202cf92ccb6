"""Rare classes are named, with the figure that accuracy has to be compared with."""

from __future__ import annotations

import numpy as np
import pytest

from dpagent.learning.data.balance import hint_of_imbalance
from dpagent.learning.data.checking import examine
from dpagent.learning.data.dataset import ArrayDataset


def with_counts(*counts: int, names: tuple[str, ...] = ()) -> ArrayDataset:
    labels = np.repeat(np.arange(len(counts)), counts).astype(np.int64)
    return ArrayDataset(np.arange(len(labels), dtype=np.float32)[:, np.newaxis], labels, len(counts), names)


@pytest.mark.parametrize("counts", [(90, 10), (9, 1), (5, 5, 5), (1, 0), (90, 0, 10), (0, 3)])
def test_up_to_nine_to_one_and_empty_classes_are_no_news(counts: tuple[int, ...]) -> None:
    assert hint_of_imbalance(with_counts(*counts)) == ""


def test_rare_classes_are_named_from_the_rarest() -> None:
    hint = hint_of_imbalance(with_counts(3000, 40, 6, 2000, names=("ok", "worn", "broken", "new")))
    assert "Rare beside ok (3,000): broken (6), worn (40)." in hint
    assert "59.5% of the records" in hint
    assert "1 more" in hint_of_imbalance(with_counts(100, 1, 2, 3, 4, 5, 6))


def test_data_check_warns() -> None:
    found = examine(with_counts(3000, 6))
    assert any("Rare beside 0 (3,000): 1 (6)." in warning for warning in found.warnings)
    assert not any("Rare" in warning for warning in examine(with_counts(30, 6)).warnings)
