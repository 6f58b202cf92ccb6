"""Layers as public records: their parameters, their ranges, and the shapes they lead to.

The union :data:`Layer` is closed. Everything that computes a layer (:mod:`dpagent.learning.models.forward`,
the two engines, the export) matches on it, and the type checker names each place that a new member is missing
from; ``docs/models.md`` says how to add one.

Activations keep the channels last. Group normalisation has no parameters and no running statistics: each
record is normalised by its own mean and variance, so one record's gradient stays a function of that record
(Wu and He, "Group Normalization", ECCV 2018, without the affine map).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias, final, get_args

from dpagent.errors import ConfigurationError, DpagentError, require_count
from dpagent.learning.models.part import Part, Shape
from dpagent.learning.models.windows import MAX_AXIS, Windows, windows_over
from dpagent.wording import counted

GROUP_NORM_EPSILON: Final = 1e-5
"""Added to the variance of a group before its root is taken."""

# No layer of any plan makes a board compute or keep more than this.
_MAX_ACTIVATION: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class _Layer(Part):
    """The common base of layers."""

    def shape_after(self, shape: Shape) -> Shape:
        """See :meth:`Part.shape_after`; at most 2²⁴ values a record."""
        after = self._shape_after(shape)
        if math.prod(after) > _MAX_ACTIVATION:
            raise ConfigurationError(
                f"its output has {counted(math.prod(after), 'value')} a record; expected at most "
                f"{_MAX_ACTIVATION:,}."
            )
        return after

    def tensors(self, shape: Shape) -> dict[str, Shape]:
        """The shapes of its own parameters by name, weight before bias, for records of ``shape``."""
        del shape
        return {}

    @abstractmethod
    def _shape_after(self, shape: Shape) -> Shape: ...


@dataclass(frozen=True, slots=True)
class Windowed(_Layer):
    """A layer that looks at its input through windows."""

    @abstractmethod
    def windows(self, shape: Shape) -> Windows:
        """Its windows over a record of ``shape``; errors as of :meth:`Part.shape_after`."""


@dataclass(frozen=True, slots=True)
class Convolution(Windowed):
    """Cross-correlation with zero padding at both ends of each of its ``axes``."""

    axes: ClassVar[int]

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0

    def windows(self, shape: Shape) -> Windows:
        """See :meth:`Windowed.windows`."""
        return windows_over(shape, self.axes, self.kernel, self.stride, self.padding)

    def tensors(self, shape: Shape) -> dict[str, Shape]:
        """Weight, the window's axes first and then channels in and out, and bias."""
        weight = (*(self.kernel,) * self.axes, shape[-1], self.channels)
        return {"weight": weight, "bias": (self.channels,)}

    def _shape_after(self, shape: Shape) -> Shape:
        require_count("channels", self.channels, maximum=MAX_AXIS)
        return (*self.windows(shape).count[-self.axes :], self.channels)


@final
@dataclass(frozen=True, slots=True)
class Conv1d(Convolution):
    """Convolution along a series."""

    kind: ClassVar[str] = "conv1d"
    axes: ClassVar[int] = 1


@final
@dataclass(frozen=True, slots=True)
class Conv2d(Convolution):
    """Convolution over an image, with square windows."""

    kind: ClassVar[str] = "conv2d"
    axes: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class Pooling(Windowed):
    """One number for each window and channel, without padding; values that fill no window are dropped."""

    axes: ClassVar[int]

    kernel: int
    stride: int

    def windows(self, shape: Shape) -> Windows:
        """See :meth:`Windowed.windows`."""
        return windows_over(shape, self.axes, self.kernel, self.stride, padding=0)

    def _shape_after(self, shape: Shape) -> Shape:
        return (*self.windows(shape).count[-self.axes :], shape[-1])


@dataclass(frozen=True, slots=True)
class MaxPool(Pooling):
    """The maximum of each window."""


@final
@dataclass(frozen=True, slots=True)
class MaxPool1d(MaxPool):
    """Maximum over windows of a series."""

    kind: ClassVar[str] = "max_pool1d"
    axes: ClassVar[int] = 1


@final
@dataclass(frozen=True, slots=True)
class MaxPool2d(MaxPool):
    """Maximum over square windows of an image."""

    kind: ClassVar[str] = "max_pool2d"
    axes: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class AveragePool(Pooling):
    """The mean of each window."""


@final
@dataclass(frozen=True, slots=True)
class AveragePool1d(AveragePool):
    """Mean over windows of a series."""

    kind: ClassVar[str] = "average_pool1d"
    axes: ClassVar[int] = 1


@final
@dataclass(frozen=True, slots=True)
class AveragePool2d(AveragePool):
    """Mean over square windows of an image."""

    kind: ClassVar[str] = "average_pool2d"
    axes: ClassVar[int] = 2


@final
@dataclass(frozen=True, slots=True)
class Dense(_Layer):
    """Affine map to ``units`` outputs; its input is flattened, channels last."""

    kind: ClassVar[str] = "dense"

    units: int

    def tensors(self, shape: Shape) -> dict[str, Shape]:
        """Weight ``(units in, units out)`` and bias."""
        return {"weight": (math.prod(shape), self.units), "bias": (self.units,)}

    def _shape_after(self, shape: Shape) -> Shape:
        return (require_count("units", self.units, maximum=MAX_AXIS),)


@dataclass(frozen=True, slots=True)
class Activation(_Layer):
    """A function of single numbers that never falls: maxima may be taken before it as well as after it."""

    def _shape_after(self, shape: Shape) -> Shape:
        return shape


@final
@dataclass(frozen=True, slots=True)
class Tanh(Activation):
    """Hyperbolic tangent."""

    kind: ClassVar[str] = "tanh"


@final
@dataclass(frozen=True, slots=True)
class Relu(Activation):
    """max(x, 0); the derivative at 0 is 0."""

    kind: ClassVar[str] = "relu"


@final
@dataclass(frozen=True, slots=True)
class GroupNorm(_Layer):
    """Each group of neighbouring channels, over all positions, brought to mean 0 and variance 1."""

    kind: ClassVar[str] = "group_norm"

    groups: int

    def _shape_after(self, shape: Shape) -> Shape:
        require_count("groups", self.groups, maximum=MAX_AXIS)
        if shape[-1] % self.groups:
            raise ConfigurationError(
                f"its {self.groups} groups do not divide the {shape[-1]} channels of its input {shape};"
                " expected groups of one size."
            )
        return shape


@final
@dataclass(frozen=True, slots=True)
class Residual(_Layer):
    """``body(x) + shortcut(x)``; without a shortcut, ``body(x) + x``. Not nested."""

    kind: ClassVar[str] = "residual"

    body: tuple[Layer, ...]
    shortcut: tuple[Layer, ...] = ()

    def _shape_after(self, shape: Shape) -> Shape:
        body, shortcut = (_shape_after_all(part, shape) for part in (self.body, self.shortcut))
        if not self.body:
            raise ConfigurationError("its body is empty; expected at least one layer.")
        if body != shortcut:
            raise ConfigurationError(
                f"its body leads from {shape} to {body} and its shortcut to {shortcut}; expected the same"
                " shape, for instance with a conv2d of kernel 1 in the shortcut."
            )
        return body


Layer: TypeAlias = (
    Conv1d
    | Conv2d
    | MaxPool1d
    | MaxPool2d
    | AveragePool1d
    | AveragePool2d
    | Dense
    | Tanh
    | Relu
    | GroupNorm
    | Residual
)

LAYERS: dict[str, type[Layer]] = {layer.kind: layer for layer in get_args(Layer)}
"""Every kind of layer by the name that a model file gives it."""


def _shape_after_all(layers: tuple[Layer, ...], shape: Shape) -> Shape:
    for layer in layers:
        if isinstance(layer, Residual):
            raise ConfigurationError("it holds another residual; expected none inside of one.")
        try:
            shape = layer.shape_after(shape)
        except DpagentError as error:
            raise ConfigurationError(f"its {layer.kind}: {error}") from error
    return shape
