"""Our engines, as the benchmark runs them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.learning import ModelSpec, NumpyEngine

ClippedSumOf = Callable[[NDArray[np.float32], NDArray[Any], NDArray[np.int64]], NDArray[np.float64]]
"""The clipped sum ``(d,)`` of weights ``(d,)``, inputs and labels."""

CLIP_NORM = 1.0
NAMES = ("numpy",)


def engine(name: str, spec: ModelSpec, microbatch: int, threads: int) -> ClippedSumOf:
    """The engine called ``name``, clipping whole gradients to :data:`CLIP_NORM`.

    Raises:
        NotImplementedError: it does not compute this model.
    """
    # To be swapped for the engines behind ``Engine.clipped_sum`` once they are there.
    del name
    if len(spec.input_shape) != 3:
        raise NotImplementedError
    engines = [NumpyEngine(spec, microbatch=microbatch) for _ in range(threads)]
    pool = ThreadPoolExecutor(threads)

    def clipped_sum(
        weights: NDArray[np.float32], inputs: NDArray[Any], labels: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        def part(number: int) -> NDArray[np.float64]:
            total = np.zeros(spec.parameter_count)
            share = slice(len(inputs) * number // threads, len(inputs) * (number + 1) // threads)
            for gradients in engines[number].gradients(weights, inputs[share], labels[share]):
                norms = np.sqrt(np.vecdot(gradients, gradients))
                total += np.minimum(1, CLIP_NORM / np.maximum(norms, 1e-30)) @ gradients
            return total

        return sum(pool.map(part, range(threads)), start=np.zeros(spec.parameter_count))

    return clipped_sum
