"""A child process of ``benchmarks.frameworks``: one model, every side in turn, as JSON.

``python -m benchmarks.frameworks.speed MODEL THREADS ENGINE…``
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import BenchmarkError
from benchmarks.frameworks import LOT, ours
from benchmarks.frameworks.networks import Network, torch
from benchmarks.frameworks.torch_sides import OPACUS, PYTORCH, TorchSide, per_example_gradients
from benchmarks.timing import alternate, seconds
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.costs import training_flops
from dpagent.learning.models.spec import ModelSpec

_BATCHES = (4, 8, 16, 32, 64, 128, 256)
# The microbatches that an engine may sum in float32; see dpagent.learning.training.engine.
_MICROBATCHES = (4, 8, 16, 32, 64)
_REPEATS = 7
_TUNING_S = 0.3
# A turn: a single step of some milliseconds would start with the caches of the side before it.
_TURN_S = 0.2
# All compute in float32, and Opacus divides by the norm plus 1e-6.
_TOLERANCE = 1e-5
_LEAST_MARGIN = 3e-6
_GEMM = 1536


class _Lot(NamedTuple):
    """Records and labels, and the sums of their gradients by the oracle, clipped and as they are."""

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]
    clipped: NDArray[np.float64]
    unclipped: NDArray[np.float64]


class _Side(NamedTuple):
    """A step with the batch it is fastest with, and how many of them make a turn."""

    name: str
    step: Callable[[], object]
    batch: int
    steps: int

    def turn(self) -> None:
        for _ in range(self.steps):
            self.step()


def main(model: str, threads: int, engines: Sequence[str]) -> dict[str, Any]:
    """Check, tune and time every side.

    Args:
        model: a built-in one.
        threads: of each side.
        engines: ours.

    Returns:
        ``peak``: GFLOP/s of a large float32 product by the faster library, and of each library;
        ``flops``: floating-point operations an example; ``sides``: for each, ``rate`` in
        examples a second and the ``batch`` it was fastest with.
    """
    torch.set_num_threads(threads)
    spec = built_in(model)
    lot = _lot(spec)
    peaks = _peaks()
    sides = [*_engines(engines, spec, lot, threads), *_frameworks(spec, lot)]
    taken = alternate(*(side.turn for side in sides), repeats=_REPEATS)
    again = _peaks()
    products = {library: max(peaks[library], again[library]) for library in peaks}
    return {
        "peak": max(products.values()),
        "products": products,
        "flops": training_flops(spec),
        "sides": {
            side.name: {"rate": side.steps * LOT / median, "batch": side.batch}
            for side, median in zip(sides, taken, strict=True)
        },
    }


def _lot(spec: ModelSpec) -> _Lot:
    """Random records, none of which has two gradients within float32's rounding, and their gradients."""
    generator = np.random.default_rng(0)
    inputs = generator.random((2 * LOT, *spec.input_shape), dtype=np.float32)
    inputs = inputs[Network(spec, images=True).pooling_margins(inputs) > _LEAST_MARGIN][:LOT]
    if len(inputs) < LOT:
        raise BenchmarkError(f"{spec.name}: {len(inputs)} records without ties; expected {LOT}. Draw more.")
    labels = generator.integers(0, spec.classes, LOT)
    clipped, unclipped = np.zeros(spec.parameter_count), np.zeros(spec.parameter_count)
    for gradients in per_example_gradients(spec, inputs, labels):
        clipped += np.minimum(1, ours.CLIP_NORM / np.linalg.norm(gradients, axis=1)) @ gradients
        unclipped += gradients.sum(axis=0)
    return _Lot(inputs, labels, clipped, unclipped)


def _engines(names: Sequence[str], spec: ModelSpec, lot: _Lot, threads: int) -> Iterable[_Side]:
    weights = spec.initial_weights(0)
    for name in names:
        steps: dict[int, Callable[[], object]] = {}
        for microbatch in _MICROBATCHES:
            engine = ours.engine(name, spec, microbatch, threads)
            steps[microbatch] = partial(engine, weights, lot.inputs, lot.labels)
        for microbatch, step in steps.items():
            _check(f"{name}, microbatch {microbatch}", np.asarray(step()), lot.clipped)
        yield _fastest(f"ours, {name}", steps)


def _frameworks(spec: ModelSpec, lot: _Lot) -> Iterable[_Side]:
    kinds: list[tuple[str, type[TorchSide]]] = [
        *((f"Opacus, {name}", kind) for name, kind in OPACUS.items()),
        *((f"PyTorch, {name}", kind) for name, kind in PYTORCH.items()),
    ]
    for name, kind in kinds:
        side = kind(spec)
        side.take(lot.inputs, lot.labels)
        # Once with a ragged last batch.
        for batch in (100, LOT):
            side.step(batch)
            _check(f"{name}, batch {batch}", side.total(), lot.clipped if side.private else lot.unclipped)
        yield _fastest(name, {batch: partial(side.step, batch) for batch in _BATCHES})


def _check(name: str, total: NDArray[Any], expected: NDArray[np.float64]) -> None:
    error = float(np.linalg.norm(total - expected) / np.linalg.norm(expected))
    # Written so that NaN fails, too.
    if not error < _TOLERANCE:
        raise BenchmarkError(
            f"{name}: its sum differs from that of torch.func's gradients by {error:.1e} of its length; "
            f"expected less than {_TOLERANCE:g}, so it is not timed."
        )


def _fastest(name: str, steps: dict[int, Callable[[], object]]) -> _Side:
    """The side with the batch it is fastest with: the least time of several, so that noise decides little."""

    def least(step: Callable[[], object]) -> float:
        # A slow step warms up within itself, and is not repeated.
        taken = [seconds(step)]
        while sum(taken) < _TUNING_S:
            taken.append(seconds(step))
        return min(taken)

    taken = {batch: least(step) for batch, step in steps.items()}
    batch = min(taken, key=lambda size: taken[size])
    return _Side(name, steps[batch], batch, math.ceil(_TURN_S / taken[batch]))


def _peaks() -> dict[str, float]:
    """GFLOP/s of a large float32 product in each library, at its best of 7."""
    left = np.random.default_rng(0).random((_GEMM, _GEMM), dtype=np.float32)
    tensor = torch.from_numpy(left)
    products: dict[str, Callable[[], object]] = {
        "numpy": partial(np.matmul, left, left, out=np.empty_like(left)),
        "PyTorch": partial(torch.matmul, tensor, tensor, out=torch.empty_like(tensor)),
    }
    work = 2 * _GEMM**3 / 1e9
    return {
        library: work / min(seconds(product) for _ in repeat(None, _REPEATS))
        for library, product in products.items()
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
