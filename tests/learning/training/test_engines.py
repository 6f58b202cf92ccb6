"""The promises of every engine: the clipped sums of the gradients by definition, for any lot."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learning.engines import ENGINES, HUGE, architectures, engine_of, singly
from learning.small_models import SPECS, close, differences, loss_of, records, small

from dpagent.errors import DataError, ParameterError
from dpagent.learning.models.built_ins import BUILT_IN, built_in
from dpagent.learning.models.layers import (
    AveragePool2d,
    Conv2d,
    Dense,
    GroupNorm,
    Layer,
    MaxPool2d,
    Relu,
    Tanh,
)
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import NOBODY, accumulation_slack

pytestmark = pytest.mark.parametrize("name", ENGINES)


@cache
def gradients_by_definition(spec: ModelSpec) -> Any:
    """Of two records, by differences."""
    weights, inputs, labels = records(spec, 2)
    return [differences(spec, weights, x, y) for x, y in zip(inputs, labels, strict=True)]


def ident(spec: ModelSpec) -> str:
    return spec.name


@pytest.mark.parametrize("spec", SPECS, ids=ident)
def test_gradients_of_every_parameter_are_those_of_the_definition(name: str, spec: ModelSpec) -> None:
    weights, inputs, labels = records(spec, 2)
    found = singly(engine_of(name, spec), weights, inputs, labels)
    for gradient, expected in zip(found, gradients_by_definition(spec), strict=True):
        close(gradient, expected)


@pytest.mark.parametrize("model", sorted(BUILT_IN))
def test_gradients_of_built_in_models_along_random_directions(name: str, model: str) -> None:
    spec = built_in(model).head
    weights, inputs, labels = records(spec, 1)
    gradient = engine_of(name, spec).clipped_sum(weights, inputs, labels, [HUGE]).total
    exact, generator = weights.astype(np.float64), np.random.default_rng(0)
    for _ in range(2):
        direction = generator.normal(0, 1, len(weights)) / np.sqrt(len(weights))
        direction += gradient / np.linalg.norm(gradient)
        below, above = (loss_of(spec, exact + h * direction, inputs[0], labels[0]) for h in (-1e-6, 1e-6))
        assert gradient @ direction == pytest.approx((above - below) / 2e-6, rel=1e-4)


@pytest.mark.parametrize("examples", [10, pytest.param(25, marks=pytest.mark.slow)])
def test_any_architecture_is_differentiated_and_clipped(name: str, examples: int) -> None:
    @settings(max_examples=examples)
    @given(spec=architectures(), seed=st.integers(0, 1000))
    def holds(spec: ModelSpec, seed: int) -> None:
        weights, inputs, labels = records(spec, 3, seed)
        subject = ENGINES[name](spec, microbatch=2)
        gradient = subject.clipped_sum(weights, inputs, labels, [HUGE]).total
        exact = weights.astype(np.float64)
        direction = np.random.default_rng(seed).normal(0, 1, len(weights)) / np.sqrt(len(weights))
        slopes = [
            sum(loss_of(spec, exact + h * direction, x, y) for x, y in zip(inputs, labels, strict=True))
            for h in (-1e-7, 1e-7)
        ]
        assert gradient @ direction == pytest.approx((slopes[1] - slopes[0]) / 2e-7, rel=1e-3, abs=1e-4)
        gradients = singly(subject, weights, inputs, labels)
        norms = np.linalg.norm(gradients, axis=1)
        clip_norm = float(np.median(norms)) + 1e-6
        expected = (gradients * np.minimum(1, clip_norm / np.maximum(norms, 1e-30))[:, np.newaxis]).sum(
            axis=0
        )
        close(subject.clipped_sum(weights, inputs, labels, [clip_norm]).total, expected)
        assert subject.is_batch_invariant(seed)

    holds()


@pytest.mark.parametrize("spec", [*SPECS[:7], built_in("digits"), built_in("sensor-cnn")], ids=ident)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 7])
def test_lots_are_clipped_and_added_up(name: str, spec: ModelSpec, count: int) -> None:
    weights, inputs, labels = records(spec, count)
    gradients = singly(engine_of(name, spec), weights, inputs, labels)
    norms = np.linalg.norm(gradients, axis=1)
    clip_norm = float(np.median(norms)) * 1.01 if count else 1.0
    result = engine_of(name, spec).clipped_sum(weights, inputs, labels, [clip_norm])
    close(result.total, gradients.T @ np.minimum(1, clip_norm / norms))
    assert result.within.tolist() == [np.count_nonzero(norms <= clip_norm)]
    assert (result.excluded, result.total.dtype) == (0, np.float64)


@pytest.mark.parametrize("spec", [*SPECS[:7], built_in("digits")], ids=ident)
@pytest.mark.parametrize(("count", "nobodies"), [(0, 9), (3, 6)])
@pytest.mark.parametrize("value", [1.0, np.nan])
def test_rows_of_nobody_add_nothing_whatever_they_hold_and_the_weights_are(
    name: str, spec: ModelSpec, count: int, nobodies: int, value: float
) -> None:
    weights, inputs, labels = records(spec, count)
    places = np.random.default_rng(count).permutation(count + nobodies)
    rows = np.concatenate([inputs, np.full((nobodies, *inputs.shape[1:]), value, inputs.dtype)])[places]
    owners = np.concatenate([labels, np.full(nobodies, NOBODY)])[places]
    for scale in (1.0, np.inf):
        with np.errstate(invalid="ignore"):
            scaled = (weights * np.float32(scale)).astype(np.float32)
        alone = engine_of(name, spec).clipped_sum(scaled, inputs, labels, [0.5])
        found = engine_of(name, spec).clipped_sum(scaled, rows, owners, [0.5])
        close(found.total, alone.total, 1e-6)
        assert (found.within.tolist(), found.excluded) == (alone.within.tolist(), alone.excluded)
        if not count:
            assert not found.total.any()


@pytest.mark.parametrize("spec", [*SPECS[1:7], built_in("digits")], ids=ident)
def test_every_layer_is_clipped_by_its_own_norm(name: str, spec: ModelSpec) -> None:
    weights, inputs, labels = records(spec, 6)
    gradients = singly(engine_of(name, spec), weights, inputs, labels)
    layers = np.split(gradients, np.cumsum(spec.layer_sizes)[:-1], axis=1)
    norms = [np.linalg.norm(layer, axis=1) for layer in layers]
    clip_norms = [float(np.median(each)) * 1.01 for each in norms]
    found = engine_of(name, spec, per_layer=True).clipped_sum(weights, inputs, labels, clip_norms)
    expected = [
        layer.T @ np.minimum(1, clip_norm / np.maximum(length, 1e-30))
        for layer, length, clip_norm in zip(layers, norms, clip_norms, strict=True)
    ]
    close(found.total, np.concatenate(expected))
    assert found.within.tolist() == [
        np.count_nonzero(length <= clip_norm) for length, clip_norm in zip(norms, clip_norms, strict=True)
    ]


@pytest.mark.parametrize("spec", [*SPECS[:7], built_in("digits")], ids=ident)
def test_views_are_averaged_before_they_are_clipped(name: str, spec: ModelSpec) -> None:
    weights, inputs, labels = records(spec, 5 * 3)
    labels = labels[:5]
    one = engine_of(name, spec)
    gradients = singly(one, weights, inputs, np.repeat(labels, 3)).reshape(5, 3, -1).mean(axis=1)
    norms = np.linalg.norm(gradients, axis=1)
    clip_norm = float(np.median(norms)) * 1.01
    views = inputs.reshape(5, 3, *spec.input_shape)
    found = engine_of(name, spec, views=3, microbatch=2).clipped_sum(weights, views, labels, [clip_norm])
    close(found.total, gradients.T @ np.minimum(1, clip_norm / norms))
    assert found.within.tolist() == [np.count_nonzero(norms <= clip_norm)]
    assert engine_of(name, spec, views=3, microbatch=2).is_batch_invariant()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", [*SPECS[:8], built_in("mnist-cnn")], ids=ident)
def test_records_that_are_not_finite_add_exact_zeros(name: str, spec: ModelSpec, value: float) -> None:
    weights, inputs, labels = records(spec, 7)
    subject = engine_of(name, spec)
    spoilt = inputs.copy()
    spoilt[[2, 5]] = value
    found = subject.clipped_sum(weights, spoilt, labels, [0.5])
    silent = subject.clipped_sum(weights, np.where(np.isfinite(spoilt), inputs, 0), labels, [0.5])
    kept = [0, 1, 3, 4, 6]
    rest = subject.clipped_sum(weights, inputs[kept], labels[kept], [0.5])
    assert (found.excluded, silent.excluded) == (2, 0)
    assert found.within.tolist() == rest.within.tolist()
    close(found.total, rest.total, 1e-6)
    # Nothing of it is left behind, neither in the next lot nor in the blank records of this one.
    assert (
        subject.clipped_sum(weights, inputs[kept], labels[kept], [0.5]).total.tobytes()
        == rest.total.tobytes()
    )
    alone = subject.clipped_sum(weights, spoilt[2:3], labels[2:3], [0.5])
    assert (alone.excluded, alone.within.sum(), np.any(alone.total)) == (1, 0, False)


@pytest.mark.parametrize(
    "layers",
    [
        (Conv2d(4, 1), Tanh(), Conv2d(4, 2, 2)),
        (Conv2d(4, 1), Tanh(), MaxPool2d(2, 1), Conv2d(4, 3, 3), Tanh()),
        (Conv2d(4, 1), AveragePool2d(2, 2), Relu()),
        (Tanh(), Conv2d(4, 1), MaxPool2d(3, 2), GroupNorm(2)),
    ],
    ids=["stride", "sliding maximum", "mean", "activation first"],
)
def test_what_no_window_reads_has_no_influence(name: str, layers: tuple[Layer, ...]) -> None:
    """But where it is not finite, the record is left out like any other that holds such a number."""
    size = 8 if isinstance(layers[2], MaxPool2d) or isinstance(layers[0], Tanh) else 9
    spec = small("unread", (size, size, 2), *layers)
    weights, inputs, labels = records(spec, 3)
    subject = engine_of(name, spec)
    expected = subject.clipped_sum(weights, inputs, labels, [0.5])
    inputs[:, -1], inputs[:, :, -1] = 12.5, -12.5
    close(subject.clipped_sum(weights, inputs, labels, [0.5]).total, expected.total, 1e-6)
    inputs[1, -1, -1, 0], inputs[2, -1, 0, 1] = np.nan, np.inf
    alone = subject.clipped_sum(weights, inputs[:1], labels[:1], [0.5])
    found = subject.clipped_sum(weights, inputs, labels, [0.5])
    assert (found.excluded, found.within.tolist()) == (2, alone.within.tolist())
    close(found.total, alone.total, 1e-6)


def test_a_gradient_too_long_for_float32_is_left_out(name: str) -> None:
    spec = small("linear", (4,))
    weights, inputs, labels = records(spec, 3)
    inputs[1] = 1e25  # Finite, and so is the gradient; its square is not.
    found = engine_of(name, spec).clipped_sum(weights, inputs, labels, [1.0])
    assert found.excluded == 1
    close(
        found.total, engine_of(name, spec).clipped_sum(weights, inputs[::2], labels[::2], [1.0]).total, 1e-6
    )


@pytest.mark.parametrize("size", [1e17, 1e18])
def test_factors_whose_squares_underflow_do_not_escape_clipping(name: str, size: float) -> None:
    """The gradient by a dense layer: one factor's square is lost to float32, and the other's is enormous."""
    spec = small("certain", (6,), Dense(8), Relu())
    weights = np.zeros(spec.parameter_count, np.float32)
    weights[: 6 * 8] = np.random.default_rng(0).uniform(0, size, 6 * 8)
    weights[-spec.classes] = 53.5  # The first class is certain: the others have some 1e-24.
    inputs = np.random.default_rng(1).random((1, 6), dtype=np.float32)
    found = engine_of(name, spec).clipped_sum(weights, inputs, np.zeros(1, np.int64), [1e-9])
    assert np.linalg.norm(found.total) <= 1e-9 * (1 + accumulation_slack(1))


@pytest.mark.parametrize("seed", range(4))
def test_no_weights_let_a_record_add_more_than_the_clip_norm(name: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for spec in SPECS[:6]:
        subject = engine_of(name, spec)
        blocks = spec.parameter_shapes
        for _ in range(25):
            weights, inputs, labels = records(spec, 1, int(generator.integers(100)))
            for block in blocks:
                weights[block.offset : block.offset + block.size] *= np.float32(
                    10 ** generator.uniform(-25, 25)
                )
            if generator.random() < 0.7:
                last = blocks[-1]
                weights[last.offset : last.offset + last.size] = 0
                weights[last.offset] = generator.uniform(20, 90)
                labels[:] = 0
            clip_norm = float(10 ** generator.uniform(-9, 3))
            with np.errstate(all="ignore"):
                found = subject.clipped_sum(weights, inputs, labels, [clip_norm])
            assert np.linalg.norm(found.total) <= clip_norm * (1 + accumulation_slack(1))


def test_weights_that_are_not_finite_release_nothing(name: str) -> None:
    spec = built_in("digits")
    weights, inputs, labels = records(spec, 5)
    weights[17] = np.nan
    found = engine_of(name, spec).clipped_sum(weights, inputs, labels, [1.0])
    assert (found.excluded, found.within.tolist(), np.any(found.total)) == (5, [0], False)


@pytest.mark.parametrize("model", ["digits", "mnist-cnn"])
def test_sums_are_as_exact_as_the_slack_says(name: str, model: str) -> None:
    spec, clip_norm, microbatch = built_in(model), 0.01, 64
    weights, inputs, labels = records(spec, 128)
    alone = engine_of(name, spec)  # In microbatches of four: an emulated board takes minutes for 128 of 64.
    singles = [
        alone.clipped_sum(weights, inputs[i : i + 1], labels[i : i + 1], [clip_norm]) for i in range(128)
    ]
    norms = np.array([np.linalg.norm(single.total) for single in singles])
    assert np.all(norms <= clip_norm * (1 + accumulation_slack(1)))
    assert norms.min() > clip_norm * 0.999
    subject = engine_of(name, spec, microbatch=microbatch)
    total = subject.clipped_sum(weights, inputs, labels, [clip_norm]).total
    exact = np.sum([single.total for single in singles], axis=0)
    # A lot of two microbatches is off by two of the errors of which the slack holds four.
    assert np.linalg.norm(total - exact) <= accumulation_slack(microbatch) * clip_norm / 2


def test_bytes_are_taken_as_parts_of_255(name: str) -> None:
    spec = built_in("digits")
    weights, inputs, labels = records(spec, 5)
    pixels = (inputs * 255).astype(np.uint8)
    subject = engine_of(name, spec)
    from_bytes = subject.clipped_sum(weights, pixels, labels, [0.5]).total
    from_floats = subject.clipped_sum(weights, pixels / np.float32(255), labels, [0.5]).total
    assert from_bytes.tobytes() == from_floats.tobytes()


def test_a_tie_in_a_pooling_window_goes_to_the_first_in_row_major_order(name: str) -> None:
    # The first channel is what is compared; the second numbers the pixels, and has no weight.
    for kernel, stride, size in ((2, 1, 3), (2, 2, 2), (3, 1, 4), (3, 3, 3), (3, 2, 5)):
        pooled = (size - kernel) // stride + 1
        spec = ModelSpec(
            "ties", (size, size, 2), 2, (Conv2d(1, 1), Tanh(), MaxPool2d(kernel, stride), Dense(2))
        )
        weights = np.zeros(spec.parameter_count, np.float32)
        weights[0] = 1
        weights[3:5] = [1, -1]  # Of all windows only the first one counts.
        assert len(weights) == 5 + 2 * (pooled * pooled - 1) + 2
        generator = np.random.default_rng(kernel)
        for _ in range(12):
            image = np.zeros((size, size, 2), np.float32)
            image[..., 1] = np.arange(size * size).reshape(size, size) / 16
            window = generator.integers(0, 2, (kernel, kernel))
            image[:kernel, :kernel, 0] = window / 2
            row, column = np.unravel_index(window.argmax(), window.shape)
            gradient = (
                engine_of(name, spec).clipped_sum(weights, image[np.newaxis], np.array([1]), [HUGE]).total
            )
            assert gradient[1] / gradient[2] == pytest.approx(image[row, column, 1], rel=1e-5)


def test_what_does_not_fit_is_named_before_anything_is_computed(name: str) -> None:
    spec = built_in("digits")
    weights, inputs, labels = records(spec, 4)
    subject = engine_of(name, spec)

    def refuse(error: type[Exception], pattern: str, **wrong: Any) -> None:
        arguments = {"weights": weights, "inputs": inputs, "labels": labels, "clip_norms": [1.0], **wrong}
        with pytest.raises(error, match=pattern):
            subject.clipped_sum(**arguments)

    refuse(ParameterError, r"float64 of shape \(9930,\)", weights=weights.astype(np.float64))
    refuse(ParameterError, r"shape \(9929,\)", weights=weights[1:])
    refuse(DataError, r"shape \(4, 8, 8\)", inputs=inputs[..., 0])
    refuse(DataError, "int32", inputs=inputs.astype(np.int32))
    refuse(DataError, r"shape \(3,\)", labels=labels[:3])
    refuse(DataError, "-2", labels=np.array([-2, 0, 0, 0]))
    refuse(DataError, "10", labels=np.array([10, 0, 0, 0]))
    refuse(ParameterError, "clip norm", clip_norms=[1.0, 1.0])
    for norm in (0.0, -1.0, np.nan, np.inf):
        refuse(ParameterError, "clip norm", clip_norms=[norm])
    for options in ({"microbatch": 0}, {"microbatch": 65}, {"views": 0}):
        with pytest.raises(ParameterError):
            ENGINES[name](spec, **options)
