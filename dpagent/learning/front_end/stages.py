"""Frozen stages before the trainable layers, as public records.

Nothing in a front end is learnt from the data of the devices (but for :class:`Projection`, which is
computed across the fleet and paid for): so what it makes of a record costs no privacy, and a device
computes it once and keeps it. Tramèr and Boneh ("Differentially Private Learning Needs Better
Features", ICLR 2021) show that under a small budget such features with a linear layer beat a
network learnt from scratch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from dpagent.errors import ConfigurationError, DpagentError, require_count
from dpagent.learning.models.layers import Layer, Residual, Shape, output_shape

_MAX_FEATURES = 1 << 22


@dataclass(frozen=True, slots=True)
class Scattering:
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


@dataclass(frozen=True, slots=True)
class RandomLayers:
    """Ordinary layers whose weights stay as ``seed`` draws them (a public constant)."""

    kind: ClassVar[str] = "random"

    layers: tuple[Layer, ...]
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FrozenNetwork:
    """A network from an ONNX file, pretrained on public data.

    Args:
        digest: SHA-256 of the file, in hexadecimal; the file travels beside the plan.
        output_shape: of one record, as of a model's input: channels last.
    """

    kind: ClassVar[str] = "onnx"

    digest: str
    output_shape: Shape


@dataclass(frozen=True, slots=True)
class Projection:
    """The record, flattened and projected on the leading directions of the fleet's data (DP-PCA).

    The directions come of a round of its own, before the first, which every device pays for; see
    :mod:`dpagent.privacy.covariance`.

    Args:
        components: how many directions, fewer than the record has values.
    """

    kind: ClassVar[str] = "projection"

    components: int


Stage: TypeAlias = Scattering | RandomLayers | FrozenNetwork | Projection

STAGES: dict[str, type[Stage]] = {
    stage.kind: stage for stage in (Scattering, RandomLayers, FrozenNetwork, Projection)
}
"""Every kind of stage by the name that a model file gives it."""

_MAX_PROJECTED = 4096
"""Values of a record whose covariance a device can keep and send."""


def stage_shape(stage: Stage, shape: Shape) -> Shape:
    """The shape of one record after ``stage``.

    Raises:
        ConfigurationError, ParameterError: ``stage`` does not fit an input of ``shape``.
    """
    match stage:
        case Scattering():
            require_count("scales", stage.scales, maximum=4)
            require_count("angles", stage.angles, maximum=16)
            if len(shape) != 3:
                raise ConfigurationError(
                    f"its input has shape {shape}; expected an image (height, width, channels)."
                )
            step = 1 << stage.scales
            if min(shape[:2]) < 2 * step:
                raise ConfigurationError(
                    f"its input of {shape[0]}x{shape[1]} is too small for {stage.scales} scales; expected at"
                    f" least {2 * step}x{2 * step}, or fewer scales."
                )
            after: Shape = (-(-shape[0] // step), -(-shape[1] // step), shape[2] * stage.paths)
        case RandomLayers():
            require_count("seed", stage.seed, minimum=0)
            if not stage.layers:
                raise ConfigurationError("it has no layers; expected at least one.")
            after = shape
            for index, layer in enumerate(stage.layers):
                if isinstance(layer, Residual):
                    raise ConfigurationError(f"layer {index} is a residual; expected plain layers.")
                try:
                    after = output_shape(layer, after)
                except DpagentError as error:
                    raise ConfigurationError(f"layer {index} {layer!r}: {error}") from error
        case FrozenNetwork():
            if len(stage.digest) != 64 or any(letter not in "0123456789abcdef" for letter in stage.digest):
                raise ConfigurationError(
                    f"its digest is {stage.digest[:80]!r}; expected SHA-256 in 64 hexadecimal digits."
                )
            if not 1 <= len(stage.output_shape) <= 3:
                raise ConfigurationError(
                    f"its output_shape is {stage.output_shape}; expected one to three sizes, channels last."
                )
            for size in stage.output_shape:
                require_count("output_shape", size)
            after = stage.output_shape
        case Projection():
            size = math.prod(shape)
            if size > _MAX_PROJECTED:
                raise ConfigurationError(
                    f"its input has {size:,} values a record; expected at most {_MAX_PROJECTED:,}, for"
                    " instance after a stage that pools."
                )
            require_count("components", stage.components, maximum=size)
            after = (stage.components,)
    if math.prod(after) > _MAX_FEATURES:
        raise ConfigurationError(
            f"it makes {math.prod(after):,} features of a record; expected at most {_MAX_FEATURES:,}."
        )
    return after
