"""The tight accountant: against dp-accounting, closed forms, quadrature and exhaustive sums."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as reference
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.choice import priced
from dpagent.privacy.accounting.gaussian_loss import DISCRETE_SHARE, MIN_SIGMA_UNITS
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.accounting.rdp import RdpAccountant
from dpagent.privacy.events import ApproximateEvent, Event, GaussianEvent, SelfComposedEvent, poisson_sampled

# What our automatic grid may cost, relative to ε.
SLACK = 5e-4


def spent(events: Sequence[Event], delta: float, **options: float) -> float:
    accountant = PldAccountant(**options)
    accountant.compose(*events)
    return accountant.epsilon(delta)


def bounds(
    rounds: Sequence[tuple[float, float, int]], delta: float, interval: float = 1e-4
) -> tuple[float, float]:
    """Google's optimistic and pessimistic ε of rounds (σ, q, steps)."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # on its way to bound from below
    try:
        return _bounds(rounds, delta, interval)
    finally:
        root.setLevel(level)


def _bounds(rounds: Sequence[tuple[float, float, int]], delta: float, interval: float) -> tuple[float, float]:
    both = []
    for pessimistic in (False, True):
        total = None
        for sigma, rate, steps in rounds:
            one = reference.from_gaussian_mechanism(
                sigma,
                sampling_prob=rate,
                value_discretization_interval=interval,
                pessimistic_estimate=pessimistic,
                use_connect_dots=pessimistic,
            ).self_compose(steps)
            total = one if total is None else total.compose(one)
        assert total is not None
        both.append(float(total.get_epsilon_for_delta(delta)))
    return both[0], both[1]


def gaussian_delta(sigma: float, epsilon: float) -> mpmath.mpf:
    """δ(ε) of the Gaussian mechanism (Balle, Wang 2018, Theorem 8)."""
    half, shift = mpmath.mpf(1) / (2 * sigma), mpmath.mpf(epsilon) * sigma
    return mpmath.ncdf(half - shift) - mpmath.exp(epsilon) * mpmath.ncdf(-half - shift)


def sampled_delta(sigma: float, rate: float, epsilon: float) -> float:
    """δ(ε) of one sampled release, the worse direction, in closed form.

    The loss rises with x, so the best event is a half-line x > c, and its mirror for the other direction.
    """
    s, q = mpmath.mpf(sigma), mpmath.mpf(rate)

    def cut(loss: mpmath.mpf) -> mpmath.mpf:
        return s**2 * mpmath.log((mpmath.exp(loss) - (1 - q)) / q) + mpmath.mpf(1) / 2

    def mixed(z: mpmath.mpf) -> mpmath.mpf:  # P(x > z) of the mixture
        return (1 - q) * mpmath.ncdf(-z / s) + q * mpmath.ncdf((1 - z) / s)

    at = cut(mpmath.mpf(epsilon))
    removed = mixed(at) - mpmath.exp(epsilon) * mpmath.ncdf(-at / s)
    if mpmath.exp(-epsilon) <= 1 - q:
        return float(removed)
    at = cut(-mpmath.mpf(epsilon))
    added = mpmath.ncdf(at / s) - mpmath.exp(epsilon) * (1 - mixed(at))
    return float(max(removed, added))


# --- against other implementations ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [
        (1.0, 1.0, 1, 1e-5),
        (1.0, 1.0, 10, 1e-6),
        (2.25, 0.1, 100, 1e-5),
        pytest.param(1.0, 0.5, 20, 1e-3, marks=pytest.mark.slow),
        (10.0, 1.0, 100, 1e-5),
        pytest.param(0.5, 0.05, 5, 1e-8, marks=pytest.mark.slow),
        (0.8, 0.01, 1000, 1e-5),
        (1.3, 0.02, 300, 1e-9),
    ],
)
def test_constant_rounds_agree_with_dp_accounting(
    sigma: float, rate: float, steps: int, delta: float
) -> None:
    optimistic, pessimistic = bounds([(sigma, rate, steps)], delta, 1e-4 if steps < 1000 else 1e-3)
    ours = spent([poisson_sampled(GaussianEvent(sigma), rate, steps)], delta)
    assert optimistic <= ours <= pessimistic * 1.001


@pytest.mark.parametrize(
    ("first", "last", "rate"),
    [(2.0, 0.8, 0.01), pytest.param(3.0, 1.5, 0.1, marks=pytest.mark.slow), (4.0, 6.0, 1.0)],
)
def test_different_rounds_agree_with_dp_accounting(first: float, last: float, rate: float) -> None:
    rounds = [(float(sigma), rate, 2) for sigma in np.linspace(first, last, 25)]
    optimistic, pessimistic = bounds(rounds, 1e-5, 1e-3)
    ours = spent([poisson_sampled(GaussianEvent(sigma), rate, steps) for sigma, rate, steps in rounds], 1e-5)
    assert optimistic <= ours <= pessimistic * 1.001


def test_the_moments_accountants_figures_are_upper_bounds() -> None:
    """q = 0.01, σ = 4, δ = 1e-5: ε = 1.26 after 10,000 steps and 2.55 after 40,000 (Abadi et al. 2016)."""
    assert spent([poisson_sampled(GaussianEvent(4.0), 0.01, 10_000)], 1e-5) == pytest.approx(0.947, abs=5e-4)
    assert spent([poisson_sampled(GaussianEvent(4.0), 0.01, 40_000)], 1e-5) == pytest.approx(2.033, abs=5e-4)


def test_a_thousand_rising_rounds_cost_what_the_docstring_says() -> None:
    events = [poisson_sampled(GaussianEvent(float(sigma)), 0.01, 1) for sigma in np.linspace(2.0, 0.8, 1000)]
    ours = spent(events, 1e-5)
    assert ours == pytest.approx(1.5304, rel=1e-3)  # what dp-accounting says, after minutes
    by_orders = RdpAccountant()
    by_orders.compose(*events)
    assert by_orders.epsilon(1e-5) > 1.4 * ours


# --- against closed forms ------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (0.3, 1), (5.0, 1), (20.0, 50), (3.0, 1000)])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12])
def test_unsampled_noise_has_its_exact_curve(sigma: float, steps: int, delta: float) -> None:
    with mpmath.workdps(40):
        total = mpmath.mpf(sigma) * (1 - mpmath.mpf(DISCRETE_SHARE)) / mpmath.sqrt(steps)
        ours = spent([poisson_sampled(GaussianEvent(sigma), 1.0, steps)], delta)
        assert gaussian_delta(total, ours) <= delta
        assert ours == 0 or gaussian_delta(total, ours * (1 - SLACK)) > delta


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 4.0, 9.0])
@pytest.mark.parametrize("sigma", [0.7, 2.0])
def test_delta_of_unsampled_noise(sigma: float, epsilon: float) -> None:
    accountant = PldAccountant()
    accountant.compose(poisson_sampled(GaussianEvent(sigma), 1.0, 3))
    with mpmath.workdps(40):
        truth = float(gaussian_delta(mpmath.mpf(sigma) * (1 - DISCRETE_SHARE) / mpmath.sqrt(3), epsilon))
    assert truth <= accountant.delta(epsilon) <= truth * 1.02 + 1e-12


@pytest.mark.parametrize("rate", [0.9, 0.3, 0.01, 1e-4])
@pytest.mark.parametrize("sigma", [0.4, 1.0, 6.0])
def test_one_sampled_release_has_its_exact_curve(sigma: float, rate: float) -> None:
    with mpmath.workdps(40):
        actual = sigma * (1 - DISCRETE_SHARE)
        for delta in (1e-2, 1e-6):
            ours = spent([poisson_sampled(GaussianEvent(sigma), rate, 1)], delta)
            assert sampled_delta(actual, rate, ours) <= delta * (1 + 1e-12)
            assert ours == 0 or sampled_delta(actual, rate, ours * (1 - SLACK)) > delta


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 0.0), (1.0, 0.0), (0.5, 1e-7), (6.0, 1e-9)])
@pytest.mark.parametrize("count", [1, 2, 9, 40])
def test_pure_releases_compose_as_the_composition_theorem_says(
    epsilon: float, delta: float, count: int
) -> None:
    """Kairouz, Oh, Viswanath (2015), Theorem 3.3: exact for randomised response."""
    accountant = PldAccountant()
    accountant.compose(SelfComposedEvent(ApproximateEvent(epsilon, delta), count))
    with mpmath.workdps(50):
        e, d = mpmath.mpf(epsilon), mpmath.mpf(delta)
        for i in range(count // 2 + 1):
            inner = mpmath.fsum(
                mpmath.binomial(count, j)
                * (mpmath.exp((count - j) * e) - mpmath.exp((count - 2 * i + j) * e))
                for j in range(i)
            ) / (1 + mpmath.exp(e)) ** count  # fmt: skip
            truth = float(1 - (1 - d) ** count * (1 - inner))
            ours = accountant.delta((count - 2 * i) * epsilon)
            assert truth * (1 - 1e-7) <= ours <= truth * (1 + 1e-5) + 2e-9 * count * epsilon + 1e-12


# --- discrete noise ------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, pytest.param(7, marks=pytest.mark.slow)])
def test_a_discrete_gaussian_is_post_processing_of_a_continuous_one(shift: int) -> None:
    """The module's lemma at s = 7, τ = 3: quadrature against the discrete probabilities."""
    with mpmath.workdps(25):
        s, tau = mpmath.mpf(7), mpmath.mpf(3)
        spread = mpmath.sqrt(s**2 - tau**2)
        normaliser = mpmath.fsum(mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * s**2)) for k in range(-130, 131))

        def rounded(k: int, y: mpmath.mpf) -> mpmath.mpf:
            weight = mpmath.exp(-((k - y) ** 2) / (2 * tau**2))
            near = int(mpmath.nint(y))
            total = mpmath.fsum(
                mpmath.exp(-((j - y) ** 2) / (2 * tau**2)) for j in range(near - 33, near + 34)
            )
            return weight / total

        for k in (shift - 20, shift + 3):
            integral = mpmath.quad(
                lambda y, k=k: mpmath.npdf(y, shift, spread) * rounded(k, y),
                mpmath.linspace(shift - 66, shift + 66, 12),
            )
            exact = mpmath.exp(-(mpmath.mpf(k - shift) ** 2) / (2 * s**2)) / normaliser
            assert abs(integral / exact - 1) < mpmath.mpf(10) ** -20


@pytest.mark.parametrize(("sigma", "rate"), [(0.6, 1.0), (1.0, 0.1), (2.0, 0.5)])
def test_discrete_noise_costs_no_more_than_is_charged(sigma: float, rate: float) -> None:
    """Exhaustively, for one coordinate at the least parameter that is priced."""
    sensitivity = math.floor(MIN_SIGMA_UNITS / sigma)
    parameter = sigma * sensitivity
    k = np.arange(-14 * MIN_SIGMA_UNITS, 14 * MIN_SIGMA_UNITS + sensitivity)
    out = np.exp(-(k.astype(np.longdouble) ** 2) / (2 * np.longdouble(parameter) ** 2))
    out /= out.sum()
    inside = np.exp(-((k - sensitivity).astype(np.longdouble) ** 2) / (2 * np.longdouble(parameter) ** 2))
    inside /= inside.sum()
    mixed = (1 - rate) * out + rate * inside
    accountant = PldAccountant()
    accountant.compose(poisson_sampled(GaussianEvent(sigma), rate, 1))
    for epsilon in (0.0, 0.1, 0.5, 2.0, 5.0):
        truth = max(
            float(np.maximum(p - np.exp(np.longdouble(epsilon)) * q, 0).sum())
            for p, q in ((mixed, out), (out, mixed))
        )
        assert truth <= accountant.delta(epsilon) + 1e-17


@given(
    parts=st.lists(
        st.tuples(st.floats(1e-3, 2), st.just(0.0) | st.floats(1e-12, 1e-8), st.integers(1, 5)),
        min_size=2,
        max_size=4,
    )
)
@settings(max_examples=25, deadline=None)
def test_unlike_pure_releases_have_their_exact_curve_whatever_the_grid(
    parts: list[tuple[float, float, int]],
) -> None:
    """Against all outcomes of randomised responses; the automatic grid, and much finer ones."""
    events = [SelfComposedEvent(ApproximateEvent(epsilon, delta), n) for epsilon, delta, n in parts]
    losses, masses, missing = np.zeros(1), np.ones(1), 1.0
    for epsilon, delta, n in parts:
        odds = 1 / (1 + math.exp(-epsilon))
        for _ in range(n):
            losses = np.concatenate((losses + epsilon, losses - epsilon))
            masses = np.concatenate((masses * odds, masses * (1 - odds)))
            missing *= 1 - delta
    for grid in (None, min(epsilon for epsilon, _, _ in parts) / 100):
        ours = spent(events, 1e-5) if grid is None else spent(events, 1e-5, grid=grid)

        def exact_delta(epsilon: float) -> float:
            hidden = float(masses @ -np.expm1(np.minimum(epsilon - losses, 0.0)))
            return 1 - missing * (1 - hidden)

        assert exact_delta(ours) <= 1e-5 * (1 + 1e-9)
        assert ours == 0 or exact_delta(ours * (1 - SLACK)) > 1e-5


# --- properties ----------------------------------------------------------------------------------

SIGMAS = st.floats(0.4, 20)
RATES = st.floats(1e-3, 1)
STEPS = st.integers(1, 200)


@given(sigma=SIGMAS, rate=RATES, steps=STEPS, log_delta=st.floats(-12, -2), factor=st.floats(1.01, 3))
@example(sigma=1.0, rate=0.001, steps=1, log_delta=-11.0, factor=2.0)
@settings(max_examples=25)
def test_more_noise_fewer_records_and_fewer_steps_cost_less(
    sigma: float, rate: float, steps: int, log_delta: float, factor: float
) -> None:
    delta = 10**log_delta
    cost = spent([poisson_sampled(GaussianEvent(sigma), rate, steps)], delta)
    for cheaper in (
        poisson_sampled(GaussianEvent(sigma * factor), rate, steps),
        poisson_sampled(GaussianEvent(sigma), rate / factor, steps),
        poisson_sampled(GaussianEvent(sigma), rate, max(1, math.floor(steps / factor))),
    ):
        assert spent([cheaper], delta) <= cost * (1 + SLACK) + 1e-9
    assert spent([poisson_sampled(GaussianEvent(sigma), rate, steps)], min(0.5, delta * factor)) <= cost * (
        1 + SLACK
    )


@given(sigma=SIGMAS, rate=RATES, steps=STEPS, log_delta=st.floats(-12, -2))
@settings(max_examples=60, deadline=None)
def test_never_above_renyi_accounting(sigma: float, rate: float, steps: int, log_delta: float) -> None:
    event = poisson_sampled(GaussianEvent(sigma), rate, steps)
    by_orders = RdpAccountant()
    by_orders.compose(event)
    assert spent([event], 10**log_delta) <= by_orders.epsilon(10**log_delta) * (1 + SLACK)


def test_equal_rounds_are_one_charge_of_many_steps() -> None:
    rounds = [poisson_sampled(GaussianEvent(2.0), 0.1, 1)] * 30
    assert spent(rounds, 1e-5) == spent([poisson_sampled(GaussianEvent(2.0), 0.1, 30)], 1e-5)


@pytest.mark.slow
def test_long_jobs_are_looked_at_here_and_there_and_never_from_below() -> None:
    events = [poisson_sampled(GaussianEvent(5.0), 0.01, 1)] * 5_000
    running = PldAccountant().running_epsilon(events, 1e-5)
    assert running.shape == (5_000,)
    assert (np.diff(running) >= 0).all()
    for count in (1, 17, 2_500, 4_999, 5_000):
        exact = spent([poisson_sampled(GaussianEvent(5.0), 0.01, 5 * math.ceil(count / 5))], 1e-5)
        assert running[count - 1] == pytest.approx(exact, rel=SLACK)


def test_a_given_grid_is_kept_and_a_finer_one_is_tighter() -> None:
    event = poisson_sampled(GaussianEvent(1.0), 0.2, 50)
    costs = [spent([event], 1e-5, grid=grid) for grid in (0.3, 0.03, 0.003, 0.0003)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1] * 1.01


# ε of 16 rounds at q = 1e-4, σ = 1 and δ = 1e-11, by convolution without transforms on a grid of 2e-4.
RARE_EPSILON = 0.034393


@pytest.mark.parametrize("grid", [None, 3.2e-6, 4.5e-6, 2.4e-5, 1.9e-4, 1.5e-3])
def test_rare_samples_at_a_tiny_delta_cost_the_same_on_any_grid(grid: float | None) -> None:
    """A window too narrow, or a tilt too small, would triple the figure, or make it eighty times as large."""
    event = poisson_sampled(GaussianEvent(1.0), 1e-4, 16)
    cost = spent([event], 1e-11) if grid is None else spent([event], 1e-11, grid=grid)
    assert RARE_EPSILON * (1 - 1e-3) <= cost <= RARE_EPSILON * 1.01


@pytest.mark.parametrize(
    ("sigma", "rate", "count", "delta"),
    [(1.0, 1e-4, 16, 1e-11), (0.77, 3.1e-4, 52, 8.2e-8)],
)
def test_a_rare_round_costs_no_more_than_its_job_on_the_jobs_grid(
    sigma: float, rate: float, count: int, delta: float
) -> None:
    job = PldAccountant.priced([poisson_sampled(GaussianEvent(sigma), rate, count)], delta)[0]
    first = job.epsilon_after([poisson_sampled(GaussianEvent(sigma), rate, 1)], delta)
    assert first < job.epsilon_after([poisson_sampled(GaussianEvent(sigma), rate, count)], delta)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [
        (0.01, 1.0, 1, 1e-5),
        (0.05, 1e-3, 100_000, 1e-5),
        (1e6, 1e-6, 10**6, 1e-5),
        (1e12, 1.0, 1, 1e-200),
        (0.01, 1e-6, 1000, 1e-5),
        (1.0, 1.0, 1, 1e-199),
        (10.0, 1.0, 10, 0.9),
        (3.0, 1.0, 10**8, 1e-5),
    ],
)
def test_extreme_charges_have_a_price_too(sigma: float, rate: float, steps: int, delta: float) -> None:
    event = poisson_sampled(GaussianEvent(sigma), rate, steps)
    cost = spent([event], delta)
    by_orders = RdpAccountant()
    by_orders.compose(event)
    assert 0 <= cost <= by_orders.epsilon(delta) * (1 + SLACK)


@pytest.mark.parametrize(
    ("rounds", "delta"),
    [
        ([(0.032240510221443135, 1), (0.20560758725112083, 34)], 1.3110302998730558e-07),
        ([(0.022929945849641118, 3), (0.012719931842963121, 3)], 5.28e-5),
        ([(0.5, 1), (30.0, 1000)], 1e-6),
        ([(0.05, 2), (4.0, 300)], 1e-9),
    ],
)
def test_unlike_rounds_in_one_block_have_the_exact_curve(
    rounds: list[tuple[float, int]], delta: float
) -> None:
    """Of unsampled noise, also where the loss of one is hundreds of times as wide as that of another."""
    events = [poisson_sampled(GaussianEvent(sigma), 1.0, steps) for sigma, steps in rounds]
    with mpmath.workdps(40):
        precisions = [steps / mpmath.mpf(sigma * (1 - DISCRETE_SHARE)) ** 2 for sigma, steps in rounds]
        for count, running in enumerate(PldAccountant().running_epsilon(events, delta), start=1):
            total = 1 / mpmath.sqrt(mpmath.fsum(precisions[:count]))
            assert gaussian_delta(total, running) <= delta
        whole = spent(events, delta)
        assert gaussian_delta(total, whole) <= delta
        assert gaussian_delta(total, whole * (1 - 4 * SLACK)) > delta


@pytest.mark.parametrize("epsilon", [700.0, 800.0, 1000.0])
def test_great_pure_epsilons_have_a_price(epsilon: float) -> None:
    assert spent([SelfComposedEvent(ApproximateEvent(epsilon, 0.0), 3)], 1e-5) == pytest.approx(
        3 * epsilon, rel=1e-3
    )


def test_a_record_that_is_hardly_ever_used_costs_nothing() -> None:
    """In the lot at most once in 10,000 such jobs: with δ = 1e-4 it might as well be published."""
    assert spent([poisson_sampled(GaussianEvent(0.01), 1e-7, 999)], 1e-4) == 0.0
    running = PldAccountant().running_epsilon([poisson_sampled(GaussianEvent(0.1), 1e-5, 9)] * 2, 1e-4)
    assert running[0] == 0.0 < running[1]


def test_no_grid_is_looked_for_where_nothing_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loss is composed for it; the parts of the job cost nothing either."""
    monkeypatch.setattr("dpagent.privacy.accounting.pld.ComposedLoss", None)
    rounds = [poisson_sampled(GaussianEvent(sigma), 1e-16, 64) for sigma in (0.1, 0.2, 5.0)]
    for delta in (0.5, 1e-12):
        job = PldAccountant.priced(rounds, delta)[0]
        assert [job.epsilon_after(rounds[:count], delta) for count in (1, 2, 3)] == [0.0, 0.0, 0.0]


def test_charges_of_delta_or_more_leave_no_epsilon() -> None:
    assert spent([SelfComposedEvent(ApproximateEvent(0.1, 1e-6), 11)], 1e-5) == math.inf
    assert spent([SelfComposedEvent(ApproximateEvent(0.1, 1e-6), 9)], 1e-5) <= 0.9 * (1 + 1e-8)


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [-0.1, math.nan, math.inf, 1e4])
def test_a_bad_epsilon_is_named(epsilon: float) -> None:
    with pytest.raises(ParameterError, match="epsilon"):
        PldAccountant().delta(epsilon)


@pytest.mark.parametrize("grid", [0.0, 1e-9, 2.0, math.nan])
def test_a_bad_grid_is_named(grid: float) -> None:
    with pytest.raises(ParameterError, match="grid"):
        PldAccountant(grid=grid)


def test_a_grid_too_fine_for_the_memory_says_so() -> None:
    with pytest.raises(ParameterError, match="coarser grid"):
        spent([poisson_sampled(GaussianEvent(0.1), 1.0, 1)], 1e-5, grid=1e-7)


@pytest.mark.parametrize(
    ("sigma", "delta"), [(0.07022719339619811, 4.931711356479981e-130), (0.0582, 1e-100)]
)
def test_masses_below_double_precision_make_no_price_too_small(sigma: float, delta: float) -> None:
    """Of one release, at the least noise that devices take and a δ of no use to anybody: where a loss is as
    great, the law without the record has less than 1e-308 there (before, 445.828 was said of 445.871)."""
    epsilon = priced([GaussianEvent(sigma)], delta)[1]
    with mpmath.workdps(60):
        mu, e = 1 / mpmath.mpf(sigma), mpmath.mpf(epsilon)
        exact = mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu)
        assert exact <= delta
