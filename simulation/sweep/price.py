"""What a sweep costs the records that it trains on: ε of all that its page shows, and of the best run alone.

A sweep runs each of its settings a fixed number of times and shows all results. So its price is that of all
its runs together, on the same records: their events compose, and nothing less is proven of choosing the best
of a fixed number of runs (:mod:`dpagent.privacy.accounting.selection`). Beside it stands what the best run
would cost if it were the only one to be shown, its setting drawn at random from those of the sweep, and the
number of runs too, with the same mean. Both assume that test records are public, as they are in a fleet: so
all runs hold out the same ones (:class:`~simulation.sweep.sweep.Sweep`), and no record that one run trains on
is one that another is tested on. Nor is there a run without noise among them, or with noise from a seed
(:class:`~simulation.sweep.file.SweepFile`).

A figure is for noise as it is drawn, as a ledger's is: a share of δ pays for what is not exact. The further
from exact, the greater ε together is: with η of all runs it is (1 + e^ε)·η. Where that share is too little
(above an ε of 30 or so), what the runs cost each by itself is added up, ε and δ.

Figures of two columns (for whom, and whom one has to trust) are never added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.settings import FleetSettings
from coordinator.stepping import Stepper
from coordinator.store import OpenRound
from dpagent.errors import ParameterError
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.accounting.choice import priced
from dpagent.privacy.accounting.composition import exact_sum
from dpagent.privacy.accounting.imperfect_noise import imperfect_delta
from dpagent.privacy.accounting.selection import (
    NumberOfRuns,
    PoissonRuns,
    TruncatedNegativeBinomial,
    selection_epsilon,
    worst_of,
)
from dpagent.privacy.events import ApproximateEvent, Event
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE
from dpagent.privacy.statement import Trust, Unit
from dpagent.protocol.task import Priced
from dpagent.protocol.weights import weights_to_bytes
from simulation.comparison import Scope, scope_in_words
from simulation.planning import trial_job, trial_planner

_LAWS: Final = {"logarithmic": 0.0, "geometric": 1.0}


@dataclass(frozen=True, slots=True)
class RunEvents:
    """What a run charges its devices.

    Attributes:
        delta: of the run's target.
        events: of all rounds, by scope.
        inexactness: total variation distance of all rounds from ideal ones, by scope; 0 where it is left out.
        dealt: what decides which records a device has: a device of another deal is another device.
    """

    delta: float
    events: Mapping[Scope, tuple[Event, ...]]
    inexactness: Mapping[Scope, float] = field(default_factory=dict)
    dealt: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class ScopePrice:
    """The price of a sweep in one scope.

    Attributes:
        scope: for whom, and whom one has to trust.
        epsilon: of all that is shown, at ``delta``; infinite where some run has no bound here, or where runs
            deal the records to devices differently.
        delta: of that.
        best_alone: ε of the best run alone at ``best_delta``, by the law of the number of runs; without those
            of which nothing is proven.
        best_delta: of these.
    """

    scope: Scope
    epsilon: float
    delta: float
    best_alone: Mapping[str, float]
    best_delta: float

    def as_dict(self) -> dict[str, Any]:
        """For scripts."""
        unit, trust = self.scope
        return {
            "unit": str(unit),
            "trust": str(trust),
            "in_words": scope_in_words(self.scope),
            "all_runs": {"epsilon": self.epsilon, "delta": self.delta},
            "best_alone": {"epsilon": dict(self.best_alone), "delta": self.best_delta},
        }


def events_of(fleet: FleetSettings, spec: ModelSpec, dealt: tuple[int, int]) -> RunEvents:
    """What a job charges its devices, by what its first round announces.

    Args:
        fleet: The coordinator's settings.
        spec: The model.
        dealt: The number of devices, and the seed of the deal.

    Raises:
        PlanError: No device would take part.
    """
    job = trial_job(fleet, spec)
    model = Stepper(fleet, spec).initial()
    task = trial_planner(fleet, spec, job).task(
        OpenRound(1, 0, 0),
        weights_to_bytes(model.weights, fleet.model.precision),
        clip_norm=model.clip_norm,
        radii=model.radii,
    )
    scoped = {(each.mechanism.unit, each.mechanism.trust): each for each in task.priced}
    return RunEvents(
        fleet.privacy.delta,
        {scope: _events(each, fleet.privacy.delta) for scope, each in scoped.items()},
        {scope: _inexactness(each) for scope, each in scoped.items()},
        dealt,
    )


def _events(release: Priced, delta: float) -> tuple[Event, ...]:
    """Of all rounds; of a job that reserves its budget whole, the reservation."""
    reserved = release.reserved_epsilon
    if reserved is None or math.isinf(reserved):
        return tuple(release.events)
    return (ApproximateEvent(reserved, delta),)


def _inexactness(release: Priced) -> float:
    """Of all rounds; none of a job that reserves its budget whole: its δ pays for that already."""
    if release.reserved_epsilon is not None:
        return 0.0
    return math.fsum(each.inexactness for each in release.mechanisms)


def price_of(runs: Sequence[RunEvents]) -> list[ScopePrice]:
    """The price of a sweep on private records, in each scope in which some run has a bound.

    Args:
        runs: all of them, at least one; also those with another seed.
    """
    scopes = {scope for run in runs for scope in run.events}
    order = [(unit, trust) for unit in Unit for trust in Trust]
    return [_price_in(scope, runs) for scope in sorted(scopes, key=order.index)]


def _price_in(scope: Scope, runs: Sequence[RunEvents]) -> ScopePrice:
    delta = max(run.delta for run in runs)
    is_other_device = scope[0] is Unit.DEVICE and len({run.dealt for run in runs}) > 1
    if is_other_device or any(scope not in run.events for run in runs):
        return ScopePrice(scope, math.inf, 1.0, {}, delta)
    epsilon, total_delta = _together(runs, scope, delta)
    return ScopePrice(scope, epsilon, total_delta, _best_alone(runs, scope, delta), delta)


def _together(runs: Sequence[RunEvents], scope: Scope, delta: float) -> tuple[float, float]:
    """(ε, δ) of all events together: composed as tightly as can be, or by adding up what each run costs."""
    events = [each for run in runs for each in run.events[scope]]
    epsilon = _as_drawn(events, delta, _distance(runs, scope))
    if math.isfinite(epsilon):
        return epsilon, delta
    alone = [_of_a_run(run, scope) for run in runs]
    if any(math.isinf(each) for each, _ in alone):
        return math.inf, 1.0
    return exact_sum((each, 1) for each, _ in alone), min(1.0, exact_sum((each, 1) for _, each in alone))


def _of_a_run(run: RunEvents, scope: Scope) -> tuple[float, float]:
    """(ε, δ) of one run by itself: of a job that reserves its budget whole, the reservation."""
    events = run.events[scope]
    if len(events) == 1 and isinstance(events[0], ApproximateEvent):
        return events[0].epsilon, events[0].delta
    return _as_drawn(events, run.delta, _distance([run], scope)), run.delta


def _distance(runs: Sequence[RunEvents], scope: Scope) -> float:
    return math.fsum(run.inexactness.get(scope, 0.0) for run in runs)


def _as_drawn(events: Sequence[Event], delta: float, distance: float) -> float:
    """ε at ``delta`` with noise as it is drawn; infinite where none is proven."""
    try:
        epsilon = priced(events, delta * (1 - NOISE_SHARE))[1]
    except ParameterError:
        return math.inf
    return _if_covered(epsilon, delta, distance)


def _if_covered(epsilon: float, delta: float, distance: float) -> float:
    """An ε of exact noise at δ without its share, if that share pays for a distance; else none is proven."""
    if math.isinf(epsilon) or imperfect_delta(epsilon, 0.0, distance) > NOISE_SHARE * delta:
        return math.inf
    return epsilon


def _best_alone(runs: Sequence[RunEvents], scope: Scope, delta: float) -> dict[str, float]:
    """ε of the best of a random number of runs, with a mean of as many as there are."""
    if len(runs) < 2:
        return {}
    try:
        run = worst_of([each.events[scope] for each in runs])
    except ParameterError:  # A mechanism without Rényi divergences.
        return {}
    laws: dict[str, NumberOfRuns] = {
        name: TruncatedNegativeBinomial.with_mean(eta, len(runs)) for name, eta in _LAWS.items()
    }
    laws["Poisson"] = PoissonRuns(len(runs))
    # Each of them is off by what the worst one is, and there are as many on average.
    distance = len(runs) * max(_distance([each], scope) for each in runs)
    found = {
        name: _if_covered(selection_epsilon(run, law, delta * (1 - NOISE_SHARE)), delta, distance)
        for name, law in laws.items()
    }
    return {name: epsilon for name, epsilon in found.items() if math.isfinite(epsilon)}
