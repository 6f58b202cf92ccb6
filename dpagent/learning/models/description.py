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
from typing import Any, Final, TypeVar, get_type_hints

from dpagent.errors import ConfigurationError
from dpagent.learning.models.layers import LAYERS, Layer, Residual
from dpagent.learning.models.part import Part, Shape
from dpagent.learning.models.spec import MAX_LAYERS, ModelSpec
from dpagent.learning.models.stages import STAGES, Stage

ARCHITECTURE_KEY: Final = "dpagent.architecture"
"""Of a description, as JSON, in the metadata of a trained model's file."""
_KEYS: Final = ("name", "input_shape", "classes", "input_offset", "input_scale", "front_end", "layers")
_REQUIRED: Final = ("name", "input_shape", "classes", "layers")
_MAX_NAME: Final = 64
_MAX_STAGES: Final = 8
# Layers that may stand inside of a residual or a stage.
_PLAIN_LAYERS: Final = {kind: layer for kind, layer in LAYERS.items() if layer is not Residual}

_P = TypeVar("_P", bound=Part)


def from_description(description: object, *, where: str = "The model") -> ModelSpec:
    """The model that a description stands for.

    Args:
        description: of :meth:`ModelSpec.describe`, or of a file; it may hold anything.
        where: the beginning of every error text.

    Raises:
        ConfigurationError: it describes no model; the text names the key or the layer.

    >>> layers = ["tanh", {"dense": 2}]
    >>> from_description({"name": "m", "input_shape": [6], "classes": 2, "layers": layers}).layers
    (Tanh(), Dense(units=2))
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
        _layers(where, description["layers"], LAYERS),
        _constant(where, "input_offset", description.get("input_offset", 0.0)),
        _constant(where, "input_scale", description.get("input_scale", 1.0)),
        _stages(where, description.get("front_end", [])),
    )


def _stages(where: str, items: object) -> tuple[Stage, ...]:
    if not isinstance(items, list) or len(items) > _MAX_STAGES:
        raise ConfigurationError(
            f"{where}: front_end is {_shown(items)}; expected a list of at most {_MAX_STAGES} stages."
        )
    return tuple(
        _part(f"{where}, front end, stage {index}", item, STAGES) for index, item in enumerate(items)
    )


def _layers(where: str, items: object, kinds: Mapping[str, type[Layer]]) -> tuple[Layer, ...]:
    if not isinstance(items, list) or len(items) > MAX_LAYERS:
        raise ConfigurationError(
            f"{where}: layers are {_shown(items)}; expected a list of at most {MAX_LAYERS}."
        )
    return tuple(_part(f"{where}, layer {index}", item, kinds) for index, item in enumerate(items))


def _part(where: str, item: object, kinds: Mapping[str, type[_P]]) -> _P:
    """One item of a list: a kind that is known, with values that are known, none of them missing."""
    values: object
    if isinstance(item, str):
        kind, values = item, {}
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
    where = f"{where} {kind}"
    of_kind = kinds[kind]
    types = get_type_hints(of_kind)
    names = [field.name for field in fields(of_kind)]
    required = [field.name for field in fields(of_kind) if field.default is MISSING]
    if values is None:
        values = {}
    elif isinstance(values, int | float) and not isinstance(values, bool) and len(required) == 1:
        values = {required[0]: values}
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"{where} has the values {_shown(values)}; expected {', '.join(names) or 'none'}."
        )
    _require_keys(where, values, names, required)
    return of_kind(**{name: _value(where, name, types[name], value) for name, value in values.items()})


def _value(where: str, name: str, of_type: object, value: object) -> Any:
    """A value by the type of its field; :class:`Part` lists the types."""
    if of_type == tuple[Layer, ...]:
        return _layers(where if name == "layers" else f"{where} {name}", value, _PLAIN_LAYERS)
    expected = "a whole number"
    if of_type is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if of_type is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _number(value)
        expected = "a number"
    if of_type is str:
        if isinstance(value, str):
            return value
        expected = "text"
    if of_type == Shape:
        if isinstance(value, list) and 1 <= len(value) <= 3:
            return tuple(value)
        expected = "a list of one to three sizes"
    raise ConfigurationError(f"{where}: {name} is {_shown(value)}; expected {expected}.")


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
