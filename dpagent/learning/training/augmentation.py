"""Several views of a record, whose gradients are averaged before clipping.

A record's views are shifted and mirrored at random, and the mean of their gradients is clipped as one
(De, Berrada, Hayes, Smith, Balle, "Unlocking High-Accuracy Differentially Private Image Classification
through Scale", 2022, section 3.3: augmentation multiplicity). A record still adds one clipped vector,
so views cost time and no privacy.

How a record is moved is drawn for each record alone, from the operating system's entropy, so it
depends on no other record; it need not be secret.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ConfigurationError, require_count
from dpagent.learning.models.part import Shape

_MAX_VIEWS = 64


@dataclass(frozen=True, slots=True)
class Augmentation:
    """How views are made. Public.

    Args:
        views: of each record, in 1..64.
        shift: most places that a view is moved along each axis but the channels; gaps are filled with zeros.
        flip: whether a view is mirrored left to right, every other time.

    Raises:
        ParameterError: a value is out of its range.
    """

    views: int
    shift: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        require_count("views", self.views, maximum=_MAX_VIEWS)
        require_count("shift", self.shift, minimum=0, maximum=1024)

    def check_fits(self, shape: Shape) -> None:
        """Raise :class:`ConfigurationError` unless records of ``shape`` can be moved so."""
        if len(shape) == 1:
            raise ConfigurationError(
                f"Records of shape {shape} have no places to shift or mirror; expected none."
            )
        if self.shift >= min(shape[:-1]):
            raise ConfigurationError(
                f"shift is {self.shift}; expected less than the {min(shape[:-1])} places."
            )
        if self.flip and len(shape) != 3:
            raise ConfigurationError(f"flip mirrors images; the records have shape {shape}.")

    def views_of(self, inputs: NDArray[Any], *, into: NDArray[Any] | None = None) -> NDArray[Any]:
        """Views of ``inputs`` (n, *shape): (n, views, *shape), of the same type.

        Args:
            inputs: the records.
            into: an array for the views, which are its values then.

        >>> Augmentation(views=4, shift=2, flip=True).views_of(np.ones((3, 8, 8, 1), np.uint8)).shape
        (3, 4, 8, 8, 1)
        """
        count, shape = len(inputs), inputs.shape[1:]
        views = np.empty((count, self.views, *shape), inputs.dtype) if into is None else into
        views[...] = 0
        draws = np.frombuffer(os.urandom(12 * count * self.views), "<u4").reshape(count, self.views, 3)
        # The bias of the remainder is below 2⁻²⁰, and of no importance here.
        shifts = (draws[..., : len(shape) - 1] % (2 * self.shift + 1)).astype(np.intp) - self.shift
        flips = (draws[..., 2] & 1).astype(bool)
        for record, places, mirrored, image in zip(inputs, shifts, flips, views, strict=True):
            for view, place, mirror in zip(image, places, mirrored, strict=True):
                source = record[:, ::-1] if self.flip and mirror else record
                into, out_of = zip(
                    *(_overlap(by, size) for by, size in zip(place, shape, strict=False)), strict=True
                )
                view[into] = source[out_of]
        return views


def _overlap(by: int, size: int) -> tuple[slice, slice]:
    """Target and source of a shift ``by`` places along an axis of ``size``."""
    return slice(max(0, by), size + min(0, by)), slice(max(0, -by), size - max(0, by))
