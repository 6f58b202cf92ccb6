"""Ordinary layers with weights that stay as a seed draws them, one record at a time.

Random convolutions are features that cost nothing: no data went into them. Their weights are those that
:meth:`ModelSpec.initial_weights` draws for a model of the same layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.models.forward import forward
from dpagent.learning.models.layers import Dense
from dpagent.learning.models.part import Shape
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import RandomLayers


class RandomFeatures:
    """The stage as a function of one record.

    Args:
        stage: layers and seed.
        shape: of a record.

    Attributes:
        nodes: its layers in their places.
        weights: the flat vector that holds theirs.
    """

    def __init__(self, stage: RandomLayers, shape: Shape) -> None:
        # The last layer makes a model of them; nothing is computed by it.
        model = ModelSpec("random", shape, 2, (*stage.layers, Dense(2)))
        self.nodes = model.nodes[:-1]
        self.weights = model.initial_weights(stage.seed)

    def __call__(self, values: NDArray[np.float32]) -> NDArray[Any]:
        """The features of one record."""
        return forward(self.nodes, self.weights, values)
