"""The file that leaves the project: a trained model with its preprocessing, its front end and its metadata.

The graph takes records with the channels last, images in [0, 1], and holds the preprocessing and the front
end of the :class:`ModelSpec`, so it runs on its own. ONNX convolves with the channels
first, so records are transposed before the layers, and back before they are flattened: the weights of the
first dense layer stay in the order of training.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError
from dpagent.learning.inference.export.front_end import append_front_end
from dpagent.learning.inference.export.graph import Graph
from dpagent.learning.inference.export.layers import append_layers, channels_first
from dpagent.learning.models.spec import ModelSpec


def export_onnx(
    spec: ModelSpec,
    weights: NDArray[np.float32],
    *,
    metadata: Mapping[str, str],
    assets: Mapping[str, bytes] | None = None,
) -> bytes:
    """The model as a serialised, checked ONNX file.

    Args:
        spec: the architecture.
        weights: flat ``(d,)`` float32, all finite.
        metadata: stored as the model's metadata properties, for instance the privacy statement.
        assets: bytes by role, of the stages of the front end that need any.

    Returns:
        The file. Input ``input`` is float32 ``(N, *input_shape)``, output ``logits`` float32
        ``(N, classes)``; N is free. The same arguments give the same bytes.

    Raises:
        ParameterError: the weights do not fit the model or are not finite.
        ConfigurationError: a frozen network cannot be part of the file.

    >>> from dpagent.learning.models.built_ins import built_in
    >>> spec = built_in("digits")
    >>> file = export_onnx(spec, spec.initial_weights(seed=0), metadata={"privacy": "none: not trained"})
    >>> import onnx
    >>> [output.name for output in onnx.load_from_string(file).graph.output]
    ['logits']
    """
    spec.require_weights(weights)
    if not np.isfinite(weights).all():
        raise ParameterError(
            f"{np.count_nonzero(~np.isfinite(weights))} of the weights are not finite; expected none."
            " The training diverged: export an earlier round."
        )
    graph, x = Graph(), "input"
    for operator, name in (("Sub", "input_offset"), ("Div", "input_scale")):
        x = graph.add(operator, x, graph.constant(getattr(spec, name), name), name=f"{name}.applied")
    x = append_front_end(graph, spec, assets or {}, x)
    x = channels_first(graph, x, len(spec.feature_shape), "channels_first")
    x = append_layers(graph, spec.nodes, weights, x)
    graph.add("Identity", x, name="logits")
    return graph.model(spec.name, {"input": spec.input_shape}, {"logits": (spec.classes,)}, metadata)
