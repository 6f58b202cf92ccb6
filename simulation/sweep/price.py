"""What a sweep costs the records that it trains on: ε of all that its page shows, and of the best run alone.

A sweep runs each of its settings a fixed number of times and shows all results. So its price is that of all
its runs together, on the same records: their events compose, and nothing less is proven of choosing the best
of a fixed number of runs (:mod:`dpagent.privacy.accounting.selection`). Beside it stands what the best run
would cost if it were the only one to be shown, its setting drawn at random from those of the sweep, and the
number of runs too, with the same mean. Both assume that test records are public, as they are in a fleet.

Figures of two columns (for whom, and whom one has to trust) are never added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coordinator.settings import FleetSettings
from coordinator.stepping import Stepper
from coordinator.store import OpenRound
from dpagent.errors import ParameterError
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.accounting.choice import priced
from dpagent.privacy.accounting.composition import exact_sum
from dpagent.privacy.accounting.selection import (
    NumberOfRuns,
    PoissonRuns,
    TruncatedNegativeBinomial,
    selection_epsilon,
    worst_of,
)
from dpagent.privacy.events import ApproximateEvent, Event
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
        epsilon: likewise.
        events: of all rounds, by scope.
        dealt: what decides which records a device has: a device of another deal is another device.
    """

    delta: float
    epsilon: float
    events: Mapping[Scope, tuple[Event, ...]]
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
    events = {
        (each.mechanism.unit, each.mechanism.trust): _events(each, fleet.privacy.delta)
        for each in task.priced
    }
    return RunEvents(fleet.privacy.delta, fleet.privacy.epsilon, events, dealt)


def _events(release: Priced, delta: float) -> tuple[Event, ...]:
    """Of all rounds; of a job that reserves its budget whole, the reservation."""
    reserved = release.reserved_epsilon
    if reserved is None or math.isinf(reserved):
        return tuple(release.events)
    return (ApproximateEvent(reserved, delta),)


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
    events = [run.events[scope] for run in runs]
    epsilon, total_delta = _together([each for run in events for each in run], runs, delta)
    return ScopePrice(scope, epsilon, total_delta, _best_alone(events, delta), delta)


def _together(events: Sequence[Event], runs: Sequence[RunEvents], delta: float) -> tuple[float, float]:
    """(ε, δ) of all events together: composed as tightly as can be, or by adding up the runs' targets."""
    try:
        epsilon = priced(events, delta)[1]
    except ParameterError:
        epsilon = math.inf
    if math.isfinite(epsilon):
        return epsilon, delta
    if any(isinstance(each, ApproximateEvent) for each in events):
        return exact_sum((run.epsilon, 1) for run in runs), exact_sum((run.delta, 1) for run in runs)
    return math.inf, 1.0


def _best_alone(events: Sequence[Sequence[Event]], delta: float) -> dict[str, float]:
    """ε of the best of a random number of runs, with a mean of as many as there are."""
    if len(events) < 2:
        return {}
    try:
        run = worst_of(events)
    except ParameterError:  # A mechanism without Rényi divergences.
        return {}
    laws: dict[str, NumberOfRuns] = {
        name: TruncatedNegativeBinomial.with_mean(eta, len(events)) for name, eta in _LAWS.items()
    }
    laws["Poisson"] = PoissonRuns(len(events))
    found = {name: selection_epsilon(run, law, delta) for name, law in laws.items()}
    return {name: epsilon for name, epsilon in found.items() if math.isfinite(epsilon)}
