"""The graph as a whole. Needs the ``onnx`` package, which no device has."""

from __future__ import annotations

from dpagent.errors import require_count
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.onnx_graph.ends import centred, loss_gradient
from dpagent.learning.training.onnx_graph.feature_map import FeatureMap, all_places
from dpagent.learning.training.onnx_graph.gradients import Gradients
from dpagent.learning.training.onnx_graph.graph import Graph
from dpagent.learning.training.onnx_graph.network import sequence
from dpagent.learning.training.onnx_graph.signature import MAX_VIEWS, signature


def build_training_graph(spec: ModelSpec, *, views: int = 1, per_layer: bool = False) -> bytes:
    """The training graph of ``spec`` as a serialised, checked ONNX file.

    Args:
        spec: the architecture; of one with a front end, the graph is that of the layers behind it.
        views: augmented copies of each record, whose gradients are averaged before clipping.
        per_layer: whether each layer with parameters has a clip norm of its own.

    Returns:
        The file, with the inputs and outputs of
        :func:`~dpagent.learning.training.onnx_graph.signature.signature`. The same arguments give the same
        bytes.

    Raises:
        ParameterError: views is out of its range.
    """
    require_count("views", views, maximum=MAX_VIEWS)
    spec = spec.head
    graph = Graph()
    gradients = Gradients(graph, spec, views=views, per_layer=per_layer)
    x = FeatureMap(
        centred(graph, spec, "inputs"),
        all_places(spec.input_shape),
        spec.input_shape[-1],
        needs_gradient=False,
    )
    logits, backward = sequence(graph, gradients, spec.nodes, x, (0,))
    backward(loss_gradient(graph, logits.name, "labels", classes=spec.classes, views=views))
    gradients.clipped_sum("clip_norms", "present", "squared_norms")
    return graph.model(spec.name, signature(spec, views=views, groups=gradients.groups))
