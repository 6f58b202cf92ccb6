"""How the commands write numbers and texts: few digits, bounds rounded up, nothing that moves a cursor."""

from __future__ import annotations

import math
import re

from dpagent.notation import upwards


def plain(value: float) -> str:
    """Up to four digits: 0.1, 2, 1e-5."""
    return re.sub(r"e([+-])0*(\d)", lambda m: "e" + m[1].replace("+", "") + m[2], f"{value:.4g}")


def figure(value: float, digits: int = 4) -> str:
    """This many significant digits, including trailing zeros: 2.100, 0.004200, 1.235e-7, 12,345."""
    if 10**digits <= abs(value) < 1e9:
        return f"{value:,.0f}"
    text = f"{value:#.{digits}g}".removesuffix(".")
    return re.sub(r"e([+-])0*(\d)", lambda m: "e" + m[1].replace("+", "") + m[2], text)


def factor(exponent: float) -> str:
    """e^ε, rounded up."""
    if exponent > 700:
        return "more than 10³⁰⁰"
    value = math.exp(exponent)
    return upwards(value, 1) if value < 100 else f"{math.ceil(value):,}"


def bound(value: float, digits: int = 4) -> str:
    """Like :func:`figure`, rounded up."""
    if not math.isfinite(value) or value <= 0:
        return figure(value, digits) if math.isfinite(value) else "∞"
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    shown = figure(value, digits)
    return shown if float(shown.replace(",", "")) >= value else figure(value + 0.75 * unit, digits)


def percent(share: float, digits: int = 1) -> str:
    """A share between 0 and 1."""
    return f"{100 * share:.{digits}f} %"


def printable(text: str) -> str:
    """Without what a broker, or the name of a file, could do to a terminal.

    >>> printable("a name\x1b[2J")
    'a name�[2J'
    """
    return "".join(each if each.isprintable() else "�" for each in text)
