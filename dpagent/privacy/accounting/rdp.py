"""What a sequence of noisy releases costs: Rényi accounting.

Adjacency: add or remove one record. D_α is the Rényi divergence of order α between the outputs
with and without it, in either direction.

*Gaussian releases.* :mod:`~dpagent.privacy.accounting.divergences` bounds D_α of one, sampling included.

*Pure mechanisms.* Those known to be (ε, 0)-DP are covered by
:func:`~dpagent.privacy.accounting.composition.pure_cumulants`. With δ > 0 no D_α of order above 1 need be
finite, so such charges are refused here.

*Composition and conversion.* D_α adds up over rounds, each with its own mechanism, when these are
fixed in advance (Mironov 2017; if not, see :mod:`~dpagent.privacy.accounting.filters`). Then, for any α,

    ε = D_α + log((α−1)/α) − (log δ + log α)/(α−1)

(Balle et al., *Hypothesis testing interpretations and Rényi differential privacy*, AISTATS 2020,
Thm 21; Canonne, Kamath, Steinke 2020, Prop. 12); the least over :data:`ORDERS` is reported and,
where all charges are pure, at most the sum of their ε (basic composition, the order ∞).

*Rounding.* Before conversion, sums are raised by a relative 2⁻³², which covers the rounding of the bounds
(1e-10) and of adding up a million (1.1e-10), and offsets by 2⁻⁴⁸ of their terms. Sums of pure ε are
rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from dpagent.errors import ParameterError, require_between, require_count
from dpagent.privacy.accounting.composition import exact_sum, pure_cumulants
from dpagent.privacy.accounting.divergences import (
    INTEGER_ORDERS,
    ORDERS,
    FloatArray,
    cumulants,
    subsampled_gaussian_rdp,
)
from dpagent.privacy.events import MAX_STEPS, ApproximateEvent, PrivacyLossEvent

__all__ = [
    "INTEGER_ORDERS",
    "ORDERS",
    "RdpAccountant",
    "RenyiEvent",
    "conversion_offsets",
    "cumulants",
    "epsilon_from_rdp",
    "renyi_divergences",
    "running_epsilon",
    "subsampled_gaussian_rdp",
]

#: What Rényi accounting can price; of the latter, those with δ = 0.
RenyiEvent: TypeAlias = PrivacyLossEvent | ApproximateEvent

_STATE_VERSION: Final = 1
_CHUNK: Final = 4096  # events priced at a time
_ORDER_RANGE: Final = (1.01, 1024.0)
_ROUNDING: Final = 2.0**-32
_OFFSET_ROUNDING: Final = 2.0**-48


class RdpAccountant:
    """Adds up the Rényi divergences of charges, and converts the total to (ε, δ).

    Adjacency: add or remove one record. The state is how often each mechanism was charged; from
    that the ε is computed, always in the same order. So the order and the grouping of charges
    make no difference, not even in the last bit, and nor do saving and restoring.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[float, ...], int] = {}  # by (σ, q) or, for pure mechanisms, (ε,)
        self._sums: _Sums | None = None  # of the above, computed when asked for

    def compose(self, event: RenyiEvent, *more: RenyiEvent) -> None:
        """Charge the events, all of them or, with an error, none.

        Raises:
            ParameterError: an event has δ > 0, or steps exceed 2⁵³.
        """
        self._steps.update(self._raised((event, *more)))
        self._sums = None

    def epsilon(self, delta: float) -> float:
        """The ε spent so far, at ``delta`` in (0, 1). 0.0 if nothing was composed."""
        if self._sums is None:
            self._sums = _sums_of(self._steps)
        return self._sums.epsilon(delta)

    def epsilon_after(self, events: Sequence[RenyiEvent], delta: float) -> float:
        """What :meth:`epsilon` would become with ``events`` charged as well. Charges nothing."""
        events = tuple(events)  # looked at more than once
        return _sums_of(self._steps | self._raised(events)).epsilon(delta) if events else self.epsilon(delta)

    def __copy__(self) -> RdpAccountant:
        return RdpAccountant.from_state(self.to_state())

    def to_state(self) -> dict[str, Any]:
        """All that was charged, for JSON: numbers in full as hexadecimals, in an order of their own.

        The orders are included: a state is read only where it gives the same ε.
        """
        charges = sorted(self._steps.items())
        return {
            "version": _STATE_VERSION,
            "orders": [order.hex() for order in ORDERS],
            "gaussian": [[key[0].hex(), key[1].hex(), steps] for key, steps in charges if len(key) == 2],
            "pure": [[key[0].hex(), steps] for key, steps in charges if len(key) == 1],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RdpAccountant:
        """The accountant that :meth:`to_state` describes.

        Raises:
            ParameterError: the version or the orders are others, or the state is malformed.
        """
        require_state(state, _STATE_VERSION, ("orders", "gaussian", "pure"))
        if state["orders"] != [order.hex() for order in ORDERS]:
            raise ParameterError("the state's Rényi orders are others; expected those of this version.")
        events: list[RenyiEvent] = []
        for name, width in (("gaussian", 3), ("pure", 2)):
            for charge in require_list(name, state[name]):
                *numbers, steps = require_list(f"{name} charge", charge, width)
                events.append(_event([read_hex(f"{name} charge", number) for number in numbers], steps))
        accountant = cls()
        accountant._steps = accountant._raised(events)
        if len(accountant._steps) != len(events):
            raise ParameterError("the state names a charge twice; expected each mechanism once.")
        return accountant

    def _raised(self, events: Sequence[RenyiEvent]) -> dict[tuple[float, ...], int]:
        """What the entries that ``events`` concern would become."""
        _require_supported(events)
        steps: dict[tuple[float, ...], int] = {}
        for event in events:
            key = (
                (float(event.noise_multiplier), float(event.sampling_rate))
                if isinstance(event, PrivacyLossEvent)
                else (event.epsilon + 0.0,)  # not −0
            )
            before = steps.get(key, self._steps.get(key, 0))
            steps[key] = require_count("steps in all", before + event.steps, maximum=MAX_STEPS)
        return steps


class _Sums(NamedTuple):
    """Sums over charges: of D_α by order, and of pure ε (infinite with a Gaussian among them)."""

    rdp: FloatArray
    pure: float

    def epsilon(self, delta: float) -> float:
        return min(float(epsilon_from_rdp(self.rdp, delta)), self.pure)


def _sums_of(steps: Mapping[tuple[float, ...], int]) -> _Sums:
    events = [_event(key, count) for key, count in sorted(steps.items())]
    rdp = np.zeros(len(ORDERS))
    for start in range(0, len(events), _CHUNK):
        rdp += renyi_divergences(events[start : start + _CHUNK]).sum(axis=0)
    return _Sums(rdp, _pure_sum(events))


def _event(key: Sequence[float], steps: int) -> RenyiEvent:
    return PrivacyLossEvent(key[0], key[1], steps) if len(key) == 2 else ApproximateEvent(key[0], 0.0, steps)


def running_epsilon(events: Sequence[RenyiEvent], delta: float) -> FloatArray:
    """The ε spent after each of the events, in order: shape (len(events),), never falling.

    Raises:
        ParameterError: ``delta`` is not in (0, 1), or an event has a δ above 0.
    """
    require_between("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    _require_supported(events)
    spent, so_far = np.zeros(len(events)), np.zeros(len(ORDERS))
    for start in range(0, len(events), _CHUNK):
        rdp = renyi_divergences(events[start : start + _CHUNK])
        rdp[0] += so_far
        np.cumsum(rdp, axis=0, out=rdp)
        spent[start : start + _CHUNK] = epsilon_from_rdp(rdp, delta)
        so_far = rdp[-1]
    pure = np.array([_pure_sum([event]) for event in events])
    # i additions round by less than i·2⁻⁵³
    return np.asarray(np.minimum(spent, np.cumsum(pure) * (1 + 2.0**-52 * np.arange(len(events)))))


def epsilon_from_rdp(rdp: FloatArray, delta: float) -> FloatArray | np.float64:
    """Convert Rényi divergences at :data:`ORDERS` to the least ε at ``delta``.

    Args:
        rdp: non-negative, shape (len(ORDERS),) or (T, len(ORDERS)).
        delta: in (0, 1).

    Returns:
        A scalar, or shape (T,); never negative, and 0 where all divergences are 0.

    Raises:
        ParameterError: ``delta`` is out of range, or ``rdp`` has another last axis.
    """
    require_between("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    divergences = np.asarray(rdp, dtype=np.float64)
    if divergences.ndim not in (1, 2) or divergences.shape[-1] != len(ORDERS):
        raise ParameterError(
            f"rdp has shape {divergences.shape}; expected ({len(ORDERS)},) or (T, {len(ORDERS)})."
        )
    if not np.all(divergences >= 0):
        raise ParameterError("rdp has a negative or undefined entry; expected divergences of at least 0.")
    offsets = conversion_offsets(np.array(ORDERS), delta)
    epsilon = np.maximum((divergences * (1 + _ROUNDING) + offsets).min(axis=-1), 0.0)
    released = divergences.any(axis=-1)
    return np.where(released, epsilon, 0.0)[()]


def conversion_offsets(orders: FloatArray, delta: float) -> FloatArray:
    """What turns D_α into ε at ``delta``: log((α−1)/α) − (log δ + log α)/(α−1), rounded up. For α > 1."""
    log_delta, log_orders = math.log(delta), np.log(orders)
    terms = 1 + (log_orders - log_delta) / (orders - 1)  # log(α/(α−1)) < 1 + log(α)/(α−1)
    return np.asarray(
        np.log1p(-1 / orders) - (log_delta + log_orders) / (orders - 1) + _OFFSET_ROUNDING * terms
    )


def renyi_divergences(events: Sequence[RenyiEvent], orders: Sequence[float] = ORDERS) -> FloatArray:
    """Bounds on D_α of each event, all its steps together: shape (len(events), len(orders)).

    Args:
        events: what is charged.
        orders: real, in [1.01, 1024].

    Raises:
        ParameterError: an event has δ > 0, or more than 2⁵³ steps, or an order is out of range.
    """
    _require_supported(events)
    for order in orders:
        require_between("order", order, *_ORDER_RANGE)
    bounds = np.empty((len(events), len(orders)))
    gaussian = {i: e for i, e in enumerate(events) if isinstance(e, PrivacyLossEvent)}
    if gaussian:
        pairs = np.array([(e.noise_multiplier, e.sampling_rate) for e in gaussian.values()], dtype=np.float64)
        distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
        bounds[list(gaussian)] = cumulants(distinct[:, 0], distinct[:, 1], orders)[inverse.reshape(-1)]
    pure = {i: e for i, e in enumerate(events) if isinstance(e, ApproximateEvent)}
    if pure:
        bounds[list(pure)] = pure_cumulants([e.epsilon for e in pure.values()], orders)
    bounds *= np.array([event.steps for event in events], dtype=np.float64)[:, np.newaxis]
    bounds /= np.array(orders) - 1
    return bounds


def _pure_sum(events: Sequence[RenyiEvent]) -> float:
    pure = [(event.epsilon, event.steps) for event in events if isinstance(event, ApproximateEvent)]
    return exact_sum(pure) if len(pure) == len(events) else math.inf


def _require_supported(events: Sequence[RenyiEvent]) -> None:
    for event in events:
        if not isinstance(event, (PrivacyLossEvent, ApproximateEvent)):
            raise ParameterError(
                f"an event is a {type(event).__name__}; expected a PrivacyLossEvent or an ApproximateEvent."
            )
        if isinstance(event, ApproximateEvent) and event.delta > 0:
            raise ParameterError(
                f"delta of an event is {event.delta!r}; expected 0, as a mechanism with δ > 0 need have no "
                "Rényi divergence. Use the PLD accountant for it."
            )
        require_count("steps", event.steps, maximum=MAX_STEPS)


def require_state(state: Mapping[str, Any], version: int, names: Sequence[str]) -> None:
    """Raise :class:`ParameterError` unless a saved state has this version and these entries only."""
    if not isinstance(state, Mapping):
        raise ParameterError(f"the state is a {type(state).__name__}; expected a mapping.")
    if (found := state.get("version")) != version or isinstance(found, bool):
        raise ParameterError(f"version of the state is {found!r}; expected {version}.")
    if set(state) != {"version", *names}:
        raise ParameterError(
            f"the state has entries {sorted(map(str, state))}; expected {sorted(['version', *names])}."
        )


def require_list(name: str, value: object, length: int | None = None) -> list[Any]:
    """Return ``value``, or raise unless it is a list (of ``length``)."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise ParameterError(
            f"{name} in the state is {value!r}; expected a list{f' of {length}' if length else ''}."
        )
    return value


def read_hex(name: str, value: object) -> float:
    """The float that ``float.hex`` wrote, or an error that names it."""
    try:
        if isinstance(value, str):
            return float.fromhex(value)
    except (ValueError, OverflowError):
        pass
    raise ParameterError(f"{name} in the state is {value!r}; expected a hexadecimal number.")
