"""Activations in the graph: rows of channels, one for each place of the image, in an order of choice.

Convolutions collect their windows with one ``Gather`` of rows, and a Gather can as well write its
rows in any order and leave out places that no later layer reads. So all activations list the
places that they hold, and each layer says which places it reads, and in which order it would have
them. A series is an image of height one, a record of features has one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.models.part import Shape
from dpagent.learning.training.onnx_graph.graph import Graph

Places: TypeAlias = tuple[int, ...]
"""Places of an image by their row-major number."""

Backward: TypeAlias = Callable[[str], str | None]
"""Appends the way back through a layer: from the gradient by its output to the gradient by its
input, or to None where nothing needs it."""


@dataclass(frozen=True, slots=True)
class FeatureMap:
    """Activations.

    Attributes:
        name: of a float32 value of shape ``(rows, len(places), channels)``, a row for each record and view.
        places: those it holds, in this order.
        channels: numbers in one place.
        needs_gradient: whether a layer with parameters led here.
    """

    name: str
    places: Places
    channels: int
    needs_gradient: bool


class Passed(NamedTuple):
    """The output of a layer, and the way back through it."""

    output: FeatureMap
    backward: Backward


def all_places(shape: Shape) -> Places:
    """Every place of a record's activations, in row-major order."""
    return tuple(range(math.prod(shape[:-1])))


def arranged(graph: Graph, x: FeatureMap, want: Places) -> Passed:
    """The same activations at the places ``want``."""
    if x.places == want:
        return Passed(x, lambda gradient: gradient)
    output = gathered(graph, x.name, len(x.places), rows_of(x.places, np.array(want)))

    def backward(gradient: str) -> str | None:
        if not x.needs_gradient:
            return None
        return gathered(graph, gradient, len(want), rows_of(want, np.array(x.places)))

    return Passed(replace(x, name=output, places=want), backward)


def gathered(graph: Graph, values: str, count: int, rows: NDArray[np.int64]) -> str:
    """Rows (axis 1, of which there are ``count``) by their numbers; number -1 is a row of zeros."""
    if np.array_equal(rows.ravel(), np.arange(count)):
        return values
    if (rows < 0).any():
        values = graph.add("Pad", values, graph.constant([0, 0, 0, 0, 1, 0], np.int64))
        rows = np.where(rows < 0, count, rows)
    return graph.gather(values, 1, rows.ravel())


def rows_of(places: Places, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The indices of the places ``wanted`` in ``places``; -1 for those that are missing, and for -1."""
    lookup = np.full(max(max(places), int(wanted.max())) + 2, -1)
    lookup[list(places)] = np.arange(len(places))
    found: NDArray[np.int64] = lookup[wanted]  # -1 hits the last entry, which is -1.
    return found
