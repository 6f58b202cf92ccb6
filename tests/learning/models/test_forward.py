"""The definition of every layer, and that the tests meet every layer."""

from __future__ import annotations

import numpy as np
import pytest
from learning.small_models import SPECS, records

from dpagent.learning.models.forward import forward
from dpagent.learning.models.layers import LAYERS
from dpagent.learning.models.spec import ModelSpec


def test_every_kind_of_layer_is_in_a_small_model() -> None:
    """The suites of engines and exports run over these models."""
    kinds = {node.layer.kind for spec in SPECS for top in spec.nodes for node in top.walk()}
    assert kinds == set(LAYERS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_shapes_and_types_are_kept(spec: ModelSpec) -> None:
    weights, inputs, _ = records(spec, 1)
    values = inputs[0]
    for node in spec.nodes:
        values = forward([node], weights, values)
        assert values.shape == node.output_shape
        assert values.dtype == np.float32
    exact = forward(spec.nodes, weights.astype(np.float64), inputs[0].astype(np.float64))
    assert exact.dtype == np.float64
    np.testing.assert_allclose(values, exact, atol=1e-5)
