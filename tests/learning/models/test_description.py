"""Models as text: there and back, and every mistake named with its layer."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from dpagent.errors import ConfigurationError
from dpagent.learning.model_files import find_model, load_assets, load_model
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
def test_a_description_reads_back_as_the_same_model(spec: ModelSpec, tmp_path: Path) -> None:
    assert from_description(spec.describe()) == spec
    assert from_description(cbor2.loads(cbor2.dumps(spec.describe(), canonical=True))) == spec
    file = tmp_path / "model.yaml"
    file.write_text(yaml.safe_dump(spec.describe()))
    assert load_model(file) == find_model(str(file)) == spec
    assert load_model(file).digest() == spec.digest()


def test_a_file_as_an_operator_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(
        "name: mine\ninput_shape: [6, 6, 1]\nclasses: 3\nlayers:\n"
        "  - conv2d: {channels: 2, kernel: 3}\n  - tanh\n  - group_norm: 2\n"
        "  - residual: {body: [tanh]}\n  - dense: 3\n"
    )
    layers = (Conv2d(2, kernel=3), Tanh(), GroupNorm(2), Residual((Tanh(),)), Dense(3))
    assert load_model(file) == ModelSpec("mine", (6, 6, 1), 3, layers)


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


def test_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.yaml: No such file"):
        find_model(str(tmp_path / "none.yaml"))
    file = tmp_path / "list.yaml"
    file.write_text("- 1\n")
    with pytest.raises(ConfigurationError, match=r"list\.yaml:1: expected keys and values, such as `name"):
        load_model(file)
    with pytest.raises(ConfigurationError, match=r"'vgg'; expected one of cifar-cnn.*or the path of a model"):
        find_model("vgg")


def write_network(path: Path) -> None:
    """Means over the rows of 6×6 pixels."""
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["x", "axes"], ["y"], keepdims=0)],
        "rows",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6, 6, 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6, 1])],
        [numpy_helper.from_array(np.array([1]), "axes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path.write_bytes(model.SerializeToString())


def with_stage(tmp_path: Path, stage: Any) -> Path:
    file = tmp_path / "model.yaml"
    file.write_text(yaml.safe_dump(PLAIN | {"front_end": [{"random": {"layers": ["tanh"]}}, stage]}))
    return file


def test_a_network_is_named_by_its_file(tmp_path: Path) -> None:
    write_network(tmp_path / "rows.onnx")
    data = (tmp_path / "rows.onnx").read_bytes()
    file = with_stage(tmp_path, {"onnx": {"file": "rows.onnx"}})
    spec = load_model(file)
    assert spec.front_end[1] == FrozenNetwork(hashlib.sha256(data).hexdigest(), (6, 1))
    assert load_assets(file) == {"frozen-network": data}
    assert load_assets(with_stage(tmp_path, {"random": {"layers": ["tanh"]}})) == {}


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ({"onnx": {"file": "none.onnx"}}, r"stage 1 onnx: .*none\.onnx: No such file"),
        ({"onnx": {"file": "model.yaml"}}, r"stage 1 onnx: .*model\.yaml is no ONNX file"),
        ({"onnx": {"file": "odd.onnx"}}, r"stage 1 onnx: .*odd\.onnx, node 0 \(Unheard\) is not among"),
        ({"onnx": {"file": "rows.onnx", "colour": 1}}, "stage 1 onnx: unknown key 'colour'"),
    ],
)
def test_a_file_that_is_no_network_is_named(tmp_path: Path, stage: Any, text: str) -> None:
    write_network(tmp_path / "rows.onnx")
    odd = helper.make_graph(
        [helper.make_node("Unheard", ["x"], ["y"])], "odd",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6, 6, 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 6, 1])],
    )  # fmt: skip
    model = helper.make_model(odd, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    (tmp_path / "odd.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ConfigurationError, match=text):
        load_model(with_stage(tmp_path, stage))
