"""Rounds of `ldp-fl` with 500 devices over Mosquitto, without training and without a window.

The real coordinator runs rounds of the 26,010-parameter model in 16 fragments, with a bit for every weight.
These 8,000 fragments a round a swarm (``benchmarks/swarm.py``) makes of the public weights, seals, and
publishes by one connection. A round lasts from its opening to its closing as the coordinator keeps them;
jitter and slot are as good as zero. Median of 5 rounds.

Interpretation: at the same time one core makes and seals what the other opens, checks, counts and stores; a
real fleet makes its fragments elsewhere.

Limits: one connection, where a real fleet has one for each device; a machine on which nothing else runs.
"""

from __future__ import annotations

import statistics
from typing import Any, Final

import numpy as np

from benchmarks.figures import Figure
from benchmarks.swarm import run_swarm
from dpagent.learning.data.dataset import ArrayDataset

_DEVICES: Final = 500
_ROUNDS: Final = 5
_TARGET_S: Final = 4.0
_SETTINGS: Final[dict[str, Any]] = {
    "rounds": _ROUNDS, "records_per_device": 120, "fragments_per_update": 16, "model": {"name": "mnist-cnn"},
    "privacy": {
        "method": "ldp-fl", "epsilon": 1000.0, "schedule": {"kind": "uniform"},
        "two_point": {"coordinates": "all"},
    },
    "cap": {"kind": "none"}, "optimiser": {"learning_rate": 1.0, "momentum": 0.0},
}  # fmt: skip


def run() -> list[Figure]:
    """Run the rounds.

    Raises:
        Skipped: Mosquitto is not installed.
    """
    nothing = ArrayDataset(np.zeros((0, 28, 28, 1), np.float32), np.zeros(0, np.int64), 10)
    rounds = run_swarm(_SETTINGS, [nothing] * _DEVICES)
    seconds = statistics.median(
        each.closed_at - each.opened_at for each in rounds if each.closed_at is not None
    )
    return [
        Figure(
            f"a round of {_DEVICES} devices", seconds, "s", f"wanted: {_TARGET_S:g} s", seconds / _TARGET_S
        ),
        Figure("fragments of a round", statistics.median(each.fragments for each in rounds), ""),
    ]
