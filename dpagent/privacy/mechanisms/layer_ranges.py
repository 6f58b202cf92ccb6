"""The public range of each layer: how far a round may move a weight, adapted to what reports show.

Sun, Qian, Chen (LDP-FL, IJCAI 2021) give each layer a range [c−r, c+r], because the noise of
:mod:`dpagent.privacy.mechanisms.two_point` is proportional to r; they take it from the least and the greatest
weight of the layer in the previous global model. Such a range is many times wider than one round's
training moves a weight: 0.1 to 0.4 against 0.003 to 0.03 in a small CNN. And it follows the noise: weights
with noise make the next range wider. Here c is each weight's own value in that model, so a device reports
the *change* of its weights, and r bounds that: a range that is too narrow slows a weight down, and never
holds it.

r follows the reports of the round before, which are private already (:func:`adapted_radius`). Nothing comes
from a device's own weights: that would leak them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import require_between, require_count
from dpagent.privacy.ranges import MAX_DIMENSION, MAX_RADIUS, MIN_RADIUS

_MAX_CENTRE: Final = 1e30
_WIDEST: Final = 0.5
_NARROWEST: Final = 0.1
_FASTEST: Final = 2.0
_SURE: Final = 2.0
"""Standard errors."""


@dataclass(frozen=True, slots=True)
class LayerRange:
    """The public range of one layer's weights.

    Attributes:
        name: as the model spells it.
        size: number of weights, at least 1.
        centre: c, in weight units, of a magnitude up to 1e30.
        radius: r, in weight units, in [1e-6, 1e6].

    Raises:
        ParameterError: an attribute is out of its range.
    """

    name: str
    size: int
    centre: float
    radius: float

    def __post_init__(self) -> None:
        require_count(f"size of layer {self.name}", self.size, maximum=MAX_DIMENSION)
        require_between(f"centre of layer {self.name}", self.centre, -_MAX_CENTRE, _MAX_CENTRE)
        require_between(f"radius of layer {self.name}", self.radius, MIN_RADIUS, MAX_RADIUS)


class Extent(NamedTuple):
    """How far devices' weights go within a layer's range, as far as their reports show it.

    The root mean square over the layer's weights of the devices' mean offset, in radii: between these bounds.
    """

    low: float
    high: float


#: Of a layer without enough reports.
UNKNOWN_EXTENT: Final = Extent(0.0, math.inf)


def extent_of(ones: NDArray[np.int64], reports: NDArray[np.int64], amplitude: float) -> Extent:
    """The extent of one layer, within two standard errors.

    Of a weight with n reports of ±B, whose sum is y·B and whose mean is m·B, y² − n has the mean n(n − 1)·m²
    and the variance 2n(n − 1)·(1 + 2(n − 2)·m² − (2n − 3)·m⁴). So noise does not count as extent. For the
    error, all weights count with their mean square.

    Args:
        ones: for each weight, how many reports had a 1, (size,).
        reports: for each weight, how many arrived, (size,).
        amplitude: B.
    """
    sums, pairs = 2 * ones - reports, reports * (reports - 1)
    total = float(np.sum(pairs))
    if not total:
        return UNKNOWN_EXTENT
    mean = float(np.sum(sums**2 - reports)) / total
    square = min(max(mean, 0.0), 1.0)
    excess = 2 * (reports - 2) * square - (2 * reports - 3) * square**2
    # Never below that of noise alone: few reports agree by chance, and seem to have no variance.
    variance = float(np.sum(2 * pairs * (1 + np.maximum(excess, 0.0))))
    error = _SURE * math.sqrt(variance) / total
    low, high = (amplitude * math.sqrt(max(0.0, mean + sign * error)) for sign in (-1, 1))
    return Extent(low, high)


def adapted_radius(radius: float, extent: Extent) -> float:
    """The radius of the next round: post-processing of this round's reports.

    It stays unless the reports are sure of better. Above an extent of a half, many changes are cut: it
    widens. Below a tenth, there is more noise than needed: it narrows. Not sooner, for changes that differ
    from device to device are cut long before their mean reaches the end, and the mean of cut changes asks for
    a narrower range again. Neither by more than a factor of 2 a round.

    Args:
        radius: of this round, in weight units.
        extent: of this round's reports.
    """
    factor = 1.0
    if extent.low > _WIDEST:
        factor = min(_FASTEST, extent.low / _WIDEST)
    elif extent.high < _NARROWEST:
        factor = max(1 / _FASTEST, extent.high / _NARROWEST)
    return min(max(radius * factor, MIN_RADIUS), MAX_RADIUS)
