"""Which records are finite, of all that four bytes can be."""

from __future__ import annotations

import numpy as np

from dpagent.learning.training.arguments import are_finite


def test_records_of_any_bits_are_finite_as_numpy_says() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, (100_000, 3), np.uint32)
    ends = np.array([0, 1, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF], np.uint32)
    edges = np.concatenate([ends, ends | np.uint32(0x80000000)])
    bits = np.concatenate([bits, np.stack(np.meshgrid(edges, edges, edges), axis=-1).reshape(-1, 3)])
    rows = bits.view(np.float32)
    found = are_finite(rows)
    assert found.tolist() == np.isfinite(rows).all(axis=1).tolist()
    assert set(found.tolist()) == {False, True}
    assert are_finite(rows[:0]).tolist() == []
