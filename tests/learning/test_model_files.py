"""Model files: read as an operator writes them, and the networks that they name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from onnx import TensorProto, helper, numpy_helper

from dpagent.errors import ConfigurationError
from dpagent.learning.model_files import find_model, load_assets, load_model
from dpagent.learning.models.built_ins import BUILT_IN
from dpagent.learning.models.layers import Conv2d, Dense, GroupNorm, Residual, Tanh
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import FrozenNetwork

PLAIN: dict[str, Any] = {"name": "m", "input_shape": [6, 6, 1], "classes": 3, "layers": [{"dense": 3}]}


@pytest.mark.parametrize("spec", BUILT_IN.values(), ids=lambda spec: spec.name)
def test_a_description_is_a_file(spec: ModelSpec, tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(yaml.safe_dump(spec.describe()))
    assert load_model(file) == find_model(str(file)) == find_model(spec.name) == spec


def test_a_file_as_an_operator_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(
        "name: mine\ninput_shape: [6, 6, 1]\nclasses: 3\nlayers:\n"
        "  - conv2d: {channels: 2, kernel: 3}\n  - tanh\n  - group_norm: 2\n"
        "  - residual: {body: [tanh]}\n  - dense: 3\n"
    )
    layers = (Conv2d(2, kernel=3), Tanh(), GroupNorm(2), Residual((Tanh(),)), Dense(3))
    assert load_model(file) == ModelSpec("mine", (6, 6, 1), 3, layers)


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
