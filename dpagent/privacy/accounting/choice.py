"""Which accountant prices a job.

Privacy-loss distributions are tight and price every event, but every mechanism that differs from the others
takes time and memory. Beyond 2,048 different ones, or where no grid of losses is coarse enough to be quick,
Rényi divergences are taken; events with a δ of their own have none, and are composed by addition. A δ of 0 is
proven by addition alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, get_args

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.accountant import Accountant
from dpagent.privacy.accounting.basic import BasicAccountant
from dpagent.privacy.accounting.composed_loss import GridTooFineError
from dpagent.privacy.accounting.normal_form import UnsupportedEventError, counted
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.accounting.rdp import RdpAccountant
from dpagent.privacy.events import Event
from dpagent.privacy.ranges import AccountantName

_MOST_DIFFERENT: Final = 2_048


def priced(events: Iterable[Event], delta: float) -> tuple[Accountant, float]:
    """An empty accountant for a job of these events, all of which it supports, and their ε by it.

    A :class:`PldAccountant` has its grid pinned to the one chosen for the whole job; from its ``name`` and
    that ``grid``, :func:`accountant_named` makes an equal one. Whatever the events are, it takes some
    seconds on one core of a PC; the slowest that were found, 10.

    >>> from dpagent.privacy.events import ApproximateEvent, GaussianEvent, poisson_sampled
    >>> accountant, epsilon = priced([poisson_sampled(GaussianEvent(2.0), 0.1)], delta=1e-5)
    >>> accountant.name, round(epsilon, 3)
    ('pld', 0.369)
    >>> priced([ApproximateEvent(0.5)], delta=0.0)[1]
    0.5

    Args:
        events: of the whole job, at least one.
        delta: in [0, 1).

    Raises:
        UnsupportedEventError: an event has no price at this δ.
        ParameterError: ``delta`` is out of range, there is no event, or no accountant prices them in a
            reasonable time.
    """
    events = tuple(events)
    name = accountant_name(events, delta)
    if name == "pld":
        try:
            return PldAccountant.priced(events, delta)
        except GridTooFineError:
            quick = _quick_name(events)
            if quick is None:
                raise
            name = quick
    accountant = accountant_named(name)
    return accountant, accountant.epsilon_after(events, delta)


def accountant_name(events: Iterable[Event], delta: float) -> AccountantName:
    """The name of the accountant for these events, unless it takes too long; see :func:`priced`.

    Raises:
        UnsupportedEventError: an event has no price at this δ.
        ParameterError: there is no event.
    """
    events = tuple(events)
    if not events:
        raise ParameterError("events are none; expected at least one.")
    different = len(counted(events))
    if delta == 0:
        if not _supports_all(BasicAccountant(), events):
            raise UnsupportedEventError(
                f"delta is {delta!r}; expected a number above 0: a GaussianEvent has no epsilon at delta 0."
            )
        return "basic"
    return (_quick_name(events) if different > _MOST_DIFFERENT else None) or "pld"


def accountant_named(name: AccountantName, *, grid: float | None = None) -> Accountant:
    """An empty accountant by its name.

    Args:
        name: ``pld``, ``rdp`` or ``basic``.
        grid: for ``pld`` alone, see :class:`PldAccountant`.

    Raises:
        ParameterError: the name is unknown, ``grid`` is out of its range, or is given to another accountant.
    """
    if name == "pld":
        return PldAccountant(grid=grid)
    if grid is not None:
        raise ParameterError(f"grid is {grid!r}; expected none for the accountant {name}.")
    if name == "rdp":
        return RdpAccountant()
    if name == "basic":
        return BasicAccountant()
    raise ParameterError(f"accountant is {name!r}; expected one of {', '.join(get_args(AccountantName))}.")


def _quick_name(events: Sequence[Event]) -> AccountantName | None:
    """The tighter of the accountants that are always quick, if one has a price."""
    for accountant in (RdpAccountant(), BasicAccountant()):
        if _supports_all(accountant, events):
            return accountant.name
    return None


def _supports_all(accountant: Accountant, events: Iterable[Event]) -> bool:
    return all(map(accountant.supports, events))
