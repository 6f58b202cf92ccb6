"""Rounds of 100 enrolled devices with TLS and one-time tokens, without training and without a window.

As `swarm_rounds`, with members: each of the 1,600 fragments of a round carries a blind signature of its own,
which the coordinator checks besides, and broker and coordinator speak TLS. A round lasts from when the
broker has all fragments to its closing.

The tokens were granted before that, in the same round: a figure of its own says how long it takes from the
first of 100 requests to the last answer. All go by one connection, and the swarm's blinding of 1,600
messages and finalizing of as many tokens is in it, which boards do side by side. In a fleet, requests leave
at random times, some rounds ahead (`tokens.rounds_ahead`).

Interpretation: 0.8 s is not reached, because a round waits once all is counted: until the receipts of the
last fragments have left, half a second after the work on those began, so that the broker does not see how
long counting took (`coordinator/own_receipts.py`). Without that, a round takes 0.48 s (one run, the same
machine). Of a fragment's processor time, opening the seal and checking the token are more than half, both in
OpenSSL.

Limits: one connection, where a real fleet has one for each device, and TLS with it: the handshakes of 100
boards are in neither figure. Medians of 5 rounds.
"""

from __future__ import annotations

import statistics
from typing import Final

import numpy as np

from benchmarks.figures import Figure
from benchmarks.swarm import run_swarm
from benchmarks.swarm_rounds import SETTINGS, SUMS
from dpagent.learning.data.dataset import ArrayDataset

_DEVICES: Final = 100
_WANTED_S: Final = 0.8


def run() -> list[Figure]:
    """Run the rounds.

    Raises:
        Skipped: Mosquitto is not installed.
    """
    nothing = ArrayDataset(np.zeros((0, 28, 28, 1), np.float32), np.zeros(0, np.int64), 10)
    rounds, worked_s, played = run_swarm(SETTINGS | SUMS, [nothing] * _DEVICES, has_members=True)
    seconds = statistics.median(worked_s)
    name = f"a round of {_DEVICES} devices with tokens and TLS"
    return [
        Figure(name, seconds, "s", f"wanted: {_WANTED_S:g} s", seconds / _WANTED_S),
        Figure(f"{name}, fragments", statistics.median(each.fragments for each in rounds), ""),
        Figure(
            f"{name}, its tokens before it",
            statistics.median(each.granted_at - each.asked_at for each in played),
            "s",
        ),
    ]
