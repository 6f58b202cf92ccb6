"""The training graph against a plain float64 network: every kind of layer, and every way to clip."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learning.graph_engines import HUGE, engine, engine_of, singly
from learning.plain_network import SPECS, close, differences, plain_loss, records, small

from dpagent.errors import ConfigurationError
from dpagent.learning.models.built_ins import BUILT_IN, built_in
from dpagent.learning.models.layers import (
    AveragePool1d,
    AveragePool2d,
    Conv1d,
    Conv2d,
    GroupNorm,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Residual,
    Tanh,
)
from dpagent.learning.models.spec import ModelSpec


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_gradients_are_those_of_the_plain_network(spec: ModelSpec) -> None:
    weights, inputs, labels = records(spec, 1)
    close(singly(spec, weights, inputs, labels)[0], differences(spec, weights, inputs[0], labels[0]))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_gradients_of_built_in_models_along_random_directions(name: str) -> None:
    spec = built_in(name).head
    weights, inputs, labels = records(spec, 1)
    gradient = engine_of(spec).clipped_sum(weights, inputs, labels, [HUGE]).total
    exact, generator = weights.astype(np.float64), np.random.default_rng(0)
    for _ in range(3):
        direction = generator.normal(0, 1, len(weights)) / np.sqrt(len(weights)) + gradient / np.linalg.norm(
            gradient
        )
        below, above = (plain_loss(spec, exact + h * direction, inputs[0], labels[0]) for h in (-1e-6, 1e-6))
        assert gradient @ direction == pytest.approx((above - below) / 2e-6, rel=1e-4)


@st.composite
def architectures(draw: Any) -> ModelSpec:
    image = draw(st.booleans())
    axes = 2 if image else 1
    convolution, most, mean = (
        (Conv2d, MaxPool2d, AveragePool2d) if image else (Conv1d, MaxPool1d, AveragePool1d)
    )
    shape = (*(draw(st.integers(7, 10)) for _ in range(axes)), draw(st.integers(1, 5)))
    layers: list[Any] = []
    for _ in range(draw(st.integers(1, 4))):
        channels, kernel = draw(st.sampled_from([2, 4, 6])), draw(st.integers(1, 3))
        stride, padding = draw(st.integers(1, 2)), draw(st.integers(0, 2))
        kind = draw(st.sampled_from(["convolution", "most", "mean", "norm", "tanh", "residual"]))
        match kind:
            case "convolution":
                layers += [
                    convolution(channels, kernel, stride, padding),
                    draw(st.sampled_from([Tanh(), Relu()])),
                ]
            case "most" | "mean":
                layers.append((most if kind == "most" else mean)(kernel, stride))
            case "norm":
                layers += [convolution(channels, 1), GroupNorm(2)]
            case "tanh":
                layers.append(Tanh())
            case "residual":
                body = (convolution(channels, 3, stride, 1), Tanh(), convolution(channels, 1))
                layers.append(Residual(body, (convolution(channels, 1, stride),)))
    try:
        return small("drawn", shape, *layers)
    except ConfigurationError:  # Windows larger than what is left of the image.
        return small("drawn", shape, layers[0] if isinstance(layers[0], Residual) else Tanh())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(spec=architectures(), seed=st.integers(0, 1000))
def test_any_architecture_is_differentiated(spec: ModelSpec, seed: int) -> None:
    weights, inputs, labels = records(spec, 2, seed)
    subject = engine(spec, microbatch=2)
    gradient = subject.clipped_sum(weights, inputs, labels, [HUGE]).total
    exact = weights.astype(np.float64)
    direction = np.random.default_rng(seed).normal(0, 1, len(weights)) / np.sqrt(len(weights))
    slopes = [
        sum(plain_loss(spec, exact + h * direction, x, y) for x, y in zip(inputs, labels, strict=True))
        for h in (-1e-7, 1e-7)
    ]
    assert gradient @ direction == pytest.approx((slopes[1] - slopes[0]) / 2e-7, rel=1e-3, abs=1e-4)
    assert subject.is_batch_invariant(seed)


@pytest.mark.parametrize(
    "spec", [*SPECS[:7], *(built_in(name) for name in ("digits", "sensor-cnn"))], ids=lambda s: s.name
)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 7])
def test_lots_are_clipped_and_added_up(spec: ModelSpec, count: int) -> None:
    weights, inputs, labels = records(spec, count)
    gradients = singly(spec, weights, inputs, labels).reshape(count, spec.parameter_count)
    norms = np.linalg.norm(gradients, axis=1)
    clip_norm = float(np.median(norms)) * 1.01 if count else 1.0
    result = engine_of(spec).clipped_sum(weights, inputs, labels, [clip_norm])
    expected = np.zeros(spec.parameter_count)
    for gradient, norm in zip(gradients, norms, strict=True):
        expected += gradient * min(1.0, clip_norm / norm)
    close(result.total, expected)
    assert result.within.tolist() == [np.count_nonzero(norms <= clip_norm)]
    assert result.excluded == 0


@pytest.mark.parametrize("spec", [*SPECS[1:7], built_in("digits")], ids=lambda spec: spec.name)
def test_every_layer_is_clipped_by_its_own_norm(spec: ModelSpec) -> None:
    weights, inputs, labels = records(spec, 6)
    gradients = singly(spec, weights, inputs, labels)
    nodes = [node for top in spec.nodes for node in top.walk() if node.blocks]
    norms = np.array([np.linalg.norm(gradients[:, node.parameters], axis=1) for node in nodes])
    clip_norms = np.median(norms, axis=1) * 1.01
    expected = np.zeros(spec.parameter_count)
    for node, clip_norm, layer_norms in zip(nodes, clip_norms, norms, strict=True):
        factors = np.minimum(1, clip_norm / layer_norms)
        expected[node.parameters] = factors @ gradients[:, node.parameters]
    result = engine(spec, per_layer=True, microbatch=4).clipped_sum(weights, inputs, labels, clip_norms)
    close(result.total, expected)
    assert result.within.tolist() == np.count_nonzero(norms <= clip_norms[:, np.newaxis], axis=1).tolist()


@pytest.mark.parametrize("spec", [*SPECS[:7], built_in("digits")], ids=lambda spec: spec.name)
def test_views_are_averaged_before_clipping(spec: ModelSpec) -> None:
    weights, inputs, labels = records(spec, 9)
    labels = labels.repeat(3)[::3][:3]
    gradients = singly(spec, weights, inputs, labels.repeat(3)).reshape(3, 3, -1).mean(axis=1)
    norms = np.linalg.norm(gradients, axis=1)
    clip_norm = float(np.median(norms))
    subject = engine(spec, views=3, microbatch=2)
    result = subject.clipped_sum(weights, inputs.reshape(3, 3, *spec.input_shape), labels, [clip_norm])
    close(result.total, np.minimum(1, clip_norm / norms) @ gradients)
    assert subject.is_batch_invariant()
