"""The best of a random number of runs: bounds against exact divergences of selections from small mechanisms.

The oracle knows nothing of the proof. It takes a mechanism with finitely many scores, computes the law of the
best of K runs from the probabilities of K themselves, adds up P^λ·Q^(1−λ) at 60 digits, and so has the exact
divergence in both directions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import mpmath
import numpy as np
import pytest

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.choice import priced
from dpagent.privacy.accounting.divergences import ORDERS
from dpagent.privacy.accounting.normal_form import UnsupportedEventError
from dpagent.privacy.accounting.rdp import epsilon_from_rdp
from dpagent.privacy.accounting.selection import (
    NumberOfRuns,
    PoissonRuns,
    TruncatedNegativeBinomial,
    delta_from_rdp,
    selection_epsilon,
    worst_of,
)
from dpagent.privacy.events import (
    ApproximateEvent,
    Event,
    GaussianEvent,
    SelfComposedEvent,
    poisson_sampled,
)

LAWS: dict[str, Callable[[float], NumberOfRuns]] = {
    "logarithmic": lambda mean: TruncatedNegativeBinomial.with_mean(0.0, mean),
    "geometric": lambda mean: TruncatedNegativeBinomial.with_mean(1.0, mean),
    "eta -0.5": lambda mean: TruncatedNegativeBinomial.with_mean(-0.5, mean),
    "eta 3": lambda mean: TruncatedNegativeBinomial.with_mean(3.0, mean),
    "poisson": PoissonRuns,
}
Law = list[mpmath.mpf]


def generating(law: NumberOfRuns) -> Callable[[mpmath.mpf], mpmath.mpf]:
    """E[x^K], from the definition of each law."""
    if isinstance(law, PoissonRuns):
        return lambda x: mpmath.exp(mpmath.mpf(law.expected) * (x - 1))
    assert isinstance(law, TruncatedNegativeBinomial)
    eta, gamma = mpmath.mpf(law.eta), mpmath.mpf(law.gamma)
    if eta == 0:
        return lambda x: mpmath.log(1 - (1 - gamma) * x) / mpmath.log(gamma)
    return lambda x: ((1 - (1 - gamma) * x) ** -eta - 1) / (gamma**-eta - 1)


def best_of(run: Law, law: NumberOfRuns) -> Law:
    """The law of the best run's score, no run first."""
    f, below = generating(law), mpmath.mpf(0)
    found = [f(below)]
    for probability in run:
        found.append(f(below + probability) - f(below))
        below += probability
    return found


def divergence(one: Law, other: Law, order: float) -> float:
    exact = mpmath.mpf(order)
    total = sum(p**exact * q ** (1 - exact) for p, q in zip(one, other, strict=True) if p)
    return float(mpmath.log(total) / (exact - 1))


def curve_of(one: Law, other: Law) -> np.ndarray:
    """The exact divergences of a run, in the worse direction, at all orders."""
    return np.array([max(divergence(one, other, a), divergence(other, one, a)) for a in ORDERS])


def discrete_gaussian(sigma: float, shift: int) -> Law:
    """Scored by its value, and cut off."""
    reach = math.ceil(6 * sigma)
    weights = [mpmath.exp(-((mpmath.mpf(y) - shift) ** 2) / (2 * mpmath.mpf(sigma) ** 2))
               for y in range(-reach, reach + 1)]  # fmt: skip
    total = sum(weights)
    return [weight / total for weight in weights]


def rare_success(epsilon: float, chance: float, middle: float = 1.0) -> tuple[Law, Law]:
    """A pure mechanism that rarely has the best outcome, and e^ε times as often next door; of the middle one,
    that share as rare, the reverse is true."""
    rare = mpmath.mpf(chance)
    often = rare * mpmath.exp(mpmath.mpf(epsilon))
    return (
        [1 - rare - middle * often, middle * often, rare],
        [1 - often - middle * rare, middle * rare, often],
    )


@functools.cache
def cases() -> list[tuple[Law, Law, np.ndarray]]:
    """Runs on two neighbouring data sets, and their divergences."""
    pairs = [(discrete_gaussian(sigma, 0), discrete_gaussian(sigma, 1)) for sigma in (1.0, 2.5)]
    for epsilon in (0.1, 1.0):
        pairs += [rare_success(epsilon, chance) for chance in (1e-6, 1e-3, 0.1)]
    return [(one, other, curve_of(one, other)) for one, other in pairs]


@pytest.fixture(autouse=True)
def _digits() -> object:
    with mpmath.workdps(60):
        yield


@pytest.mark.parametrize("mean", [1.5, 10.0, 200.0])
@pytest.mark.parametrize("name", LAWS)
def test_no_selection_diverges_more_than_its_bound(name: str, mean: float) -> None:
    law, tightest = LAWS[name](mean), 0.0
    for one, other, curve in cases():
        bounds = law.selection_rdp(curve)
        selected, selected_there = best_of(one, law), best_of(other, law)
        for order in (1.1, 2.0, 5.0, 20.0, 256.0):
            exact = max(
                divergence(selected, selected_there, order), divergence(selected_there, selected, order)
            )
            bound = bounds[ORDERS.index(order)]
            assert exact <= bound
            tightest = max(tightest, exact / bound)
    # Some selection comes near: a bound that forgot a factor would be above it all the same.
    assert tightest > 0.3


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_the_bound_is_nearly_reached(eta: float) -> None:
    """Without the factor 1 + η this selection would diverge more than its bound."""
    law = TruncatedNegativeBinomial(eta, 1e-4)
    one, other = rare_success(0.5, 0.05, 1e-3)
    selected, there = best_of(one, law), best_of(other, law)
    exact = divergence(selected, there, 1024.0)
    bound = law.selection_rdp(curve_of(one, other))[-1]
    assert exact > (1.9 + eta) * 0.5
    assert 0.95 * bound < exact <= bound


@pytest.mark.parametrize("name", [name for name in LAWS if name != "poisson"])
@pytest.mark.parametrize("mean", [1.001, 3.0, 1000.0])
def test_a_law_has_the_mean_that_is_asked_for(name: str, mean: float) -> None:
    law = LAWS[name](mean)
    assert law.mean <= mean * (1 + 1e-9)
    assert law.mean == pytest.approx(mean, rel=1e-6)
    slope = mpmath.diff(generating(law), mpmath.mpf(1))
    assert float(slope) == pytest.approx(law.mean, rel=1e-6)


def test_delta_is_the_conversion_turned_round() -> None:
    curve = np.array(ORDERS) / 8
    for delta in (1e-9, 1e-5, 1e-2):
        epsilon = epsilon_from_rdp(curve, delta)
        assert delta_from_rdp(curve, np.array([epsilon]))[0] == pytest.approx(delta, rel=1e-4)
    assert delta_from_rdp(curve, np.array([0.0]))[0] <= 1


ROUNDS: Sequence[Event] = [poisson_sampled(GaussianEvent(2.25), 0.1, count=100)]


def test_few_runs_cost_less_together_and_many_cost_less_by_chance() -> None:
    run = worst_of([ROUNDS])

    def together(runs: int) -> float:
        return priced([SelfComposedEvent(each, runs) for each in ROUNDS], 1e-5)[1]

    def by_chance(runs: int) -> float:
        return selection_epsilon(run, TruncatedNegativeBinomial.with_mean(0.0, runs), 1e-5)

    assert together(2) < by_chance(2)
    assert by_chance(10) < together(10) / 1.5
    alone = float(epsilon_from_rdp(run, 1e-5))
    assert alone < by_chance(2) < by_chance(10) < by_chance(100) < 3 * alone


def test_the_worst_setting_decides() -> None:
    weak = [poisson_sampled(GaussianEvent(4.0), 0.1, count=100)]
    np.testing.assert_array_equal(worst_of([weak, ROUNDS]), worst_of([ROUNDS]))
    assert (worst_of([weak]) < worst_of([ROUNDS])).all()
    np.testing.assert_allclose(worst_of([[*weak, *ROUNDS]]), worst_of([weak]) + worst_of([ROUNDS]))


def test_values_out_of_range_are_named() -> None:
    for make, name in (
        (lambda: TruncatedNegativeBinomial(-1.0, 0.5), "eta"),
        (lambda: TruncatedNegativeBinomial(1.0, 1.0), "gamma"),
        (lambda: TruncatedNegativeBinomial.with_mean(1.0, 1.0), "mean number of runs"),
        (lambda: PoissonRuns(0.0), "mean number of runs"),
        (lambda: PoissonRuns(3.0).selection_rdp(np.zeros(3)), "rdp"),
        (lambda: worst_of([]), "settings"),
    ):
        with pytest.raises(ParameterError, match=name):
            make()
    with pytest.raises(UnsupportedEventError):
        worst_of([[ApproximateEvent(1.0, 1e-6)]])
