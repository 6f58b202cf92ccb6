"""Architectures as public records: the computation of a model, without its weights.

A :class:`ModelSpec` is agreed between coordinator and devices before any training. It names the
frozen front end, the trainable layers, the fixed preprocessing of the inputs, and the order in
which all parameters lie in one flat float32 vector: the vector that is published, differentiated,
clipped and exported. Engines and exporters read the specification; they add nothing to it.

Layout. Every layer with parameters occupies one contiguous block of the flat vector, its weight
first and its bias straight after it:

* ``Conv1d``: weight ``(kernel, channels in, channels out)``, bias ``(channels out,)``;
* ``Conv2d``: weight ``(kernel, kernel, channels in, channels out)``, bias ``(channels out,)``;
* ``Dense``: weight ``(units in, units out)``, bias ``(units out,)``.

So each block is also one row-major matrix whose last row is the bias, which is what lets an
engine treat the bias as the weight of a constant input of one. The body of a residual comes
before its shortcut.

The initial weights follow LeCun et al., "Efficient BackProp" (1998), section 4.6.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import (
    ConfigurationError,
    DpagentError,
    ParameterError,
    require_count,
    require_finite,
    require_positive,
)
from dpagent.learning.models.layers import Dense, Layer, Residual
from dpagent.learning.models.part import Shape
from dpagent.learning.models.stages import FrozenNetwork, Projection, Stage
from dpagent.wording import counted

# Part of every digest: raise it when the meaning of a layer, the order of the parameters or
# the preprocessing changes, so that two versions of this code never train one model together.
_SEMANTICS = 2

MAX_PARAMETERS = 50_000_000
MAX_LAYERS = 256

_AXES = {1: ("features",), 2: ("length", "channels"), 3: ("height", "width", "channels")}


class ParameterBlock(NamedTuple):
    """One named tensor inside the flat parameter vector."""

    name: str
    shape: Shape
    offset: int

    @property
    def size(self) -> int:
        """The number of parameters in the block."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Node:
    """One layer in its place, as engines and exporters read it.

    Attributes:
        path: its name, for instance ``3.residual.body.0.conv2d``.
        layer: the layer.
        input_shape, output_shape: of one record.
        blocks: its weight and its bias, or nothing.
        body, shortcut: the nodes of a residual.
    """

    path: str
    layer: Layer
    input_shape: Shape
    output_shape: Shape
    blocks: tuple[ParameterBlock, ...] = ()
    body: tuple[Node, ...] = ()
    shortcut: tuple[Node, ...] = ()

    @property
    def parameters(self) -> slice:
        """The place of its own parameters in the flat vector: weight, then bias."""
        return slice(self.blocks[0].offset, self.blocks[-1].offset + self.blocks[-1].size)

    def walk(self) -> Iterator[Node]:
        """The node and, of a residual, the nodes inside, in the order of their parameters."""
        yield self
        for inner in (*self.body, *self.shortcut):
            yield from inner.walk()


@dataclass(frozen=True)
class ModelSpec:
    """One classifier: its input, its layers and its fixed preprocessing. All of it is public.

    Args:
        name: as plans and messages spell it.
        input_shape: of one record: ``(features,)``, ``(length, channels)`` or
            ``(height, width, channels)``.
        classes: number of classes; the last layer is ``Dense(classes)``.
        layers: the trainable part, in order of computation.
        front_end: frozen stages before the layers; the features of a record are computed once.
        input_offset, input_scale: the network sees ``(x - input_offset) / input_scale`` of an
            input (images: in [0, 1]). One number, or one a channel. They are constants fixed with
            the architecture, never computed from anyone's data.

    Raises:
        ConfigurationError: a layer does not fit the one before it; the text names the layer.

    >>> from dpagent.learning.models.layers import Conv2d, Tanh
    >>> spec = ModelSpec("small", (8, 8, 1), 3, (Conv2d(channels=4, kernel=3), Tanh(), Dense(3)))
    >>> [(node.path, node.output_shape) for node in spec.nodes]
    [('0.conv2d', (6, 6, 4)), ('1.tanh', (6, 6, 4)), ('2.dense', (3,))]
    >>> spec.parameter_count
    475
    >>> spec.describe()["layers"]
    [{'conv2d': {'channels': 4, 'kernel': 3, 'stride': 1, 'padding': 0}}, 'tanh', {'dense': {'units': 3}}]
    """

    name: str
    input_shape: Shape
    classes: int
    layers: tuple[Layer, ...]
    input_offset: float | tuple[float, ...] = 0.0
    input_scale: float | tuple[float, ...] = 1.0
    front_end: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        try:
            self._check_input()
        except DpagentError as error:
            raise ConfigurationError(f"Model {self.name!r}: {error}") from error
        last = self.layers[-1] if self.layers else None
        if last != Dense(self.classes):
            raise ConfigurationError(
                f"Model {self.name!r} ends with {last and last.shown}; expected"
                f" Dense(units={self.classes}), one unit a class."
            )
        if len(self.layers) > MAX_LAYERS:
            raise ConfigurationError(
                f"Model {self.name!r} has {counted(len(self.layers), 'layer')}; expected at most "
                f"{MAX_LAYERS}."
            )
        if self.parameter_count > MAX_PARAMETERS:
            raise ConfigurationError(
                f"Model {self.name!r} has {counted(self.parameter_count, 'parameter')}; expected at most "
                f"{MAX_PARAMETERS:,}."
            )

    @cached_property
    def feature_shape(self) -> Shape:
        """The shape of one record after the front end, as the layers see it."""
        shape = self.input_shape
        if sum(isinstance(stage, FrozenNetwork) for stage in self.front_end) > 1:
            raise ConfigurationError(f"Model {self.name!r}: its front end has two networks; expected one.")
        if any(isinstance(stage, Projection) for stage in self.front_end[:-1]):
            raise ConfigurationError(
                f"Model {self.name!r}: a projection stands within its front end; expected it last, and once."
            )
        for index, stage in enumerate(self.front_end):
            try:
                shape = stage.shape_after(shape)
            except DpagentError as error:
                raise ConfigurationError(
                    f"Model {self.name!r}, front end, stage {index} {stage.shown}: {error}"
                ) from error
        return shape

    @property
    def projection(self) -> Projection | None:
        """The stage that needs a round of its own, which is the last of its front end, or None."""
        last = self.front_end[-1] if self.front_end else None
        return last if isinstance(last, Projection) else None

    @property
    def shape_before_projection(self) -> Shape:
        """The shape of one record before its projection."""
        shape = self.input_shape
        for stage in self.front_end[:-1]:
            shape = stage.shape_after(shape)
        return shape

    @property
    def head(self) -> ModelSpec:
        """The trainable part alone, which takes features as they are."""
        if not self.front_end:
            return self
        return replace(self, input_shape=self.feature_shape, input_offset=0.0, input_scale=1.0, front_end=())

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The layers in their places."""
        nodes: list[Node] = []
        shape, offset = self.feature_shape, 0
        for index, layer in enumerate(self.layers):
            try:
                node = _node(f"{index}.{layer.kind}", layer, shape, offset)
            except DpagentError as error:
                raise ConfigurationError(
                    f"Model {self.name!r}, layer {index} {layer.shown}: {error}"
                ) from error
            nodes.append(node)
            shape, offset = node.output_shape, _end(node, offset)
        return tuple(nodes)

    @cached_property
    def parameter_shapes(self) -> list[ParameterBlock]:
        """Name, shape and offset of every tensor, in the order of the flat vector."""
        return [block for top in self.nodes for node in top.walk() for block in node.blocks]

    @property
    def parameter_count(self) -> int:
        """The length d of the flat parameter vector."""
        last = self.parameter_shapes[-1]
        return last.offset + last.size

    @property
    def layer_sizes(self) -> tuple[int, ...]:
        """Parameters of each layer that has any, weight and bias together, in their order."""
        nodes = (node for top in self.nodes for node in top.walk() if node.blocks)
        return tuple(node.parameters.stop - node.parameters.start for node in nodes)

    def require_weights(self, weights: NDArray[np.float32]) -> None:
        """Raise :class:`ParameterError` unless ``weights`` is a flat float32 vector for this model."""
        if weights.dtype != np.float32 or weights.shape != (self.parameter_count,):
            raise ParameterError(
                f"The weights are {weights.dtype} of shape {weights.shape}; model {self.name!r} takes"
                f" float32 of shape ({self.parameter_count},)."
            )

    def initial_weights(self, seed: int) -> NDArray[np.float32]:
        """Starting weights, a flat float32 vector of length ``parameter_count``.

        Weights are uniform with variance 1 / fan-in (LeCun), biases are zero. The same seed
        gives the same bits everywhere: only raw 53-bit uniforms of PCG64 are used, and the
        scaling to the bound is done in float64.
        """
        generator = np.random.Generator(np.random.PCG64(require_count("seed", seed, minimum=0)))
        weights = np.zeros(self.parameter_count, dtype=np.float32)
        for block in self.parameter_shapes:
            if len(block.shape) == 1:
                continue
            bound = math.sqrt(3.0 / math.prod(block.shape[:-1]))
            draws = generator.random(block.size)
            weights[block.offset : block.offset + block.size] = (2.0 * draws - 1.0) * bound
        return weights

    def describe(self) -> dict[str, Any]:
        """The model in plain lists, maps, numbers and strings.

        :func:`~dpagent.learning.models.description.from_description` reads it back.
        """
        return {
            "name": self.name,
            "input_shape": list(self.input_shape),
            "classes": self.classes,
            "input_offset": _plain(self.input_offset),
            "input_scale": _plain(self.input_scale),
            "front_end": [stage.describe() for stage in self.front_end],
            "layers": [layer.describe() for layer in self.layers],
        }

    def canonical_text(self) -> str:
        """Everything that determines the model's function, as JSON with sorted keys and no spaces."""
        canonical = {
            "semantics": _SEMANTICS,
            "model": self.describe(),
            "constants": [
                [float(x).hex() for x in _numbers(y)] for y in (self.input_offset, self.input_scale)
            ],
            "parameters": [[block.name, list(block.shape), block.offset] for block in self.parameter_shapes],
        }
        return json.dumps(canonical, sort_keys=True, separators=(",", ":"))

    def digest(self) -> bytes:
        """SHA-256 of the canonical text: equal digests mean equal computations."""
        return hashlib.sha256(self.canonical_text().encode()).digest()

    def _check_input(self) -> None:
        axes = _AXES.get(len(self.input_shape))
        if axes is None:
            raise ConfigurationError(
                f"input_shape is {self.input_shape!r}; expected (features,), (length, channels) or"
                " (height, width, channels)."
            )
        for axis, size in zip(axes, self.input_shape, strict=True):
            require_count(f"input {axis}", size, maximum=1 << 24)
        if math.prod(self.input_shape) > 1 << 24:
            raise ConfigurationError(
                f"input_shape is {self.input_shape!r}; expected at most 2²⁴ values a record."
            )
        require_count("classes", self.classes, minimum=2, maximum=65_536)
        for name, value, require in (
            ("input_offset", self.input_offset, require_finite),
            ("input_scale", self.input_scale, require_positive),
        ):
            for number in _numbers(value):
                require(name, number)
            if len(_numbers(value)) not in (1, self.input_shape[-1]):
                raise ConfigurationError(
                    f"{name} has {counted(len(_numbers(value)), 'number')}; expected one, or one for each "
                    f"of the {self.input_shape[-1]} {axes[-1]} of the input."
                )


def _plain(value: float | tuple[float, ...]) -> float | list[float]:
    return [float(number) for number in value] if isinstance(value, tuple) else float(value)


def _numbers(value: Any) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,)


def _node(path: str, layer: Layer, shape: Shape, offset: int) -> Node:
    after = layer.shape_after(shape)
    if isinstance(layer, Residual):
        body = _branch(f"{path}.body", layer.body, shape, offset)
        start = max((_end(node, offset) for node in body), default=offset)
        shortcut = _branch(f"{path}.shortcut", layer.shortcut, shape, start)
        return Node(path, layer, shape, after, (), body, shortcut)
    blocks: list[ParameterBlock] = []
    for name, tensor in layer.tensors(shape).items():
        blocks.append(ParameterBlock(f"{path}.{name}", tensor, offset))
        offset += blocks[-1].size
    return Node(path, layer, shape, after, tuple(blocks))


def _branch(path: str, layers: tuple[Layer, ...], shape: Shape, offset: int) -> tuple[Node, ...]:
    nodes: list[Node] = []
    for index, layer in enumerate(layers):
        node = _node(f"{path}.{index}.{layer.kind}", layer, shape, offset)
        nodes.append(node)
        shape, offset = node.output_shape, _end(node, offset)
    return tuple(nodes)


def _end(node: Node, offset: int) -> int:
    """The first place in the flat vector after the parameters of ``node``, which begin at ``offset``."""
    return max((inner.parameters.stop for inner in node.walk() if inner.blocks), default=offset)
