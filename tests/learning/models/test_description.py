"""Models as text: there and back, and every mistake named with its layer."""

from __future__ import annotations

import contextlib
from typing import Any

import cbor2
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dpagent.errors import ConfigurationError
from dpagent.learning.models.built_ins import BUILT_IN
from dpagent.learning.models.description import from_description
from dpagent.learning.models.layers import Conv2d, Dense, GroupNorm, Residual, Tanh
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import FrozenNetwork, Projection, RandomLayers, Scattering

ODD = ModelSpec(
    "odd", (16, 16, 2), 4,
    (Residual((Conv2d(3, kernel=1), Tanh()), (Conv2d(3, kernel=1),)), GroupNorm(3), Dense(4)),
    (0.1, 0.2), (1.0, 2.5),
    (RandomLayers((Conv2d(2, kernel=3, padding=1), Tanh()), seed=7), FrozenNetwork("0" * 64, (8, 8, 3))),
)  # fmt: skip
PROJECTED = ModelSpec("projected", (16, 16, 2), 4, (Dense(4),), front_end=(Scattering(1, 2), Projection(5)))
SPECS = [*BUILT_IN.values(), ODD, PROJECTED]

PLAIN: dict[str, Any] = {"name": "m", "input_shape": [6, 6, 1], "classes": 3, "layers": [{"dense": 3}]}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_description_reads_back_as_the_same_model(spec: ModelSpec) -> None:
    assert from_description(spec.describe()) == spec
    assert from_description(cbor2.loads(cbor2.dumps(spec.describe(), canonical=True))) == spec
    assert from_description(yaml.safe_load(yaml.safe_dump(spec.describe()))).digest() == spec.digest()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": ""}, "name is ''"),
        ({"name": "x" * 65}, "name is 'xxx.*1 to 64 printable"),
        ({"name": "a\nb"}, "printable"),
        ({"colour": 1}, "unknown key 'colour'; expected name, input_shape"),
        ({"input_shape": "6x6"}, "input_shape is '6x6'"),
        ({"input_shape": [6, 6, "1"]}, "input channels is '1'; expected a whole number"),
        ({"input_shape": [6, 6, True]}, "input channels is True"),
        ({"classes": 2.5}, "classes is 2.5"),
        ({"input_scale": "wide"}, "input_scale is 'wide'"),
        ({"input_scale": []}, r"input_scale is \[\]"),
        ({"input_scale": 0}, "input_scale is 0"),
        ({"input_scale": 10**400}, "input_scale is inf"),
        ({"layers": {}}, "layers are {}"),
        ({"layers": [{"dense": 3}] * 300}, "at most 256"),
        ({"layers": [7]}, "layer 0 is 7; expected a kind with its values"),
        ({"layers": [{"a": 1, "b": 2}]}, "layer 0 is "),
        ({"layers": [{"conv3d": {}}]}, "layer 0 is of the kind 'conv3d'; expected one of conv1d, conv2d"),
        ({"layers": ["tanh", {"conv2d": {"channels": 1}}]}, "layer 1 conv2d: kernel is missing"),
        ({"layers": [{"conv2d": {"channels": 1, "kernal": 1}}]}, "layer 0 conv2d: unknown key 'kernal'"),
        ({"layers": [{"conv2d": {"channels": "1", "kernel": 1}}]}, "layer 0 conv2d: channels is '1'"),
        ({"layers": [{"conv2d": 3}]}, "layer 0 conv2d has the values 3"),
        ({"layers": [{"dense": True}]}, "layer 0 dense has the values True"),
        ({"layers": [{"tanh": {"slope": 1}}]}, "layer 0 tanh: unknown key 'slope'; expected none"),
        ({"layers": [{"residual": {"body": ["tanh", {"residual": {"body": ["tanh"]}}]}}]},
         "layer 0 residual body, layer 1 is of the kind 'residual'; expected one of conv1d"),
        ({"layers": [{"residual": {"body": "tanh"}}]}, "layer 0 residual body: layers are 'tanh'"),
        ({"front_end": "scattering"}, "front_end is 'scattering'"),
        ({"front_end": [{"wavelets": {}}]}, "front end, stage 0 is of the kind 'wavelets'"),
        ({"front_end": [{"scattering": {"scales": "two"}}]}, "stage 0 scattering: scales is 'two'"),
        ({"front_end": [{"onnx": {"digest": 5, "output_shape": [1]}}]}, "stage 0 onnx: digest is 5"),
        ({"front_end": [{"onnx": {"digest": "a", "output_shape": 1}}]}, "stage 0 onnx: output_shape is 1"),
        ({"front_end": [{"random": {"layers": [{"nothing": 1}]}}]}, "stage 0 random, layer 0 is of the kind"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        from_description(PLAIN | changes)


@pytest.mark.parametrize("key", ["name", "input_shape", "classes", "layers"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{key} is missing"):
        from_description({name: value for name, value in PLAIN.items() if name != key})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(PLAIN | {"front_end": 0, "input_offset": 0, "input_scale": 0})), ANYTHING)
def test_nothing_else_than_a_configuration_error_comes_of_rubbish(key: str, value: object) -> None:
    with contextlib.suppress(ConfigurationError):
        assert isinstance(from_description(PLAIN | {key: value}), ModelSpec)


@given(ANYTHING)
def test_rubbish_in_place_of_a_layer(value: object) -> None:
    for kind in ("conv2d", "dense", "residual", "group_norm"):
        with pytest.raises(ConfigurationError):
            from_description(PLAIN | {"layers": [{kind: value}, {"dense": 4}]})
