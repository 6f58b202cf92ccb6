"""A coordinator makes the model that a board's programs ask, so that it computes long for inputs that it
likes, and training beside that ends slots later.

**Claim.** A board takes no model whose work depends on what it is asked. **Before**, one with a branch and a
loop gave the same answers as the honest one, in 0.7 ms for some pictures and 3.2 s of the processor for
others; beside these, training on one core took 11 s in place of 2 (of 3 each, at no ε). **Power**: certainty,
for branches, loops, shapes, whole numbers and powers, however the file hides them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from exported_models import write_model
from hostile_brokers import length
from onnx import TensorProto, helper, numpy_helper

from dpagent.errors import DataError
from dpagent.learning.inference.even_work import require_even_work
from dpagent.learning.inference.export.model import export_onnx
from dpagent.learning.inference.personal import Recipe, personalise
from dpagent.learning.inference.prediction.exported_model import ExportedModel
from dpagent.learning.models.built_ins import BUILT_IN, built_in

Add = Callable[..., None]


def odd(file: Path, change: Callable[[Add, Callable[..., str]], str]) -> bytes:
    """An honest model to whose answers a change adds a number."""
    model = onnx.load(file)
    graph = model.graph
    graph.node[-1].output[0] = "honest"

    def add(operator: str, inputs: list[str], outputs: str | list[str], **attributes: Any) -> None:
        made = [outputs] if isinstance(outputs, str) else outputs
        graph.node.append(helper.make_node(operator, inputs, made, **attributes))

    def constant(name: str, value: Any, kind: Any = np.float32) -> str:
        graph.initializer.append(numpy_helper.from_array(np.asarray(value, kind), name))
        return name

    add("ReduceMax", ["input"], "most", keepdims=0)
    add("Add", ["honest", change(add, constant)], "logits")
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def _scalar(name: str, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, [])


def _loop(add: Add, constant: Callable[..., str]) -> str:
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Tanh", ["x"], ["y"])], "body",
        [_scalar("i", TensorProto.INT64), _scalar("c", TensorProto.BOOL), _scalar("x")],
        [_scalar("d", TensorProto.BOOL), _scalar("y")],
    )  # fmt: skip
    add("Cast", ["most"], "times", to=TensorProto.INT64)
    add("Loop", ["times", constant("yes", True, bool), constant("zero", 0.0)], "extra", body=body)
    return "extra"


def _branch(add: Add, constant: Callable[..., str]) -> str:
    sides = {
        name: helper.make_graph(
            [helper.make_node("Identity", ["most"], [f"{name}.out"])], name, [], [_scalar(f"{name}.out")]
        )
        for name in ("then_branch", "else_branch")
    }
    add("Greater", ["most", constant("high", 0.9)], "likes")
    add("If", ["likes"], "extra", **sides)
    return "extra"


def _shape(add: Add, constant: Callable[..., str]) -> str:
    add("Cast", ["most"], "size", to=TensorProto.INT64)
    add("Unsqueeze", ["size", constant("first", [0], np.int64)], "sizes")
    add("ConstantOfShape", ["sizes"], "many")
    add("ReduceSum", ["many"], "extra", keepdims=0)
    return "extra"


def _whole_numbers(add: Add, constant: Callable[..., str]) -> str:
    add("Greater", ["most", constant("high", 0.9)], "likes")
    add("Where", ["likes", constant("nought", 0, np.int64), constant("one", 1, np.int64)], "divisor")
    add("Div", ["one", "divisor"], "whole")  # It ends the process.
    add("Cast", ["whole"], "extra", to=TensorProto.FLOAT)
    return "extra"


def _power(add: Add, constant: Callable[..., str]) -> str:
    add("Pow", ["most", constant("exponent", 2.5)], "extra")
    return "extra"


def _place(add: Add, constant: Callable[..., str]) -> str:
    add("Reshape", ["input", constant("row", [1, 1, -1], np.int64)], "wide")
    add("MaxPool", ["wide"], ["values", "places"], kernel_shape=[1])
    add("Div", ["row", "places"], "whole")
    add("Cast", ["whole"], "floats", to=TensorProto.FLOAT)
    add("ReduceMax", ["floats"], "extra", keepdims=0)
    return "extra"


def _chance(add: Add, constant: Callable[..., str]) -> str:
    add("Greater", ["most", constant("high", 0.9)], "likes")
    add("Dropout", ["most", constant("half", 0.5), "likes"], "extra")
    return "extra"


def _dilated(add: Add, constant: Callable[..., str]) -> str:
    add("MaxPool", ["input"], "pooled", kernel_shape=[1, 1], dilations=[1, 2])
    add("ReduceMax", ["pooled"], "extra", keepdims=0)
    return "extra"


def _by_columns(add: Add, constant: Callable[..., str]) -> str:
    add("MaxPool", ["input"], "pooled", kernel_shape=[1, 1], storage_order=1)
    add("ReduceMax", ["pooled"], "extra", keepdims=0)
    return "extra"


def _sign(add: Add, constant: Callable[..., str]) -> str:
    add("Sqrt", ["most"], "root")
    add("Sign", ["root"], "extra")
    return "extra"


ODD = [_loop, _branch, _shape, _whole_numbers, _power, _place, _chance, _dilated, _by_columns, _sign]


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    return write_model(tmp_path / "honest.onnx", (2, 3, 1), 4)


@pytest.mark.parametrize("change", ODD)
def test_a_model_that_computes_longer_for_some_inputs_is_not_taken(honest: Path, change: Any) -> None:
    model = odd(honest, change)
    file = honest.with_name("odd.onnx")
    file.write_bytes(model)
    with pytest.raises(DataError, match="Expected a model that dpagent exported"):
        ExportedModel(file)
    with pytest.raises(DataError, match="Expected a model that dpagent exported"):
        personalise(model, None, Recipe(), honest.parent)  # type: ignore[arg-type]


def test_hidden_in_a_second_part_of_the_graph_it_is_found_too(honest: Path) -> None:
    """Protocol Buffers add what comes twice to what came before."""
    hidden, whole = onnx.ModelProto(), onnx.load_from_string(odd(honest, _power))
    hidden.graph.node.extend([whole.graph.node.pop(-2), whole.graph.node.pop()])
    model = whole.SerializeToString() + hidden.SerializeToString()
    assert "Pow" in [node.op_type for node in onnx.load_from_string(model).graph.node]
    with pytest.raises(DataError, match="Pow"):
        require_even_work("it", model)


def test_whole_numbers_that_are_made_later_are_found_too(honest: Path) -> None:
    """ONNX Runtime brings nodes into their order."""
    model = onnx.load_from_string(odd(honest, _whole_numbers))
    for number, tensor in enumerate(
        [each for each in model.graph.initializer if each.name in ("nought", "one")]
    ):
        model.graph.node.append(helper.make_node("Constant", [], [f"later {number}"], value=tensor))
        (where,) = (node for node in model.graph.node if node.op_type == "Where")
        where.input[1 + number] = f"later {number}"
    with pytest.raises(DataError, match="Where"):
        require_even_work("it", model.SerializeToString())


def test_a_key_that_other_readers_cut_off_is_refused(honest: Path) -> None:
    """They take the lower 32 bits of it, by which it is the graph's."""
    data = honest.read_bytes()
    cut = bytes([7 << 3 | 2 | 0x80, 0x80, 0x80, 0x80, 0x10])
    with pytest.raises(DataError, match="key"):
        require_even_work("it", data + cut + b"\0")


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + length(len(data)) + data


PASSED_OVER = bytes([1 << 3, 0])
"""An input by its number that is no text: readers of Protocol Buffers pass it over."""


def shifted(model: bytes, operator: str, before: int, count: int) -> bytes:
    """The same model for ONNX Runtime, where a node's inputs stand behind what is none."""
    whole = onnx.load_from_string(model)
    nodes = list(whole.graph.node)
    del whole.graph.node[:]
    written = b""
    for node in nodes:
        inputs = [_field(1, name.encode()) for name in node.input]
        if node.op_type == operator:
            inputs[before:before] = [PASSED_OVER] * count
        del node.input[:]
        written += _field(1, b"".join(inputs) + node.SerializeToString())
    return bytes(whole.SerializeToString()) + _field(7, written)


def _scaled(add: Add, constant: Callable[..., str]) -> str:
    """As much larger as the input likes: an image for some of gigabytes."""
    add("Greater", ["most", constant("high", 0.9)], "likes")
    add("Cast", ["likes"], "one or none", to=TensorProto.FLOAT)
    add("Mul", ["one or none", constant("by", [0.0, 0.0, 1e6, 0.0])], "larger")
    add("Add", ["larger", constant("as it is", [1.0] * 4)], "scales")
    add("Resize", ["input", "", "scales"], "large", mode="nearest")
    add("ReduceMax", ["large"], "extra", keepdims=0)
    return "extra"


def _power_of_two(add: Add, constant: Callable[..., str]) -> str:
    add("Pow", [constant("two", 2.0), "most"], "extra")
    return "extra"


@pytest.mark.parametrize(
    ("change", "operator", "before", "count"), [(_scaled, "Resize", 2, 2), (_power_of_two, "Pow", 0, 1)]
)
def test_what_other_readers_pass_over_moves_no_input(
    honest: Path, change: Any, operator: str, before: int, count: int
) -> None:
    """Before, a Resize whose scales hang on the input passed: it took 0.06 ms or, for inputs that its
    coordinator likes, 33, and a file may have as many as it likes."""
    model = odd(honest, change)
    with pytest.raises(DataError, match=operator):
        require_even_work("it", model)
    with pytest.raises(DataError, match=operator):
        require_even_work("it", shifted(model, operator, before, count))


def test_exponents_that_stand_one_by_one_are_several(honest: Path) -> None:
    model = onnx.load_from_string(odd(honest, _power))
    (one,) = (each for each in model.graph.initializer if each.name == "exponent")
    model.graph.initializer.remove(one)
    exponent = TensorProto(name="exponent", data_type=TensorProto.FLOAT, dims=[2])
    tensor = exponent.SerializeToString() + _field(4, np.float32(2.0).tobytes())
    tensor += bytes([4 << 3 | 5]) + np.float32(2.5).tobytes()  # float_data, one more that is not packed
    data = model.SerializeToString() + _field(7, _field(5, tensor))
    with pytest.raises(DataError, match="Pow"):
        require_even_work("it", data)


@pytest.mark.parametrize("is_first", [True, False])
def test_whole_numbers_beside_a_value_are_found(honest: Path, is_first: bool) -> None:
    """ONNX Runtime takes a constant's first attribute, and the part of it that its type names."""
    model = onnx.load_from_string(odd(honest, _whole_numbers))
    plain = helper.make_attribute("value", numpy_helper.from_array(np.float32(0)))
    for number in (0, 1):
        node = helper.make_node("Constant", [], [f"hidden {number}"], value_int=number)
        if is_first:
            node.attribute.append(plain)
        else:
            node.attribute[0].name = "value"
            node.attribute[0].t.CopyFrom(plain.t)
        model.graph.node.insert(0, node)
        (where,) = (node for node in model.graph.node if node.op_type == "Where")
        where.input[1 + number] = f"hidden {number}"
    (division,) = (node for node in model.graph.node if node.op_type == "Div" and node.output[0] == "whole")
    division.input[0] = "hidden 1"
    with pytest.raises(DataError, match="Constant" if is_first else "Where"):
        require_even_work("it", model.SerializeToString())


def test_what_other_exporters_write_is_taken(honest: Path) -> None:
    def change(add: Add, constant: Callable[..., str]) -> str:
        add("Constant", [], "by", value_float=0.5)
        add("Constant", [], "shape", value_ints=[1, -1])
        add("MaxPool", ["input"], "pooled", kernel_shape=[1, 1], dilations=[1, 1])
        add("Reshape", ["pooled", "shape"], "row")
        add("ReduceMax", ["row"], "extra", keepdims=0)
        return "extra"

    require_even_work("it", odd(honest, change))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_what_is_exported_passes(name: str) -> None:
    spec = built_in(name)
    require_even_work("it", export_onnx(spec, spec.initial_weights(seed=0), metadata={}))
