"""A model as text: the YAML file an operator writes, and the description that travels in a plan.

One layer is one item of a list, its kind and its values::

    name: my-cnn
    input_shape: [28, 28, 1]
    classes: 10
    input_offset: 0.5
    input_scale: 0.25
    layers:
      - conv2d: {channels: 16, kernel: 5, stride: 2}
      - tanh
      - residual:
          body: [{conv2d: {channels: 16, kernel: 3, padding: 1}}, relu]
      - dense: 10

A layer with one value may be written short, ``dense: 10``. What comes from outside, a file or a
plan, is checked here for its form; :class:`~dpagent.learning.models.spec.ModelSpec` checks that it fits
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

from dpagent.errors import ConfigurationError
from dpagent.learning.front_end.stages import STAGES, FrozenNetwork, RandomLayers, Stage
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.layers import LAYERS, Layer, Residual
from dpagent.learning.models.spec import MAX_LAYERS, ModelSpec

_KEYS: Final = ("name", "input_shape", "classes", "input_offset", "input_scale", "front_end", "layers")
_REQUIRED: Final = ("name", "input_shape", "classes", "layers")
_MAX_NAME: Final = 64
_MAX_STAGES: Final = 8


def describe(spec: ModelSpec) -> dict[str, Any]:
    """``spec`` in plain lists, maps, numbers and strings; :func:`from_description` reads it back."""
    return {
        "name": spec.name,
        "input_shape": list(spec.input_shape),
        "classes": spec.classes,
        "input_offset": _plain(spec.input_offset),
        "input_scale": _plain(spec.input_scale),
        "front_end": [_describe_stage(stage) for stage in spec.front_end],
        "layers": [_describe_layer(layer) for layer in spec.layers],
    }


def from_description(description: object, *, where: str = "The model") -> ModelSpec:
    """The model that a description stands for.

    Args:
        description: of :func:`describe`, or of a file; it may hold anything.
        where: what the text of an error begins with.

    Raises:
        ConfigurationError: it describes no model; the text names the key or the layer.
    """
    if not isinstance(description, dict):
        raise ConfigurationError(
            f"{where} is {_shown(description)}; expected keys and values, such as `name: …`."
        )
    _require_keys(where, description, _KEYS, _REQUIRED)
    name = description["name"]
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME or not name.isprintable():
        raise ConfigurationError(
            f"{where}: name is {_shown(name)}; expected 1 to {_MAX_NAME} printable characters."
        )
    shape = description["input_shape"]
    if not isinstance(shape, list) or not 1 <= len(shape) <= 3:
        raise ConfigurationError(
            f"{where}: input_shape is {_shown(shape)}; expected [features], [length, channels] or"
            " [height, width, channels]."
        )
    return ModelSpec(
        name,
        tuple(shape),
        description["classes"],
        _layers(where, description["layers"]),
        _constant(where, "input_offset", description.get("input_offset", 0.0)),
        _constant(where, "input_scale", description.get("input_scale", 1.0)),
        _stages(where, description.get("front_end", [])),
    )


def load_model(path: Path) -> ModelSpec:
    """Read a model file.

    A stage ``onnx: {file: features.onnx}`` names a file beside it in place of a digest and a shape.

    Raises:
        ConfigurationError: the file is missing, is not YAML, or describes no model; or a file that it
            names is missing, or no network.
    """
    from dpagent.configuration import load_yaml

    description = load_yaml(path, example="name: …")
    if _names_files(description):
        from dpagent.learning.front_end.frozen_network import with_digests

        description = with_digests(description, path)
    return from_description(description, where=str(path))


def load_assets(path: Path) -> dict[str, bytes]:
    """The files that a model file names, by role; see :func:`load_model`.

    Raises:
        ConfigurationError: as of :func:`load_model`.
    """
    from dpagent.configuration import load_yaml

    description = load_yaml(path, example="name: …")
    if not _names_files(description):
        return {}
    from dpagent.learning.front_end.frozen_network import named_files

    return dict.fromkeys(["frozen-network"], named_files(description, path)[0][1])


def is_model_file(name: str) -> bool:
    """Whether ``name`` is the path of a model file and not the name of a built-in model."""
    return name.endswith((".yaml", ".yml"))


def find_model(name: str) -> ModelSpec:
    """The built-in model called ``name``, or the one in the YAML file that ``name`` is the path of.

    Raises:
        ConfigurationError: there is no such model; the text lists the choices.
    """
    return load_model(Path(name)) if is_model_file(name) else built_in(name)


def _names_files(description: dict[Any, Any]) -> bool:
    stages = description.get("front_end")
    return isinstance(stages, list) and any(
        isinstance(stage, dict) and isinstance(stage.get("onnx"), dict) and "file" in stage["onnx"]
        for stage in stages
    )


def _plain(value: float | tuple[float, ...]) -> float | list[float]:
    return [float(number) for number in value] if isinstance(value, tuple) else float(value)


def _describe_layer(layer: Layer) -> Any:
    if isinstance(layer, Residual):
        parts = {"body": layer.body, "shortcut": layer.shortcut}
        return {layer.kind: {key: [_describe_layer(inner) for inner in part] for key, part in parts.items()}}
    values = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return {layer.kind: values} if values else layer.kind


def _describe_stage(stage: Stage) -> Any:
    if isinstance(stage, RandomLayers):
        return {
            stage.kind: {"layers": [_describe_layer(layer) for layer in stage.layers], "seed": stage.seed}
        }
    if isinstance(stage, FrozenNetwork):
        return {stage.kind: {"digest": stage.digest, "output_shape": list(stage.output_shape)}}
    return {stage.kind: {field.name: getattr(stage, field.name) for field in fields(stage)}}


def _stages(where: str, items: object) -> tuple[Stage, ...]:
    if not isinstance(items, list) or len(items) > _MAX_STAGES:
        raise ConfigurationError(
            f"{where}: front_end is {_shown(items)}; expected a list of at most {_MAX_STAGES} stages."
        )
    return tuple(_stage(f"{where}, front end, stage {index}", item) for index, item in enumerate(items))


def _stage(where: str, item: object) -> Stage:
    kind, values, of_kind = _kind_and_values(where, item, STAGES)
    where = f"{where} {kind}"
    if of_kind is RandomLayers:
        return RandomLayers(
            _layers(where, values["layers"], inside=True), _whole(where, "seed", values.get("seed", 0))
        )
    if of_kind is FrozenNetwork:
        digest, shape = values["digest"], values["output_shape"]
        if not isinstance(digest, str):
            raise ConfigurationError(f"{where}: digest is {_shown(digest)}; expected SHA-256 in hexadecimal.")
        if not isinstance(shape, list) or not 1 <= len(shape) <= 3:
            raise ConfigurationError(f"{where}: output_shape is {_shown(shape)}; expected a list of sizes.")
        return FrozenNetwork(digest, tuple(shape))
    stage: Stage = of_kind(**{name: _whole(where, name, value) for name, value in values.items()})
    return stage


def _layers(where: str, items: object, *, inside: bool = False) -> tuple[Layer, ...]:
    if not isinstance(items, list) or len(items) > MAX_LAYERS:
        raise ConfigurationError(
            f"{where}: layers are {_shown(items)}; expected a list of at most {MAX_LAYERS}."
        )
    return tuple(_layer(f"{where}, layer {index}", item, inside=inside) for index, item in enumerate(items))


def _layer(where: str, item: object, *, inside: bool) -> Layer:
    """One layer; ``inside`` a residual there is no other."""
    kind, values, of_kind = _kind_and_values(where, item, LAYERS)
    where = f"{where} {kind}"
    if of_kind is Residual:
        if inside:
            raise ConfigurationError(
                f"{where} lies in another stage; expected a residual among the layers alone."
            )
        return Residual(
            *(_layers(f"{where} {part}", values.get(part, []), inside=True) for part in ("body", "shortcut"))
        )
    layer: Layer = of_kind(**{name: _whole(where, name, value) for name, value in values.items()})
    return layer


def _kind_and_values(where: str, item: object, kinds: Mapping[str, Any]) -> tuple[str, dict[str, Any], Any]:
    """An item of a list: its kind, its values by name, all of them known and none missing, and its class."""
    values: object
    if isinstance(item, str):
        kind, values = item, None
    elif isinstance(item, dict) and len(item) == 1:
        kind, values = next(iter(item.items()))
    else:
        raise ConfigurationError(
            f"{where} is {_shown(item)}; expected a kind with its values, such as `conv2d: {{channels: 16,"
            " kernel: 3}`, or a kind alone, such as `tanh`."
        )
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigurationError(
            f"{where} is of the kind {_shown(kind)}; expected one of {', '.join(kinds)}."
        )
    of_kind = kinds[kind]
    names = [field.name for field in fields(of_kind)]
    required = [field.name for field in fields(of_kind) if field.default is MISSING]
    if values is None:
        values = {}
    elif isinstance(values, int) and not isinstance(values, bool) and len(required) == 1:
        values = {required[0]: values}
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"{where} {kind} has the values {_shown(values)}; expected {', '.join(names) or 'none'}."
        )
    _require_keys(f"{where} {kind}", values, names, required)
    return kind, values, of_kind


def _whole(where: str, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(f"{where}: {name} is {_shown(value)}; expected a whole number.")
    return value


def _require_keys(where: str, values: dict[Any, Any], known: Any, required: Any) -> None:
    for key in values:
        if key not in known:
            raise ConfigurationError(
                f"{where}: unknown key {_shown(key)}; expected {', '.join(known) if known else 'none'}."
            )
    for key in required:
        if key not in values:
            raise ConfigurationError(f"{where}: {key} is missing.")


def _constant(where: str, key: str, value: object) -> float | tuple[float, ...]:
    numbers = value if isinstance(value, list) else [value]
    if not numbers or any(isinstance(x, bool) or not isinstance(x, int | float) for x in numbers):
        raise ConfigurationError(f"{where}: {key} is {_shown(value)}; expected a number, or one a channel.")
    return tuple(map(_number, numbers)) if isinstance(value, list) else _number(value)


def _number(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")  # refused, with its name, by the specification


def _shown(value: object) -> str:
    """A value from outside, in one line of bearable length."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
