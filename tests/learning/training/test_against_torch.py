"""Clipped sums of every engine against PyTorch's per-example gradients, where it is installed."""

from __future__ import annotations

import numpy as np
import pytest
from learning.engines import ENGINES
from learning.plain_network import SPECS, records

from dpagent.learning.models.built_ins import BUILT_IN
from dpagent.learning.models.spec import ModelSpec

pytest.importorskip("torch")

from learning.torch_network import gradients_of  # which needs it

MODELS = [*SPECS, *(BUILT_IN[name].head for name in sorted(BUILT_IN))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.name)
def test_clipped_sums_are_those_of_torch(name: str, spec: ModelSpec) -> None:
    weights, inputs, labels = records(spec, 12)
    gradients = gradients_of(spec, weights, inputs, labels)
    norms = np.linalg.norm(gradients, axis=1)
    clip_norm = float(np.median(norms)) * 1.01
    found = ENGINES[name](spec, microbatch=5).clipped_sum(weights, inputs, labels, [clip_norm])
    expected = gradients.T @ np.minimum(1, clip_norm / norms)
    np.testing.assert_allclose(found.total, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert found.within.tolist() == [np.count_nonzero(norms <= clip_norm)]
