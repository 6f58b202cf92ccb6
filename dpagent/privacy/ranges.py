"""Names and ranges of what plans, settings and ledgers state, apart from the code that computes with them.

The forms of plans and of configurations check numbers against these. A program that only reads plans, as the
agent does besides its pricing and training processes, has no need of the mathematics, nor of numpy.
"""

from __future__ import annotations

from typing import Final, Literal

AccountantName = Literal["pld", "rdp", "basic"]
ScheduleKind = Literal["uniform", "incrementing", "linear", "custom"]

MIN_NORM: Final = 1e-9
MAX_NORM: Final = 1e6
"""Least and greatest clip norm that a plan may announce; a norm that follows a quantile stays in this range,
which devices accept."""

NOISE_RANGE: Final = (0.05, 10_000.0)
"""Noise multipliers that devices accept in a plan."""

MAX_DIMENSION: Final = 2**28
"""Most weights of a layer."""
#: Radii in weight units.
MIN_RADIUS: Final = 1e-6
MAX_RADIUS: Final = 1e6

MAX_WIRE_STEP: Final = 1 << 40
"""Most grid units in a wire unit."""

MAX_SCHEDULE_STEP: Final = 0.99
"""Greatest step of an incrementing schedule, as a fraction of the one that leaves round 1 nothing."""


def moments_dimension(values: int) -> int:
    """Coordinates of a sum of second moments of D values: D(D+1)/2."""
    return values * (values + 1) // 2
