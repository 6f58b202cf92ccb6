"""Means over windows. Back, each place takes its share from every window that it stands in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.models.windows import Windows
from dpagent.learning.training.onnx_graph.feature_map import FeatureMap, Passed, Places, gathered, rows_of
from dpagent.learning.training.onnx_graph.geometry import places_in_windows
from dpagent.learning.training.onnx_graph.graph import Graph


def places_read(over: Windows, write: Places) -> Places:
    """Tap by tap where the windows do not overlap, so that nothing is copied; else every place once."""
    taps = places_in_windows(over, write)
    if np.unique(taps).size == taps.size:
        return tuple(taps.T.ravel().tolist())
    return tuple(np.unique(taps).tolist())


def average_pool(graph: Graph, over: Windows, x: FeatureMap, write: Places) -> Passed:
    """The mean of each window; ``x`` holds the places of :func:`places_read`."""
    taps = rows_of(x.places, places_in_windows(over, write))
    share = 1 / taps.shape[1]
    y = _sums(graph, x.name, len(x.places), taps.T, x.channels, share)

    def backward(gradient: str) -> str | None:
        if not x.needs_gradient:
            return None
        return _sums(graph, gradient, len(write), _holders(taps, len(x.places)), x.channels, share)

    return Passed(FeatureMap(y, write, x.channels, x.needs_gradient), backward)


def _sums(graph: Graph, values: str, count: int, rows: NDArray[np.int64], channels: int, share: float) -> str:
    """For each column of ``rows``, the sum of those rows of ``values``, times ``share``."""
    terms, columns = rows.shape
    blocks = graph.reshape(gathered(graph, values, count, rows), -1, terms, columns * channels)
    summed = graph.add("MatMul", graph.constant(np.full((1, terms), share)), blocks)
    return graph.reshape(summed, -1, columns, channels)


def _holders(taps: NDArray[np.int64], places: int) -> NDArray[np.int64]:
    """For each place, a column of the windows that it stands in, filled up with -1."""
    order = np.argsort(taps, axis=None, kind="stable")
    counts = np.bincount(taps.ravel(), minlength=places)
    holders = np.full((counts.max(), places), -1)
    nth = np.arange(taps.size) - np.repeat(np.cumsum(counts) - counts, counts)
    holders[nth, taps.ravel()[order]] = order // taps.shape[1]
    return holders
