"""A child process of ``benchmarks.frameworks``: one side trains, and prints its memory as JSON.

``python -m benchmarks.frameworks.memory SIDE MODEL BATCH``. Each step takes the next lot of 6,000 records,
which are kept as bytes; only the modules that the side needs are imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.frameworks import LOT, ours
from benchmarks.programs import memory_mib
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.spec import ModelSpec

_RECORDS, _STEPS = 6_000, 3


def main(name: str, model: str, batch: int) -> float:
    """Take three steps with one thread; returns the peak of the resident memory, MiB."""
    spec = built_in(model)
    generator = np.random.default_rng(0)
    records = generator.integers(0, 256, (_RECORDS, *spec.input_shape), np.uint8)
    labels = generator.integers(0, spec.classes, _RECORDS)
    step = _our_step(name, spec, batch) if name in ours.NAMES else _torch_step(name, spec, batch)
    for number in range(_STEPS):
        lot = slice(number * LOT, (number + 1) * LOT)
        step(records[lot], labels[lot])
    return memory_mib("VmHWM")


def _our_step(name: str, spec: ModelSpec, batch: int) -> Callable[[NDArray[Any], NDArray[np.int64]], object]:
    clipped_sum, weights = ours.engine(name, spec, batch, 1), spec.initial_weights(0)
    return lambda records, labels: clipped_sum(weights, records, labels)


def _torch_step(
    name: str, spec: ModelSpec, batch: int
) -> Callable[[NDArray[Any], NDArray[np.int64]], object]:
    # Not for our own sides, whose memory must be that on a board.
    from benchmarks.frameworks.torch_sides import OPACUS, PYTORCH, torch

    torch.set_num_threads(1)
    side = {**OPACUS, **PYTORCH}[name](spec)

    def step(records: NDArray[Any], labels: NDArray[np.int64]) -> None:
        side.take(records.astype(np.float32) / np.float32(255), labels)
        side.step(batch)

    return step


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
