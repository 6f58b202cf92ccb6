"""The places of an image under each window."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.models.windows import Windows
from dpagent.learning.training.onnx_graph.feature_map import Places


def places_in_windows(over: Windows, which: Places) -> NDArray[np.int64]:
    """The places under the taps of the windows ``which``, ``(windows, taps)``; -1 in the padding.

    Taps are in row-major order, and windows are called by their row-major number.
    """
    axes = [
        np.arange(over.count[axis])[:, None] * over.stride[axis]
        + np.arange(over.kernel[axis])
        - over.padding[axis]
        for axis in (0, 1)
    ]
    rows, columns = (axes[0][:, None, :, None], axes[1][None, :, None, :])
    height, width, _ = over.image
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    places = np.where(inside, rows * width + columns, -1)
    return places.reshape(over.positions, -1)[list(which)]
