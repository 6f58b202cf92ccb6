"""Privacy statements: an (ε, δ) together with its scope.

An ε alone means little. It is a bound for a unit (a record, a whole device, one coordinate of an
update), under an adjacency and an assumption about trusted parties. A :class:`BudgetStatement`
holds all of these, and is the only type in which figures leave this package: plans, ledgers, reports and
models show it. Statements that differ in unit, adjacency or trust are never added, and appear in
different columns: the sum of a figure with a trusted shuffler and one without a trusted party bounds nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from enum import StrEnum
from typing import Any, Final, TypeAlias

from dpagent.errors import ParameterError, require_between, require_finite, require_positive
from dpagent.notation import plain_bound

_VERSION: Final = 1
_MOST_EXPECTED: Final = 0.1  # most records of one device that δ may reveal, on average
_MOST_DELTA: Final = 1e-3
_MOST_EPSILON: Final = 10.0


class Unit(StrEnum):
    """The unit whose presence, or whose value, is hidden."""

    RECORD = "record"
    """One record of a device."""
    DEVICE = "device"
    """The whole contribution of a device."""
    COORDINATE = "coordinate"
    """One coordinate of a device's update, without the others."""

    @property
    def meaning(self) -> str:
        """In words."""
        return {
            Unit.RECORD: "one record on one device",
            Unit.DEVICE: "everything that one device contributes",
            Unit.COORDINATE: "a single coordinate that one device sends",
        }[self]


class Adjacency(StrEnum):
    """Which data sets are neighbours."""

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    """One has a unit that the other lacks."""
    REPLACE_ONE = "replace-one"
    """They differ in the value of one unit; participation is no secret."""
    ZERO_OUT = "zero-out"
    """In one, a unit takes part and adds zeros, and noise if it adds any; participation is no secret. After
    Erlingsson et al., *Encode, shuffle, analyze privacy revisited* (2020), and Kairouz et al., *Practical and
    private (deep) learning without sampling or shuffling* (ICML 2021)."""

    @property
    def meaning(self) -> str:
        """In words."""
        return {
            Adjacency.ADD_OR_REMOVE_ONE: "presence or absence",
            Adjacency.REPLACE_ONE: "value",
            Adjacency.ZERO_OUT: "difference from zeros",
        }[self]


class Trust(StrEnum):
    """The parties that must follow the protocol for the figure to hold."""

    NONE = "none"
    """No party: the device adds all the noise before anything leaves it."""
    SHUFFLER = "shuffler"
    """Broker and coordinator: they must not link a fragment with its sender."""
    COORDINATOR = "coordinator"
    """The coordinator: it sees updates without noise, adds the noise and keeps the updates secret."""

    @property
    def meaning(self) -> str:
        """In words."""
        return {
            Trust.NONE: "no one; the device adds all the noise before anything leaves it",
            Trust.SHUFFLER: "broker and coordinator, which must not link a fragment with its sender",
            Trust.COORDINATOR: "the coordinator, which sees updates without noise and adds it afterwards",
        }[self]


Scope: TypeAlias = tuple[Unit, Adjacency, Trust]
"""What a figure holds for."""

_IMPLIED: Final[dict[tuple[str, str, str], tuple[Scope, ...]]] = {
    (Unit.DEVICE, Adjacency.REPLACE_ONE, Trust.NONE): (
        (Unit.RECORD, Adjacency.ADD_OR_REMOVE_ONE, Trust.NONE),
        (Unit.DEVICE, Adjacency.ZERO_OUT, Trust.COORDINATOR),
        (Unit.DEVICE, Adjacency.REPLACE_ONE, Trust.SHUFFLER),
    )
}


def implies(scope: tuple[str, str, str], other: tuple[str, str, str]) -> bool:
    """Whether a figure of a scope is one of the other scope as well.

    A bound for any other records of a whole device holds for those with one record more or less, and for
    none, with which a device adds zeros; and one that trusts nobody holds whomever one trusts. So a job that
    has such a figure costs as much in those columns too, unless it has one there itself.

    >>> device = (Unit.DEVICE, Adjacency.REPLACE_ONE, Trust.NONE)
    >>> record = (Unit.RECORD, Adjacency.ADD_OR_REMOVE_ONE, Trust.NONE)
    >>> implies(device, record), implies(record, device), implies(record, record)
    (True, False, True)
    """
    return other == scope or other in _IMPLIED.get(scope, ())


@dataclass(frozen=True, slots=True)
class BudgetStatement:
    """(ε, δ)-differential privacy of a mechanism, and the scope of the two numbers. Public.

    Attributes:
        unit: the unit whose presence or value is hidden.
        adjacency: which data sets are neighbours.
        trust: the parties that must follow the protocol.
        mechanism: its name, as plans and ledgers spell it.
        epsilon: at least 0; infinite without a guarantee.
        delta: in [0, 1]; 1 without a guarantee.
        assumptions: further conditions, one sentence each.

    Raises:
        ParameterError: ε or δ is out of range.
    """

    unit: Unit
    adjacency: Adjacency
    trust: Trust
    mechanism: str
    epsilon: float
    delta: float
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("unit", Unit), ("adjacency", Adjacency), ("trust", Trust)):
            if not isinstance(value := getattr(self, name), kind):
                raise ParameterError(f"{name} is {value!r}; expected one of {', '.join(kind)}.")
        if (
            isinstance(self.epsilon, bool)
            or not isinstance(self.epsilon, (int, float))
            or not self.epsilon >= 0
        ):
            raise ParameterError(f"epsilon is {self.epsilon!r}; expected a number of at least 0.")
        if not 0 <= require_finite("delta", self.delta) <= 1:
            raise ParameterError(f"delta is {self.delta!r}; expected a number in [0, 1].")

    @property
    def is_guarantee(self) -> bool:
        """Whether the figure is a bound: ε is finite and δ below 1."""
        return math.isfinite(self.epsilon) and self.delta < 1

    @property
    def scope(self) -> Scope:
        """Unit, adjacency and trust, which are equal in figures that share a column or a sum."""
        return self.unit, self.adjacency, self.trust

    def sentence(self) -> str:
        """The figure and its scope in one line, for a table header or a log."""
        scope = f"{self.unit}-level, {self.adjacency} adjacency, trusted party: {self.trust}"
        if not self.is_guarantee:
            return f"no guarantee ({scope})"
        # Bounds must not be rounded down.
        delta = plain_bound(self.delta)
        epsilon = Context(prec=6, rounding=ROUND_CEILING).create_decimal_from_float(self.epsilon)
        return f"ε = {float(epsilon):g}, δ = {delta} ({scope})"

    def as_dict(self) -> dict[str, Any]:
        """For JSON and model metadata; ``epsilon`` and ``delta`` are null without a guarantee."""
        return {
            "version": _VERSION,
            "unit": str(self.unit),
            "adjacency": str(self.adjacency),
            "trust": str(self.trust),
            "mechanism": self.mechanism,
            "guarantee": "differential privacy" if self.is_guarantee else "none",
            "epsilon": self.epsilon if self.is_guarantee else None,
            "delta": self.delta if self.is_guarantee else None,
            "assumptions": list(self.assumptions),
        }


def delta_warning(delta: float, units: float, unit: Unit = Unit.RECORD) -> str | None:
    """A warning for a δ that is too large for a meaningful guarantee; None otherwise.

    A mechanism that reveals a record entirely with probability δ is (0, δ)-DP; of a device's n records it
    reveals δ·n on average. Likewise of a fleet's n devices, where the guarantee is for a device. So δ must be
    well below 1/n (Dwork, Roth, *The algorithmic foundations of differential privacy*, 2014, section 2.3;
    Vadhan 2017; Ponomareva et al., *How to DP-fy ML*, 2023). The limits here are δ·n ≤ 0.1 and, since n can
    be small and a fleet has many devices, δ ≤ 10⁻³.

    >>> delta_warning(1e-5, 600) is None
    True
    >>> print(delta_warning(0.5, 600))
    δ = 0.5 is not well below one over a device's records, 1/600 = 0.0017: it permits a mechanism that \
sometimes publishes a record. Choose a δ of at most 0.0001.

    Args:
        delta: of a job or a lifetime budget, in [0, 1].
        units: expected number of records of a device, or of devices of a fleet, above 0.
        unit: which of them.

    Raises:
        ParameterError: a value is out of range.
    """
    require_between("delta", delta, 0.0, 1.0)
    require_positive(f"{unit}s", units)
    limit = min(_MOST_EXPECTED / units, _MOST_DELTA)
    if delta <= limit:
        return None
    if delta > _MOST_EXPECTED / units:
        whole = "fleet" if unit is Unit.DEVICE else "device"
        reason = (
            f"is not well below one over a {whole}'s {unit}s, 1/{units:g} = {1 / units:.2g}: it permits a "
            f"mechanism that sometimes publishes a {unit}"
        )
    else:
        reason = f"permits a mechanism that reveals a {unit} entirely with that probability"
    power = 10.0 ** math.floor(math.log10(limit))
    return (
        f"δ = {delta:g} {reason}. Choose a δ of at most {math.floor(limit / power * (1 + 1e-9)) * power:g}."
    )


def epsilon_warning(epsilon: float, unit: Unit) -> str | None:
    """A warning for an ε that is a bound and yet protects hardly anybody; None otherwise.

    The limit is 10, above which Ponomareva et al., *How to DP-fy ML* (2023), see a weak guarantee or none.

    >>> epsilon_warning(8.0, Unit.DEVICE) is None
    True
    >>> print(epsilon_warning(900.0, Unit.DEVICE))
    ε = 900 protects hardly any device: what an attacker concludes of one may be e^900 times as likely as \
without it. Choose an ε of at most 10.

    Args:
        epsilon: of a job, at least 0.
        unit: that it is for.
    """
    if epsilon <= _MOST_EPSILON:
        return None
    return (
        f"ε = {epsilon:g} protects hardly any {unit}: what an attacker concludes of one may be e^{epsilon:g} "
        f"times as likely as without it. Choose an ε of at most {_MOST_EPSILON:g}."
    )
