"""Privacy filters: limits for charges that are chosen in the light of earlier outputs.

Not wired: no program imports this yet.

An accountant adds up charges that were fixed in advance. Over the lifetime of a data set they are
not: a coordinator picks the next job, its noise and its length after seeing the outputs of earlier
ones, and reallocation does so within a job. A *privacy filter* admits a charge only while the
guarantee set beforehand is certain to hold, however charges are chosen.

*The Rényi filter* (Feldman, Zrnic, *Individual privacy accounting via a Rényi filter*, NeurIPS
2021; Whitehouse, Ramdas, Rogers, Wu, *Fully-adaptive composition in differential privacy*, ICML
2023). Fix an order α > 1 and the budget at which order-α divergence converts to (ε, δ),

    B = ε − [log((α−1)/α) − (log δ + log α)/(α−1)].

Each release t, given the outputs before it, has D_α ≤ ρ_t in both directions, where ρ_t may depend
on these outputs. Admit it iff ρ_1 + … + ρ_t ≤ B. *Proof.* Let P and Q be the distributions of
all outputs on neighbouring data sets, r_t the ratio of the two worlds' densities of output t given
those before it, and M_t = Π_{i≤t} r_i^α·e^(−(α−1)ρ_i). Given the past, E_Q[r_t^α] =
exp((α−1)·D_α) ≤ e^((α−1)ρ_t), so M is a supermartingale under Q with E_Q[M] ≤ 1. The filter makes
Σρ_i ≤ B on *every* path, so E_Q[(P/Q)^α] ≤ e^((α−1)B)·E_Q[M] ≤ e^((α−1)B): the whole is
(α, B)-RDP, after any number of releases, and therefore (ε, δ)-DP. With P and Q swapped the same
holds. A refusal releases nothing: it depends on ρ's only, which are public.

*Why one order, fixed in advance.* Accountants take the best of many orders, for fixed charges have
fixed sums. Here the sums depend on outputs. A rule that admits while *some* order has budget left
bounds no single order on every path; each path is within budget at an order of its own, and of the
paths of one order alone the proof above says that P(S) ≤ e^ε·Q(S) + δ; so m orders prove (ε, mδ).
That is to say: with δ/m in each B, m orders may be used. Lécuyer (*Practical privacy
filters and odometers with Rényi differential privacy*, 2021) treats the curve of all orders; we
rely on none of that. That the whole curve comes free is not to be expected: filters that admit by
the exact privacy profile are not valid in general (Regehr, Hu, Leeman, Manurangsi, Tholoniat,
Lécuyer, *Privacy filters are captured by residues*, 2026).

*zCDP.* For mechanisms with D_α ≤ ρ_t·α at all α, the rule ρ_1 + … + ρ_t ≤ ρ bounds the sums at
every order at once. By the proof above the whole is (α, αρ)-RDP for each α, that is ρ-zCDP; the
order may then be chosen for the conversion, as ρ is fixed. (Whitehouse et al., for δ = 0.)

*Order and concurrency.* The theorem is about releases one after another, each alone. Those of
several jobs may alternate if every release is charged, or was reserved by its job, before it is
made. A job that ends early may be given back its reservation for releases it never made, by
restoring a filter to which only its releases were charged. (That interaction within a release does
no harm either: Haney et al., *Concurrent composition for interactive differential privacy with
adaptive privacy-loss parameters*, CCS 2023.)

*Rounding.* Costs are raised by a relative 1e-10, which covers the rounding of
:mod:`~dpagent.privacy.accounting.divergences`, and counted in whole units of 2⁻⁶⁰, rounded up, at least one
an event, lest one too small for a double be free; the budget is rounded down likewise. Sums of units
are exact, so no sequence of charges gets past the budget.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import numpy as np

from dpagent.errors import ParameterError, PlanError, require_between, require_positive
from dpagent.privacy.accounting.divergences import ORDERS
from dpagent.privacy.accounting.normal_form import Runs, SampledGaussian, UnsupportedEventError, runs_of
from dpagent.privacy.accounting.rdp import conversion_offsets, renyi_divergences, require_divergence
from dpagent.privacy.accounting.zcdp import gaussian_rho, pure_rho, zcdp_rho
from dpagent.privacy.events import ApproximateEvent, Event

_STATE_VERSION: Final = 1
_MAX_EPSILON: Final = 1000.0
_ORDER_RANGE: Final = (1.01, 1024.0)
_UNITS: Final = 2.0**60  # to one nat of divergence
_ROUNDING: Final = 1e-10  # relative, of costs and budgets
_SUBTRACTION: Final = 1e-14  # relative to what is subtracted to get a budget


class BudgetExceededError(PlanError):
    """A charge does not fit into the rest of a filter's budget; nothing was charged."""


class _Filter(ABC):
    """Sums of costs held below a budget, in exact whole units."""

    def __init__(self, budget: float) -> None:
        self._budget = math.floor(budget * (1 - _ROUNDING) * _UNITS)
        self._spent = 0
        if self._budget <= 0:
            terms = ", ".join(f"{name} {value:g}" for name, value in self._terms().items())
            raise PlanError(
                f"{terms} leave no budget, as conversion to (ε, δ) costs all of it. Raise epsilon or delta, "
                "or take a higher order where there is one."
            )

    @property
    def left(self) -> float:
        """The rest of the budget, in units of cost (nats), at least 0."""
        return max(0.0, math.nextafter((self._budget - self._spent) / _UNITS, 0.0))

    @property
    def spent(self) -> float:
        """The sum of charges, in units of cost (nats)."""
        return self._spent / _UNITS

    def admits(self, events: Sequence[Event]) -> bool:
        """Whether all of ``events`` fit together. Charges nothing.

        Raises:
            UnsupportedEventError: an event has no price here.
        """
        return self._spent + self._units(events) <= self._budget

    def charge(self, events: Sequence[Event]) -> None:
        """Charge all of ``events``, before their outputs leave; or, with an error, none.

        Raises:
            BudgetExceededError: they do not fit.
            UnsupportedEventError: an event has no price here.
        """
        units = self._units(events)
        if self._spent + units > self._budget:
            raise BudgetExceededError(
                f"{len(events)} events cost {units / _UNITS:.6g}; expected at most the "
                f"{self.left:.6g} that is left of {self._budget / _UNITS:.6g}. Release less, with more noise."
            )
        self._spent += units

    def _units(self, events: Sequence[Event]) -> int:
        costs = self._costs([runs_of(event) for event in events])
        return sum(max(1, math.ceil(cost * (1 + _ROUNDING) * _UNITS)) for cost in costs)

    @abstractmethod
    def _costs(self, charges: Sequence[Runs]) -> list[float]:
        """The cost of each charge, all its runs together."""

    @abstractmethod
    def _terms(self) -> dict[str, float]:
        """The parameters, by their names."""

    def to_state(self) -> dict[str, Any]:
        """Terms and spending, exactly, for JSON."""
        terms = {name: value.hex() for name, value in self._terms().items()}
        return {"version": _STATE_VERSION, **terms, "spent": hex(self._spent)}

    @classmethod
    def _restored(cls, state: Mapping[str, Any], names: Sequence[str]) -> Self:
        _require_state(state, _STATE_VERSION, (*names, "spent"))
        restored = cls(*(_read_hex(name, state[name]) for name in names))
        spent = state["spent"]
        try:
            if not isinstance(spent, str) or len(spent) > 100:
                raise ValueError
            restored._spent = int(spent, 16)
        except ValueError:
            raise ParameterError(
                f"spent in the state is {spent!r}; expected a hexadecimal integer."
            ) from None
        if not 0 <= restored._spent <= restored._budget:
            raise ParameterError(f"spent in the state is {spent}; expected 0 to {restored._budget:#x}.")
        return restored


class RenyiFilter(_Filter):
    """Admits charges while the divergences of one order fit the budget that gives (ε, δ).

    For one neighbouring relation, that of the charges (add or remove one record for Gaussian ones).

    >>> from dpagent.privacy.events import GaussianEvent, poisson_sampled
    >>> job = [poisson_sampled(GaussianEvent(10.0), 0.1, count=100)]
    >>> privacy_filter = RenyiFilter(2.0, 1e-5, order=best_order(2.0, 1e-5, job))
    >>> jobs = 0
    >>> while privacy_filter.admits(job):
    ...     privacy_filter.charge(job)
    ...     jobs += 1
    >>> jobs
    21

    Args:
        epsilon: of everything that is ever admitted, in (0, 1000].
        delta: likewise, in (0, 1).
        order: α, in [1.01, 1024], chosen before the first charge: see :func:`best_order`.

    Raises:
        ParameterError: a value is out of its range.
        PlanError: at this order the conversion alone costs ε, so there is no budget.
    """

    def __init__(self, epsilon: float, delta: float, order: float) -> None:
        self.epsilon = require_positive("epsilon", epsilon, maximum=_MAX_EPSILON)
        self.delta = require_between("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
        self.order = require_between("order", order, *_ORDER_RANGE)
        conversion = float(conversion_offsets(np.array([self.order]), self.delta)[0])
        super().__init__(self.epsilon - conversion - _SUBTRACTION * (self.epsilon + abs(conversion)))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RenyiFilter:
        """The filter that :meth:`to_state` describes.

        Raises:
            ParameterError: the version is another, or the state is malformed.
            PlanError: its terms leave no budget.
        """
        return cls._restored(state, ("epsilon", "delta", "order"))

    def _terms(self) -> dict[str, float]:
        return {"epsilon": self.epsilon, "delta": self.delta, "order": self.order}

    def _costs(self, charges: Sequence[Runs]) -> list[float]:
        return renyi_divergences(charges, [self.order])[:, 0].tolist() if charges else []


class ZcdpFilter(_Filter):
    """Admits charges while their ρ fit the greatest ρ that gives (ε, δ). For unsampled mechanisms.

    Args:
        epsilon: of everything that is ever admitted, in (0, 1000].
        delta: likewise, in (0, 1).

    Raises:
        ParameterError: a value is out of its range.
        PlanError: the budget is below 2⁻⁶⁰.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        self.epsilon = require_positive("epsilon", epsilon, maximum=_MAX_EPSILON)
        self.delta = require_between("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
        super().__init__(zcdp_rho(self.epsilon, self.delta))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ZcdpFilter:
        """The filter that :meth:`to_state` describes.

        Raises:
            ParameterError: the version is another, or the state is malformed.
            PlanError: its terms leave no budget.
        """
        return cls._restored(state, ("epsilon", "delta"))

    def _terms(self) -> dict[str, float]:
        return {"epsilon": self.epsilon, "delta": self.delta}

    def _costs(self, charges: Sequence[Runs]) -> list[float]:
        costs = []
        for mechanism, count in charges:
            require_divergence(mechanism)
            if isinstance(mechanism, ApproximateEvent):
                costs.append(count * pure_rho(mechanism.epsilon))
            elif isinstance(mechanism, SampledGaussian) and mechanism.sampling_rate == 1.0:
                costs.append(count * gaussian_rho(mechanism.noise_multiplier))
            elif isinstance(mechanism, SampledGaussian):
                raise UnsupportedEventError(
                    f"sampling rate of a GaussianEvent is {mechanism.sampling_rate!r}; expected 1, as zCDP "
                    "gains nothing from sampling. Use a RenyiFilter."
                )
        return costs


def best_order(epsilon: float, delta: float, events: Sequence[Event]) -> float:
    """The order in :data:`ORDERS` at which ``events`` fit most often into a :class:`RenyiFilter`.

    To be called before the first charge, with typical events; for others the order may be a poor choice,
    never an unsafe one.

    Args:
        epsilon: in (0, 1000].
        delta: in (0, 1).
        events: at least one.

    Raises:
        ParameterError: a value is out of its range, there is no event, or one cannot be priced.
        PlanError: no order leaves any budget.
    """
    require_positive("epsilon", epsilon, maximum=_MAX_EPSILON)
    require_between("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    if not events:
        raise ParameterError("events are none; expected at least one, typical of those to come.")
    budgets = epsilon - conversion_offsets(np.array(ORDERS), delta)
    costs = renyi_divergences([runs_of(event) for event in events]).sum(axis=0)
    if not (budgets > 0).any():
        raise PlanError(
            f"epsilon {epsilon:g} at delta {delta:g} leaves no budget at any order up to {ORDERS[-1]:g}: "
            f"conversion alone costs {(epsilon - budgets).min():.4g}. Raise epsilon or delta."
        )
    return ORDERS[int((budgets / np.maximum(costs, 1e-300)).argmax())]


def _require_state(state: Mapping[str, Any], version: int, names: Sequence[str]) -> None:
    """Raise :class:`ParameterError` unless a saved state has this version and these entries only."""
    if not isinstance(state, Mapping):
        raise ParameterError(f"the state is a {type(state).__name__}; expected a mapping.")
    if (found := state.get("version")) != version or isinstance(found, bool):
        raise ParameterError(f"version of the state is {found!r}; expected {version}.")
    if set(state) != {"version", *names}:
        raise ParameterError(
            f"the state has entries {sorted(map(str, state))}; expected {sorted(['version', *names])}."
        )


def _read_hex(name: str, value: object) -> float:
    """The float that ``float.hex`` wrote, or an error that names it."""
    try:
        if isinstance(value, str):
            return float.fromhex(value)
    except (ValueError, OverflowError):
        pass
    raise ParameterError(f"{name} in the state is {value!r}; expected a hexadecimal number.")
