"""Many devices in one process, over a real broker and with the real coordinator."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from benchmarks.swarm import run_swarm
from dpagent.learning.data.dataset import ArrayDataset

DEVICES, ROUNDS, FRAGMENTS = 12, 2, 4


@pytest.mark.slow
def test_every_fragment_of_every_device_is_counted_in_every_round() -> None:
    bunch = load_digits()
    inputs = (bunch.images / 16.0).astype(np.float32)[..., np.newaxis]
    labels = bunch.target.astype(np.int64)
    shards = [ArrayDataset(inputs[n::DEVICES], labels[n::DEVICES], 10) for n in range(DEVICES)]
    settings = {
        "rounds": ROUNDS, "records_per_device": len(shards[0]), "fragments_per_update": FRAGMENTS,
        "model": {"name": "digits"},
        "privacy": {
            "method": "ldp-fl", "epsilon": 100.0, "schedule": {"kind": "uniform"},
            "local_training": {"steps": 2, "batch": 8},
        },
        "cap": {"kind": "none"}, "optimiser": {"learning_rate": 1.0, "momentum": 0.0},
    }  # fmt: skip
    rounds, worked_s, _ = run_swarm(settings, shards, test=shards[0])
    assert len(worked_s) == ROUNDS
    assert min(worked_s) > 0
    assert [each.fragments for each in rounds] == [DEVICES * FRAGMENTS] * ROUNDS
    assert all(each.accuracy is not None for each in rounds)


@pytest.mark.slow
def test_members_ask_for_the_tokens_of_each_round_and_spend_them() -> None:
    nothing = ArrayDataset(np.zeros((0, 8, 8, 1), np.float32), np.zeros(0, np.int64), 10)
    settings = {
        "rounds": ROUNDS, "records_per_device": 50, "fragments_per_update": FRAGMENTS,
        "model": {"name": "digits"}, "privacy": {"epsilon": 2.0, "sampling_rate": 0.1},
    }  # fmt: skip
    rounds, _, played = run_swarm(settings, [nothing] * DEVICES, has_members=True)
    assert [each.fragments for each in rounds] == [DEVICES * FRAGMENTS] * ROUNDS
    assert all(each.asked_at < each.granted_at < each.went_on_at for each in played)
