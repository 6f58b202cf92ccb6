"""Which accountant prices a job.

Privacy-loss distributions are tight and price every event, but every mechanism that differs from the others
takes time and memory. Beyond 2,048 different ones Rényi divergences are taken, which are quick; events
with a δ of their own have none, and are composed by addition. A δ of 0 is proven by addition alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, get_args

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.accountant import Accountant, AccountantName
from dpagent.privacy.accounting.basic import BasicAccountant
from dpagent.privacy.accounting.normal_form import UnsupportedEventError, counted
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.accounting.rdp import RdpAccountant
from dpagent.privacy.events import Event

_MOST_DIFFERENT: Final = 2_048


def accountant_for(events: Iterable[Event], delta: float) -> Accountant:
    """An empty accountant for a job of these events, all of which it supports.

    A :class:`PldAccountant` has its grid pinned to the one chosen for the whole job; from its ``name`` and
    that ``grid``, :func:`accountant_named` makes an equal one.

    >>> from dpagent.privacy.events import ApproximateEvent, GaussianEvent, poisson_sampled
    >>> accountant_for([poisson_sampled(GaussianEvent(2.0), 0.1)], delta=1e-5).name
    'pld'
    >>> accountant_for([ApproximateEvent(0.5)], delta=0.0).name
    'basic'

    Args:
        events: of the whole job, at least one.
        delta: in [0, 1).

    Raises:
        UnsupportedEventError: an event has no price at this δ.
        ParameterError: ``delta`` is out of range, or there is no event.
    """
    events = tuple(events)
    name = accountant_name(events, delta)
    return PldAccountant.on_grid_for(events, delta) if name == "pld" else accountant_named(name)


def accountant_name(events: Iterable[Event], delta: float) -> AccountantName:
    """The name of the accountant that :func:`accountant_for` gives.

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
    if different > _MOST_DIFFERENT:
        for accountant in (RdpAccountant(), BasicAccountant()):
            if _supports_all(accountant, events):
                return accountant.name
    return "pld"


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


def _supports_all(accountant: Accountant, events: Iterable[Event]) -> bool:
    return all(map(accountant.supports, events))
