"""Architectures as public records: what a model computes, without a weight in it.

A :class:`ModelSpec` is agreed between coordinator and devices before any training. It
names the layers, the fixed preprocessing of the inputs, and the order in which all
parameters lie in one flat float32 vector: the vector that is published, differentiated,
clipped and exported. Engines and exporters read the specification; they add nothing to it.

Layout. Activations are NHWC. Every layer with parameters occupies one contiguous block of
the flat vector, its weight first and its bias straight after it:

* ``Conv2d``: weight ``(kernel, kernel, channels in, channels out)``, bias ``(channels out,)``;
* ``Dense``: weight ``(units in, units out)``, bias ``(units out,)``.

So each block is also one row-major matrix whose last row is the bias, which is what lets an
engine treat the bias as the weight of a constant input of one.

Sources. ``mnist-cnn`` is the 26,010-parameter network with tanh that the literature of
private learning uses for MNIST (Papernot et al., "Tempered Sigmoid Activations for Deep
Learning with Differential Privacy", AAAI 2021; Tramèr and Boneh, "Differentially Private
Learning Needs Better Features", ICLR 2021). The initial weights follow LeCun et al.,
"Efficient BackProp" (1998), section 4.6.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ConfigurationError, DpagentError, require_count, require_finite, require_positive

# Part of every digest: raise it when the meaning of a layer, the order of the parameters or
# the preprocessing changes, so that two versions of this code never train one model together.
_SEMANTICS = 1


@dataclass(frozen=True, slots=True)
class Conv2d:
    """Square cross-correlation over NHWC images, with zero padding on all four sides."""

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0


@dataclass(frozen=True, slots=True)
class MaxPool2d:
    """Maximum over square windows, without padding; rows that fill no window are dropped."""

    kernel: int
    stride: int


@dataclass(frozen=True, slots=True)
class Dense:
    """Affine map to ``units`` outputs; images are flattened in NHWC order before it."""

    units: int


@dataclass(frozen=True, slots=True)
class Tanh:
    """Hyperbolic tangent, element by element."""


Layer: TypeAlias = Conv2d | MaxPool2d | Dense | Tanh
Shape: TypeAlias = tuple[int, ...]


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
class ModelSpec:
    """One classifier: its input, its layers and its fixed preprocessing. All of it is public.

    Args:
        name: what plans and messages call it.
        input_shape: height, width and channels of one example.
        classes: number of classes; the last layer is ``Dense(classes)``.
        layers: in order of computation.
        input_offset, input_scale: the network sees ``(x - input_offset) / input_scale`` of an
            input in [0, 1]. They are constants fixed with the architecture, never computed
            from anyone's data.

    Raises:
        ConfigurationError: a layer does not fit what comes before it; the text names the layer.
    """

    name: str
    input_shape: tuple[int, int, int]
    classes: int
    layers: tuple[Layer, ...]
    input_offset: float = 0.0
    input_scale: float = 1.0

    def __post_init__(self) -> None:
        try:
            if len(self.input_shape) != 3:
                raise ConfigurationError(
                    f"input_shape is {self.input_shape!r}; expected (height, width, channels)."
                )
            for axis, size in zip(("height", "width", "channels"), self.input_shape, strict=True):
                require_count(f"input {axis}", size)
            require_count("classes", self.classes, minimum=2)
            require_finite("input_offset", self.input_offset)
            require_positive("input_scale", self.input_scale)
        except DpagentError as error:
            raise ConfigurationError(f"Model {self.name!r}: {error}") from error
        last = self.layers[-1] if self.layers else None
        if last != Dense(self.classes):
            raise ConfigurationError(
                f"Model {self.name!r} ends with {last!r}; expected"
                f" Dense(units={self.classes}), one unit a class."
            )
        _ = self.output_shapes

    @property
    def output_shapes(self) -> tuple[Shape, ...]:
        """The shape of one example after each layer."""
        shapes: list[Shape] = []
        shape: Shape = self.input_shape
        for index, layer in enumerate(self.layers):
            try:
                shape = _output_shape(layer, shape)
            except DpagentError as error:
                raise ConfigurationError(f"Model {self.name!r}, layer {index} {layer!r}: {error}") from error
            shapes.append(shape)
        return tuple(shapes)

    @property
    def parameter_shapes(self) -> list[ParameterBlock]:
        """Name, shape and offset of every tensor, in the order of the flat vector."""
        blocks: list[ParameterBlock] = []
        offset = 0
        inputs = (self.input_shape, *self.output_shapes)
        for index, (layer, shape) in enumerate(zip(self.layers, inputs, strict=False)):
            for kind, tensor in _parameter_tensors(layer, shape):
                block = ParameterBlock(f"{index}.{type(layer).__name__.lower()}.{kind}", tensor, offset)
                blocks.append(block)
                offset += block.size
        return blocks

    @property
    def parameter_count(self) -> int:
        """The length d of the flat parameter vector."""
        last = self.parameter_shapes[-1]
        return last.offset + last.size

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

    def digest(self) -> bytes:
        """SHA-256 over a canonical description; equal digests mean equal computations."""
        description = {
            "semantics": _SEMANTICS,
            "name": self.name,
            "input_shape": list(self.input_shape),
            "input_offset": float(self.input_offset).hex(),
            "input_scale": float(self.input_scale).hex(),
            "classes": self.classes,
            "layers": [[type(layer).__name__, asdict(layer)] for layer in self.layers],
            "parameters": [[block.name, list(block.shape), block.offset] for block in self.parameter_shapes],
        }
        return hashlib.sha256(
            json.dumps(description, sort_keys=True, separators=(",", ":")).encode()
        ).digest()


def _output_shape(layer: Layer, shape: Shape) -> Shape:
    """The shape after ``layer``; raises with the reason when ``layer`` does not fit ``shape``."""
    match layer:
        case Conv2d():
            require_count("channels", layer.channels)
            require_count("padding", layer.padding, minimum=0)
            height, width = _window_counts(shape, layer.kernel, layer.stride, layer.padding)
            return (height, width, layer.channels)
        case MaxPool2d():
            height, width = _window_counts(shape, layer.kernel, layer.stride, 0)
            return (height, width, shape[2])
        case Dense():
            return (require_count("units", layer.units),)
        case Tanh():
            return shape


def _window_counts(shape: Shape, kernel: int, stride: int, padding: int) -> tuple[int, int]:
    """How many windows fit down and across an image."""
    require_count("kernel", kernel)
    require_count("stride", stride)
    if len(shape) != 3:
        raise ConfigurationError(f"its input is the flat {shape!r}; expected (height, width, channels).")
    height, width = ((size + 2 * padding - kernel) // stride + 1 for size in shape[:2])
    if height < 1 or width < 1:
        raise ConfigurationError(
            f"its window of {kernel}x{kernel} is larger than the {shape[0]}x{shape[1]} input with padding"
            f" {padding}; expected a smaller kernel or more padding."
        )
    return height, width


def _parameter_tensors(layer: Layer, shape: Shape) -> tuple[tuple[str, Shape], ...]:
    """The tensors ``layer`` owns when its input has ``shape``."""
    match layer:
        case Conv2d():
            weight: Shape = (layer.kernel, layer.kernel, shape[2], layer.channels)
            return ("weight", weight), ("bias", (layer.channels,))
        case Dense():
            return ("weight", (math.prod(shape), layer.units)), ("bias", (layer.units,))
        case MaxPool2d() | Tanh():
            return ()


_MNIST_CNN = ModelSpec(
    name="mnist-cnn",
    input_shape=(28, 28, 1),
    classes=10,
    layers=(
        Conv2d(channels=16, kernel=8, stride=2, padding=3),
        Tanh(),
        MaxPool2d(kernel=2, stride=1),
        Conv2d(channels=32, kernel=4, stride=2),
        Tanh(),
        MaxPool2d(kernel=2, stride=1),
        Dense(32),
        Tanh(),
        Dense(10),
    ),
    # Mean and standard deviation of MNIST's pixels as the literature uses them: public constants.
    input_offset=0.1307,
    input_scale=0.3081,
)

_DIGITS = ModelSpec(
    name="digits",
    input_shape=(8, 8, 1),
    classes=10,
    layers=(
        Conv2d(channels=16, kernel=3, padding=1),
        Tanh(),
        MaxPool2d(kernel=2, stride=2),
        Conv2d(channels=32, kernel=3, padding=1),
        Tanh(),
        Dense(10),
    ),
    # Roughly the mean and standard deviation of the public handwritten digits in scikit-learn.
    input_offset=0.3,
    input_scale=0.37,
)

BUILT_IN: Mapping[str, ModelSpec] = MappingProxyType({spec.name: spec for spec in (_DIGITS, _MNIST_CNN)})
"""The architectures that a plan can name."""


def built_in(name: str) -> ModelSpec:
    """The built-in architecture called ``name``, or a :class:`ConfigurationError` with the choices."""
    try:
        return BUILT_IN[name]
    except KeyError:
        choices = ", ".join(sorted(BUILT_IN))
        raise ConfigurationError(f"The model is {name!r}; expected one of: {choices}.") from None
