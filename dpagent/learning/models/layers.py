"""What a network can be made of: layers as public records, and the shapes they lead to.

A record's shape is ``(features,)``, ``(length, channels)`` for a series or
``(height, width, channels)`` for an image; activations keep the channels last. A series is
computed as an image of height one, so an engine knows windows over two axes only
(:class:`Windows`).

Group normalisation has no parameters and no running statistics: each record is normalised by its
own mean and variance, so one record's gradient stays a function of that record (Wu and He,
"Group Normalization", ECCV 2018, without the affine map).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from dpagent.errors import ConfigurationError, require_count

Shape: TypeAlias = tuple[int, ...]

GROUP_NORM_EPSILON = 1e-5
"""Added to the variance of a group before its root is taken."""

# Whoever signed a plan: no layer of it makes a board compute or keep more than this.
_MAX_AXIS = 65_536
_MAX_ACTIVATION = 1 << 24


@dataclass(frozen=True, slots=True)
class Conv1d:
    """Cross-correlation along a series, with zero padding at both ends."""

    kind: ClassVar[str] = "conv1d"

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Conv2d:
    """Square cross-correlation over images, with zero padding on all four sides."""

    kind: ClassVar[str] = "conv2d"

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0


@dataclass(frozen=True, slots=True)
class MaxPool1d:
    """Maximum over windows of a series, without padding; what fills no window is dropped."""

    kind: ClassVar[str] = "max_pool1d"

    kernel: int
    stride: int


@dataclass(frozen=True, slots=True)
class MaxPool2d:
    """Maximum over square windows, without padding; rows and columns that fill no window are dropped."""

    kind: ClassVar[str] = "max_pool2d"

    kernel: int
    stride: int


@dataclass(frozen=True, slots=True)
class AveragePool1d:
    """Mean over windows of a series, without padding."""

    kind: ClassVar[str] = "average_pool1d"

    kernel: int
    stride: int


@dataclass(frozen=True, slots=True)
class AveragePool2d:
    """Mean over square windows, without padding."""

    kind: ClassVar[str] = "average_pool2d"

    kernel: int
    stride: int


@dataclass(frozen=True, slots=True)
class Dense:
    """Affine map to ``units`` outputs; what comes before is flattened, channels last."""

    kind: ClassVar[str] = "dense"

    units: int


@dataclass(frozen=True, slots=True)
class Tanh:
    """Hyperbolic tangent, element by element."""

    kind: ClassVar[str] = "tanh"


@dataclass(frozen=True, slots=True)
class Relu:
    """max(x, 0), element by element; the derivative at 0 is 0."""

    kind: ClassVar[str] = "relu"


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """Each group of neighbouring channels, over all positions, brought to mean 0 and variance 1."""

    kind: ClassVar[str] = "group_norm"

    groups: int


@dataclass(frozen=True, slots=True)
class Residual:
    """``body(x) + shortcut(x)``; without a shortcut, ``body(x) + x``. Not nested."""

    kind: ClassVar[str] = "residual"

    body: tuple[Layer, ...]
    shortcut: tuple[Layer, ...] = ()


Convolution: TypeAlias = Conv1d | Conv2d
MaxPool: TypeAlias = MaxPool1d | MaxPool2d
AveragePool: TypeAlias = AveragePool1d | AveragePool2d
Windowed: TypeAlias = Convolution | MaxPool | AveragePool
Layer: TypeAlias = Windowed | Dense | Tanh | Relu | GroupNorm | Residual

LAYERS: dict[str, type[Layer]] = {
    kind.kind: kind
    for kind in (
        Conv1d, Conv2d, MaxPool1d, MaxPool2d, AveragePool1d, AveragePool2d, Dense, Tanh, Relu, GroupNorm,
        Residual,
    )
}  # fmt: skip
"""Every kind of layer by the name that a model file gives it."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows over the two axes of an image; over a series, the first axis has length one.

    Attributes:
        image: height, width, channels of the input.
        kernel, stride, padding: down and across.
        count: windows down and across.
    """

    image: tuple[int, int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    count: tuple[int, int]

    @property
    def positions(self) -> int:
        """Number of windows."""
        return self.count[0] * self.count[1]

    @property
    def taps(self) -> int:
        """Numbers in one window: kernel area times channels."""
        return self.kernel[0] * self.kernel[1] * self.image[2]


def windows(layer: Windowed, shape: Shape) -> Windows:
    """Where the windows of ``layer`` lie over an input of ``shape``.

    Raises:
        ConfigurationError, ParameterError: they do not fit it.
    """
    require_count("kernel", layer.kernel, maximum=_MAX_AXIS)
    require_count("stride", layer.stride, maximum=_MAX_AXIS)
    padding = layer.padding if isinstance(layer, Conv1d | Conv2d) else 0
    require_count("padding", padding, minimum=0, maximum=_MAX_AXIS)
    if isinstance(layer, Conv1d | MaxPool1d | AveragePool1d):
        if len(shape) != 2:
            raise ConfigurationError(f"its input has shape {shape}; expected a series (length, channels).")
        length, channels = shape
        count = _windows_along(length, layer.kernel, layer.stride, padding)
        if count < 1:
            raise ConfigurationError(
                f"its window of {layer.kernel} is longer than the input of {length} with padding {padding};"
                " expected a smaller kernel or more padding."
            )
        return Windows((1, length, channels), (1, layer.kernel), (1, layer.stride), (0, padding), (1, count))
    if len(shape) != 3:
        raise ConfigurationError(f"its input has shape {shape}; expected an image (height, width, channels).")
    height, width, channels = shape
    down = _windows_along(height, layer.kernel, layer.stride, padding)
    across = _windows_along(width, layer.kernel, layer.stride, padding)
    if down < 1 or across < 1:
        raise ConfigurationError(
            f"its window of {layer.kernel}x{layer.kernel} is larger than the {height}x{width} input with"
            f" padding {padding}; expected a smaller kernel or more padding."
        )
    square = (layer.kernel, layer.kernel)
    return Windows((height, width, channels), square, (layer.stride,) * 2, (padding,) * 2, (down, across))


def output_shape(layer: Layer, shape: Shape) -> Shape:
    """The shape of one record after ``layer``.

    Raises:
        ConfigurationError, ParameterError: ``layer`` does not fit an input of ``shape``; the
            text says why, the caller knows which layer it is.
    """
    after = _output_shape(layer, shape)
    if math.prod(after) > _MAX_ACTIVATION:
        raise ConfigurationError(
            f"its output has {math.prod(after):,} values a record; expected at most {_MAX_ACTIVATION:,}."
        )
    return after


def _output_shape(layer: Layer, shape: Shape) -> Shape:
    match layer:
        case Conv1d() | Conv2d():
            require_count("channels", layer.channels, maximum=_MAX_AXIS)
            return _image_shape(windows(layer, shape), layer.channels, len(shape))
        case MaxPool1d() | MaxPool2d() | AveragePool1d() | AveragePool2d():
            return _image_shape(windows(layer, shape), shape[-1], len(shape))
        case Dense():
            return (require_count("units", layer.units, maximum=_MAX_AXIS),)
        case GroupNorm():
            require_count("groups", layer.groups, maximum=_MAX_AXIS)
            if shape[-1] % layer.groups:
                raise ConfigurationError(
                    f"its {layer.groups} groups do not divide the {shape[-1]} channels of its input {shape};"
                    " expected groups of one size."
                )
            return shape
        case Tanh() | Relu():
            return shape
        case Residual():
            body, shortcut = (_shape_after(part, shape) for part in (layer.body, layer.shortcut))
            if not layer.body:
                raise ConfigurationError("its body is empty; expected at least one layer.")
            if body != shortcut:
                raise ConfigurationError(
                    f"its body leads from {shape} to {body} and its shortcut to {shortcut}; expected the same"
                    " shape, for instance with a conv2d of kernel 1 in the shortcut."
                )
            return body


def _shape_after(layers: tuple[Layer, ...], shape: Shape) -> Shape:
    for layer in layers:
        if isinstance(layer, Residual):
            raise ConfigurationError("it holds another residual; expected none inside of one.")
        try:
            shape = output_shape(layer, shape)
        except ValueError as error:  # a number out of its range
            raise ConfigurationError(f"its {layer.kind}: {error}") from error
        except ConfigurationError as error:
            raise ConfigurationError(f"its {layer.kind}: {error}") from error
    return shape


def parameter_tensors(layer: Layer, shape: Shape) -> tuple[tuple[str, Shape], ...]:
    """Names and shapes of the tensors that ``layer`` itself owns when its input has ``shape``."""
    match layer:
        case Conv1d():
            weight: Shape = (layer.kernel, shape[-1], layer.channels)
            return ("weight", weight), ("bias", (layer.channels,))
        case Conv2d():
            weight = (layer.kernel, layer.kernel, shape[-1], layer.channels)
            return ("weight", weight), ("bias", (layer.channels,))
        case Dense():
            return ("weight", (math.prod(shape), layer.units)), ("bias", (layer.units,))
        case _:
            return ()


def _windows_along(size: int, kernel: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - kernel) // stride + 1


def _image_shape(over: Windows, channels: int, axes: int) -> Shape:
    return (*over.count[3 - axes :], channels)
