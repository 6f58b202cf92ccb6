"""How programs write a bound for people, rounded up, and what is left of one, rounded down: in few digits."""

from __future__ import annotations

import math
from typing import Final

_SIGNIFICANT: Final = 2


def upwards(value: float, decimals: int = 3) -> str:
    """A bound, rounded up to ``decimals``, or to two significant digits where those would say too much.

    Args:
        value: at least 0.
        decimals: digits after the point, at least.

    >>> upwards(1.5004), upwards(0.0001), upwards(0.0), upwards(math.inf)
    ('1.501', '0.00010', '0.000', '∞')
    """
    if not math.isfinite(value):
        return "∞"
    if 0 < value < 10.0**-decimals * 10 ** (_SIGNIFICANT - 1):
        decimals = _SIGNIFICANT - 1 - math.floor(math.log10(value))
    scale = 10.0**decimals
    return f"{math.ceil(value * scale - 1e-6) / scale:.{decimals}f}"


def downwards(value: float, decimals: int = 3) -> str:
    """What is left of a bound, rounded down to ``decimals``.

    Args:
        value: at least 0.
        decimals: digits after the point.

    >>> downwards(1.5009), downwards(49.99999)
    ('1.500', '49.999')
    """
    scale = 10.0**decimals
    return f"{math.floor(value * scale + 1e-6) / scale:.{decimals}f}"
