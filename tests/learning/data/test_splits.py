"""Splits deal every record to exactly one part, none of them empty, and do what they are called."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpagent.errors import DataError, ParameterError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.splits import How, split


def numbered(labels: list[int], groups: list[int] | None = None) -> ArrayDataset:
    """Records that hold their own number."""
    return ArrayDataset(
        np.arange(len(labels), dtype=np.float32)[:, np.newaxis], np.array(labels, np.int64), 10,
        groups=None if groups is None else np.array(groups, np.int64),
    )  # fmt: skip


def members(part: Any) -> list[int]:
    inputs, labels = part.batch(np.arange(len(part)))
    assert np.array_equal(labels, part.labels)
    return [int(number) for number in inputs[:, 0]]


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=80),
    st.integers(1, 8),
    st.sampled_from(["iid", "dirichlet", "class", "file"]),
    st.floats(0.001, 100),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_every_record_is_in_exactly_one_part_and_no_part_is_empty(
    records: list[tuple[int, int]], parts: int, how: Any, alpha: float, shards: int, seed: int
) -> None:
    data = numbered([label for label, _ in records], [group for _, group in records])
    options = {"seed": seed, "alpha": alpha, "classes_per_part": shards}
    pieces = {"class": parts * shards, "file": parts}.get(how, parts)
    available = len(set(data.groups.tolist())) if how == "file" and data.groups is not None else len(data)
    if pieces > available or parts > len(data):
        with pytest.raises(DataError):
            split(data, parts, how, **options)
        return
    # So few records with so small an alpha may leave a part empty in every draw.
    with contextlib.suppress(DataError) if how == "dirichlet" else contextlib.nullcontext():
        require_exact(data, records, parts, how, options)


def require_exact(
    data: ArrayDataset, records: list[tuple[int, int]], parts: int, how: Any, options: dict[str, Any]
) -> None:
    made = split(data, parts, how, **options)
    assert len(made) == parts
    assert min(map(len, made)) > 0
    assert sorted(number for part in made for number in members(part)) == list(range(len(records)))
    again = split(data, parts, how, **options)
    assert [members(part) for part in again] == [members(part) for part in made]
    if how == "iid":
        assert max(map(len, made)) - min(map(len, made)) <= 1
    if how == "file":
        homes = [{records[number][1] for number in members(part)} for part in made]
        assert sum(map(len, homes)) == len(set.union(*homes))


def test_the_seed_matters() -> None:
    data = numbered([number % 10 for number in range(100)])
    ways: tuple[How, ...] = ("iid", "dirichlet", "class")
    for how in ways:
        one, other = (split(data, 5, how, seed=seed) for seed in (1, 2))
        assert [members(part) for part in one] != [members(part) for part in other]


def shares(alpha: float) -> np.ndarray:
    """The share of each class that each of 10 parts got, of 2,000 records a class."""
    data = numbered([number % 10 for number in range(20_000)])
    parts = split(data, 10, "dirichlet", seed=3, alpha=alpha)
    return np.array([np.bincount(part.labels, minlength=10) / 2_000 for part in parts])


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_shares_scatter_as_the_distribution_says(alpha: float) -> None:
    """A share's mean is 1/n and its variance (1/n)(1 − 1/n)/(nα + 1), over 100 shares."""
    found = shares(alpha)
    assert np.allclose(found.sum(axis=0), 1)
    expected = 0.1 * 0.9 / (10 * alpha + 1)
    # Factor of six standard errors or more: shares are heavy-tailed where alpha is small.
    assert expected / 2.5 < found.var() < 2.5 * expected


def test_by_class_gives_each_part_few_classes_and_even_sizes() -> None:
    data = numbered([number % 10 for number in range(1_000)])
    parts = split(data, 5, "class", seed=1, classes_per_part=2)
    assert [len(part) for part in parts] == [200] * 5
    # Each shard is a tenth of the sorted records, and so of one class.
    assert all(len(set(part.labels.tolist())) <= 2 for part in parts)
    assert any(set(part.labels.tolist()) != set(parts[0].labels.tolist()) for part in parts)


def test_by_file_balances_sizes() -> None:
    groups = [0] * 50 + [1] * 30 + [2] * 30 + [3] * 10 + [4] * 10 + [5] * 10
    parts = split(numbered([0] * 140, groups), 3, "file", seed=0)
    assert sorted(map(len, parts)) == [40, 50, 50]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"parts": 5}, "4 records cannot be split into 5 parts"),
        ({"parts": 0}, "parts is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"how": "random"}, "how is 'random'; expected one of iid, dirichlet, class, file"),
        ({"how": "dirichlet", "alpha": 0.0}, "alpha is 0.0"),
        ({"how": "dirichlet", "alpha": float("nan")}, "alpha is nan"),
        ({"how": "class", "classes_per_part": 9}, "cannot be cut into 2 × 9 shards; use fewer"),
        ({"how": "file"}, "do not tell which file"),
        ({"how": "dirichlet", "alpha": 0.001, "parts": 4}, "Use a larger alpha or fewer parts"),
    ],
)
def test_what_cannot_be_split_is_told_what_to_change(change: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"parts": 2, "how": "iid", "seed": 0} | change
    with pytest.raises((DataError, ParameterError), match=text):
        split(numbered([0, 0, 0, 0]), given.pop("parts"), given.pop("how"), **given)


def test_more_parts_than_files_is_refused() -> None:
    with pytest.raises(DataError, match="2 files or groups for 3 parts; use at most 2"):
        split(numbered([0] * 6, [0, 0, 0, 7, 7, 7]), 3, "file", seed=0)
