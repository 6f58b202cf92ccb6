"""The benchmark of the loss on CIFAR-10, on a few pictures of its own."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.reproduce_m1_cifar import Line, _figures, losses
from dpagent.learning.data.dataset import ArrayDataset
from simulation.data.source import Source

_TINY = {"name": "tiny", "input_shape": [4, 4, 3], "classes": 2, "layers": [{"dense": 2}]}


def test_the_loss_falls_from_chance_where_the_classes_are_plain(tmp_path: Path) -> None:
    """Of dark and bright pictures, half each; there are as many looks as were asked for."""
    labels = np.arange(1_000) % 2
    pictures = np.broadcast_to((200 * labels)[:, None, None, None], (1_000, 4, 4, 3)).astype(np.uint8)
    records = ArrayDataset(pictures, labels, 2)
    (file := tmp_path / "tiny.yaml").write_text(yaml.safe_dump(_TINY))
    first, last = losses(Source(records, records), str(file), Line("gaussian"), rounds=8, every=4, seed=0)
    assert last < math.log(2)
    assert last < first


def test_noise_is_compared_with_its_absence_seed_by_seed() -> None:
    figures = _figures("8 rounds", {"without noise": [1.0, 2.0], "even split": [1.5, 2.5]})
    found = {figure.name.removeprefix("8 rounds: loss, "): figure.value for figure in figures}
    assert found["even split"] == pytest.approx(2.0)
    assert found["even split, above without noise"] == pytest.approx(500.0)
    assert found["even split, above without noise, standard error"] == pytest.approx(0.0)
