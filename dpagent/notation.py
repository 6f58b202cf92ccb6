"""How programs write a bound for people, rounded up, and what is left of one, rounded down: in few digits."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Final

_SIGNIFICANT: Final = 2
_NO_MORE: Final = 1e-12


def upwards(value: float, decimals: int = 3, *, of: float = math.inf) -> str:
    """A bound, rounded up to ``decimals``, or to two significant digits where those would say too much; but
    for a relative 10⁻¹², by which a sum of doubles may be off.

    Args:
        value: at least 0.
        decimals: digits after the point, at least.
        of: what stands beside it as :func:`plain_bound` writes it, such as a budget. Where ``value`` is no
            more than that, it is not shown as more either, but in as many digits.

    >>> upwards(1.5004), upwards(0.0001), upwards(0.0), upwards(math.inf)
    ('1.501', '0.00010', '0.000', '∞')
    >>> upwards(2 + 5e-10), upwards(0.1 + 0.2)
    ('2.001', '0.300')
    >>> upwards(1.23442, of=1.23445), upwards(1.23442, of=1.25), upwards(1.26, of=1.25)
    ('1.23442', '1.235', '1.260')
    """
    if not math.isfinite(value):
        return "∞"
    if 0 < value < 10.0**-decimals * 10 ** (_SIGNIFICANT - 1):
        decimals = _SIGNIFICANT - 1 - math.floor(math.log10(value))
    scale = 10.0**decimals
    shown = f"{math.ceil(value * (1 - _NO_MORE) * scale) / scale:.{decimals}f}"
    return plain_bound(value) if value * (1 - _NO_MORE) <= of < float(shown) else shown


def downwards(value: float, decimals: int = 3) -> str:
    """What is left of a bound, rounded down to ``decimals`` likewise.

    Args:
        value: at least 0.
        decimals: digits after the point.

    >>> downwards(1.5009), downwards(49.99999)
    ('1.500', '49.999')
    """
    scale = 10.0**decimals
    return f"{math.floor(value * (1 + _NO_MORE) * scale) / scale:.{decimals}f}"


def plain_bound(value: float) -> str:
    """A δ, or an ε that somebody has chosen, rounded up to six significant digits, as few of them as say the
    same; but for a relative 10⁻¹², by which a sum of doubles may be off.

    Args:
        value: at least 0.

    >>> plain_bound(4.0), plain_bound(1e-5), plain_bound(1.2344999), plain_bound(30.2345001)
    ('4', '1e-5', '1.2345', '30.2346')
    >>> plain_bound(1.2345641e-5), plain_bound(0.1 + 0.2)
    ('1.23457e-5', '0.3')
    """
    return _in_six_digits(value * (1 - _NO_MORE), ROUND_CEILING)


def plain_bounds(epsilon: float, delta: float) -> str:
    """An ε and a δ that somebody has chosen.

    >>> plain_bounds(4.0, 1e-5)
    'ε = 4, δ = 1e-5'
    """
    return f"ε = {plain_bound(epsilon)}, δ = {plain_bound(delta)}"


def delta_downwards(value: float) -> str:
    """What is left of a δ, rounded down likewise.

    >>> delta_downwards(9.8765439e-4), delta_downwards(1e-4 - 1e-5)
    ('0.000987654', '9e-5')
    """
    return _in_six_digits(value * (1 + _NO_MORE), ROUND_FLOOR)


def _in_six_digits(value: float, rounding: str) -> str:
    shown = f"{float(Context(6, rounding).create_decimal_from_float(value)):g}"
    return shown.replace("e-0", "e-")
