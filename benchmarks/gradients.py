"""Per-example gradients, clipped and rounded: examples a second, and memory.

``NumpyEngine.gradients`` in microbatches of 32 with ``DiscretisedGaussian.constrain`` on each, for
both built-in models, against the plainest correct way, one example at a time through the same engine.
The two take turns in a child process with one BLAS thread; medians of 7. The results are equal bit by bit
(``tests/learning/test_engine_invariance.py``).
Then the peak resident memory of a child process that takes three noisy steps with ``mnist-cnn`` on 6,000
records (lots of 600), without the agent around it.

Limits: random images; no comparison with other frameworks, which are not installed here.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from benchmarks.figures import Figure
from benchmarks.programs import memory_mib, python, run_json
from benchmarks.timing import alternate
from dpagent.learning import ArrayDataset, NumpyEngine, built_in
from dpagent.privacy import DiscretisedGaussian, poisson_lot

_MODELS = ("mnist-cnn", "digits")
_MICROBATCH = 32
_EXAMPLES, _ALONE = 512, 64
_REPEATS = 7
_RECORDS, _RATE, _STEPS = 6_000, 0.1, 3
_TIMEOUT_S = 600.0


def run() -> list[Figure]:
    """Measure in child processes, whose BLAS has one thread."""
    figures = []
    for model in _MODELS:
        speed = run_json(python("-m", "benchmarks.gradients", "speed", model), timeout_s=_TIMEOUT_S)
        figures.append(
            Figure(
                f"{model}: gradients, clipped and rounded",
                speed["together"],
                "examples a second",
                f"one example at a time: {speed['alone']:,.0f}",
                speed["together"] / speed["alone"],
            )
        )
    peak = run_json(python("-m", "benchmarks.gradients", "memory", "mnist-cnn"), timeout_s=_TIMEOUT_S)
    return [*figures, Figure("mnist-cnn: peak resident memory of a training process", peak["mib"], "MiB")]


def _data(model: str, records: int) -> ArrayDataset:
    generator = np.random.default_rng(0)
    shape = (records, *built_in(model).input_shape)
    return ArrayDataset(generator.integers(0, 256, shape, np.uint8), generator.integers(0, 10, records), 10)


def _mechanism(model: str) -> DiscretisedGaussian:
    return DiscretisedGaussian(1.0, 2.25, _RATE, built_in(model).parameter_count)


def _speed(model: str) -> dict[str, float]:
    """Examples a second in microbatches, and one by one."""
    spec, mechanism = built_in(model), _mechanism(model)
    weights, data = spec.initial_weights(0), _data(model, _EXAMPLES)
    many, single = NumpyEngine(spec, microbatch=_MICROBATCH), NumpyEngine(spec, microbatch=1)

    def together() -> None:
        for gradients in many.gradients(weights, data.inputs, data.labels):
            mechanism.constrain(gradients)

    def alone() -> None:
        for number in range(_ALONE):
            example = slice(number, number + 1)
            for gradients in single.gradients(weights, data.inputs[example], data.labels[example]):
                mechanism.constrain(gradients)

    fast, slow = alternate(together, alone, repeats=_REPEATS)
    return {"together": _EXAMPLES / fast, "alone": _ALONE / slow}


def _memory(model: str) -> dict[str, float]:
    """Peak memory of this process once it has trained."""
    spec, mechanism, data = built_in(model), _mechanism(model), _data(model, _RECORDS)
    weights, engine = spec.initial_weights(0), NumpyEngine(spec, microbatch=_MICROBATCH)
    for _ in range(_STEPS):
        total = np.zeros(spec.parameter_count, np.int64)
        lot = poisson_lot(len(data), _RATE)
        for gradients in engine.gradients(weights, data.inputs[lot], data.labels[lot]):
            total += mechanism.constrain(gradients).total
        noisy = mechanism.perturb(total)
        weights = (weights - noisy * (mechanism.granularity / (_RATE * _RECORDS))).astype(np.float32)
    return {"mib": memory_mib("VmHWM")}


if __name__ == "__main__":
    _, what, name = sys.argv
    print(json.dumps({"speed": _speed, "memory": _memory}[what](name)))
