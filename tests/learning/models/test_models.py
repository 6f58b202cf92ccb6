"""Architectures: counts, layout, rejection of what does not fit, digests and initial weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from dpagent.errors import ConfigurationError
from dpagent.learning.models.built_ins import BUILT_IN, built_in
from dpagent.learning.models.layers import (
    AveragePool1d,
    Conv1d,
    Conv2d,
    Dense,
    GroupNorm,
    Layer,
    MaxPool2d,
    Relu,
    Residual,
    Tanh,
)
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import FrozenNetwork, Projection, RandomLayers, Scattering, Stage


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mnist-cnn", 26_010),
        ("digits", 9_930),
        ("cifar-cnn", 550_570),
        ("sensor-cnn", 143_302),
        ("resnet-8", 77_706),
        ("scattering", 39_700),
    ],
)
def test_built_in_models_have_the_published_number_of_parameters(name: str, count: int) -> None:
    assert built_in(name).parameter_count == count


def test_shapes_of_mnist_cnn() -> None:
    spec = built_in("mnist-cnn")
    assert tuple(node.output_shape for node in spec.nodes) == (
        (14, 14, 16),
        (14, 14, 16),
        (13, 13, 16),
        (5, 5, 32),
        (5, 5, 32),
        (4, 4, 32),
        (32,),
        (32,),
        (10,),
    )


@pytest.mark.parametrize("spec", BUILT_IN.values(), ids=str)
def test_blocks_tile_the_flat_vector_in_order(spec: ModelSpec) -> None:
    position = 0
    for block in spec.parameter_shapes:
        assert block.offset == position
        assert block.size == math.prod(block.shape)
        position += block.size
    assert position == spec.parameter_count


def test_an_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigurationError, match=r"'resnet'.*digits, mnist-cnn"):
        built_in("resnet")


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((), r"ends with None; expected Dense\(units=3\)"),
        ((Dense(4),), r"ends with Dense\(units=4\); expected Dense\(units=3\)"),
        ((Dense(3), Tanh()), r"ends with Tanh"),
        ((Conv2d(2, kernel=9), Dense(3)), r"layer 0 Conv2d.*window of 9x9 is larger than its input of 6x5"),
        ((Tanh(), MaxPool2d(6, 1), Dense(3)), r"layer 1 MaxPool2d.*larger than its input of 6x5"),
        ((Dense(4), Conv2d(2, kernel=1), Dense(3)), r"layer 1 Conv2d.*shape \(4,\); expected an image"),
        ((Conv1d(2, kernel=1), Dense(3)), r"layer 0 Conv1d.*shape \(6, 5, 1\); expected a series"),
        (
            (Conv2d(3, kernel=1), GroupNorm(2), Dense(3)),
            r"layer 1 GroupNorm.*2 groups do not divide the 3 ch",
        ),
        ((Residual(()), Dense(3)), r"layer 0 Residual.*its body is empty"),
        (
            (Residual((Conv2d(2, kernel=1),)), Dense(3)),
            r"layer 0 Residual.*body leads from .* to \(6, 5, 2\)",
        ),
        ((Residual((Residual((Tanh(),)),)), Dense(3)), r"layer 0 Residual.*holds another residual"),
        (
            (Residual((Tanh(), Conv2d(1, kernel=9))), Dense(3)),
            r"layer 0 Residual.*its conv2d: its window of 9x9",
        ),
        ((Conv2d(70_000, kernel=1), Dense(3)), r"layer 0 Conv2d.*channels is 70000.*at most 65536"),
        (
            (Dense(60_000), Dense(60_000), Dense(3)),
            "has 3,602,100,003 parameters; expected at most 50,000,000",
        ),
        ((Tanh(),) * 300 + (Dense(3),), r"has 301 layers; expected at most 256"),
        ((Conv2d(0, kernel=1), Dense(3)), r"layer 0 Conv2d.*channels is 0"),
        ((Conv2d(1, kernel=1, stride=0), Dense(3)), r"layer 0 Conv2d.*stride is 0"),
        ((Conv2d(1, kernel=1, padding=-1), Dense(3)), r"layer 0 Conv2d.*padding is -1"),
        ((Dense(0), Dense(3)), r"layer 0 Dense.*units is 0"),
    ],
)
def test_a_layer_that_does_not_fit_is_named(layers: tuple[Layer, ...], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        ModelSpec("bad", (6, 5, 1), 3, layers)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"input_shape": (6, 5, 1, 1)}, r"expected \(features,\), \(length, channels\) or \(height, width"),
        ({"input_shape": ()}, r"input_shape is \(\)"),
        ({"input_offset": (0.1, 0.2)}, r"input_offset has 2 numbers; expected one, or one for each of the 1"),
        ({"input_shape": (1 << 20, 1 << 20, 1)}, r"at most 2²⁴ values"),
        ({"input_shape": (6, 0, 1)}, "input width is 0"),
        ({"classes": 1}, "classes is 1"),
        ({"input_scale": 0.0}, "input_scale is 0.0"),
        ({"input_offset": math.nan}, "input_offset is nan"),
    ],
)
def test_a_bad_field_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        dataclasses.replace(built_in("digits"), **changes)


def test_any_change_of_the_architecture_changes_the_digest() -> None:
    spec = built_in("digits")
    first, *rest = spec.layers
    variants = [
        spec,
        dataclasses.replace(spec, name="other"),
        dataclasses.replace(spec, input_offset=0.25),
        dataclasses.replace(spec, input_scale=0.25),
        dataclasses.replace(spec, layers=(Conv2d(16, kernel=5, padding=2), *rest)),
        dataclasses.replace(spec, layers=(first, Tanh(), *rest)),
        dataclasses.replace(spec, input_shape=(9, 8, 1)),
    ]
    digests = [variant.digest() for variant in variants]
    assert all(len(digest) == 32 for digest in digests)
    assert len(set(digests)) == len(digests)
    assert dataclasses.replace(spec).digest() == spec.digest()


@pytest.mark.parametrize("spec", BUILT_IN.values(), ids=str)
def test_initial_weights_are_lecun_uniform_with_zero_biases(spec: ModelSpec) -> None:
    weights = spec.initial_weights(7)
    assert weights.dtype == np.float32
    assert weights.shape == (spec.parameter_count,)
    for block in spec.parameter_shapes:
        values = weights[block.offset : block.offset + block.size]
        if block.name.endswith("bias"):
            assert not values.any()
        else:
            fan_in = math.prod(block.shape[:-1])
            assert np.abs(values).max() <= math.sqrt(3 / fan_in) * (1 + 1e-6)
            # 6 standard errors of the variance of a uniform sample.
            assert values.var() * fan_in == pytest.approx(1, abs=6 * math.sqrt(0.8 / block.size))


def test_initial_weights_depend_on_the_seed_only() -> None:
    spec = built_in("digits")
    assert np.array_equal(spec.initial_weights(1), spec.initial_weights(1))
    assert not np.array_equal(spec.initial_weights(1), spec.initial_weights(2))
    # Recorded from this code: every machine and numpy must start from the same bits.
    assert hashlib.sha256(spec.initial_weights(1).tobytes()).hexdigest()[:16] == "d7489af280fa3899"


def test_a_residual_holds_its_layers_in_their_order() -> None:
    block = Residual((Conv2d(4, kernel=3, padding=1), Relu()), (Conv2d(4, kernel=1),))
    spec = ModelSpec("residual", (6, 5, 2), 3, (block, GroupNorm(2), Dense(3)))
    assert [(b.name, b.shape) for b in spec.parameter_shapes] == [
        ("0.residual.body.0.conv2d.weight", (3, 3, 2, 4)),
        ("0.residual.body.0.conv2d.bias", (4,)),
        ("0.residual.shortcut.0.conv2d.weight", (1, 1, 2, 4)),
        ("0.residual.shortcut.0.conv2d.bias", (4,)),
        ("2.dense.weight", (120, 3)),
        ("2.dense.bias", (3,)),
    ]
    assert spec.layer_sizes == (76, 12, 363)
    node = spec.nodes[0]
    assert [inner.path for inner in node.walk()][1:] == [
        "0.residual.body.0.conv2d",
        "0.residual.body.1.relu",
        "0.residual.shortcut.0.conv2d",
    ]
    assert node.shortcut[0].parameters == slice(76, 88)


def test_series_and_tables_have_shapes_of_their_own() -> None:
    layers = (Conv1d(4, kernel=3, stride=2, padding=1), AveragePool1d(2, 2), Dense(3))
    spec = ModelSpec("series", (9, 2), 3, layers, (0.0, 1.0), (1.0, 2.0))
    assert tuple(node.output_shape for node in spec.nodes) == ((5, 4), (2, 4), (3,))
    assert spec.parameter_shapes[0].shape == (3, 2, 4)
    assert ModelSpec("table", (7,), 3, (Dense(3),)).parameter_count == 24


def test_a_front_end_gives_the_layers_their_input() -> None:
    spec = built_in("scattering")
    assert spec.feature_shape == (7, 7, 81)
    head = spec.head
    assert (head.input_shape, head.front_end, head.parameter_count) == ((7, 7, 81), (), 39_700)
    assert head.head is head
    assert built_in("digits").head is built_in("digits")


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (Scattering(scales=5), "scales is 5"),
        (Scattering(scales=4), "input of 28x28 is too small for 4 scales; expected at least 32x32"),
        (Scattering(angles=0), "angles is 0"),
        (RandomLayers(()), "it has no layers"),
        (RandomLayers((Conv2d(2, kernel=40),)), "layer 0 Conv2d.*window of 40x40"),
        (RandomLayers((Residual((Tanh(),)),)), "layer 0 is a residual"),
        (FrozenNetwork("ab", (3,)), "digest is 'ab'"),
        (FrozenNetwork("0" * 64, (3, 3, 3, 3)), r"output_shape is \(3, 3, 3, 3\)"),
        (FrozenNetwork("0" * 64, (1 << 23,)), "makes 8,388,608 features"),
        (Projection(785), "components is 785.*at most 784"),
    ],
)
def test_a_stage_that_does_not_fit_is_named(stage: Stage, text: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"front end, stage 0.*{text}"):
        ModelSpec("bad", (28, 28, 1), 3, (Dense(3),), front_end=(stage,))


def test_the_package_needs_numpy_and_the_standard_library_only() -> None:
    program = "import sys, json, dpagent.learning; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    )
    heavy = {"onnx", "onnxruntime", "scipy", "sklearn", "google", "paho"}
    assert not heavy & {name.partition(".")[0] for name in loaded}
