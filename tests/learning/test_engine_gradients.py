"""Per-example gradients of the numpy engine against an oracle written from the definitions.

The oracle is the network once more: float64, one example, explicit loops. It shares the
specification with the engine and nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dpagent.errors import DataError, ParameterError
from dpagent.learning import BUILT_IN, Conv2d, Dense, MaxPool2d, ModelSpec, NumpyEngine, Tanh, built_in

Array = np.ndarray[Any, np.dtype[np.float64]]


def naive_logits(spec: ModelSpec, weights: Array, image: Array) -> Array:
    """The logits of one image in [0, 1]."""
    taken = 0

    def take(*shape: int) -> Array:
        nonlocal taken
        size = int(np.prod(shape))
        taken += size
        return weights[taken - size : taken].reshape(shape)

    value: Array = (image.astype(np.float64) - spec.input_offset) / spec.input_scale
    for layer in spec.layers:
        match layer:
            case Conv2d(channels=channels, kernel=kernel, stride=stride, padding=padding):
                weight = take(kernel, kernel, value.shape[2], channels)
                value = _convolve(value, weight, stride, padding) + take(channels)
            case MaxPool2d(kernel=kernel, stride=stride):
                value = _pool(value, kernel, stride)
            case Tanh():
                value = np.tanh(value)
            case Dense(units=units):
                flat = value.ravel()
                value = flat @ take(flat.size, units) + take(units)
    assert taken == len(weights)
    return value


def naive_loss(spec: ModelSpec, weights: Array, image: Array, label: int) -> float:
    """Softmax cross-entropy in nats."""
    logits = naive_logits(spec, weights, image)
    shifted = logits - logits.max()
    return float(np.log(np.exp(shifted).sum()) - shifted[label])


def _convolve(image: Array, weight: Array, stride: int, padding: int) -> Array:
    kernel = weight.shape[0]
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    rows = range(0, padded.shape[0] - kernel + 1, stride)
    columns = range(0, padded.shape[1] - kernel + 1, stride)
    return np.array(
        [
            [np.tensordot(padded[r : r + kernel, c : c + kernel], weight, axes=3) for c in columns]
            for r in rows
        ]
    )


def _pool(image: Array, kernel: int, stride: int) -> Array:
    rows = range(0, image.shape[0] - kernel + 1, stride)
    columns = range(0, image.shape[1] - kernel + 1, stride)
    return np.array([[image[r : r + kernel, c : c + kernel].max(axis=(0, 1)) for c in columns] for r in rows])


# One for each way two layers can meet; small, so that every coordinate can be checked.
SMALL = [
    ModelSpec("dense", (2, 3, 2), 3, (Dense(3),)),
    ModelSpec("dense-dense", (2, 3, 2), 3, (Dense(5), Tanh(), Dense(3)), 0.4, 0.5),
    ModelSpec("convolution", (6, 5, 2), 3, (Conv2d(4, 3), Dense(3)), 0.4, 0.5),
    ModelSpec(
        "strided", (7, 8, 1), 3, (Conv2d(4, 3, stride=2, padding=1), Tanh(), Conv2d(3, 3, stride=2), Dense(3))
    ),
    ModelSpec("padded", (4, 4, 2), 3, (Conv2d(3, 3, padding=2), Conv2d(3, 2, padding=1), Tanh(), Dense(3))),
    ModelSpec("tangent-pool", (7, 7, 1), 3, (Conv2d(3, 2), Tanh(), MaxPool2d(2, 1), Conv2d(3, 2), Dense(3))),
    ModelSpec("pool-tangent", (7, 7, 1), 3, (Conv2d(3, 2), MaxPool2d(3, 2), Tanh(), Dense(3))),
    ModelSpec("pool-first", (7, 6, 2), 3, (MaxPool2d(2, 2), Tanh(), MaxPool2d(2, 1), Conv2d(3, 2), Dense(3))),
    ModelSpec("wide-pool", (8, 8, 1), 3, (Conv2d(2, 2), Tanh(), MaxPool2d(3, 1), MaxPool2d(2, 3), Dense(3))),
    ModelSpec("gaps", (9, 9, 1), 3, (Conv2d(2, 2, stride=3), Conv2d(2, 1, stride=2), Tanh(), Dense(3))),
]


def ident(spec: ModelSpec) -> str:
    return spec.name


def records(spec: ModelSpec, count: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Weights with non-zero biases, inputs in [0, 1] and labels."""
    generator = np.random.default_rng(seed)
    weights = spec.initial_weights(seed) + generator.normal(0, 0.05, spec.parameter_count).astype(np.float32)
    inputs = generator.random((count, *spec.input_shape), dtype=np.float32)
    return weights, inputs, generator.integers(0, spec.classes, count)


def all_gradients(engine: NumpyEngine, weights: Any, inputs: Any, labels: Any) -> Any:
    parts = [part.copy() for part in engine.gradients(weights, inputs, labels)]
    return np.concatenate([np.zeros((0, len(weights)), np.float32), *parts])


def central_difference(spec: ModelSpec, weights: Any, image: Any, label: int, coordinate: int) -> float:
    step = 1e-6
    moved = weights.astype(np.float64)
    moved[coordinate] += step
    above = naive_loss(spec, moved, image, label)
    moved[coordinate] -= 2 * step
    return (above - naive_loss(spec, moved, image, label)) / (2 * step)


@pytest.mark.parametrize("spec", SMALL, ids=ident)
def test_gradient_of_every_parameter_of_small_networks(spec: ModelSpec) -> None:
    weights, inputs, labels = records(spec, 3)
    gradients = all_gradients(NumpyEngine(spec, microbatch=2), weights, inputs, labels)
    for example in range(3):
        expected = [
            central_difference(spec, weights, inputs[example], labels[example], coordinate)
            for coordinate in range(spec.parameter_count)
        ]
        np.testing.assert_allclose(gradients[example], expected, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("spec", BUILT_IN.values(), ids=ident)
def test_gradient_of_random_parameters_of_the_built_in_models(spec: ModelSpec) -> None:
    weights, inputs, labels = records(spec, 2, seed=3)
    gradients = all_gradients(NumpyEngine(spec), weights, inputs, labels)
    generator = np.random.default_rng(4)
    for block in spec.parameter_shapes:
        for coordinate in block.offset + generator.choice(block.size, min(6, block.size), replace=False):
            expected = central_difference(spec, weights, inputs[1], labels[1], coordinate)
            assert gradients[1, coordinate] == pytest.approx(expected, rel=1e-3, abs=3e-6), block.name


@pytest.mark.parametrize("spec", [*SMALL, *BUILT_IN.values()], ids=ident)
def test_logits_losses_and_accuracy(spec: ModelSpec) -> None:
    weights, inputs, labels = records(spec, 5, seed=1)
    engine = NumpyEngine(spec, microbatch=2)
    wide = weights.astype(np.float64)
    expected = np.array([naive_logits(spec, wide, image) for image in inputs])
    np.testing.assert_allclose(engine.logits(weights, inputs), expected, atol=2e-5)
    losses = [naive_loss(spec, wide, image, label) for image, label in zip(inputs, labels, strict=True)]
    np.testing.assert_allclose(engine.losses(weights, inputs, labels), losses, atol=2e-5)
    assert engine.accuracy(weights, inputs, labels) == np.mean(expected.argmax(axis=1) == labels)


def test_a_tie_in_a_pooling_window_goes_to_the_first_in_row_major_order() -> None:
    # A 1x1 convolution with two inputs per output: its weight gradient is, per channel, the sum
    # over windows of the pixel chosen; the second channel numbers the pixels, with no weight.
    spec = ModelSpec("ties", (3, 3, 2), 2, (Conv2d(1, 1), MaxPool2d(2, 1), Dense(2)))
    weights = np.zeros(spec.parameter_count, np.float32)
    weights[0] = 1
    weights[3:11] = [1, -1, 0, 0, 0, 0, 0, 0]  # Only the first of the four windows counts.
    for window, first in (
        ([1, 1, 1, 1], 0),
        ([0, 1, 1, 1], 1),
        ([0, 1, 1, 0], 1),
        ([0, 0, 1, 1], 2),
        ([1, 0, 1, 0], 0),
        ([0, 0, 0, 1], 3),
    ):
        image = np.zeros((3, 3, 2), np.float32)
        image[..., 1] = np.arange(9).reshape(3, 3)
        image[:2, :2, 0] = np.reshape(window, (2, 2))
        gradient = all_gradients(NumpyEngine(spec), weights, image[np.newaxis], np.array([1]))[0]
        # d loss / d (value of window 0) = 2 * softmax(class 0) = 2 / (1 + exp(-2 * value)).
        incoming = 2 / (1 + np.exp(-2.0 * max(window)))
        assert gradient[1] == pytest.approx(incoming * [0, 1, 3, 4][first], rel=1e-6), window
        assert gradient[2] == pytest.approx(incoming, rel=1e-6)


def test_flat_images_give_a_subgradient_of_unit_mass() -> None:
    # MNIST's background ties in every window: each window must pass its gradient on exactly once.
    spec = ModelSpec("flat", (4, 4, 1), 2, (Conv2d(1, 1), Tanh(), MaxPool2d(2, 2), Dense(2)))
    weights, inputs, labels = records(spec, 1)
    inputs[:] = 0
    gradient = all_gradients(NumpyEngine(spec), weights, inputs, labels)[0]
    assert gradient[1] == pytest.approx(central_difference(spec, weights, inputs[0], labels[0], 1), rel=1e-4)


@pytest.mark.parametrize("spec", BUILT_IN.values(), ids=ident)
def test_uint8_inputs_are_scaled_like_a_batch(spec: ModelSpec) -> None:
    weights, _, labels = records(spec, 7)
    pixels = np.random.default_rng(1).integers(0, 256, (7, *spec.input_shape)).astype(np.uint8)
    scaled = pixels.astype(np.float32) / np.float32(255)
    engine = NumpyEngine(spec, microbatch=4)
    assert np.array_equal(
        all_gradients(engine, weights, pixels, labels), all_gradients(engine, weights, scaled, labels)
    )


def test_no_examples_give_no_microbatches() -> None:
    spec = built_in("digits")
    weights, inputs, labels = records(spec, 1)
    engine = NumpyEngine(spec)
    assert list(engine.gradients(weights, inputs[:0], labels[:0])) == []
    assert engine.logits(weights, inputs[:0]).shape == (0, 10)
    with pytest.raises(DataError, match="no records"):
        engine.accuracy(weights, inputs[:0], labels[:0])


def test_two_iterations_may_interleave_when_each_is_consumed_at_once() -> None:
    spec = built_in("digits")
    weights, inputs, labels = records(spec, 8)
    engine = NumpyEngine(spec, microbatch=4)
    expected = all_gradients(engine, weights, inputs, labels)
    other = (weights * np.float32(0.5)).astype(np.float32)
    found = []
    for part in engine.gradients(weights, inputs, labels):
        found.append(part.copy())
        engine.logits(other, inputs)
        next(engine.gradients(other, inputs, labels))
    assert np.array_equal(np.concatenate(found), expected)


def test_what_does_not_fit_is_named_before_anything_is_computed() -> None:
    spec = built_in("digits")
    weights, inputs, labels = records(spec, 4)
    engine = NumpyEngine(spec)
    with pytest.raises(ParameterError, match=r"float64 of shape \(9930,\).*float32 of shape \(9930,\)"):
        engine.gradients(weights.astype(np.float64), inputs, labels)
    with pytest.raises(ParameterError, match=r"shape \(9929,\)"):
        engine.gradients(weights[1:], inputs, labels)
    with pytest.raises(DataError, match=r"shape \(4, 8, 8\); model 'digits'.*\(n, 8, 8, 1\)"):
        engine.gradients(weights, inputs[..., 0], labels)
    with pytest.raises(DataError, match="int32"):
        engine.logits(weights, inputs.astype(np.int32))
    with pytest.raises(DataError, match=r"shape \(3,\); expected whole numbers of shape \(4,\)"):
        engine.gradients(weights, inputs, labels[:3])
    with pytest.raises(DataError, match="from -1 to"):
        engine.losses(weights, inputs, np.array([-1, 0, 0, 0]))
    with pytest.raises(DataError, match="to 10; expected 0 to 9"):
        engine.gradients(weights, inputs, np.array([10, 0, 0, 0]))
    with pytest.raises(ParameterError, match="microbatch is 0"):
        NumpyEngine(spec, microbatch=0)
