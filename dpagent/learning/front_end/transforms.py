"""Each frozen stage as a function of one record."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ConfigurationError
from dpagent.extras import runtime_remedy
from dpagent.learning.front_end.scattering import ScatteringTransform
from dpagent.learning.models.part import Shape
from dpagent.learning.models.stages import FrozenNetwork, Projection, Scattering

Floats = NDArray[np.float32]


class Transform(NamedTuple):
    """A stage as a function of one record.

    Attributes:
        output_shape: of one record after it.
        function: from ``(*input_shape)`` float32 to ``(*output_shape)`` float32.
    """

    output_shape: Shape
    function: Callable[[Floats], Floats]

    def __call__(self, values: Floats) -> Floats:
        """The record after the stage."""
        return self.function(values)


def scattering(stage: Scattering, shape: Shape) -> Transform:
    """Wavelet scattering."""
    height, width, channels = shape
    transform = ScatteringTransform(stage, (height, width, channels))
    return Transform(stage.shape_after(shape), lambda image: transform(image[np.newaxis])[0])


def projection(where: str, stage: Projection, shape: Shape, matrix: bytes) -> Transform:
    """The record, flattened, times a matrix ``(values, components)``, float32, little-endian.

    Raises:
        ConfigurationError: the matrix has another size, or entries that are not finite.
    """
    size = math.prod(shape)
    if len(matrix) != 4 * size * stage.components:
        raise ConfigurationError(
            f"{where}: its matrix has {len(matrix)} bytes; expected {4 * size * stage.components}."
        )
    directions = np.frombuffer(matrix, "<f4").astype(np.float32).reshape(size, stage.components)
    if not np.isfinite(directions).all():
        raise ConfigurationError(f"{where}: its matrix has entries that are not finite.")
    return Transform((stage.components,), lambda values: np.asarray(values.reshape(-1) @ directions))


def frozen_network(where: str, stage: FrozenNetwork, shape: Shape, model: bytes) -> Transform:
    """A network of an ONNX file, run by ONNX Runtime.

    Raises:
        ConfigurationError: the file is another than the stage names, or does not fit it; or there is no
            ONNX Runtime here.
    """
    if hashlib.sha256(model).hexdigest() != stage.digest:
        raise ConfigurationError(f"{where}: its network is not the one that the model names.")
    try:
        from dpagent.learning.front_end.frozen_network import OnnxFeatures
    except ImportError as error:
        raise ConfigurationError(
            f"{where}: networks are run with the package onnxruntime, which cannot be used here: {error}. "
            f"Take a front end that needs none (scattering, random, projection). {runtime_remedy()}"
        ) from error
    network = OnnxFeatures(where, model, shape, stage.output_shape)
    return Transform(stage.output_shape, network)
