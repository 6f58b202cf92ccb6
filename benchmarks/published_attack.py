"""The exact attack on Algorithm 1 of Luo, Xu and Guan: whose record was in the lot, read off the model.

Their noise cap replaces noise that exceeds the regulariser's pull γ·w by that pull, which everyone who sees
the model knows. Wherever that happens, the step of the model is the exact gradient
(`dpagent.privacy.mechanisms.published`; a device runs it only where its owner allows it). An observer knows
all records of a device but not whether one of them was in the lot, sees the model before and after one
round, and decides.

The device has 600 handwritten digits (the bundled ones), the model of the digits demo with 9,930 parameters,
and the published settings: ε = 1, 5 and 10 over 100 rounds, clip norm 0.002, regularisation 0.5 over 600,
learning rate 0.01, an incrementing schedule. The model leaves with 32 bits a weight (`model.precision:
float32`), or with 64. The observer subtracts γ·w and the gradient of either candidate, keeps the coordinates
where hardly more than rounding is left, and takes the candidate that leaves less. 200 releases a row, each
with another record and fresh noise.

A mechanism that gives a round the ε that the algorithm counts lets nobody name more than e^ε/(1 + e^ε) of
them, 50.2 % at ε = 0.007 and 51.7 % at 0.07, the first rounds' shares. Limits: one model, first round of a
job; later ones have no other noise.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import Figure
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.privacy.mechanisms.published import PublishedCap
from dpagent.privacy.schedules import Schedule

_RECORDS, _ROUNDS, _RELEASES = 600, 100, 200
_CLIP_NORM, _REGULARISATION, _LEARNING_RATE = 0.002, 0.5 / _RECORDS, 0.01
_EPSILONS: Final = (1.0, 5.0, 10.0)
_FEW_ROUNDINGS: Final = 8


class Reading(NamedTuple):
    """What the attack reads off the model.

    Attributes:
        named: Share of the releases for which the observer names the true candidate.
        exposed: Share of the coordinates that took the second branch, on average.
        epsilon: That the algorithm counts for the round.
    """

    named: float
    exposed: float
    epsilon: float


def read_off(epsilon: float, *, dtype: type[np.floating] = np.float32, releases: int = _RELEASES) -> Reading:
    """Attack the first round of a job.

    Args:
        epsilon: Of the job.
        dtype: With which the model leaves.
        releases: How many rounds are attacked, each with and without another record.
    """
    schedule = Schedule("incrementing")
    cap = PublishedCap(
        epsilon=epsilon, rounds=_ROUNDS, step=schedule.increment(epsilon, _ROUNDS),
        sensitivity=_CLIP_NORM / _RECORDS, regularisation=_REGULARISATION, allow_unproven=True,
    )  # fmt: skip
    weights = built_in("digits").initial_weights(0).astype(np.float64)
    lot_mean, parts = _gradients()
    generator, state = np.random.default_rng(), cap.start(len(weights))
    counted = float(cap.scheduled(state)[0])
    right, exposed = 0, 0.0
    for _ in range(releases):
        part = parts[generator.integers(len(parts))]
        candidates = (lot_mean, lot_mean - part)
        truth = int(generator.integers(2))
        step = cap.noisy_step(candidates[truth], weights, state)
        before = weights.astype(dtype)
        after = (before - _LEARNING_RATE * step.gradient).astype(dtype)
        right += _guess(before, after, candidates) == truth
        exposed += float(step.capped.mean())
    return Reading(right / releases, exposed / releases, counted)


def run() -> list[Figure]:
    """Attack at each ε, with weights of both sizes."""
    figures = []
    for epsilon in _EPSILONS:
        for dtype in (np.float32, np.float64):
            reading = read_off(epsilon, dtype=dtype)
            bound = 1 / (1 + math.exp(-reading.epsilon))
            figures.append(
                Figure(
                    f"ε = {epsilon:g}, {np.dtype(dtype).itemsize * 8} bits a weight: named",
                    100 * reading.named,
                    "% of the releases", f"most under ε = {reading.epsilon:.3g}: {100 * bound:.1f}",
                    reading.named / bound,
                )
            )  # fmt: skip
        figures.append(
            Figure(f"ε = {epsilon:g}: coordinates that give the gradient away", 100 * reading.exposed, "%")
        )
    return figures


def _gradients() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The mean of the clipped gradients, and the part of each of the first records in it."""
    from sklearn.datasets import load_digits

    digits, spec = load_digits(), built_in("digits")
    inputs = (digits.images[:_RECORDS] / 16).astype(np.float32)[..., np.newaxis]
    labels = digits.target[:_RECORDS].astype(np.int64)
    engine, weights = NumpyEngine(spec), spec.initial_weights(0)

    def mean_part(rows: slice) -> NDArray[np.float64]:
        return engine.clipped_sum(weights, inputs[rows], labels[rows], [_CLIP_NORM]).total / _RECORDS

    return mean_part(slice(None)), np.array([mean_part(slice(row, row + 1)) for row in range(20)])


def _guess(
    before: NDArray[np.floating], after: NDArray[np.floating], candidates: tuple[NDArray[np.float64], ...]
) -> int:
    """Which candidate's gradient the step holds, where it holds one and no noise."""
    step = (before.astype(np.float64) - after) / _LEARNING_RATE
    rounding = np.spacing(np.abs(after)).astype(np.float64) / _LEARNING_RATE
    left = [step - _REGULARISATION * before.astype(np.float64) - gradient for gradient in candidates]
    apart = np.abs(candidates[0] - candidates[1])
    is_bare = np.minimum(*map(np.abs, left)) <= _FEW_ROUNDINGS * rounding + apart
    return int(np.argmin([np.sum((part[is_bare] / rounding[is_bare]) ** 2) for part in left]))
