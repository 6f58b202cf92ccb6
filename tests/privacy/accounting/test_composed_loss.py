"""Composition of losses on a grid: never below direct convolution, and hardly above it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from dpagent.errors import ParameterError
from dpagent.privacy.accounting import composed_loss, tilted_law
from dpagent.privacy.accounting.composed_loss import ComposedLoss, LossBlock, split_masses
from dpagent.privacy.accounting.gaussian_loss import on_grid
from dpagent.privacy.accounting.normal_form import SampledGaussian

FloatArray = NDArray[np.float64]
LongArray = NDArray[np.longdouble]
STEP = 0.01


class Direct:
    """The same composition term by term, in extended precision."""

    def __init__(self, step: float, first: int, masses: FloatArray, infinite: float, count: int) -> None:
        law, single = np.ones(1, dtype=np.longdouble), masses.astype(np.longdouble)
        for _ in range(count):
            law = np.convolve(law, single)
        self.losses = (count * first + np.arange(law.size)) * np.longdouble(step)
        self.law = law
        self.infinite = -math.expm1(count * math.log1p(-infinite))

    def delta(self, epsilon: float) -> float:
        beyond = np.maximum(self.losses - np.longdouble(epsilon), 0)
        return float((self.law * -np.expm1(-beyond)).sum() + self.infinite)


def random_loss(seed: int, cells: int = 40) -> tuple[int, FloatArray]:
    """A loss from −0.15 to 0.24 whose mean is not far from half its variance, as all true ones."""
    rng = np.random.default_rng(seed)
    centre, width = rng.uniform(0, 3), rng.uniform(3, 8)
    columns = np.arange(-15, cells - 15)
    masses = np.exp(-(((columns - centre) / width) ** 2)) * rng.uniform(0.5, 1, cells)
    return -15, masses / masses.sum()


def composed(first: int, masses: FloatArray, infinite: float, count: int) -> ComposedLoss:
    block = LossBlock(first, masses[np.newaxis] * (1 - infinite), np.array([infinite]))
    return ComposedLoss(STEP, [block], [[(0, count)]])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 2, 17, 200])
@pytest.mark.parametrize("infinite", [0.0, 1e-9])
def test_delta_is_that_of_direct_convolution_from_above(seed: int, count: int, infinite: float) -> None:
    first, masses = random_loss(seed)
    loss, direct = (
        composed(first, masses, infinite, count),
        Direct(STEP, first, masses * (1 - infinite), infinite, count),
    )
    for epsilon in (0.0, 0.05, 0.123456, 0.4, 1.0, 2.0, 3.0, 5.0):
        truth = direct.delta(epsilon)
        # to 1e-12 where little is left, however small the truth
        assert truth * (1 - 1e-13) <= loss.delta(epsilon) <= truth * (1 + 1e-8) + 1e-12


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 3, 60])
@pytest.mark.parametrize("delta", [0.3, 1e-3, 1e-5, 1e-10, 1e-40])
def test_epsilon_is_where_direct_convolution_has_that_delta(seed: int, count: int, delta: float) -> None:
    first, masses = random_loss(seed)
    loss, direct = composed(first, masses, 0.0, count), Direct(STEP, first, masses, 0.0, count)
    epsilon = loss.epsilon(delta)
    assert direct.delta(epsilon * (1 + 1e-12)) <= delta
    if epsilon > 0:
        assert direct.delta(epsilon - 1e-5 * (1 + epsilon)) > delta


@pytest.mark.parametrize("step", [1.5e-3, 6e-3])
@pytest.mark.parametrize(("count", "delta"), [(1, 1e-11), (16, 1e-11), (16, 1e-8)])
def test_rare_great_losses_cost_what_direct_convolution_says(step: float, count: int, delta: float) -> None:
    """Nearly all mass is in a cell or two at loss 0; a run in 10,000 reaches a hundred times further."""
    (block,), _ = on_grid([SampledGaussian(1.0, 1e-4)], step, 1e-4 * delta / count)
    loss = ComposedLoss(step, [block], [[(0, count)]])
    direct = Direct(step, block.first, block.masses[0], float(block.infinite[0]), count)
    epsilon = loss.epsilon(delta)
    assert direct.delta(epsilon * (1 + 1e-12)) <= delta
    assert direct.delta(epsilon * (1 - 2e-3)) > delta


def test_stages_of_unlike_releases_are_those_of_direct_convolution() -> None:
    losses = [random_loss(seed) for seed in range(4)]
    block = LossBlock(losses[0][0], np.stack([masses for _, masses in losses]), np.zeros(4))
    stages = [[(2, 1)], [(0, 3), (1, 2)], [(3, 1)], [(2, 5)]]
    running = ComposedLoss(STEP, [block], stages).running_epsilon(1e-4)
    law = np.ones(1, dtype=np.longdouble)
    counts = 0
    for stage, epsilon in zip(stages, running, strict=True):
        for release, count in stage:
            for _ in range(count):
                law = np.convolve(law, losses[release][1].astype(np.longdouble))
                counts += 1
        grid = (counts * losses[0][0] + np.arange(law.size)) * np.longdouble(STEP)

        def delta(at: float, law: LongArray = law, grid: LongArray = grid) -> float:
            return float((law * -np.expm1(-np.maximum(grid - at, 0))).sum())

        assert delta(float(epsilon) * (1 + 1e-12)) <= 1e-4
        assert epsilon == 0 or delta(float(epsilon) - 1e-6) > 1e-4
    assert running[-1] == pytest.approx(
        ComposedLoss(STEP, [block], [[entry for stage in stages for entry in stage]]).epsilon(1e-4), rel=1e-7
    )


def test_blocks_at_different_places_compose_as_one() -> None:
    (first, one), (_, other) = random_loss(1), random_loss(2)
    whole = LossBlock(first, np.stack((one, other)), np.zeros(2))
    apart = [LossBlock(first, one[np.newaxis], np.zeros(1)), LossBlock(first, other[np.newaxis], np.zeros(1))]
    shifted = LossBlock(first - 3, np.concatenate((np.zeros(3), other))[np.newaxis], np.zeros(1))
    expected = ComposedLoss(STEP, [whole], [[(0, 4), (1, 9)]]).epsilon(1e-6)
    assert ComposedLoss(STEP, apart, [[(0, 4), (1, 9)]]).epsilon(1e-6) == pytest.approx(expected, rel=1e-12)
    assert ComposedLoss(STEP, [apart[0], shifted], [[(0, 4), (1, 9)]]).epsilon(1e-6) == pytest.approx(
        expected, rel=1e-9
    )


def test_infinite_losses_of_delta_or_more_leave_no_epsilon() -> None:
    first, masses = random_loss(3)
    assert composed(first, masses, 1e-6, 10).epsilon(1e-5) == math.inf
    assert composed(first, masses, 1e-6, 9).epsilon(1e-5) < math.inf
    assert composed(first, masses, 1e-6, 10**6).delta(1.0) <= 1.0


@pytest.mark.parametrize("spread", [0.1, 30.0, 300.0, 3_000.0])
def test_losses_of_any_size_compose_without_overflow(spread: float) -> None:
    """Two atoms at ±spread, as randomised response has: all sums are known exactly."""
    step, count = spread / 8, 12
    masses = np.zeros(17)
    masses[0], masses[16] = 1 / (1 + math.exp(min(spread, 700))), 1 / (1 + math.exp(-spread))
    loss = ComposedLoss(step, [LossBlock(-8, masses[np.newaxis], np.zeros(1))], [[(0, count)]])
    direct = Direct(step, -8, masses, 0.0, count)
    for epsilon in (0.0, spread / 2, 5 * spread, 11.5 * spread):
        truth = direct.delta(epsilon)
        assert truth * (1 - 1e-13) <= loss.delta(epsilon) <= truth * (1 + 1e-7) + 1e-12
    assert loss.epsilon(1e-5) <= count * spread * (1 + 1e-12)
    assert direct.delta(loss.epsilon(1e-5)) <= 1e-5 * (1 + 1e-13)


@given(
    p=st.lists(st.just(0.0) | st.floats(1e-100, 1), min_size=1, max_size=6),
    positions=st.lists(st.floats(0, 1), min_size=6, max_size=6),
    first=st.integers(-300, 300),
    step=st.floats(1e-5, 1),
)
@settings(max_examples=300, deadline=None)
def test_a_cell_split_to_its_ends_dominates_what_was_inside(
    p: list[float], positions: list[float], first: int, step: float
) -> None:
    """Atoms of one cell, each with its own loss, against the two atoms they are merged to."""
    left = first * step
    inner = np.array([left + step * position for position in positions[: len(p)]])
    under_p = np.array(p)
    under_q = under_p * np.exp(-inner)
    total_p, total_q = under_p.sum(keepdims=True), under_q.sum(keepdims=True)
    right = split_masses(total_p, total_q, np.array([left]), step)[0]
    for epsilon in np.linspace(left - 2 * step, left + 2 * step, 41):
        truth = float((under_p * -np.expm1(np.minimum(epsilon - inner, 0))).sum())
        ends = np.array([left, left + step])
        weights = np.array([float(total_p[0]) - right, right])
        grid = float((weights * -np.expm1(np.minimum(epsilon - ends, 0))).sum())
        assert grid >= truth - 1e-14 * total_p[0]
        if epsilon <= left or epsilon >= left + step:  # and nothing is lost outside the cell
            assert grid == pytest.approx(truth, abs=1e-13 * max(1.0, float(total_p[0]) / step))


def test_nothing_to_compose_is_refused() -> None:
    first, masses = random_loss(1)
    block = LossBlock(first, masses[np.newaxis], np.zeros(1))
    for stages in ([], [[]], [[(0, 1)], []]):
        with pytest.raises(ParameterError, match="no privacy losses"):
            ComposedLoss(STEP, [block], stages)


def test_too_fine_a_grid_says_so() -> None:
    masses = np.zeros(2)
    masses[:] = 0.5
    block = LossBlock(10**9, masses[np.newaxis], np.zeros(1))
    with pytest.raises(ParameterError, match=r"grid cells; expected at most.*coarser"):
        ComposedLoss(1e-6, [block], [[(0, 5)]]).delta(0.0)


@pytest.mark.parametrize("rate", [1e-12, 1e-9, 1e-6])
@pytest.mark.parametrize("great", [700, 5_000])
def test_rare_great_losses_are_composed_on_few_cells_and_as_binomials(
    rate: float, great: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of great losses is binomial. Without a tilt a window once had 2.6 million cells here."""
    sizes: list[int] = []

    def transform_size(least: int) -> int:
        sizes.append(tilted_law.transform_size(least))
        return sizes[-1]

    monkeypatch.setattr(composed_loss, "transform_size", transform_size)
    count = 500
    masses = np.zeros((1, great + 1))
    masses[0, 0], masses[0, great] = 1 - rate, rate
    loss = ComposedLoss(STEP, [LossBlock(0, masses, np.zeros(1))], [[(0, count)]])

    def exact(epsilon: float) -> float:
        hits = np.arange(1, 20)
        beyond = np.maximum(hits * great * STEP - epsilon, 0.0)
        return float(stats.binom.pmf(hits, count, rate) @ -np.expm1(-beyond))

    for share in (0.1, 0.5, 0.9, 0.999):
        delta = exact(share * great * STEP)
        assert exact(loss.epsilon(delta)) <= delta * (1 + 1e-9)
    assert max(sizes) <= 2**17
    for epsilon in (0.0, great * STEP / 2, 1.5 * great * STEP):
        for tilt in (0.0, 0.5):
            law = next(loss._laws(tilt, prefixes=False, delta=1e-14, reaching=epsilon))
            assert law.delta(epsilon) >= exact(epsilon) * (1 - 1e-9)


def test_unlike_mechanisms_take_no_more_cells_than_twice_their_own() -> None:
    """In one block each takes the cells of the widest: here one of small noise among 15 of great noise."""
    alone = [
        on_grid([SampledGaussian(sigma, 1e-6)], STEP, 1e-15)[0][0].masses.size
        for sigma in [0.1, *np.linspace(4.0, 5.0, 15).tolist()]
    ]
    together = on_grid(
        [SampledGaussian(sigma, 1e-6) for sigma in [0.1, *np.linspace(4.0, 5.0, 15).tolist()]], STEP, 1e-15
    )
    for blocks in together:
        assert [len(block.masses) for block in blocks] == [len(block.infinite) for block in blocks]
        assert sum(len(block.masses) for block in blocks) == 16
        assert sum(block.masses.size for block in blocks) <= 2 * sum(alone) + 4 * 16
