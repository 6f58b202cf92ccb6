"""Rounds over Mosquitto without training and without a window: 100 devices of `dp-sgd`, 500 of `ldp-fl`.

The real coordinator runs rounds of the 26,010-parameter model in 16 fragments: noisy sums of 100 devices, and
reports of 500 with a bit for every weight. These 1,600 and 8,000 fragments a round a swarm
(``benchmarks/swarm.py``) of devices without records makes, seals, and publishes by one connection. Then the
coordinator goes on: a round lasts from then to its closing, with the broker's delivery, opening, checking,
counting, receipts and the step. Jitter and slot are as good as zero. Medians of 5 rounds.

Interpretation: both are within what was wanted, on a machine that counts 10,200 fragments a second
(`counting`). On the one of 23 November, which counted 5,400, a round of 100 devices took 0.44 s.

Limits: one connection, where a real fleet has one for each device; a machine on which nothing else runs.
"""

from __future__ import annotations

import statistics
from typing import Any, Final

import numpy as np

from benchmarks.figures import Figure
from benchmarks.swarm import run_swarm
from dpagent.learning.data.dataset import ArrayDataset

_ROUNDS: Final = 5
SETTINGS: Final[dict[str, Any]] = {
    "rounds": _ROUNDS, "records_per_device": 120, "fragments_per_update": 16, "model": {"name": "mnist-cnn"},
}  # fmt: skip
SUMS: Final = {
    "privacy": {"method": "dp-sgd", "epsilon": 2.0, "sampling_rate": 0.1},
}
_REPORTS: Final = {
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
    return [
        *_figures("dp-sgd", 100, SUMS, wanted_s=0.35),
        *_figures("ldp-fl", 500, _REPORTS, wanted_s=4.0),
    ]


def _figures(method: str, devices: int, settings: dict[str, Any], *, wanted_s: float) -> list[Figure]:
    nothing = ArrayDataset(np.zeros((0, 28, 28, 1), np.float32), np.zeros(0, np.int64), 10)
    rounds, worked_s, _ = run_swarm(SETTINGS | settings, [nothing] * devices)
    seconds = statistics.median(worked_s)
    name = f"a round of {devices} devices of {method}"
    return [
        Figure(name, seconds, "s", f"wanted: {wanted_s:g} s", seconds / wanted_s),
        Figure(f"{name}, fragments", statistics.median(each.fragments for each in rounds), ""),
    ]
