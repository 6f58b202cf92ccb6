"""Time and tightness of Rényi accounting.

A thousand rounds, each with a noise multiplier of its own (the incrementing schedule that Rényi
accounting finds for ε = 2, δ = 1e-5, q = 0.1), priced by our ``RdpAccountant``
(median of 5) and, in the same process, by dp-accounting's ``RdpAccountant`` with
its default orders (once, since it is slow). The benchmark also compares ε: ours covers discrete noise and so
may be slightly larger. The last figures are the times of ``calibrate`` for a target, with each
accountant, and those of pricing, as a device does, the two slowest schedules that were found: 2,048 rounds of
64 local steps that all differ. On the grids that would lose next to nothing they take 12 s (Gaussian noise)
and 110 s (Laplace noise); their ε there is 211.704 and 0.0248993.

Limits: the two do different work: the orders differ, and dp-accounting handles many other
mechanisms.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from benchmarks.figures import Figure
from benchmarks.oracle import rdp_epsilon
from benchmarks.timing import alternate, seconds
from dpagent.privacy.accounting.choice import priced
from dpagent.privacy.accounting.rdp import RdpAccountant
from dpagent.privacy.calibration import BudgetPlan, calibrate, gaussian_family
from dpagent.privacy.events import ApproximateEvent, Event, GaussianEvent, poisson_sampled
from dpagent.privacy.ranges import AccountantName
from dpagent.privacy.schedules import Schedule

_ROUNDS = 1000
_EPSILON, _DELTA, _RATE = 2.0, 1e-5, 0.1
_REPEATS = 5


def run() -> list[Figure]:
    """Price the rounds with both, then time the calibration."""
    plan = _calibrate(_ROUNDS, "rdp")
    events = [poisson_sampled(GaussianEvent(sigma), _RATE) for sigma in plan.noise_multipliers]
    rounds = [(sigma, _RATE, 1) for sigma in plan.noise_multipliers]

    def price() -> float:
        return RdpAccountant().epsilon_after(events, _DELTA)

    (ours,) = alternate(price, repeats=_REPEATS)
    epsilons: list[float] = []
    theirs = seconds(lambda: epsilons.append(rdp_epsilon(rounds, _DELTA)))
    figures = [
        Figure(
            "time to price 1,000 different rounds", 1000 * ours, "ms",
            f"dp-accounting: {1000 * theirs:,.0f} ms", ours / theirs,
        ),
        Figure(
            "ε of these rounds", price(), "ε", f"dp-accounting: {epsilons[0]:.5f}", price() / epsilons[0]
        ),
        Figure("ε of these rounds, ours less dp-accounting's", price() - epsilons[0], "ε"),
    ]  # fmt: skip
    for count in (100, 1000):
        taken = alternate(
            partial(_calibrate, count, "pld"), partial(_calibrate, count, "rdp"), repeats=_REPEATS
        )
        name = f"time to calibrate {count:,} rounds to ε = 2"
        figures.append(Figure(name, 1000 * taken[0], "ms"))
        figures.append(Figure(f"{name}, by Rényi divergence", 1000 * taken[1], "ms"))
    for name, (schedule, exact) in _slow().items():
        (seconds_taken,) = alternate(partial(priced, schedule, _DELTA), repeats=_REPEATS)
        figures.append(Figure(f"time to price a hostile schedule, {name}", seconds_taken, "s"))
        epsilon = priced(schedule, _DELTA)[1]
        figures.append(Figure(f"ε of it, {name}", epsilon, "ε", f"on a fine grid: {exact}", epsilon / exact))
    return figures


def _slow() -> dict[str, tuple[list[Event], float]]:
    """Schedules, and their ε on a grid that loses next to nothing."""
    gaussian: list[Event] = [
        poisson_sampled(GaussianEvent(sigma), 0.9999, 64) for sigma in _geometric(10.0, 100.0)
    ]
    laplace: list[Event] = [
        poisson_sampled(ApproximateEvent(cost), 0.5, 64) for cost in _geometric(5e-5, 5.2e-5)
    ]
    return {"Gaussian noise": (gaussian, 211.704), "Laplace noise": (laplace, 0.0248993)}


def _geometric(least: float, most: float) -> list[float]:
    return [float(value) for value in np.geomspace(least, most, 2_048)]


def _calibrate(rounds: int, accountant: AccountantName) -> BudgetPlan:
    return calibrate(
        Schedule(), gaussian_family(_RATE),
        epsilon=_EPSILON, delta=_DELTA, rounds=rounds, accountant=accountant,
    )  # fmt: skip
