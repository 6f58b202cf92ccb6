"""How numbers are written on the page: few digits, with their unit, and a bound never too low."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable


def plain(value: float) -> str:
    """Few digits: 0.1, 2, 1e-5."""
    return re.sub(r"e([+-])0*(\d)", lambda m: "e" + m[1].replace("+", "") + m[2], f"{value:.4g}")


def factor(exponent: float) -> str:
    """e^ε, rounded up."""
    if exponent > 700:
        return "more than 10³⁰⁰"
    value = math.exp(exponent)
    return f"{math.ceil(value * 100) / 100:,.2f}" if value < 100 else f"{math.ceil(value):,}"


def percent(share: float, digits: int = 1) -> str:
    """A share between 0 and 1; a dash for one that was not measured."""
    return "–" if math.isnan(share) else f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"


def points(difference: float) -> str:
    """A difference of two shares: '2.1 points below', 'level with'."""
    amount = f"{abs(100 * difference):.1f}"
    if amount == "0.0":
        return "level with"
    return f"{amount} {'point' if amount == '1.0' else 'points'} {'above' if difference > 0 else 'below'}"


def duration(seconds: float) -> str:
    """Seconds with a decimal; from a minute on, whole ones."""
    if seconds < 59.95:
        return f"{seconds:.1f}\N{NO-BREAK SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    shown = f"{minutes}\N{NO-BREAK SPACE}min {rest}\N{NO-BREAK SPACE}s"
    return f"{hours}\N{NO-BREAK SPACE}h {shown}" if hours else shown


def size(count: float) -> str:
    """Bytes, to three digits of a decimal unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        amount = count / scale
        if amount >= 0.9995:
            shown = f"{amount:.3g}" if amount < 999.5 else f"{amount:,.0f}"
            return f"{shown}\N{NO-BREAK SPACE}{unit}"
    return f"{count:.0f}\N{NO-BREAK SPACE}B"


def mebibytes(amount: float | None) -> str:
    """Memory, where the system tells it."""
    return "not measured" if amount is None else f"{amount:.0f}\N{NO-BREAK SPACE}MiB"


def span(values: Iterable[float], show: Callable[[float], str]) -> str:
    """'x', or 'x to y' where they differ as shown."""
    ordered = sorted(values)
    low, high = show(ordered[0]), show(ordered[-1])
    return low if low == high else f"{low} to {high}"
