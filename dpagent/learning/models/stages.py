"""Frozen stages before the trainable layers, as public records.

Nothing in a front end is learnt from the data of the devices (but for :class:`Projection`, which is
computed across the fleet and paid for): so its features of a record cost no privacy, and a device
computes them once and keeps them. Tramèr and Boneh ("Differentially Private Learning Needs Better
Features", ICLR 2021) show that under a small budget such features with a linear layer beat a
network learnt from scratch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias, final, get_args

from dpagent.errors import ConfigurationError, DpagentError, require_count
from dpagent.learning.models.layers import Layer, Residual
from dpagent.learning.models.part import Part, Shape
from dpagent.wording import counted

_MAX_FEATURES: Final = 1 << 22
_MAX_PROJECTED: Final = 4096
"""Values of a record whose covariance a device can keep and send."""


@dataclass(frozen=True, slots=True)
class _Stage(Part):
    """The common base of stages."""

    def shape_after(self, shape: Shape) -> Shape:
        """See :meth:`Part.shape_after`; at most 2²² features a record."""
        after = self._shape_after(shape)
        if math.prod(after) > _MAX_FEATURES:
            raise ConfigurationError(
                f"it makes {counted(math.prod(after), 'feature')} of a record; expected at most "
                f"{_MAX_FEATURES:,}."
            )
        return after

    @abstractmethod
    def _shape_after(self, shape: Shape) -> Shape: ...


@final
@dataclass(frozen=True, slots=True)
class Scattering(_Stage):
    """Wavelet scattering of order two; see :mod:`dpagent.learning.front_end.scattering`.

    Args:
        scales: J, in 1..4. The image shrinks by 2^J.
        angles: L, in 1..16. A channel becomes 1 + JL + L²J(J−1)/2.
    """

    kind: ClassVar[str] = "scattering"

    scales: int = 2
    angles: int = 8

    @property
    def paths(self) -> int:
        """Channels that come of one."""
        j, n = self.scales, self.angles
        return 1 + j * n + n * n * j * (j - 1) // 2

    def _shape_after(self, shape: Shape) -> Shape:
        require_count("scales", self.scales, maximum=4)
        require_count("angles", self.angles, maximum=16)
        if len(shape) != 3:
            raise ConfigurationError(
                f"its input has shape {shape}; expected an image (height, width, channels)."
            )
        step = 1 << self.scales
        if min(shape[:2]) < 2 * step:
            raise ConfigurationError(
                f"its input of {shape[0]}x{shape[1]} is too small for {self.scales} scales; expected at"
                f" least {2 * step}x{2 * step}, or fewer scales."
            )
        return (-(-shape[0] // step), -(-shape[1] // step), shape[2] * self.paths)


@final
@dataclass(frozen=True, slots=True)
class RandomLayers(_Stage):
    """Ordinary layers whose weights stay as ``seed`` draws them (a public constant)."""

    kind: ClassVar[str] = "random"

    layers: tuple[Layer, ...]
    seed: int = 0

    def _shape_after(self, shape: Shape) -> Shape:
        require_count("seed", self.seed, minimum=0)
        if not self.layers:
            raise ConfigurationError("it has no layers; expected at least one.")
        for index, layer in enumerate(self.layers):
            if isinstance(layer, Residual):
                raise ConfigurationError(f"layer {index} is a residual; expected plain layers.")
            try:
                shape = layer.shape_after(shape)
            except DpagentError as error:
                raise ConfigurationError(f"layer {index} {layer.shown}: {error}") from error
        return shape


@final
@dataclass(frozen=True, slots=True)
class FrozenNetwork(_Stage):
    """A network from an ONNX file, pretrained on public data.

    Args:
        digest: SHA-256 of the file, in hexadecimal; the file travels beside the plan.
        output_shape: of one record, as of a model's input: channels last.
    """

    kind: ClassVar[str] = "onnx"

    digest: str
    output_shape: Shape

    def _shape_after(self, shape: Shape) -> Shape:
        del shape  # Checked where the network is run.
        if len(self.digest) != 64 or any(letter not in "0123456789abcdef" for letter in self.digest):
            raise ConfigurationError(
                f"its digest is {self.digest[:80]!r}; expected SHA-256 in 64 hexadecimal digits."
            )
        if not 1 <= len(self.output_shape) <= 3:
            raise ConfigurationError(
                f"its output_shape is {self.output_shape}; expected one to three sizes, channels last."
            )
        for size in self.output_shape:
            require_count("output_shape", size)
        return self.output_shape


@final
@dataclass(frozen=True, slots=True)
class Projection(_Stage):
    """The record, flattened and projected on the leading directions of the fleet's data (DP-PCA).

    The directions come of a round of its own, before the first, which every device pays for; see
    :mod:`dpagent.privacy.covariance`.

    Args:
        components: how many directions, fewer than the record has values.
    """

    kind: ClassVar[str] = "projection"

    components: int

    def _shape_after(self, shape: Shape) -> Shape:
        size = math.prod(shape)
        if size > _MAX_PROJECTED:
            raise ConfigurationError(
                f"its input has {counted(size, 'value')} a record; expected at most {_MAX_PROJECTED:,}, for "
                "instance after a stage that pools."
            )
        require_count("components", self.components, maximum=size)
        return (self.components,)


Stage: TypeAlias = Scattering | RandomLayers | FrozenNetwork | Projection

STAGES: dict[str, type[Stage]] = {stage.kind: stage for stage in get_args(Stage)}
"""Every kind of stage by the name that a model file gives it."""
