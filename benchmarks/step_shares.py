"""Time of a training step in the numpy engine, by kind of work.

Steps of 256 records, whole gradients clipped, one thread, microbatches of 64, for two seconds of each model
in a separate process. Calls are timed individually, which costs about a percent. *Matrix products* are those
of forward and backward passes; their rate is compared with that of a 1536×1536 float32 product in the
same process, in numpy. (Of `mnist-cnn` 5 % is counted and not computed: positions that nothing reads.)
*Windows* is the rest of convolutions: gathering windows as rows, padding, scattering gradients
back. *Pooling* and *activations* pass over memory. *Norms and clipping* reads each record's gradients twice
more and adds them up. The rest is scaling of inputs, the loss, and Python between the calls.

Limits: the shares depend on the size of the processor's caches.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np

from benchmarks.figures import Figure
from benchmarks.programs import python, run_json
from benchmarks.timing import seconds
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.costs import training_flops
from dpagent.learning.training.numpy_engine.activations import ReluStage, TanhStage
from dpagent.learning.training.numpy_engine.average_pooling import AveragePoolStage
from dpagent.learning.training.numpy_engine.convolution import ConvolutionStage
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.numpy_engine.gathering import SlidingProduct
from dpagent.learning.training.numpy_engine.network import Network
from dpagent.learning.training.numpy_engine.pooling import CopyStage, MaximumStage
from dpagent.learning.training.numpy_engine.products import Product

_MODELS = ("mnist-cnn", "digits", "sensor-cnn", "cifar-cnn")
_LOT, _MICROBATCH, _SECONDS, _GEMM = 256, 64, 2.0, 1536
_TIMEOUT_S = 300.0
_POOLING = (AveragePoolStage, CopyStage, MaximumStage)


def run() -> list[Figure]:
    """Measure every model in a child."""
    figures = []
    for model in _MODELS:
        found = run_json(python("-m", "benchmarks.step_shares", model), timeout_s=_TIMEOUT_S)
        figures += [
            Figure(f"{model}: {kind}", 100 * share, "% of a step") for kind, share in found["shares"].items()
        ]
        rate, peak = found["rate"], found["peak"]
        large = f"large product: {peak:.0f}"
        figures.append(Figure(f"{model}: rate of its products", rate, "GFLOP/s", large, rate / peak))
    return figures


class _Clock:
    """Seconds by kind of work, without those of calls within that are timed as well."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._within = 0.0

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def call(*arguments: Any) -> Any:
            outside, self._within = self._within, 0.0
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                taken = time.perf_counter() - start
                self.seconds[kind] += taken - self._within
                self._within = outside + taken

        return call


def main(model: str) -> dict[str, Any]:
    """Time one model's steps.

    Returns:
        ``shares`` of a step by kind, ``rate`` of its products and ``peak`` in GFLOP/s.
    """
    spec = built_in(model)
    engine = NumpyEngine(spec, microbatch=_MICROBATCH)
    generator = np.random.default_rng(0)
    inputs = generator.random((_LOT, *spec.input_shape), dtype=np.float32)
    labels = generator.integers(0, spec.classes, _LOT)
    weights = spec.initial_weights(0)

    def step() -> None:
        engine.clipped_sum(weights, inputs, labels, [1.0])

    step()
    clock = _Clock()
    setattr(Product, "__call__", clock.timed("matrix products", Product.__call__))  # noqa: B010
    setattr(SlidingProduct, "slide", clock.timed("matrix products", SlidingProduct.slide))  # noqa: B010
    _time_stages(engine._network, clock)
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < _SECONDS:
        clock.timed("the rest", step)()
        steps += 1
    whole = sum(clock.seconds.values())
    square = generator.random((_GEMM, _GEMM), dtype=np.float32)
    kinds = sorted(clock.seconds, key=lambda kind: -clock.seconds[kind])
    peak = 2 * _GEMM**3 / min(seconds(lambda: square @ square) for _ in repeat(None, 7))
    return {
        "shares": {kind: clock.seconds[kind] / whole for kind in kinds},
        "rate": steps * _LOT * training_flops(spec) / clock.seconds["matrix products"] / 1e9,
        "peak": peak / 1e9,
    }


def _time_stages(network: Network, clock: _Clock) -> None:
    for stage in network._stages:
        kind = "dense layers besides products"
        if isinstance(stage, ConvolutionStage):
            kind = "windows"
        elif isinstance(stage, _POOLING):
            kind = "pooling"
        elif isinstance(stage, TanhStage | ReluStage):
            kind = "activations"
        for name in ("forward", "backward"):
            setattr(stage, name, clock.timed(kind, getattr(stage, name)))
    for trained in network.trained:
        for name in ("power_sums", "add_clipped", "finish"):
            setattr(trained, name, clock.timed("norms and clipping", getattr(trained, name)))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
