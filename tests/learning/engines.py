"""Every engine by its name, for the suite that all of them pass, and architectures drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st
from learning.small_models import small

from dpagent.errors import ConfigurationError
from dpagent.learning.models.layers import (
    AveragePool1d,
    AveragePool2d,
    Conv1d,
    Conv2d,
    Dense,
    GroupNorm,
    Layer,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Residual,
    Tanh,
)
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import Engine
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.onnx_graph.signature import graph_digest
from dpagent.learning.training.parallel_engine import ParallelEngine

if TYPE_CHECKING:
    from dpagent.learning.training.onnx_engine import OnnxEngine

HUGE = 1e9
"""A clip norm that clips nothing."""


def _numpy(spec: ModelSpec, *, per_layer: bool = False, **options: Any) -> NumpyEngine:
    del per_layer  # It takes either at every call.
    return NumpyEngine(spec, **options)


def _stacked(spec: ModelSpec, *, per_layer: bool = False, **options: Any) -> NumpyEngine:
    del per_layer
    return NumpyEngine(spec, products="stacked", **options)


def onnx_engine(spec: ModelSpec, *, views: int = 1, per_layer: bool = False, **options: Any) -> OnnxEngine:
    """With a graph built and trusted on the spot."""
    from dpagent.learning.training.onnx_engine import OnnxEngine
    from dpagent.learning.training.onnx_graph.build import build_training_graph

    graph = build_training_graph(spec, views=views, per_layer=per_layer)
    return OnnxEngine(spec, graph, trusted={graph_digest(graph)}, **options)


def _in_processes(spec: ModelSpec, *, per_layer: bool = False, **options: Any) -> ParallelEngine:
    return ParallelEngine(_stacked(spec, per_layer=per_layer, **options), 2)


ENGINES: dict[str, Callable[..., Engine]] = {
    "numpy": _numpy,
    "numpy, stacked": _stacked,
    "numpy, in processes": _in_processes,
}
"""Makers: of a specification, and by keyword of microbatch, views and per_layer."""
if find_spec("onnxruntime") is not None:  # Boards of 32 bits have neither it nor onnx.
    ENGINES["onnx"] = onnx_engine


@cache
def engine_of(name: str, spec: ModelSpec, **options: Any) -> Engine:
    """An engine with microbatches of four, made once."""
    return ENGINES[name](spec, **{"microbatch": 4, **options})


def singly(engine: Engine, weights: Any, inputs: Any, labels: Any) -> Any:
    """Each record's gradient by the plainest way: in a lot of its own, never clipped."""
    parts = zip(inputs[:, np.newaxis], labels[:, np.newaxis], strict=True)
    gradients = [engine.clipped_sum(weights, x, y, [HUGE]).total for x, y in parts]
    return np.reshape(gradients, (len(labels), len(weights)))


@st.composite
def architectures(draw: Any) -> ModelSpec:
    """Small networks over tables, series and images."""
    axes = draw(st.integers(0, 2))
    shape = (*(draw(st.integers(6, 10)) for _ in range(axes)), draw(st.integers(1, 5)))
    layers: list[Layer] = []
    for _ in range(draw(st.integers(1, 4))):
        layers += draw(_tabular() if axes == 0 else _windowed(axes))
    if draw(st.booleans()):
        layers += [Dense(draw(st.integers(1, 9))), Tanh()]
    while True:
        try:
            return small("drawn", shape, *layers)
        except ConfigurationError:  # Windows larger than what is left of the image.
            layers.pop()


@st.composite
def _tabular(draw: Any) -> list[Layer]:
    units = draw(st.sampled_from([2, 4, 6]))
    kinds: list[list[Layer]] = [
        [Dense(units), draw(st.sampled_from([Tanh(), Relu()]))],
        [Dense(units), GroupNorm(2), Relu(), Tanh()],
        [Dense(units), Residual((Tanh(), Dense(units)))],
        [Residual((Dense(units), Relu()), (Dense(units),)), Tanh()],
    ]
    return draw(st.sampled_from(kinds))


@st.composite
def _windowed(draw: Any, axes: int) -> list[Layer]:
    conv: Any = (Conv1d, Conv2d)[axes - 1]
    most: Any = (MaxPool1d, MaxPool2d)[axes - 1]
    mean: Any = (AveragePool1d, AveragePool2d)[axes - 1]
    channels, kernel = draw(st.sampled_from([2, 4, 6])), draw(st.integers(1, 4))
    stride, padding = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    activation = draw(st.sampled_from([Tanh(), Relu()]))
    kinds: list[list[Layer]] = [
        [conv(channels, kernel, stride, padding), activation],
        [conv(channels, kernel, stride, padding), activation, most(2, 2)],
        [conv(channels, kernel, 1, padding), most(kernel, 1), activation, conv(channels, 2, 1, 1)],
        [most(kernel, stride)],
        [activation, mean(kernel, stride)],
        [conv(channels, 1), GroupNorm(2), activation, most(2, 2)],
        [activation],
        [
            Residual(
                (conv(channels, 3, stride, 1), activation, conv(channels, 1)), (conv(channels, 1, stride),)
            )
        ],
        [
            Residual(
                (conv(channels, 3, 1, 1), activation, most(2, 2)),
                (conv(channels, 1), activation, most(2, 2)),
            )
        ],
        [conv(channels, 1), Residual((activation, conv(channels, 3, 1, 1), GroupNorm(2))), activation],
    ]
    return draw(st.sampled_from(kinds))
