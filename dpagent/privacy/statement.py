"""Privacy statements: an (ε, δ) with everything that it is meaningless without.

An ε says little by itself. It is a bound for some unit (a record, a whole device, one coordinate of an
update), under some adjacency, as long as somebody is trusted with something. A :class:`BudgetStatement`
carries these along, and is the one type in which figures leave this package: plans, ledgers, reports and
models show it. Statements that differ in unit, adjacency or trust are never added up, and are shown in
different columns: the sum of a figure that trusts the shuffler and one that trusts nobody bounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from dpagent.errors import ParameterError, require_between, require_finite, require_positive

_VERSION: Final = 1
_MOST_EXPECTED: Final = 0.1  # records of one device that all that δ allows may give away, on average
_MOST_DELTA: Final = 1e-3


class Unit(StrEnum):
    """The unit whose presence, or whose value, is hidden."""

    RECORD = "record"
    """One record among those of a device."""
    DEVICE = "device"
    """All that a device contributes, together."""
    COORDINATE = "coordinate"
    """One coordinate of a device's update, and nothing of the others."""

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

    @property
    def meaning(self) -> str:
        """In words."""
        return {
            Adjacency.ADD_OR_REMOVE_ONE: "being there or not",
            Adjacency.REPLACE_ONE: "having one value or any other",
        }[self]


class Trust(StrEnum):
    """The parties that have to keep to the protocol for the figure to hold."""

    NONE = "none"
    """Nobody: the device perturbs what it sends before anything leaves it."""
    SHUFFLER = "shuffler"
    """Broker and coordinator, not to link a fragment with its sender."""
    COORDINATOR = "coordinator"
    """The coordinator, to see updates without noise, to add the noise, and to keep silent."""

    @property
    def meaning(self) -> str:
        """In words."""
        return {
            Trust.NONE: "nobody: the device adds all the noise before anything leaves it",
            Trust.SHUFFLER: "broker and coordinator, who must not link a fragment with its sender",
            Trust.COORDINATOR: "the coordinator, who sees updates without noise and adds it afterwards",
        }[self]


@dataclass(frozen=True, slots=True)
class BudgetStatement:
    """(ε, δ)-differential privacy of a mechanism, and the scope of the two numbers. Public.

    Attributes:
        unit: the unit whose presence or value is hidden.
        adjacency: which data sets are neighbours.
        trust: the parties that have to keep to the protocol.
        mechanism: its name, as plans and ledgers spell it.
        epsilon: at least 0; infinite where nothing is guaranteed.
        delta: in [0, 1]; 1 where nothing is guaranteed.
        assumptions: further conditions, a full sentence each.

    Raises:
        ParameterError: ε or δ is out of its range.
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
        """Whether the figure bounds anything: ε is finite and δ below 1."""
        return math.isfinite(self.epsilon) and self.delta < 1

    @property
    def scope(self) -> tuple[Unit, Adjacency, Trust]:
        """Unit, adjacency and trust, which are alike in figures that share a column or a sum."""
        return self.unit, self.adjacency, self.trust

    def plus(self, *others: BudgetStatement) -> BudgetStatement:
        """Basic composition: ε and δ add up, also for mechanisms chosen in the light of earlier ones.

        (Dwork, Rothblum, Vadhan, FOCS 2010; as a filter: Rogers, Roth, Ullman, Vadhan, NeurIPS 2016.)

        Raises:
            ParameterError: a statement has another unit, adjacency or trust.
        """
        for other in others:
            if other.scope != self.scope:
                raise ParameterError(
                    f"privacy of {'/'.join(other.scope)} cannot be added to {'/'.join(self.scope)}; "
                    "expected the same unit, adjacency and trust. Keep the figures apart."
                )
        statements = (self, *others)
        return BudgetStatement(
            *self.scope,
            mechanism=" + ".join(_distinct(statement.mechanism for statement in statements)),
            epsilon=math.fsum(statement.epsilon for statement in statements),
            delta=min(1.0, math.fsum(statement.delta for statement in statements)),
            assumptions=_distinct(text for statement in statements for text in statement.assumptions),
        )

    def sentence(self) -> str:
        """The figure and its scope in one line, for a table's head or a log."""
        scope = f"{self.unit}-level, {self.adjacency} adjacency, trusted party: {self.trust}"
        if not self.is_guarantee:
            return f"no guarantee ({scope})"
        delta = f"{self.delta:g}".replace("e-0", "e-")
        epsilon = f"{self.epsilon:g}"
        if float(epsilon) < self.epsilon:  # never less than is true
            epsilon = f"{self.epsilon * (1 + 5e-6):g}"
        return f"ε = {epsilon}, δ = {delta} ({scope})"

    def as_dict(self) -> dict[str, Any]:
        """For JSON and model metadata; ``epsilon`` and ``delta`` are null where nothing is guaranteed."""
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


def delta_warning(delta: float, records: float) -> str | None:
    """A sentence of warning where a δ is too large to mean much; None where it is fine.

    A mechanism that gives a record away entirely with probability δ is (0, δ)-DP; of n records it gives away
    δ·n on average. So δ has to be well below 1/n (Dwork, Roth, *The algorithmic foundations of differential
    privacy*, 2014, section 2.3; Vadhan 2017; Ponomareva et al., *How to DP-fy ML*, 2023). Here δ·n is to be
    at most 0.1 and, as n may be small and there are many devices, δ at most 10⁻³.

    >>> delta_warning(1e-5, records=600) is None
    True
    >>> print(delta_warning(0.5, records=600))
    δ = 0.5 is not well below one over a device's records, 1/600 = 0.0017: a mechanism that publishes some \
record now and then would be allowed. Choose a δ of at most 0.0001.

    Args:
        delta: of a job or a lifetime budget, in [0, 1].
        records: expected number of records of a device, above 0.

    Raises:
        ParameterError: a value is out of its range.
    """
    require_between("delta", delta, 0.0, 1.0)
    require_positive("records", records)
    limit = min(_MOST_EXPECTED / records, _MOST_DELTA)
    if delta <= limit:
        return None
    if delta > _MOST_EXPECTED / records:
        reason = (
            f"is not well below one over a device's records, 1/{records:g} = {1 / records:.2g}: a mechanism "
            "that publishes some record now and then would be allowed"
        )
    else:
        reason = "allows a record to be given away entirely with that probability"
    power = 10.0 ** math.floor(math.log10(limit))
    return (
        f"δ = {delta:g} {reason}. Choose a δ of at most {math.floor(limit / power * (1 + 1e-9)) * power:g}."
    )


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
