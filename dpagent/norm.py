"""The norms in which records are clipped: learning clips in them, privacy states sensitivities in them."""

from __future__ import annotations

from enum import StrEnum


class Norm(StrEnum):
    """In which norm records are clipped, and the sensitivity is stated.

    >>> Norm.L1.power, Norm.L2.power
    (1, 2)
    """

    L1 = "L1"
    L2 = "L2"

    @property
    def power(self) -> int:
        """p: the norm of x is (Σ|x_j|^p)^(1/p)."""
        return {Norm.L1: 1, Norm.L2: 2}[self]
