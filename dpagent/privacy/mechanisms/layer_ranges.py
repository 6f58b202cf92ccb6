"""The public interval of each layer's weights, adapted from round to round.

Sun, Qian, Chen (LDP-FL, IJCAI 2021) give each layer a range [c−r, c+r], because the noise of
:mod:`dpagent.privacy.mechanisms.two_point` is proportional to r, and layers differ much in width. The ranges
come from the previous global model, which is public; ranges from a device's own weights would leak them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between, require_count, require_finite

MAX_DIMENSION: Final = 2**28
_MIN_RADIUS: Final = 1e-30
_MAX_MAGNITUDE: Final = 1e30


@dataclass(frozen=True, slots=True)
class LayerRange:
    """The public range of one layer's weights.

    Attributes:
        name: as the model spells it.
        size: number of weights, at least 1.
        centre: c, in weight units, of a magnitude up to 1e30.
        radius: r, in weight units, in [1e-30, 1e30].

    Raises:
        ParameterError: an attribute is out of its range.
    """

    name: str
    size: int
    centre: float
    radius: float

    def __post_init__(self) -> None:
        require_count(f"size of layer {self.name}", self.size, maximum=MAX_DIMENSION)
        require_between(f"centre of layer {self.name}", self.centre, -_MAX_MAGNITUDE, _MAX_MAGNITUDE)
        require_between(f"radius of layer {self.name}", self.radius, _MIN_RADIUS, _MAX_MAGNITUDE)


def adapted_ranges(
    layers: Sequence[tuple[str, int]],
    weights: NDArray[np.floating[Any]],
    *,
    floor: float,
    margin: float = 1.0,
) -> tuple[LayerRange, ...]:
    """Ranges from the previous global model, which is public: the middle and half the width of each layer.

    Args:
        layers: names and sizes, in the order of the weight vector.
        weights: public global weights, shape (d,), finite. Never a device's own.
        floor: least radius, in weight units, above 0: lets a layer of equal weights move.
        margin: factor on the half width, in [1, 100]: room for the change by a round's training.

    Raises:
        ParameterError: a value is out of its range, there is no layer, or the sizes do not add up to d.
    """
    require_between("floor", floor, _MIN_RADIUS, _MAX_MAGNITUDE)
    require_between("margin", margin, 1.0, 100.0)
    if not layers:
        raise ParameterError("layers is empty; expected at least one layer.")
    for name, size in layers:
        require_count(f"size of layer {name}", size, maximum=MAX_DIMENSION)
    dimension = sum(size for _, size in layers)
    if weights.shape != (dimension,):
        raise ParameterError(
            f"weights have shape {weights.shape}; expected ({dimension},), one for each weight of the layers."
        )
    ranges, start = [], 0
    for name, size in layers:
        part = weights[start : start + size].astype(np.float64)
        start += size
        low = require_finite(f"least weight of layer {name}", float(part.min()))
        high = require_finite(f"greatest weight of layer {name}", float(part.max()))
        radius = max(floor, margin * (high / 2 - low / 2))
        ranges.append(LayerRange(name, size, low / 2 + high / 2, radius))
    return tuple(ranges)
