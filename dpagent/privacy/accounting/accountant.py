"""The interface of accountants: they add up events and state the cost of all together.

An accountant is for events whose parameters are fixed in advance, or at least do not depend on earlier
outputs; for others see :mod:`dpagent.privacy.accounting.filters`. Its state is the number of runs of each
mechanism, and every figure is computed from that in one order. So neither the order nor the grouping of
charges changes a figure, not even in the last bit, and events alone restore an accountant.

Adjacency: add or remove one (:mod:`dpagent.privacy.events`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import require_between
from dpagent.privacy.accounting.normal_form import (
    Component,
    Runs,
    UnsupportedEventError,
    canonical,
    counted,
    event_of,
    runs_of,
)
from dpagent.privacy.events import Event
from dpagent.privacy.ranges import AccountantName

FloatArray = NDArray[np.float64]


class Accountant(ABC):
    """Composes privacy events and converts the total to (ε, δ). Empty at first.

    Attributes:
        name: as plans and ledgers spell it.
        least_delta: the least δ at which it states an ε; the greatest is below 1.
    """

    name: ClassVar[AccountantName]
    least_delta: ClassVar[float]

    def __init__(self) -> None:
        self._counts: Counter[Component] = Counter()

    def supports(self, event: Event) -> bool:
        """Whether the accountant has a price for ``event``."""
        try:
            self._require_supported(runs_of(event)[0])
        except UnsupportedEventError:
            return False
        return True

    def compose(self, *events: Event) -> None:
        """Charge the events: all of them or, with an error, none.

        Raises:
            UnsupportedEventError: an event has no price here.
            ParameterError: one mechanism is charged more than 2⁵³ times.
        """
        self._counts = self._with(events)

    @property
    def events(self) -> tuple[Event, ...]:
        """All charges, equal mechanisms together, in an order that depends on nothing else."""
        return tuple(event_of(mechanism, count) for mechanism, count in canonical(self._counts))

    def epsilon(self, delta: float) -> float:
        """The ε spent so far at ``delta``; 0.0 if nothing was charged, infinite if no ε is proven.

        Raises:
            ParameterError: ``delta`` is not in [``least_delta``, 1).
        """
        return self.epsilon_after((), delta)

    def epsilon_after(self, events: Iterable[Event], delta: float) -> float:
        """The value of :meth:`epsilon` with ``events`` charged as well. Charges nothing.

        Raises:
            UnsupportedEventError: an event has no price here.
            ParameterError: ``delta`` is out of range, or a count is.
        """
        self._require_delta(delta)
        counts = self._with(events)
        return self._epsilon(canonical(counts), delta) if counts else 0.0

    def running_epsilon(self, events: Iterable[Event], delta: float) -> FloatArray:
        """The ε after each of ``events``, charged one after the other on top of the rest. Charges nothing.

        Returns:
            Shape (number of events,), never falling.

        Raises:
            UnsupportedEventError: an event has no price here.
            ParameterError: ``delta`` is out of range, or a count is.
        """
        self._require_delta(delta)
        sequence = [runs_of(event) for event in events]
        for mechanism, _ in sequence:
            self._require_supported(mechanism)
        before = canonical(self._counts)
        if not sequence:
            return np.zeros(0)
        return self._running_epsilon([*before, *sequence], delta)[len(before) :]

    def _with(self, events: Iterable[Event]) -> Counter[Component]:
        counts = counted(events, self._counts)
        for mechanism in counts:
            self._require_supported(mechanism)
        return counts

    def _require_delta(self, delta: float) -> None:
        require_between("delta", delta, self.least_delta, 1.0, high_open=True)

    @abstractmethod
    def _require_supported(self, mechanism: Component) -> None:
        """Raise :class:`UnsupportedEventError`, naming the offending part, unless there is a price."""

    @abstractmethod
    def _epsilon(self, charges: Sequence[Runs], delta: float) -> float:
        """The ε of charges in canonical order, at least one."""

    @abstractmethod
    def _running_epsilon(self, charges: Sequence[Runs], delta: float) -> FloatArray:
        """The ε after each of the charges in the order given, at least one: shape (len(charges),)."""
