"""Attack: a record more takes the others to places where their gradients are computed in another order.

Claim: a record's gradient is the same bits at every place of a microbatch. So one record more changes the
integer sum by at most the sensitivity that the noise is for.

Before, it did not hold for graphs with a product of one column (``Dense(1)``, a convolution with one
channel): ONNX Runtime 1.31 on x86-64 adds up the last rows of such a product in another order where they are
no multiple of four, and the board's check, which looked at one record, passed about half of such engines.
With the coordinator's weights below, u = (2²⁴ + 1) − 2²⁴ is 0 or 1 by the order, and decides the class: one
record more, which reaches such a row or moves another there, changed the sum by 2.997 sensitivities (ε of
9.8 where 2.75 was charged).

Power: on the code of before, each random order of the lot with one record more moves the sum by more than a
sensitivity with a probability of 0.49 to 0.95; that all 20 do not is less likely than 2·10⁻⁶. On another
processor, or with another ONNX Runtime, the kernels may be sound, and the test passes on any code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fleets import make_plan, model_section
from learning.small_models import small

from agent.noisy_sums import clipped_sum
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.models.layers import AveragePool2d, Conv2d, Dense, Layer, Tanh
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import Engine
from dpagent.learning.training.engine_choice import Bench
from dpagent.learning.training.onnx_graph.build import build_training_graph
from dpagent.learning.training.onnx_graph.signature import graph_digest
from dpagent.protocol.chunks import content_digest
from dpagent.protocol.task import RoundTask
from dpagent.protocol.weights import weights_to_bytes

S, A, ORDERS = 2.0**12, -100.0, 20


def engine_on_this_board(spec: ModelSpec, microbatch: int, views: int = 1) -> Engine:
    """As an agent makes it, of a graph that its owner trusts."""
    graph = build_training_graph(spec, views=views)
    return Bench(spec, graph, microbatch, views=views, trusted={graph_digest(graph)}).make("onnx")


def moved_by(engine: Engine, weights: Any, common: Any, new: Any, count: int, **plan: Any) -> float:
    """How far one record more moves the integer sum, in sensitivities."""
    section = model_section(engine.spec) | {"digest": content_digest(weights_to_bytes(weights, "float32"))}
    sampling = {"rate": 1.0, "expected_lot": 8.0}
    release = RoundTask.of(make_plan(model=section, sampling=sampling, step=1, **plan)).release
    mechanism: Any = release.mechanism
    without = np.tile(common, (count, *(1 for _ in common.shape)))
    one = ArrayDataset(without, np.zeros(count, np.int64), 3)
    other = ArrayDataset(np.concatenate([without, new[np.newaxis]]), np.zeros(count + 1, np.int64), 3)

    def total(dataset: ArrayDataset) -> Any:
        return mechanism.quantize(clipped_sum(release, weights, dataset, engine)).astype(np.float64)

    return max(
        float(np.linalg.norm(total(other) - total(one))) / mechanism.sensitivity_units for _ in range(ORDERS)
    )


@pytest.mark.parametrize(("microbatch", "count"), [(7, 4), (10, 8), (18, 16), (30, 28)])
def test_one_record_of_a_table(microbatch: int, count: int) -> None:
    spec = small("bottleneck", (4,), Dense(1))
    weights = np.zeros(spec.parameter_count, np.float32)
    weights[:4] = S
    weights[5:8], weights[8:11] = [0, A, -A], [0, 50, 0]
    common, new = (np.array([S, u / S, -S, 0], np.float32) for u in (1, 64))
    assert moved_by(engine_on_this_board(spec, microbatch), weights, common, new, count) <= 1


def test_one_picture_with_views_on_a_board_as_shipped() -> None:
    layers: tuple[Layer, ...] = (Conv2d(32, 7, 1, 3), Tanh(), AveragePool2d(32, 32), Dense(3), Dense(1))
    spec = small("photographs", (32, 32, 3), *layers)
    weights = np.zeros(spec.parameter_count, np.float32)
    kernel, _, narrow, bias, one, _, out, out_bias = (
        weights[block.offset : block.offset + block.size] for block in spec.parameter_shapes
    )
    kernel.reshape(7, 7, 3, 32)[3, 3, :, 0] = 5.0  # The first filter sees the pixel in the middle.
    narrow.reshape(32, 3)[0, 1], bias[:] = 64 / S, [S, 1 / S, -S]
    one[:], out[:], out_bias[:] = S, [0, A, -A], [0, 50, 0]
    dark, bright = np.zeros((32, 32, 3), np.float32), np.ones((32, 32, 3), np.float32)
    engine = engine_on_this_board(spec, 16, views=3)
    views = {"views": 3, "shift": 0, "flip": False}
    assert moved_by(engine, weights, dark, bright, 9, augmentation=views) <= 1
