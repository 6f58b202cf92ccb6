"""The training engine on ONNX Runtime: one run of a training graph computes a microbatch.

The graph comes from the coordinator (``dpagent.learning.training.onnx_graph``) and holds forward, backward,
norms, clip and sum. The arrays it reads and writes are buffers of this engine, bound once.

**Trust.** A graph decides how gradients are clipped, so no coordinator may choose it freely: the engine
takes only graphs whose SHA-256 the device knows.

**Batch invariance.** A run always has the same number of rows; those without a record are computed
and left out. Every record's products and sums lie in its own rows, but which of the runtime's
kernels computes a row may depend on the machine, and on the row: graphs ask for no product of which that is
known (:meth:`~dpagent.learning.training.onnx_graph.graph.Graph.product`), and
:meth:`OnnxEngine.is_batch_invariant` tries all of them.

**Rows.** A run takes as many records as the processor's caches like, for a large model fewer than a
microbatch. The float32 sums of a microbatch's runs are added in float32, those of microbatches in float64.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.blank_rows import blank_all_but
from dpagent.errors import DataError, ParameterError, require_count, require_positive
from dpagent.learning.models.layers import Convolution
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.onnx_session import RUNTIME_ERRORS, first_line
from dpagent.learning.training.arguments import are_finite, require_inputs, require_labels
from dpagent.learning.training.batch_invariance import CLIP_NORM, Computed, is_invariant
from dpagent.learning.training.engine import (
    MAX_LOT_MICROBATCHES,
    MAX_MICROBATCH,
    NOBODY,
    ClippedSum,
    parts_of,
)
from dpagent.learning.training.onnx_graph.session import LoadedGraph, load_graph
from dpagent.learning.training.onnx_graph.signature import LARGEST_SQUARE, Tensor, matrix_shape, sum_of
from dpagent.norm import Norm

# Bytes that a run's windows and gradients may take: with more, caches lose more than fixed costs gain.
_WORKING_SET = 8 << 20
_FEWEST_ROWS = 4


class OnnxEngine:
    """Computes one architecture; see :class:`~dpagent.learning.training.engine.Engine`.

    Args:
        spec: the architecture; of one with a front end, the layers behind it, which take features.
        graph: made for ``spec`` by :func:`~dpagent.learning.training.onnx_graph.build.build_training_graph`.
            It settles how many views a record has, and whether each layer has a clip norm of its own.
        microbatch: records whose clipped gradients are added in float32, in ``1..MAX_MICROBATCH``.
        trusted: digests (:func:`~dpagent.learning.training.onnx_graph.graph_digest`) of graphs that the
            device's owner allows besides those that this version knows.

    Attributes:
        rows: records computed together in one run, a divisor of ``microbatch``.
        groups: how many clip norms the graph takes.
        norm: in which records are clipped: graphs do it in L2.

    Raises:
        ConfigurationError: the graph is not known to the device, or is not one for ``spec``.
        ParameterError: a number is out of its range.
    """

    norm: Final = Norm.L2
    processes: Final = 1
    elsewhere_s: Final = 0.0

    def __init__(
        self,
        spec: ModelSpec,
        graph: bytes,
        *,
        microbatch: int = 32,
        trusted: Collection[str] = (),
    ) -> None:
        self.spec = spec = spec.head
        self.microbatch = require_count("microbatch", microbatch, maximum=MAX_MICROBATCH)
        self.rows = _rows(spec, self.microbatch, 1)
        loaded = load_graph(spec, graph, rows=self.rows, trusted=trusted)
        if loaded.views > 1:
            self.rows = _rows(spec, self.microbatch, loaded.views)
            loaded = load_graph(spec, graph, rows=self.rows, trusted=trusted)
        self.views, self.groups = loaded.views, loaded.groups
        self._weights = np.zeros(spec.parameter_count, np.float32)
        self._clip_norms = np.ones(self.groups)
        self._buffers = _Buffers(spec, loaded, self._weights, self._clip_norms, self.rows)

    def clipped_sum(
        self,
        weights: NDArray[np.float32],
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
        clip_norms: Sequence[float],
        microbatches: Iterable[int] | None = None,
    ) -> ClippedSum:
        """Clip each record's gradient and add up; see :meth:`SingleEngine.clipped_sum`."""
        self.spec.require_weights(weights)
        self._check_norms(clip_norms)
        require_inputs(self.spec, inputs, self.views)
        require_labels(self.spec, labels, len(inputs))
        self._check_length(len(labels))
        self._weights[:] = weights
        self._clip_norms[:] = clip_norms
        total, within, excluded = np.zeros(len(weights)), np.zeros(self.groups, np.int64), 0
        for part in parts_of(len(labels), self.microbatch, microbatches):
            records, squares = labels[part], self._buffers.add_microbatch(inputs[part], labels[part], total)
            finite = np.logical_and.reduce(squares <= LARGEST_SQUARE, axis=1)
            within += np.count_nonzero(finite[:, np.newaxis] & (np.sqrt(squares) <= self._clip_norms), axis=0)
            excluded += int(np.count_nonzero(~finite & (records != NOBODY)))
        return ClippedSum(total, within, excluded)

    def is_batch_invariant(self, seed: int | None = None) -> bool:
        """Whether this machine computes a record alike at every place and beside any other; see
        :func:`~dpagent.learning.training.batch_invariance.is_invariant`."""
        self._clip_norms[:] = CLIP_NORM
        record = self._buffers.inputs.shape[1:]
        return is_invariant(self.spec, record, self.rows, self._computed, seed)

    def _computed(
        self,
        weights: NDArray[np.float32],
        inputs: NDArray[np.float32],
        labels: NDArray[np.int64],
        counted: int,
    ) -> Computed:
        self._weights[:] = weights
        return self._buffers.computed(inputs, labels, counted)

    def _check_norms(self, clip_norms: Sequence[float]) -> None:
        if len(clip_norms) != self.groups:
            raise ParameterError(
                f"There are {len(clip_norms)} clip norms; the training graph takes {self.groups}"
                f" ({'one a layer' if self.groups > 1 else 'one for the whole gradient'})."
            )
        for norm in clip_norms:
            require_positive("clip norm", float(norm))

    def _check_length(self, records: int) -> None:
        microbatches = -(-records // self.microbatch)
        if microbatches * records > MAX_LOT_MICROBATCHES:
            raise ParameterError(
                f"The lot has {records:,} records in {microbatches:,} microbatches; expected a product of at"
                f" most {MAX_LOT_MICROBATCHES:,}. Take smaller lots."
            )


class _Buffers:
    """The memory that is bound to the inputs and outputs of the session."""

    def __init__(
        self,
        spec: ModelSpec,
        graph: LoadedGraph,
        weights: NDArray[np.float32],
        clip_norms: NDArray[np.float64],
        rows: int,
    ) -> None:
        self._session, self._binding = graph.session, graph.session.io_binding()
        self._sum, self._run_sum = np.zeros_like(weights), np.zeros_like(weights)
        for block in spec.parameter_shapes:
            part = slice(block.offset, block.offset + block.size)
            self._bind(self._binding.bind_input, block.name, weights[part].reshape(matrix_shape(block)))
            shape = graph.ends.outputs[sum_of(block)].sizes(rows)
            self._bind(self._binding.bind_output, sum_of(block), self._run_sum[part].reshape(shape))
        self._bind(self._binding.bind_input, "clip_norms", clip_norms)
        self.inputs, self.labels, self.present = (
            self._buffer(self._binding.bind_input, name, graph.ends.inputs[name], rows)
            for name in ("inputs", "labels", "present")
        )
        squares = graph.ends.outputs["squared_norms"]
        self.squared_norms = self._buffer(self._binding.bind_output, "squared_norms", squares, rows)

    def add_microbatch(
        self, inputs: NDArray[Any], labels: NDArray[np.int64], total: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Add the clipped sum of a microbatch to ``total``.

        Returns:
            The squared norms, ``(n, groups)``: infinite for records that are not finite.
        """
        squares = np.full((len(labels), *self.squared_norms.shape[1:]), np.inf)
        self._sum[:] = 0
        for rows in parts_of(len(labels), len(self.labels)):
            self._load(inputs[rows], labels[rows])
            self._run()
            self._sum += self._run_sum
            used = slice(len(labels[rows]))
            squares[rows] = np.where(self.present[used, np.newaxis], self.squared_norms[used], np.inf)
        total += self._sum
        return squares

    def computed(self, inputs: NDArray[np.float32], labels: NDArray[np.int64], counted: int) -> Computed:
        """Squared norms, and the sum of a run in which one record counts: its clipped gradient."""
        self.inputs[:], self.labels[:], self.present[:] = inputs, labels, False
        self.present[counted] = True
        self._run()
        return Computed(self.squared_norms.view(np.uint8).copy(), self._run_sum.copy())

    def _load(self, inputs: NDArray[Any], labels: NDArray[np.int64]) -> None:
        count = len(labels)
        target, present = self.inputs[:count], self.present[:count]
        np.not_equal(labels, NOBODY, out=present)
        if inputs.dtype == np.uint8:
            np.divide(inputs, np.float32(255), out=target)
        else:
            # The runtime's maxima may lose a NaN on its way, so records are looked at here.
            present &= are_finite(inputs)
            np.copyto(target, inputs)
        blank_all_but(present, target)
        np.maximum(labels, 0, out=self.labels[:count], casting="same_kind")
        self.inputs[count:], self.labels[count:], self.present[count:] = 0, 0, False

    def _run(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
        except RUNTIME_ERRORS as error:
            raise DataError(f"The training graph cannot be run: {first_line(error)}") from error

    def _buffer(self, bind: Any, name: str, tensor: Tensor, rows: int) -> NDArray[Any]:
        values = np.zeros(tensor.sizes(rows), tensor.dtype)
        self._bind(bind, name, values)
        return values

    def _bind(self, bind: Any, name: str, values: NDArray[Any]) -> None:
        bind(name, "cpu", 0, values.dtype.type, values.shape, values.ctypes.data)


def _rows(spec: ModelSpec, microbatch: int, views: int) -> int:
    """How many records a run takes: a divisor of ``microbatch`` whose working set suits the caches."""
    numbers = 0
    for node in (node for top in spec.nodes for node in top.walk() if node.blocks):
        numbers += views * math.prod(node.output_shape)
        if isinstance(node.layer, Convolution):
            over = node.layer.windows(node.input_shape)
            numbers += views * over.positions * over.taps + sum(block.size for block in node.blocks)
    most = max(1, _FEWEST_ROWS // views, _WORKING_SET // (4 * numbers))
    return max(rows for rows in range(1, microbatch + 1) if microbatch % rows == 0 and rows <= most)
