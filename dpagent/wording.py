"""Plurals in sentences for people."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """'1 device', '2,000 devices'; 'class' and 'box' get their 'es'."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{number:,} {noun}{ending}"
