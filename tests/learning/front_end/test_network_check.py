"""Frozen networks that may see private records, by their operators, before anything is run."""

from __future__ import annotations

import contextlib
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import yaml
from frozen_networks import choosy, external, network, node, of_a_file, of_chance, selective, tanh
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dpagent.errors import ConfigurationError
from dpagent.learning.front_end.network_check import check_network, operators
from dpagent.learning.model_files import load_assets, load_model
from dpagent.learning.onnx_session import LOAD_ERRORS, quiet_session

TRUE, FALSE = (np.array(value) for value in (True, False))


def branch(name: str) -> Any:
    return helper.make_graph(
        [helper.make_node("Identity", ["x"], [name])],
        name,
        [],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
    )


def sparse() -> Any:
    tensor = helper.make_sparse_tensor(
        numpy_helper.from_array(np.ones(1, np.float32), "v"), numpy_helper.from_array(np.array([1]), "i"), [4]
    )
    return helper.make_node("Constant", [], ["s"], "the constant", sparse_value=tensor)


def of(nodes: list[Any], **constants: NDArray[Any]) -> bytes:
    return network(nodes, constants=constants)


def two_minded(name: str, number: int) -> Any:
    """A whole number to ONNX Runtime, and to who looks for a tensor, one of float32."""
    made = helper.make_node("Constant", [], [name], value_int=number)
    made.attribute[0].name = "value"
    made.attribute[0].t.CopyFrom(numpy_helper.from_array(np.float32(0)))
    return made


BAD: dict[str, tuple[bytes, str]] = {
    "the runtime's own format": (b"\x18\0\0\0ORTM" + bytes(64), "ONNX Runtime's own format"),
    "integers divided": (
        of([node("Div", "n m", "q"), node("Cast", "q", "c", to=TensorProto.FLOAT), node("Add", "x c", "y")],
           n=np.array(-(2**63)), m=np.array(-1)),
        "divides integers",
    ),
    "an exponent of the record": (of([node("Pow", "x x", "y")]), "depends on the record"),
    "a sine": (of([node("Sin", "x", "y")]), r"\(Sin\) is not among"),
    "a branch for each sign": (
        of([node("PRelu", "x slope", "y")], slope=np.ones(4, np.float32)), r"\(PRelu\) is not among"
    ),
    "a root as a power": (of([node("Pow", "x half", "y")], half=np.float32(0.5)), "Pow.* 2 or 3"),
    "several powers": (of([node("Pow", "x two", "y")], two=np.full(4, 2, np.float32)), "Pow.* 2 or 3"),
    "64 bits": (
        of([node("Cast", "x", "d", to=11), node("Exp", "d", "e"), node("Cast", "e", "y", to=1)]),
        "makes 'd' of type double",
    ),
    "16 bits": (
        of([node("Cast", "x", "h", to=10), node("Cast", "h", "y", to=1)]),
        "makes 'h' of type float16",
    ),
    "a branch for each number that is none": (of([node("Sign", "x", "y")]), r"\(Sign\) is not among"),
    "a branch for each length": (
        of([node("LpNormalization", "x", "y")]), r"\(LpNormalization\) is not among"
    ),
    "a branch for each place": (
        of([node("Unsqueeze", "x a", "u"), node("MaxPool", "u", "m", kernel_shape=[2], dilations=[2]),
            node("Squeeze", "m a", "y")], a=np.array([1])),
        "MaxPool.* has dilations, or an order by columns",
    ),
    "another order of places": (
        of([node("Unsqueeze", "x a", "u"), node("MaxPool", "u", "m", kernel_shape=[2], storage_order=1),
            node("Squeeze", "m a", "y")], a=np.array([1])),
        "MaxPool.* has dilations, or an order by columns",
    ),
    "a branch for each gate": (
        of([node("Unsqueeze", "x a", "u"), node("GRU", "u w w", "g", hidden_size=4),
            node("Reshape", "g flat", "y")],
           a=np.array([1]), w=np.ones((1, 12, 4), np.float32), flat=np.array([-1, 4])),
        r"\(GRU\) is not among",
    ),
    "a branch for each cell": (
        of([node("Unsqueeze", "x a", "u"), node("LSTM", "u w w", "g", hidden_size=4),
            node("Reshape", "g flat", "y")],
           a=np.array([1]), w=np.ones((1, 16, 4), np.float32), flat=np.array([-1, 4])),
        r"\(LSTM\) is not among",
    ),
    "a constant of another kind": (
        of([two_minded("one", 1), two_minded("none", 0), node("Less", "x zero", "c"),
            node("Where", "c one none", "i"), node("Div", "one i", "q"), node("Cast", "q", "y", to=1)],
           zero=np.zeros(1, np.float32)),
        "another kind than its name says",
    ),
    "a constant of two minds": (
        of([helper.make_node("Constant", [], ["w"], value_float=1.0, value_int=1), node("Add", "x w", "y")]),
        "2 attributes|does not fit together",
    ),
    "external": (of_a_file("private.bin"), "constant 'w' lies in another file"),
    "external in a node": (
        of([helper.make_node("Constant", [], ["w"], "weights", value=external("../key")),
            node("MatMul", "x w", "y")]),
        r"node 0 'weights' \(Constant\) lies in another file",
    ),
    "random": (of_chance(), r"node 0 'the RandomUniformLike' \(RandomUniformLike\) is not among"),
    "random without inputs": (
        of([node("RandomNormal", "", "r", shape=[4]), node("Add", "x r", "y")]), r"node 0 .*RandomNormal"
    ),
    "bernoulli": (of([node("Bernoulli", "x", "y")]), r"\(Bernoulli\) is not among"),
    "if": (
        of([node("If", "c", "y", then_branch=branch("a"), else_branch=branch("b"))], c=TRUE),
        r"node 0 'the If' \(If\) runs a graph of its own",
    ),
    "nonzero": (of([node("NonZero", "x", "i"), node("Cast", "i", "y", to=1)]), r"\(NonZero\) is not among"),
    "look-up": (choosy(), r"node 0 'the Cast' \(Cast\) makes 'i' of type int64 of a record"),
    "selection": (selective(), r"\(Compress\) is not among"),
    "places": (of([node("ArgMax", "x", "i"), node("Gather", "x i", "y")]), "ArgMax.* is not among"),
    "shape of a record": (
        of([node("Cast", "x", "i", to=7), node("Reshape", "i flat", "j"), node("Expand", "one j", "y")],
           flat=np.array([-1]), one=np.ones(1, np.float32)),
        "makes 'i' of type int64",
    ),
    "float place": (of([node("CumSum", "x x", "y")]), "takes 'x' for its shapes or places|does not fit"),
    "integers by a choice": (
        of([node("Less", "x zero", "c"), node("Where", "c one none", "i"), node("Cast", "i", "y", to=1)],
           zero=np.zeros(1, np.float32), one=np.array([1]), none=np.array([0])),
        r"node 1 'the Where' \(Where\) makes 'i' of type int64",
    ),
    "where pooling looked": (
        of([node("Unsqueeze", "x a", "u"), node("MaxPool", "u", "m i", kernel_shape=[1]),
            node("Squeeze", "m a", "y")], a=np.array([1])),
        "makes 'i' of type int64",
    ),
    "another domain": (
        of([helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")]), r"domain 'com\.microsoft'"
    ),
    "dropout": (
        of([node("Dropout", "x r t", "y")], r=np.float32(0.5), t=TRUE), "Dropout.* may be in training mode"
    ),
    "dropout by the record": (
        of([node("Less", "x h", "c"), node("Squeeze", "c", "t"), node("Dropout", "x r t", "y")],
           h=np.float32(0.5), r=np.float32(0.5)),
        "Dropout.* may be in training mode",
    ),
    "training": (
        of([node("BatchNormalization", "x s s s s", "y m v", training_mode=1)], s=np.ones(4, np.float32)),
        "BatchNormalization.* is in training mode",
    ),
    "sparse": (of([sparse(), node("Add", "x s", "y")]), "node 0 'the constant'.* sparse"),
    "out of order": (
        of([node("Tanh", "t", "y"), node("Tanh", "x", "t")]), "node 0 .* 't' is made after|does not fit"
    ),
    "made twice": (of([node("Tanh", "x", "y"), node("Relu", "x", "y")]), "'y' is made .*twice|does not fit"),
    "not text": (tanh().replace(b"Tanh", b"T\xff\xfeh"), "is not among"),
    "empty": (b"", "is no ONNX file"),
    "rubbish": (b"\xff" * 40, "is no ONNX file"),
    "cut short": (tanh()[:60], "is no ONNX file"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_function_of_one_record_is_refused_by_file_and_node(case: str) -> None:
    data, text = BAD[case]
    with pytest.raises(ConfigurationError, match=rf"^features\.onnx.*({text})"):
        check_network("features.onnx", data)


def test_a_model_file_that_names_such_a_network_cannot_be_loaded(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    stage = {"onnx": {"file": "odd.onnx"}}
    values = {"name": "odd", "input_shape": [4], "classes": 2, "front_end": [stage]}
    file.write_text(yaml.safe_dump(values | {"layers": [{"dense": 2}]}))
    (tmp_path / "odd.onnx").write_bytes(tanh())
    assert load_model(file).feature_shape == (4,)
    (tmp_path / "odd.onnx").write_bytes(of_chance())
    for load in (load_model, load_assets):
        with pytest.raises(ConfigurationError, match=r"stage 0 onnx: .*odd\.onnx, node 0 .*RandomUniform"):
            load(file)


def test_only_what_was_looked_at_is_loaded(tmp_path: Path) -> None:
    """The runtime knows its own format by four bytes, at a place where ONNX may have anything."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "own.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(tanh(), options, providers=["CPUExecutionProvider"])
    own = (tmp_path / "own.ort").read_bytes()
    assert own[4:8] == b"ORTM"
    onnxruntime.InferenceSession(own, providers=["CPUExecutionProvider"])
    with pytest.raises(LOAD_ERRORS):
        quiet_session(own)


def test_a_function_or_steps_of_training_are_refused() -> None:
    model = onnx.load_model_from_string(tanh())
    model.functions.add().name = "f"
    with pytest.raises(ConfigurationError, match="functions or training steps"):
        check_network("f.onnx", model.SerializeToString())
    model = onnx.load_model_from_string(tanh())
    model.training_info.add()
    with pytest.raises(ConfigurationError, match="functions or training steps"):
        check_network("f.onnx", model.SerializeToString())


def test_what_a_file_claims_of_its_types_is_not_believed() -> None:
    model = onnx.load_model_from_string(choosy())
    model.graph.value_info.append(helper.make_tensor_value_info("i", TensorProto.FLOAT, ["n", 4]))
    with pytest.raises(ConfigurationError, match="makes 'i' of type int64"):
        check_network("f.onnx", model.SerializeToString())


def network_of_images() -> bytes:
    """As an exporter writes one: shapes computed from shapes, an inactive dropout, two branches."""
    generator = np.random.default_rng(0)
    nodes = [
        node("Transpose", "x", "planes", perm=[0, 3, 1, 2]),
        node("Conv", "planes w b", "c", pads=[1, 1, 1, 1]),
        node("BatchNormalization", "c s b s s", "n"),
        node("Clip", "n low high", "r"),
        node("MaxPool", "r", "p", kernel_shape=[2, 2], strides=[2, 2]),
        node("ReduceMean", "r axes", "m", keepdims=0),
        node("Shape", "p", "size"),
        node("Gather", "size first", "count"),
        node("Concat", "count rest", "flat", axis=0),
        node("Reshape", "p flat", "f"),
        node("Dropout", "f half no", "d"),
        helper.make_node("Concat", ["d", "m"], ["joined"], axis=1),
        node("Gemm", "joined g", "o"),
        node("Softmax", "o", "y", axis=1),
    ]
    constants: dict[str, Any] = {
        "w": generator.normal(size=(3, 1, 3, 3)).astype(np.float32), "b": np.zeros(3, np.float32),
        "s": np.ones(3, np.float32), "low": np.float32(0), "high": np.float32(6), "axes": np.array([2, 3]),
        "first": np.array([0]), "rest": np.array([-1]), "half": np.float32(0.5), "no": FALSE,
        "g": generator.normal(size=(15, 5)).astype(np.float32),
    }  # fmt: skip
    graph = helper.make_graph(
        nodes, "images",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 4, 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())


def test_an_ordinary_network_passes_and_runs() -> None:
    data = network_of_images()
    check_network("images.onnx", data)
    (features,) = quiet_session(data).run(None, {"x": np.zeros((1, 4, 4, 1), np.float32)})
    assert features.shape == (1, 5)


def test_squares_and_cubes_pass() -> None:
    """What takes the same time for all numbers, of an operator that does not always."""
    check_network("square.onnx", of([node("Pow", "x two", "y")], two=np.float32(2)))
    check_network("cube.onnx", of([node("Pow", "x three", "y")], three=np.full((1, 1), 3, np.float32)))


def test_no_operator_that_draws_or_branches_is_on_the_list() -> None:
    """By what ONNX says of its operators: none that passes may hold a graph or be random."""
    listed = set(operators())
    for schema in onnx.defs.get_all_schemas():
        if schema.domain == "" and schema.name in listed:
            kinds = {attribute.type for attribute in schema.attributes.values()}
            assert onnx.defs.OpSchema.AttrType.GRAPH not in kinds, schema.name
            if "seed" in schema.attributes:
                assert schema.name == "Dropout"
    known = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    assert listed <= known | {"Upsample"}, listed - known


def test_damaged_files_never_end_in_a_traceback() -> None:
    whole = network_of_images()
    draws = random.Random(0)
    for cut in itertools.chain(range(0, len(whole), 97), range(40)):
        damaged = bytearray(whole[:cut] if cut % 2 else whole)
        for _ in range(3):
            if damaged:
                damaged[draws.randrange(len(damaged))] = draws.randrange(256)
        with contextlib.suppress(ConfigurationError):
            check_network("damaged.onnx", bytes(damaged))
