"""Zeros in place of rows that do not count, in steps that do not depend on which rows those are.

A product of zero and a number that is not finite is not zero, so what is left out has to be overwritten. To
write zeros only where they are due takes the longer the more rows there are, and how long many steps take can
be seen from outside of a device. So all bits of every row are kept, or all are taken off.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def blank_all_but(kept: NDArray[np.bool_], rows: NDArray[Any]) -> None:
    """Overwrite all rows but some with zeros, whatever they hold, in place.

    Args:
        kept: ``(n,)``.
        rows: ``(n, …)``, float32 or float64.

    >>> rows = np.array([[1.0, np.nan], [2.0, 3.0]])
    >>> blank_all_but(np.array([False, True]), rows)
    >>> rows.tolist()
    [[0.0, 0.0], [2.0, 3.0]]
    """
    bits = rows.view(f"i{rows.itemsize}")
    mask = np.negative(kept.astype(bits.dtype)).reshape(len(kept), *[1] * (rows.ndim - 1))
    np.bitwise_and(bits, mask, out=bits)
