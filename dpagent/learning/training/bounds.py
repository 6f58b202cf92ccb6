"""A bound that a board's profile keeps to, apart from the engines, which need numpy."""

from __future__ import annotations

from typing import Final

MAX_PROCESSES: Final = 64
"""That compute microbatches of one lot side by side."""
