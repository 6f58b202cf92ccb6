"""Numbers for trials are of the distribution and the range that they are asked for."""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dpagent.learning.trial_numbers import TrialNumbers

_COUNT = 200_000


def test_uniform_numbers_are_uniform() -> None:
    """Kolmogorov and Smirnov's distance, of a range's numbers."""
    numbers = TrialNumbers(1).uniform((_COUNT,), -2, 3)
    assert numbers.dtype == np.float32
    assert numbers.min() >= -2
    assert numbers.max() < 3
    assert stats.kstest(numbers, stats.uniform(-2, 5).cdf).pvalue > 1e-3


@pytest.mark.parametrize("shape", [(_COUNT,), (3, 5, 7), (1,), (0, 4)])
def test_normal_numbers_are_normal(shape: tuple[int, ...]) -> None:
    """Of each shape, an odd number of them too."""
    numbers = TrialNumbers(2).normal(shape)
    assert numbers.dtype == np.float32
    assert numbers.shape == shape
    assert np.isfinite(numbers).all()
    if numbers.size == _COUNT:
        assert stats.kstest(numbers, stats.norm.cdf).pvalue > 1e-3
        assert abs(np.corrcoef(numbers[::2], numbers[1::2])[0, 1]) < 4 / (_COUNT / 2) ** 0.5


def test_integers_are_below_their_bound_and_alike() -> None:
    """Chi-square of each integer's number."""
    numbers = TrialNumbers(3)
    drawn = numbers.integers(7, _COUNT)
    assert stats.chisquare(np.bincount(drawn, minlength=7)).pvalue > 1e-3
    assert {numbers.integer(3) for _ in range(100)} == {0, 1, 2}
    assert np.array_equal(np.sort(numbers.order(100)), np.arange(100))


def test_a_seed_fixes_them_and_none_does_not() -> None:
    """The same again, or others."""
    assert np.array_equal(TrialNumbers(4).normal((9,)), TrialNumbers(4).normal((9,)))
    assert not np.array_equal(TrialNumbers().normal((9,)), TrialNumbers().normal((9,)))


def test_they_need_none_of_numpys_generators() -> None:
    """Whose import takes memory of a board."""
    program = (
        "import sys; from dpagent.learning.trial_numbers import TrialNumbers; TrialNumbers(0).normal((3,));"
        "sys.exit('numpy.random' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("draw", [TrialNumbers.uniform, TrialNumbers.normal])
def test_many_take_little_more_memory_than_they_have(
    draw: Callable[[TrialNumbers, tuple[int]], NDArray[np.float32]],
) -> None:
    """Before, twice or three times as much, and no more than 2²⁶ could be drawn."""
    tracemalloc.start()
    numbers = draw(TrialNumbers(5), (1 << 20,))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.6 * numbers.nbytes
