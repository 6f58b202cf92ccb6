"""A training graph in ONNX Runtime: known, loaded, and found to fit its model. Device side."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from dpagent.errors import ConfigurationError
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.onnx_session import LOAD_ERRORS, first_line, quiet_session
from dpagent.learning.training.onnx_graph.signature import (
    RECORDS,
    Signature,
    graph_digest,
    known_digests,
    layers_with_parameters,
    signature,
)

_TYPES = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(bool)": np.dtype(np.bool_),
}


class LoadedGraph(NamedTuple):
    """A graph that can be run.

    Attributes:
        session: of ONNX Runtime, on one thread.
        views: copies of each record that the graph takes.
        groups: clip norms that it takes.
        ends: its inputs and outputs.
    """

    session: Any
    views: int
    groups: int
    ends: Signature


def load_graph(spec: ModelSpec, graph: bytes, *, rows: int, trusted: Collection[str]) -> LoadedGraph:
    """The graph, ready to be run with ``rows`` records.

    Raises:
        ConfigurationError: it is not known to the device, or not a graph for ``spec``.
    """
    digest, model = graph_digest(graph), spec.digest().hex()
    if (model, digest) not in known_digests() and digest not in trusted:
        if model not in {known for known, _ in known_digests()}:
            raise ConfigurationError(
                f"not tried, since {spec.name!r} is no built-in model and trusted_graphs of agent.yaml does"
                f" not list its training graph (SHA-256 {digest}); the numpy engine needs no graph"
            )
        raise ConfigurationError(
            f"the training graph for the built-in model {spec.name!r} has the SHA-256 {digest}; expected the"
            " one that this version of dpagent builds. Install the coordinator's version on the device, or"
            " build the graph there and list its digest in trusted_graphs"
        )
    try:
        session = quiet_session(graph, sizes={RECORDS: rows})
    except LOAD_ERRORS as error:
        raise ConfigurationError(
            f"The training graph of {len(graph)} bytes for model {spec.name!r} cannot be loaded:"
            f" {first_line(error)}"
        ) from error
    return _checked(spec, session, rows)


def _checked(spec: ModelSpec, session: Any, rows: int) -> LoadedGraph:
    found = [
        {end.name: (_TYPES.get(end.type), tuple(end.shape)) for end in ends}
        for ends in (session.get_inputs(), session.get_outputs())
    ]
    _, record = found[0].get("inputs", (None, ()))
    _, norms = found[0].get("clip_norms", (None, ()))
    views = record[1] if len(record) == len(spec.input_shape) + 2 and isinstance(record[1], int) else 1
    groups = norms[0] if norms == (layers_with_parameters(spec),) else 1
    ends = signature(spec, views=views, groups=groups)
    for kind, ours, theirs in zip(("inputs", "outputs"), ends, found, strict=True):
        expected = {name: (np.dtype(tensor.dtype), tensor.sizes(rows)) for name, tensor in ours.items()}
        wrong = [name for name in {*expected, *theirs} if expected.get(name) != theirs.get(name)]
        if wrong:
            name = min(wrong)
            raise ConfigurationError(
                f"The training graph is not one for model {spec.name!r}: of its {kind}, {name!r} is"
                f" {theirs.get(name)}; expected {expected.get(name)}. Build it for this model."
            )
    return LoadedGraph(session, views, groups, ends)
