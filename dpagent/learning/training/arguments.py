"""Checks of the records that engines are given: their form and their labels, before anything is computed, and
which of them are finite."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import DataError
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import NOBODY

_INFINITE: Final = 0x7F80_0000
"""The bits of infinity: those of numbers that are not finite, without the sign, are no less."""
_SIGN: Final = 0x8000_0000


def require_inputs(spec: ModelSpec, inputs: NDArray[Any], views: int = 1) -> None:
    """Raise :class:`DataError` unless ``inputs`` are records of ``spec``, each with ``views`` views."""
    record = (views, *spec.input_shape) if views > 1 else spec.input_shape
    if inputs.dtype not in (np.float32, np.uint8) or inputs.ndim == 0 or inputs.shape[1:] != record:
        raise DataError(
            f"The inputs are {inputs.dtype} of shape {inputs.shape}; model {spec.name!r} takes float32 or"
            f" uint8 of shape (n, {', '.join(map(str, record))})."
        )


def require_labels(spec: ModelSpec, labels: NDArray[Any], count: int) -> None:
    """Raise :class:`DataError` unless ``labels`` are ``count`` classes of ``spec``, or nobody's, one for each
    input."""
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise DataError(
            f"The labels are {labels.dtype} of shape {labels.shape}; expected whole numbers of shape"
            f" ({count},), one for each input."
        )
    if count and (labels.min() < NOBODY or labels.max() >= spec.classes):
        raise DataError(
            f"The labels run from {labels.min()} to {labels.max()}; expected 0 to {spec.classes - 1}."
        )


def are_finite(inputs: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which of the records ``(n, …)`` hold finite numbers only, ``(n,)``; in no memory of their size.

    The bits are looked at as whole numbers: a comparison with a NaN leaves a flag, which takes longer to
    clear than the rest of a small record.
    """
    rows = inputs.reshape(len(inputs), math.prod(inputs.shape[1:]))
    above: NDArray[np.bool_] = rows.view(np.int32).max(axis=1) < _INFINITE
    below: NDArray[np.bool_] = rows.view(np.uint32).max(axis=1) < _INFINITE + _SIGN
    return above & below
