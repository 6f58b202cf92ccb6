"""Pieces of a round's work on records of all kinds, whose instructions :mod:`instruction_counts` counts.

The first of each group is done to warm up: the first fork of a process takes some hundreds more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import shake_128
from typing import Any

import numpy as np

from dpagent.learning.models.built_ins import built_in
from dpagent.learning.subnormals import flush_subnormals
from dpagent.learning.training.engine import NOBODY
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.onnx_engine import OnnxEngine
from dpagent.learning.training.onnx_graph.build import build_training_graph
from dpagent.norm import Norm
from dpagent.privacy.covariance import SecondMoments
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.noise.discrete_gaussian import DiscreteGaussianSampler

RECORDS = 8
PIECES: dict[str, Callable[[], object]] = {}


def _gradients() -> None:
    spec = built_in("digits")
    generator = np.random.default_rng(0)
    inputs = generator.random((RECORDS, *spec.input_shape), np.float32)
    labels, weights = np.arange(RECORDS), spec.initial_weights(0)
    last = spec.parameter_shapes[-2]
    huge, wide = weights.copy(), weights.copy()
    signs = generator.choice(np.array([-1, 1], np.float32), last.size)
    huge[last.offset : last.offset + last.size] = np.float32(3e38) * signs
    wide[last.offset : last.offset + last.size] = np.float32(60) * signs
    one = inputs.copy()
    one[3] = np.nan
    kinds: dict[str, tuple[Any, Any, Any]] = {
        "warm up": (weights, inputs, labels),
        "usual": (weights, inputs, labels),
        "others": (weights, 1 - inputs, labels),
        "flat": (weights, np.zeros_like(inputs), labels),
        "of other classes": (weights, inputs, labels[::-1].copy()),
        "one is nobody's": (weights, inputs, np.where(np.arange(RECORDS) == 3, -1, labels)),
        "one is not finite": (weights, one, labels),
        "none is finite": (weights, np.full_like(inputs, np.inf), labels),
        "no gradient is finite": (huge, inputs, labels),
        "subnormal": (weights, np.full_like(inputs, 1e-40), labels),
        "far apart": (wide, inputs, labels),
    }
    for norm in Norm:
        engine = NumpyEngine(spec, microbatch=RECORDS, products="stacked", norm=norm)
        for kind, (of, records, classes) in kinds.items():
            PIECES[f"gradients in {norm}: {kind}"] = partial(engine.clipped_sum, of, records, classes, [1.0])


def _gradients_by_graphs() -> None:
    spec = built_in("digits")
    generator = np.random.default_rng(0)
    inputs = generator.random((RECORDS, *spec.input_shape), np.float32)
    labels, weights, blank = np.arange(RECORDS) + 1, spec.initial_weights(0), np.zeros_like(inputs)
    one, huge = inputs.copy(), inputs.copy()
    one[3], huge[3] = np.nan, 3e38
    # The gradient of a blank row is finite with these, and of no record, but of those of the first class.
    trap, (last, bias) = np.zeros_like(weights), spec.parameter_shapes[-2:]
    signs = generator.choice(np.array([-1, 1], np.float32), last.size)
    trap[last.offset : last.offset + last.size] = np.float32(3e37) * signs
    trap[bias.offset] = 100
    engine = OnnxEngine(spec, build_training_graph(spec.head), microbatch=RECORDS)
    kinds: dict[str, tuple[Any, Any, Any]] = {
        "warm up": (weights, inputs, labels),
        "usual": (weights, inputs, labels),
        "others": (weights, 1 - inputs, labels),
        "nobody's": (weights, blank, np.full(RECORDS, NOBODY)),
        "one is not finite": (weights, one, labels),
        "one has no finite gradient": (weights, huge, labels),
        "no gradient is finite": (trap, inputs, labels),
        "nobody's, beside such": (trap, blank, np.full(RECORDS, NOBODY)),
        "subnormal": (weights, np.full_like(inputs, 1e-40), labels),
    }
    for kind, (of, records, classes) in kinds.items():
        PIECES[f"gradients by graphs: {kind}"] = partial(engine.clipped_sum, of, records, classes, [1.0])


def _moments() -> None:
    moments = SecondMoments(64, 4.0)
    usual = np.random.default_rng(0).random((RECORDS, 64), np.float32)
    one, none = usual.copy(), np.full_like(usual, np.nan)
    one[3, 10] = np.inf
    for kind, rows in {"warm up": usual, "usual": usual, "one is not finite": one, "none is": none}.items():
        PIECES[f"second moments: {kind}"] = partial(moments.total, rows)


def _noise() -> None:
    mechanism = DiscretisedGaussian(
        clip_norm=1.0, noise_multiplier=2.0, sampling_rate=1.0, dimension=100, accumulation_slack=1e-3
    )
    sizes = {"warm up": 0, "nothing": 0, "small": 1 << 20, "large": 1 << 45, "negative": -(1 << 45)}
    for kind, size in sizes.items():
        total = np.full(100, size, np.int64)
        PIECES[f"noise on: {kind}"] = partial(mechanism.add_noise, total, entropy=bytes)


def _draws() -> None:
    sampler = partial(DiscreteGaussianSampler, 147_640.5)

    def draw(seed: bytes) -> None:
        sampler(entropy=lambda count: shake_128(seed).digest(count)).sample(26_010)

    seeds = {
        "warm up": b"b",
        "none is tied": b"d",
        "the 4,874th is": b"'",
        "the 23,151st is": b"a",
        "two are": b"w",
    }
    for kind, seed in seeds.items():
        PIECES[f"draws: {kind}"] = partial(draw, seed)


flush_subnormals()
_gradients()
_gradients_by_graphs()
_moments()
_noise()
_draws()
