"""Keys that configuration files had, and what took their place: for the error that a file with one gets."""

from __future__ import annotations

from typing import Final

FORMER_KEYS: Final = {
    "aggregation.largest_device": "aggregation.largest_signal",
    "limits.mechanisms": "limits.methods",
    "memory_mib": "board.memory_mib",
    "privacy.mechanism": "privacy.method",
    "privacy.two_point.floor": "privacy.two_point.radius",
    "privacy.two_point.margin": "privacy.two_point.adapts",
    "threads": "processes",
}
"""Dotted, of all files. A file that has the old key, or has not the new one, means something else by it."""
