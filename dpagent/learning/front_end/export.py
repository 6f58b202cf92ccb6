"""Front ends as ONNX nodes, so that an exported model is whole. Needs the ``onnx`` package.

Scattering becomes products with constant matrices: a discrete Fourier transform of a few dozen places
is one, and so are its inverse and the blur. It follows
:class:`~dpagent.learning.front_end.scattering.ScatteringTransform` step by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper, version_converter

from dpagent.errors import ConfigurationError
from dpagent.learning.front_end.random_layers import random_model
from dpagent.learning.front_end.scattering import ScatteringTransform
from dpagent.learning.front_end.stages import FrozenNetwork, Projection, RandomLayers, Scattering, stage_shape
from dpagent.learning.models.layers import Shape
from dpagent.learning.models.spec import ModelSpec


class FrontEndNodes:
    """The nodes and constants of a front end.

    Args:
        spec: the model.
        assets: bytes by role, of the stages that need any.
        source: the tensor that the front end sees, ``(N, *input_shape)``, offset and scale applied.
        opset: the version of the operators.

    Attributes:
        nodes, constants: for the graph.
        output: the tensor of the features, ``(N, *feature_shape)``.

    Raises:
        ConfigurationError: a frozen network cannot be joined to the graph.
    """

    def __init__(self, spec: ModelSpec, assets: Mapping[str, bytes], source: str, opset: int) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._names = 0
        shape = spec.input_shape
        for stage in spec.front_end:
            match stage:
                case Scattering():
                    source, shape = self._scattering(stage, shape, source)
                case Projection():
                    source, shape = self._projection(stage, shape, source, assets["projection"])
                case FrozenNetwork():
                    source = self._network(assets["frozen-network"], source, opset)
                    shape = stage.output_shape
                case RandomLayers():
                    from dpagent.learning.inference.export import export_features

                    model = random_model(stage, shape)
                    layers = export_features(model, model.initial_weights(stage.seed))
                    source, shape = self._network(layers, source, opset), stage_shape(stage, shape)
        self.output = source

    def _node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        self._names += 1
        output = f"front_end.{self._names}.{operator.lower()}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], output, **attributes))
        return output

    def _constant(self, values: NDArray[Any]) -> str:
        self._names += 1
        name = f"front_end.{self._names}.constant"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def _reshape(self, source: str, *shape: int) -> str:
        """With 0 for an axis that stays."""
        return self._node("Reshape", source, self._constant(np.array(shape, np.int64)))

    def _projection(self, stage: Projection, shape: Shape, source: str, matrix: bytes) -> tuple[str, Shape]:
        directions = np.frombuffer(matrix, "<f4").reshape(-1, stage.components)
        flat = self._reshape(source, 0, -1)
        return self._node("MatMul", flat, self._constant(directions)), (stage.components,)

    def _network(self, model: bytes, source: str, opset: int) -> str:
        """The nodes of another ONNX file, from its one input to its one output."""
        self._names += 1
        try:
            network = onnx.load_from_string(model)
            network = version_converter.convert_version(network, opset)
            prefixed = onnx.compose.add_prefix(network, f"front_end.{self._names}.").graph
        except (ValueError, RuntimeError, onnx.checker.ValidationError) as error:
            first = str(error).partition("\n")[0]
            raise ConfigurationError(f"The frozen network cannot be part of an export: {first}") from error
        known = {tensor.name for tensor in prefixed.initializer}
        (entry,) = (value.name for value in prefixed.input if value.name not in known)
        self.nodes.append(helper.make_node("Identity", [source], [entry]))
        self.nodes.extend(prefixed.node)
        self.constants.extend(prefixed.initializer)
        return str(prefixed.output[0].name)

    def _scattering(self, stage: Scattering, shape: Shape, source: str) -> tuple[str, Shape]:
        height, width, channels = shape
        transform = ScatteringTransform(stage, (height, width, channels))
        parts = transform.constants
        planes = self._node("Transpose", source, perm=[0, 3, 1, 2])
        planes = self._node("Gather", planes, self._constant(parts.rows.astype(np.int64)), axis=2)
        planes = self._node("Gather", planes, self._constant(parts.columns.astype(np.int64)), axis=3)
        # (N, channels, 1, height, width): the third axis counts the paths.
        planes = self._node("Unsqueeze", planes, self._constant(np.array([2], np.int64)))
        orders: list[list[str]] = [[self._smooth(planes, parts.blurs[0])], [], []]
        real, imaginary = self._transform(planes, None, parts.padded)
        for j, wavelets in enumerate(parts.wavelets):
            first = self._waves(real, imaginary, wavelets[np.newaxis], j, channels, parts.padded)
            orders[1].append(self._smooth(first, parts.blurs[j]))
            if j + 1 == stage.scales:
                break
            coarse = tuple(size >> j for size in parts.padded)
            spectrum = self._transform(first, None, coarse)
            for finer in range(j + 1, stage.scales):
                filters = parts.folded_filters(finer, j)
                waves = self._waves(*spectrum, filters[np.newaxis], finer - j, channels, coarse)
                orders[2].append(self._smooth(waves, parts.blurs[finer]))
        paths = self._node("Concat", *(name for order in orders for name in order), axis=2)
        paths = self._node("Transpose", paths, perm=[0, 3, 4, 1, 2])
        after = transform.output_shape
        return self._reshape(paths, 0, *after), after

    def _waves(
        self, real: str, imaginary: str, filters: Any, octaves: int, channels: int, size: tuple[int, ...]
    ) -> str:
        """|x ∗ ψ| for each of the filters, at every 2^octaves-th place: (N, channels, paths, …)."""
        factor = 1 << octaves
        coarse = tuple(axis // factor for axis in size)
        parts = []
        for part in (real, imaginary):
            # Each path before times each filter: (N, channels, before, filters, height, width).
            wide = self._node("Unsqueeze", part, self._constant(np.array([3], np.int64)))
            product = self._node("Mul", wide, self._constant(filters[np.newaxis, np.newaxis]))
            if octaves:
                folded = self._reshape(product, 0, channels, -1, factor, coarse[0], factor, coarse[1])
                product = self._node(
                    "ReduceMean", folded, self._constant(np.array([3, 5], np.int64)), keepdims=0
                )
            else:
                product = self._reshape(product, 0, channels, -1, *coarse)
            parts.append(product)
        real, imaginary = self._transform(parts[0], parts[1], coarse, inverse=True)
        squares = [self._node("Mul", part, part) for part in (real, imaginary)]
        return self._node("Sqrt", self._node("Add", *squares))

    def _transform(
        self, real: str, imaginary: str | None, size: tuple[int, ...], *, inverse: bool = False
    ) -> tuple[str, str]:
        """The discrete Fourier transform along the last two axes, as real and imaginary part."""
        for axis, places in enumerate(size):
            angles = 2 * np.pi / places * np.outer(np.arange(places), np.arange(places))
            scale = 1 / places if inverse else 1.0
            cosine = self._constant((np.cos(angles) * scale).astype(np.float32))
            sine = self._constant((np.sin(angles) * scale * (1 if inverse else -1)).astype(np.float32))

            def product(matrix: str, values: str, across: int = axis) -> str:
                # The matrices are symmetric.
                return self._node("MatMul", *((values, matrix) if across else (matrix, values)))

            turned = product(cosine, real), product(sine, real)
            if imaginary is not None:
                turned = (
                    self._node("Sub", turned[0], product(sine, imaginary)),
                    self._node("Add", turned[1], product(cosine, imaginary)),
                )
            real, imaginary = turned
        assert imaginary is not None
        return real, imaginary

    def _smooth(self, planes: str, blur: tuple[Any, ...]) -> str:
        down, across = blur
        left = self._node("MatMul", self._constant(down), planes)
        return self._node("MatMul", left, self._constant(np.ascontiguousarray(across.T)))
