"""The cost of training an architecture, from its shapes alone: operations, and an estimate of memory.

Operations are those of matrix products: a multiplication and an addition for each weight at each position,
biases counted as weights. Activations, pooling and normalisation are left out; on the processors this is
made for they take time by the bytes they touch.

The memory is that of the arrays which an engine keeps for the records it computes at once, in float32:
every activation and its gradient, and of convolutions the windows they multiply and the gradient of each
record. Engines take the largest part of a microbatch that suits a processor's caches, so the estimate does,
too. The interpreter and its libraries come on top; ``dpagent bench`` measures all of it.
"""

from __future__ import annotations

import math

from dpagent.errors import require_count
from dpagent.learning.models.layers import Convolution
from dpagent.learning.models.spec import ModelSpec, Node

_FLOAT32 = 4
_FLOAT64 = 8

# The engines' assumed cache in bytes, and the least number of records at a time.
_CACHED = 8 << 20
_FEWEST_RECORDS = 4


def forward_flops(node: Node) -> int:
    """Operations of one record's forward pass through a layer; of a residual, of all layers inside."""
    total = 0
    for inner in node.walk():
        if inner.blocks:
            positions = math.prod(inner.output_shape[:-1])
            total += 2 * positions * (inner.parameters.stop - inner.parameters.start)
    return total


def training_flops(spec: ModelSpec) -> int:
    """Operations of one record's gradient.

    Three products of one size for each convolution and dense layer: the output, the gradient by the
    weights and, but for the first layer, the gradient by the input.

    >>> from dpagent.learning.models.built_ins import built_in
    >>> training_flops(built_in("digits"))
    517180
    """
    trained = [node for top in spec.nodes for node in top.walk() if node.blocks]
    return sum(forward_flops(node) * (3 if node is not trained[0] else 2) for node in trained)


def record_bytes(spec: ModelSpec) -> int:
    """Bytes that the layers keep for one record; of a model with a front end, the layers behind it."""
    floats = 2 * math.prod(spec.feature_shape)
    for node in (node for top in spec.nodes for node in top.walk()):
        floats += 2 * math.prod(node.output_shape)
        if isinstance(node.layer, Convolution):
            over = node.layer.windows(node.input_shape)
            floats += over.positions * (over.taps + 1) + sum(block.size for block in node.blocks)
    return _FLOAT32 * floats


def working_bytes(spec: ModelSpec, microbatch: int) -> int:
    """Estimated bytes that the layers keep for the records of a microbatch that are computed at once.

    Raises:
        ParameterError: microbatch is below 1.
    """
    require_count("microbatch", microbatch)
    one = record_bytes(spec)
    return one * min(microbatch, max(_FEWEST_RECORDS, _CACHED // one))


def parameter_bytes(spec: ModelSpec) -> int:
    """Bytes of the weights, their clipped sum in float32 and the lot's in float64."""
    return (2 * _FLOAT32 + _FLOAT64) * spec.parameter_count


def features_mib(spec: ModelSpec, records: int) -> int:
    """Room on disk, in MiB, for the features of so many records in any round of a job; 0 without a front end.

    >>> from dpagent.learning.models.built_ins import built_in
    >>> features_mib(built_in("scattering"), 2000), features_mib(built_in("digits"), 2000)
    (31, 0)
    """
    if not spec.front_end:
        return 0
    shapes = [spec.feature_shape, *([spec.shape_before_projection] if spec.projection else [])]
    return -(-records * 4 * max(map(math.prod, shapes)) >> 20)
