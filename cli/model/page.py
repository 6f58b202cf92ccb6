"""A model for a person, and as a file to start from."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, Final

import yaml

from cli.notation import figure, plain
from cli.tables import render_table
from dpagent.learning.models.costs import features_mib, forward_flops, parameter_bytes, working_bytes
from dpagent.learning.models.layers import Residual
from dpagent.learning.models.spec import ModelSpec, Node
from dpagent.learning.models.stages import FrozenNetwork, RandomLayers
from dpagent.learning.training.onnx_graph.signature import known_digests
from dpagent.protocol.messages import MAX_MESSAGE_BYTES
from dpagent.wording import counted

_WIDTH: Final = 100
_FRAGMENTS: Final = 16
"""By default, as ``fragments_per_update`` in fleet.yaml."""
_VALUE_BITS: Final = 12
"""A usual width of a value on the wire; plans have 4 to 32, by their noise and their lots."""

_RECORDS: Final = 1_000
"""Of which the room for features is shown."""

_MOST_PAYLOAD: Final = MAX_MESSAGE_BYTES - 512


def dimensions(shape: tuple[int, ...]) -> str:
    """28 × 28 × 1."""
    return " × ".join(map(str, shape))


def model_page(spec: ModelSpec, microbatch: int) -> str:
    """Layers with shapes, parameters and operations; then what training takes."""
    rows = [
        ["input", "", dimensions(spec.input_shape), "", ""],
        *_stage_rows(spec),
        *(row for node in spec.nodes for row in _layer_rows(node, "")),
        ["", "", "", f"{spec.parameter_count:,}", f"{sum(map(forward_flops, spec.nodes)):,}"],
    ]
    table = render_table(["layer", "", "output", "parameters", "FLOPs"], rows, words=3)
    return f"Model {spec.name}\n\n{table}\n" + "".join(_facts(spec, microbatch)) + "\n" + _notes(spec)


def as_json(models: Sequence[ModelSpec]) -> dict[str, Any]:
    """Models for a script."""
    return {
        "models": [
            {
                "name": spec.name,
                "input_shape": list(spec.input_shape),
                "classes": spec.classes,
                "parameters": spec.parameter_count,
                "front_end": [stage.kind for stage in spec.front_end],
                "digest": spec.digest().hex(),
            }
            for spec in models
        ]
    }


def model_file(spec: ModelSpec) -> str:
    """The same model as a file for :func:`~dpagent.learning.model_files.load_model`, a line a layer."""
    description = spec.describe()
    lines = [f"# The model {spec.name}, to start one of your own from: give it another name."]
    for key, value in description.items():
        if key == "front_end" and not value:
            continue
        if key in ("front_end", "layers"):
            lines.append(f"{key}:")
            lines += [line for item in value for line in _item(item, "  ")]
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _item(item: Any, indent: str) -> Iterator[str]:
    """An item of a list: what fits a line in one, a residual branch by branch."""
    if not isinstance(item, dict):
        yield f"{indent}- {item}"
        return
    ((kind, values),) = item.items()
    branches = [key for key, value in values.items() if value and isinstance(value, list)]
    if kind not in (Residual.kind, RandomLayers.kind):
        yield f"{indent}- {kind}: {_flow(values)}"
        return
    yield f"{indent}- {kind}:"
    for key, value in values.items():
        if key in branches:
            yield f"{indent}    {key}:"
            yield from (line for inner in value for line in _item(inner, indent + "      "))
        elif not isinstance(value, list):
            yield f"{indent}    {key}: {_flow(value)}"


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _stage_rows(spec: ModelSpec) -> Iterator[list[str]]:
    shape = spec.input_shape
    for number, stage in enumerate(spec.front_end):
        shape = stage.shape_after(shape)
        yield [f"front end {number} {stage.kind}", _values(stage), dimensions(shape), "frozen", ""]


def _layer_rows(node: Node, indent: str) -> Iterator[list[str]]:
    number, _, kind = node.path.rpartition(".")
    number = number.rpartition(".")[2]
    residual = isinstance(node.layer, Residual)
    parameters = sum(block.size for block in node.blocks)
    yield [
        f"{indent}{number} {kind}",
        "" if residual else _values(node.layer),
        dimensions(node.output_shape),
        f"{parameters:,}" if parameters else "",
        f"{forward_flops(node):,}" if parameters else "",
    ]
    for name, branch in (("body", node.body), ("shortcut", node.shortcut)):
        if residual:
            yield [f"{indent}  {name}{'' if branch else ': as it is'}", "", "", "", ""]
        for inner in branch:
            yield from _layer_rows(inner, indent + "    ")


def _values(part: Any) -> str:
    """What a layer or a stage is told, in a few words."""
    said = []
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name == "layers":
            value = ", ".join(layer.kind for layer in value)
        elif field.name == "digest":
            value = f"{value[:12]}…"
        elif isinstance(value, tuple):
            continue  # Which is the output's shape.
        said.append(f"{field.name} {value}")
    return ", ".join(said)


def _facts(spec: ModelSpec, microbatch: int) -> Iterator[str]:
    heads, head = [], spec.head
    if spec.front_end:
        values = head.input_shape
        room = features_mib(spec, _RECORDS)
        heads = [
            ("features", f"{dimensions(values)}, computed once a record and kept"),
            (
                "on disk",
                f"data.features_mib: {room} in agent.yaml for {_RECORDS:,} records (data.max_records)",
            ),
        ]
    networks = [("network", f"{stage.digest}, for trusted_graphs in agent.yaml")
                for stage in spec.front_end if isinstance(stage, FrozenNetwork)]  # fmt: skip
    offset, scale = (_constants(value) for value in (spec.input_offset, spec.input_scale))
    centred = "as they are" if (offset, scale) == ("0", "1") else f"(x - {offset}) / {scale}"
    fragments = max(_FRAGMENTS, -(-spec.parameter_count * _VALUE_BITS // (8 * _MOST_PAYLOAD)))
    payload = -(-spec.parameter_count // fragments) * _VALUE_BITS // 8
    known = any(model == head.digest().hex() for model, _ in known_digests())
    rows = [
        ("classes", f"{spec.classes:,}"),
        ("inputs", f"{centred}; pixels are in [0, 1]"),
        *heads,
        ("digest", spec.digest().hex()),
        ("memory", f"about {_mib(working_bytes(head, microbatch))} for a microbatch of {microbatch},"
                   f" {_mib(parameter_bytes(head))} for the parameters"),
        ("weights", f"{_kb(4 * spec.parameter_count)} to each device, each round"),
        ("update", f"{_kb(fragments * payload)} from each device, each round:"
                   f" {counted(fragments, 'fragment')} of {_kb(payload)} at {_VALUE_BITS} bits a value"),
        *networks,
        ("graph", "known to devices with this version" if known else "to be trusted: dpagent model graph"),
    ]  # fmt: skip
    for name, text in rows:
        yield f"{name:<10}{text}\n"


def _notes(spec: ModelSpec) -> str:
    text = (
        "FLOPs: multiplications and additions of products, one record forward; training takes about three"
        " times as many. Memory is an estimate of what the layers keep: `dpagent bench` measures."
        " Fragments and their width are the plan's (fragments_per_update; the noise)."
    )
    width = max(20, min(shutil.get_terminal_size((_WIDTH, 0)).columns, _WIDTH))
    return textwrap.fill(text, width, break_on_hyphens=False) + "\n"


def _constants(value: float | tuple[float, ...]) -> str:
    return f"[{', '.join(map(plain, value))}]" if isinstance(value, tuple) else plain(value)


def _mib(size: int) -> str:
    return f"{figure(size / 2**20, 2)} MiB"


def _kb(size: int) -> str:
    return f"{figure(size / 1000, 3)} kB"
