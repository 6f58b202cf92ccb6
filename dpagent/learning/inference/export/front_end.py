"""Front ends as ONNX operators, so that an exported model is whole.

Scattering becomes products with constant matrices: a discrete Fourier transform of a few dozen places
is one, and so are its inverse and the blur. It follows
:class:`~dpagent.learning.front_end.scattering.ScatteringTransform` step by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

import numpy as np
import onnx

from dpagent.errors import ConfigurationError
from dpagent.learning.front_end.random_layers import RandomFeatures
from dpagent.learning.front_end.scattering import ScatteringTransform
from dpagent.learning.inference.export.graph import Graph
from dpagent.learning.inference.export.layers import append_layers, channels_first, channels_last
from dpagent.learning.models.part import Shape
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import FrozenNetwork, Projection, RandomLayers, Scattering


def append_front_end(graph: Graph, spec: ModelSpec, assets: Mapping[str, bytes], x: str) -> str:
    """Append the frozen stages of a model.

    Args:
        graph: is appended to.
        spec: the model.
        assets: bytes by role, of the stages that need any.
        x: the records ``(N, *input_shape)``, offset and scale applied.

    Returns:
        The features, ``(N, *feature_shape)``.

    Raises:
        ConfigurationError: a frozen network cannot be joined to the graph.
    """
    shape = spec.input_shape
    for number, stage in enumerate(spec.front_end):
        graph.scope = f"front_end.{number}.{stage.kind}."
        match stage:
            case Scattering():
                x = _Scattering(graph, stage, shape).append(x)
            case RandomLayers():
                features = RandomFeatures(stage, shape)
                x = channels_first(graph, x, len(shape))
                x = append_layers(graph, features.nodes, features.weights, x)
                x = channels_last(graph, x, len(stage.shape_after(shape)))
            case FrozenNetwork():
                x = _frozen_network(graph, assets["frozen-network"], x)
            case Projection():
                directions = np.frombuffer(assets["projection"], "<f4").reshape(-1, stage.components)
                x = graph.add("MatMul", graph.reshape(x, 0, -1), graph.constant(directions))
            case _:
                assert_never(stage)
        shape = stage.shape_after(shape)
    graph.scope = ""
    return x


def _frozen_network(graph: Graph, model: bytes, x: str) -> str:
    try:
        return graph.join(onnx.load_from_string(model), x)
    except (ValueError, RuntimeError, onnx.checker.ValidationError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigurationError(f"The frozen network cannot be part of an export: {first}") from error


class _Scattering:
    """The stage, for records of ``shape``."""

    def __init__(self, graph: Graph, stage: Scattering, shape: Shape) -> None:
        height, width, self._channels = shape
        self._graph, self._scales = graph, stage.scales
        self._transform = ScatteringTransform(stage, (height, width, self._channels))

    def append(self, x: str) -> str:
        """Append it; ``x`` and the result have their channels last."""
        graph, parts = self._graph, self._transform.constants
        planes = graph.add("Transpose", x, perm=[0, 3, 1, 2])
        planes = graph.add("Gather", planes, graph.constant(parts.rows, dtype=np.int64), axis=2)
        planes = graph.add("Gather", planes, graph.constant(parts.columns, dtype=np.int64), axis=3)
        # (N, channels, 1, height, width): the third axis counts the paths.
        planes = graph.add("Unsqueeze", planes, graph.constant([2], dtype=np.int64))
        orders: list[list[str]] = [[self._smooth(planes, parts.blurs[0])], [], []]
        spectrum = self._fourier(planes, None, parts.padded)
        for j, wavelets in enumerate(parts.wavelets):
            first = self._waves(*spectrum, wavelets[np.newaxis], j, parts.padded)
            orders[1].append(self._smooth(first, parts.blurs[j]))
            if j + 1 == self._scales:
                break
            coarse = tuple(size >> j for size in parts.padded)
            spectrum_of_first = self._fourier(first, None, coarse)
            for finer in range(j + 1, self._scales):
                filters = parts.folded_filters(finer, j)
                waves = self._waves(*spectrum_of_first, filters[np.newaxis], finer - j, coarse)
                orders[2].append(self._smooth(waves, parts.blurs[finer]))
        paths = graph.add("Concat", *(name for order in orders for name in order), axis=2)
        paths = graph.add("Transpose", paths, perm=[0, 3, 4, 1, 2])
        return graph.reshape(paths, 0, *self._transform.output_shape)

    def _waves(self, real: str, imaginary: str, filters: Any, octaves: int, size: tuple[int, ...]) -> str:
        """|x ∗ ψ| for each of the filters, at every 2^octaves-th place: (N, channels, paths, …)."""
        factor = 1 << octaves
        coarse = tuple(axis // factor for axis in size)
        parts = []
        for part in (real, imaginary):
            # Each path before times each filter: (N, channels, before, filters, height, width).
            wide = self._graph.add("Unsqueeze", part, self._graph.constant([3], dtype=np.int64))
            product = self._graph.add("Mul", wide, self._graph.constant(filters[np.newaxis, np.newaxis]))
            if octaves:
                folded = self._graph.reshape(
                    product, 0, self._channels, -1, factor, coarse[0], factor, coarse[1]
                )
                product = self._graph.add(
                    "ReduceMean", folded, self._graph.constant([3, 5], dtype=np.int64), keepdims=0
                )
            else:
                product = self._graph.reshape(product, 0, self._channels, -1, *coarse)
            parts.append(product)
        real, imaginary = self._fourier(parts[0], parts[1], coarse, inverse=True)
        squares = [self._graph.add("Mul", part, part) for part in (real, imaginary)]
        return self._graph.add("Sqrt", self._graph.add("Add", *squares))

    def _fourier(
        self, real: str, imaginary: str | None, size: tuple[int, ...], *, inverse: bool = False
    ) -> tuple[str, str]:
        """The discrete Fourier transform along the last two axes, as real and imaginary part."""
        for axis, places in enumerate(size):
            angles = 2 * np.pi / places * np.outer(np.arange(places), np.arange(places))
            scale = 1 / places if inverse else 1.0
            cosine = self._graph.constant(np.cos(angles) * scale)
            sine = self._graph.constant(np.sin(angles) * scale * (1 if inverse else -1))

            def product(matrix: str, values: str, across: int = axis) -> str:
                # The matrices are symmetric.
                return self._graph.add("MatMul", *((values, matrix) if across else (matrix, values)))

            turned = product(cosine, real), product(sine, real)
            if imaginary is not None:
                turned = (
                    self._graph.add("Sub", turned[0], product(sine, imaginary)),
                    self._graph.add("Add", turned[1], product(cosine, imaginary)),
                )
            real, imaginary = turned
        assert imaginary is not None
        return real, imaginary

    def _smooth(self, planes: str, blur: tuple[Any, ...]) -> str:
        down, across = blur
        left = self._graph.add("MatMul", self._graph.constant(down), planes)
        return self._graph.add("MatMul", left, self._graph.constant(across.T))
