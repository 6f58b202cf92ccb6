"""What (ε, δ) leaves an attacker, as bounds on guesses and tests.

They follow from (ε, δ)-differential privacy as a hypothesis test between two data sets (Kairouz, Oh,
Viswanath,
*The composition theorem for differential privacy*, 2015): a test with false-positive rate a has a
true-positive rate of at most e^ε·a + δ, and at most 1 − e^(−ε)·(1 − δ − a). From even odds, a guess is
correct with probability at most (e^ε + δ)/(1 + e^ε).
"""

from __future__ import annotations

import math


def guessing(epsilon: float, delta: float) -> float:
    """The largest probability of a correct guess from even odds: (e^ε + δ)/(1 + e^ε).

    >>> guessing(0.0, 0.0), guessing(math.inf, 0.0)
    (0.5, 1.0)
    """
    shrunk = math.exp(-epsilon)
    return (1 + delta * shrunk) / (1 + shrunk)


def detection(epsilon: float, delta: float, false_alarms: float) -> float:
    """The largest true-positive rate of a test with that false-positive rate."""
    shrunk = math.exp(-epsilon)
    steep = math.inf if epsilon > 700 else math.exp(epsilon) * false_alarms + delta
    return min(1.0, steep, 1 - shrunk * max(0.0, 1 - delta - false_alarms))
