"""The inputs and outputs of a training graph, and the graphs that a device may run.

The coordinator that builds a graph and the device that runs it both read this. The device does
not trust the coordinator with privacy, and a graph that does not clip looks like one that does. So it
runs a graph only if its SHA-256 is that of a graph which this code builds: ``digests.yaml`` lists
those of the built-in models, and any other has to be given on the device itself.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import Any, Final, NamedTuple

import numpy as np
import yaml
from numpy.typing import DTypeLike

from dpagent.learning.models.part import Shape
from dpagent.learning.models.spec import ModelSpec, ParameterBlock

MAX_VIEWS: Final = 64
"""Augmented copies of one record that are averaged at the most."""

RECORDS: Final = "M"
"""The first dimension of tensors with one entry for each record; a device fixes it."""

LARGEST_SQUARE: Final = float(np.finfo(np.float32).max)
"""No gradient that counts as finite has a larger squared norm: so every clip factor has all its bits
in float32."""


class Tensor(NamedTuple):
    """An input or an output; a dimension is a number or :data:`RECORDS`."""

    dtype: DTypeLike
    shape: tuple[int | str, ...]

    def sizes(self, records: int) -> Shape:
        """The shape with that many records."""
        return tuple(size if isinstance(size, int) else records for size in self.shape)


class Signature(NamedTuple):
    """Inputs and outputs by their names."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


def signature(spec: ModelSpec, *, views: int, groups: int) -> Signature:
    """The inputs and outputs of a training graph for M records and ``groups`` clip norms.

    Inputs:

    * each block of parameters by its name, a weight as a matrix ``(inputs, units)``: the flat vector cut
      into pieces, which costs no copy;
    * ``inputs``, ``(M, *input_shape)``, or ``(M, views, *input_shape)`` with several views;
    * ``labels``, ``(M,)``, in ``0..classes-1``;
    * ``present``, ``(M,)``: false for records that only fill up the microbatch;
    * ``clip_norms``, ``(groups,)``: one for the whole gradient or one for each layer with parameters.

    Outputs:

    * for each block :func:`sum_of` it, in one row or in the shape of its matrix: its part of the clipped sum
      over the records that are present and finite;
    * ``squared_norms``, ``(M, groups)``. A record was left out unless all of its are at most
      :data:`LARGEST_SQUARE`.
    """
    record = (views, *spec.input_shape) if views > 1 else spec.input_shape
    blocks = spec.parameter_shapes
    return Signature(
        {
            **{block.name: Tensor(np.float32, matrix_shape(block)) for block in blocks},
            "inputs": Tensor(np.float32, (RECORDS, *record)),
            "labels": Tensor(np.int64, (RECORDS,)),
            "present": Tensor(np.bool_, (RECORDS,)),
            "clip_norms": Tensor(np.float64, (groups,)),
        },
        {
            **{sum_of(block): Tensor(np.float32, _sum_shape(block, views)) for block in blocks},
            "squared_norms": Tensor(np.float64, (RECORDS, groups)),
        },
    )


def sum_of(block: ParameterBlock) -> str:
    """The name of the clipped sum by a block of parameters."""
    return f"{block.name}.sum"


def matrix_shape(block: ParameterBlock) -> Shape:
    """A weight as a matrix with a column for each unit or filter; a bias as it is."""
    units = block.shape[-1]
    return (block.size // units, units) if len(block.shape) > 1 else (units,)


def _sum_shape(block: ParameterBlock, views: int) -> Shape:
    # As the product leaves it: another shape would cost a copy.
    return matrix_shape(block) if len(block.shape) == 2 and views == 1 else (1, block.size)


def layers_with_parameters(spec: ModelSpec) -> int:
    """How many layers have a clip norm of their own, where layers do."""
    return sum(1 for top in spec.nodes for node in top.walk() if node.blocks)


def graph_digest(graph: bytes) -> str:
    """SHA-256 of a graph, in hexadecimal digits."""
    return hashlib.sha256(graph).hexdigest()


@cache
def known_digests() -> frozenset[tuple[str, str]]:
    """Of every graph in ``digests.yaml``: the digest of its model and its own."""
    text = resources.files(__package__).joinpath("digests.yaml").read_text("utf-8")
    table: dict[str, dict[str, Any]] = yaml.safe_load(text) or {}
    return frozenset(
        (entry["model"], graph) for entry in table.values() for graph in entry["graphs"].values()
    )
