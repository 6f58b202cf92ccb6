"""Per-example gradients in numpy: fast, small, and the same bits in any company.

The mechanism clips each example's gradient by its norm, so it needs every gradient on its
own, not their mean. This engine hands them out microbatch by microbatch in one reused
``(microbatch, d)`` buffer.

**Batch invariance.** The privacy proof bounds what one record can change in the sum. It
holds for the program only if the float32 gradient of a record is a function of that record
and the weights alone: bit for bit the same whatever else was sampled, at whatever position,
in however full a microbatch. Three rules give that here:

* Every matrix product is a *stack* of products, one example each. ``numpy.matmul`` issues
  one BLAS call per member of a stack, all of one shape, so no sum runs across examples and
  no kernel is chosen by the number of examples.
* The workspaces have a fixed number of rows. A partial microbatch is computed with blank
  rows, and only its filled rows are handed out.
* ``tanh`` and ``exp``, whose vector and scalar code may round differently, run over rows
  padded to whole vectors (:data:`_VECTOR`). All else outside the products is correctly rounded
  arithmetic, or a reduction within one row.

How a BLAS behaves is a property of the machine: :meth:`NumpyEngine.is_batch_invariant` tries it
on the spot. It also follows that one record's NaN stays in that record's gradient.

**Formulation.** A convolution gathers its windows into rows (im2col) with a column of ones
for the bias; with U the rows of one example and G the gradient of the loss by its output,
the forward pass is U·W, the weight gradient Uᵀ·G (written straight into the flat buffer),
and the input gradient G·Wᵀ scattered back to the windows. Max-pooling is done across, then
down: a maximum that occurs more than once in a window passes its gradient to the first in
row-major order. A ``Tanh`` directly followed by ``MaxPool2d`` is computed in the other order:
the tangent is monotone, so the result is the same and there is less of it to compute.

One thread (``OPENBLAS_NUM_THREADS=1``) is best at these sizes; use a process or an engine
per core to go wider. An engine is not thread-safe.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dpagent.errors import DataError, ParameterError, require_count
from dpagent.learning.models import Conv2d, Dense, Layer, MaxPool2d, ModelSpec, ParameterBlock, Shape, Tanh

Floats: TypeAlias = NDArray[np.float32]

# Floats in 64 bytes: the widest vectors of x86-64 (AVX-512), and a multiple of NEON's four.
_VECTOR = 16


class NumpyEngine:
    """Computes one architecture; keeps its workspaces between calls.

    Args:
        spec: the architecture.
        microbatch: examples computed together. More of them amortise Python's overhead, fewer
            stay in the cache. It has no influence on any result.
    """

    def __init__(self, spec: ModelSpec, *, microbatch: int = 32) -> None:
        require_count("microbatch", microbatch, maximum=4096)
        self.spec = spec
        self.microbatch = microbatch
        self._parameters = spec.parameter_count
        self._images = np.zeros((microbatch, *spec.input_shape), np.float32)
        self._loss = _SoftmaxCrossEntropy(microbatch, spec.classes)
        self._stages = _stages(spec, microbatch)
        self._jacobian: Floats | None = None

    def gradients(self, weights: Floats, inputs: NDArray[Any], labels: NDArray[Any]) -> Iterator[Floats]:
        """Gradients of the softmax cross-entropy of each example by all parameters.

        Args:
            weights: ``(d,)`` float32.
            inputs: ``(n, height, width, channels)``; float32 in [0, 1], or uint8 in 0..255,
                which is divided by 255 here.
            labels: ``(n,)`` integers in ``0..classes-1``.

        Yields:
            ``(m, d)`` with m at most ``microbatch``, in the order of the inputs. It is a view
            of a workspace that the next step and the next call overwrite: consume it first.
            A record with non-finite inputs has non-finite gradients; the others do not notice.

        Raises:
            ParameterError: the weights do not fit the model.
            DataError: inputs or labels do not fit the model.
        """
        self._check(weights, inputs)
        self._check_labels(labels, len(inputs))
        return self._gradients(weights, inputs, labels)

    def logits(self, weights: Floats, inputs: NDArray[Any]) -> Floats:
        """The ``(n, classes)`` scores before the softmax."""
        self._check(weights, inputs)
        self._load(weights)
        logits = np.empty((len(inputs), self.spec.classes), np.float32)
        for start in range(0, len(inputs), self.microbatch):
            part = inputs[start : start + self.microbatch]
            logits[start : start + len(part)] = self._forward(part)[: len(part)]
        return logits

    def losses(self, weights: Floats, inputs: NDArray[Any], labels: NDArray[Any]) -> Floats:
        """The ``(n,)`` softmax cross-entropies, in nats."""
        self._check(weights, inputs)
        self._check_labels(labels, len(inputs))
        self._load(weights)
        losses = np.empty(len(inputs), np.float32)
        for start in range(0, len(inputs), self.microbatch):
            part = slice(start, start + self.microbatch)
            count = len(labels[part])
            losses[part] = self._loss.value(self._forward(inputs[part]), labels[part])[:count]
        return losses

    def accuracy(self, weights: Floats, inputs: NDArray[Any], labels: NDArray[Any]) -> float:
        """The fraction of examples whose largest logit is that of their label."""
        self._check_labels(labels, len(inputs))
        if len(inputs) == 0:
            raise DataError("There are no records; expected at least one to measure an accuracy.")
        return float(np.mean(self.logits(weights, inputs).argmax(axis=1) == labels))

    def is_batch_invariant(self, seed: int = 0) -> bool:
        """Whether this machine computes an example alike at every position and beside any other.

        Costs a few microbatches. The answer is an experiment, not a proof: False is a reason
        not to train on this machine; True says that its numeric libraries passed.
        """
        generator = np.random.Generator(np.random.PCG64(seed))
        weights = self.spec.initial_weights(seed)
        count = 2 * self.microbatch + 1
        inputs = generator.random((count, *self.spec.input_shape), dtype=np.float32)
        inputs *= inputs > 0.5
        labels = generator.integers(0, self.spec.classes, count)
        together = np.concatenate([part.copy() for part in self.gradients(weights, inputs, labels)])
        order = np.roll(np.arange(count), self.microbatch // 2 + 1)
        start = 0
        for part in self.gradients(weights, inputs[order], labels[order]):
            if part.tobytes() != together[order[start : start + len(part)]].tobytes():
                return False
            start += len(part)
        return True

    def _gradients(self, weights: Floats, inputs: NDArray[Any], labels: NDArray[Any]) -> Iterator[Floats]:
        if self._jacobian is None:
            self._jacobian = np.zeros((self.microbatch, self._parameters), np.float32)
        for start in range(0, len(inputs), self.microbatch):
            part = slice(start, start + self.microbatch)
            # Loaded each time: another call may have come between two steps of this iterator.
            self._load(weights)
            self._backward(self._forward(inputs[part]), labels[part], self._jacobian)
            yield self._jacobian[: len(inputs[part])]

    def _load(self, weights: Floats) -> None:
        flat = np.ascontiguousarray(weights)
        for stage in self._stages:
            stage.load(flat)

    def _forward(self, inputs: NDArray[Any]) -> Floats:
        """Logits of a whole microbatch; rows beyond the inputs are blank images."""
        count = len(inputs)
        filled = self._images[:count]
        # A record may hold anything, and whatever comes of it is the caller's to see in the result.
        with np.errstate(all="ignore"):
            if inputs.dtype == np.uint8:
                np.divide(inputs, np.float32(255), out=filled)
            else:
                filled[...] = inputs
            filled -= np.float32(self.spec.input_offset)
            filled /= np.float32(self.spec.input_scale)
            self._images[count:] = 0
            values = self._images
            for stage in self._stages:
                values = stage.forward(values)
        return values

    def _backward(self, logits: Floats, labels: NDArray[Any], jacobian: Floats) -> None:
        with np.errstate(all="ignore"):
            gradient = self._loss.gradient(logits, labels)
            for stage in reversed(self._stages):
                following = stage.backward(gradient, jacobian)
                if following is None:
                    break
                gradient = following

    def _check(self, weights: Floats, inputs: NDArray[Any]) -> None:
        if weights.dtype != np.float32 or weights.shape != (self._parameters,):
            raise ParameterError(
                f"The weights are {weights.dtype} of shape {weights.shape}; model {self.spec.name!r}"
                f" takes float32 of shape ({self._parameters},)."
            )
        if inputs.dtype not in (np.float32, np.uint8) or inputs.shape[1:] != self.spec.input_shape:
            raise DataError(
                f"The inputs are {inputs.dtype} of shape {inputs.shape}; model {self.spec.name!r} takes"
                f" float32 or uint8 of shape (n, {', '.join(map(str, self.spec.input_shape))})."
            )

    def _check_labels(self, labels: NDArray[Any], count: int) -> None:
        if labels.shape != (count,) or labels.dtype.kind not in "iu":
            raise DataError(
                f"The labels are {labels.dtype} of shape {labels.shape}; expected whole numbers"
                f" of shape ({count},), one for each input."
            )
        if count and (labels.min() < 0 or labels.max() >= self.spec.classes):
            raise DataError(
                f"The labels run from {labels.min()} to {labels.max()}; expected 0 to"
                f" {self.spec.classes - 1}."
            )


class _SoftmaxCrossEntropy:
    """The loss, over rows of logits copied to whole vectors."""

    def __init__(self, rows: int, classes: int) -> None:
        self._shifted = np.zeros((rows, _round_up(classes)), np.float32)
        self._exponentials = np.ones_like(self._shifted)
        self._values = self._exponentials[:, :classes]
        self._row_numbers = np.arange(rows)

    def gradient(self, logits: Floats, labels: NDArray[Any]) -> Floats:
        """Softmax minus the one-hot label, ``(rows, classes)``, in a workspace."""
        self._exponentiate(logits)
        self._values /= self._values.sum(axis=1, keepdims=True)
        self._values[self._row_numbers[: len(labels)], labels] -= np.float32(1)
        return self._values

    def value(self, logits: Floats, labels: NDArray[Any]) -> Floats:
        """The loss of each labelled row."""
        with np.errstate(all="ignore"):
            rows = self._row_numbers[: len(labels)]
            largest = self._exponentiate(logits)[: len(labels), 0]
            total = np.log(self._values[: len(labels)].sum(axis=1, dtype=np.float64))
            losses: Floats = (total + largest - logits[rows, labels]).astype(np.float32)
        return losses

    def _exponentiate(self, logits: Floats) -> Floats:
        """Fill the workspace with exp(logit - largest), and return the largest."""
        largest: Floats = logits.max(axis=1, keepdims=True)
        np.subtract(logits, largest, out=self._shifted[:, : logits.shape[1]])
        np.exp(self._shifted, out=self._exponentials)
        return largest


class _Stage(ABC):
    """One step of the network over a whole microbatch, with its own workspaces.

    Every workspace has the engine's number of rows and one fixed layout, so the products of a
    stack differ in nothing but where their operands lie.

    ``forward`` returns a workspace that stays valid until the next ``forward``; ``backward`` takes
    the gradient by that output and returns the gradient by the input, or None when nothing
    before this stage has parameters.
    """

    def load(self, weights: Floats) -> None:
        """Take this stage's parameters, as views, from the flat vector."""
        del weights

    @abstractmethod
    def forward(self, values: Floats) -> Floats: ...

    @abstractmethod
    def backward(self, gradient: Floats, jacobian: Floats) -> Floats | None: ...


class _TanhStage(_Stage):
    def __init__(self, rows: int, shape: Shape) -> None:
        size = math.prod(shape)
        self._padded = np.zeros((rows, _round_up(size)), np.float32)
        self._output = self._padded[:, :size].reshape((rows, *shape))
        self._slope = np.empty((rows, *shape), np.float32)

    def forward(self, values: Floats) -> Floats:
        np.copyto(self._output, values)
        np.tanh(self._padded, out=self._padded)
        return self._output

    def backward(self, gradient: Floats, jacobian: Floats) -> Floats:
        np.multiply(self._output, self._output, out=self._slope)
        np.subtract(np.float32(1), self._slope, out=self._slope)
        np.multiply(self._slope, gradient, out=self._slope)
        return self._slope


class _DenseStage(_Stage):
    def __init__(self, rows: int, shape: Shape, weight: ParameterBlock, *, first: bool) -> None:
        self._inputs, self._units = weight.shape
        self._start = weight.offset
        self._stop = weight.offset + weight.size + self._units
        self._shape = (rows, *shape)
        self._first = first
        # The gradient is the outer product of input and incoming gradient. Numpy is slow at a
        # matrix product over one term, so a second one, zero times zero, keeps it company.
        self._augmented = np.zeros((rows, 2, self._inputs + 1), np.float32)
        self._augmented[:, 0, -1] = 1
        self._input = self._augmented[:, :1]
        self._image = self._augmented[:, 0, :-1].reshape(self._shape)
        self._output = np.empty((rows, 1, self._units), np.float32)
        self._incoming = np.zeros((rows, 2, self._units), np.float32)
        self._back = np.empty((0 if first else rows, 1, self._inputs), np.float32)
        self._matrix = np.empty((0, 0), np.float32)

    def load(self, weights: Floats) -> None:
        self._matrix = weights[self._start : self._stop].reshape(self._inputs + 1, self._units)

    def forward(self, values: Floats) -> Floats:
        np.copyto(self._image, values)
        np.matmul(self._input, self._matrix, out=self._output)
        return self._output[:, 0]

    def backward(self, gradient: Floats, jacobian: Floats) -> Floats | None:
        block = jacobian[:, self._start : self._stop].reshape(-1, self._inputs + 1, self._units)
        np.copyto(self._incoming[:, 0], gradient)
        np.matmul(self._augmented.swapaxes(1, 2), self._incoming, out=block)
        if self._first:
            return None
        np.matmul(self._incoming[:, :1], self._matrix[:-1].T, out=self._back)
        return self._back.reshape(self._shape)


class _ConvStage(_Stage):
    def __init__(
        self, rows: int, shape: Shape, output: Shape, layer: Conv2d, weight: ParameterBlock, *, first: bool
    ) -> None:
        height, width, channels = shape
        down, across, filters = output
        kernel, stride, padding = layer.kernel, layer.stride, layer.padding
        self._layer, self._first, self._filters = layer, first, filters
        self._taps = kernel * kernel * channels
        self._positions = down * across
        self._start = weight.offset
        self._stop = weight.offset + weight.size + filters
        self._padded = np.zeros((rows, height + 2 * padding, width + 2 * padding, channels), np.float32)
        self._image = self._padded[:, padding : padding + height, padding : padding + width]
        step = self._padded.strides
        window_shape = (rows, down, across, kernel, kernel, channels)
        self._windows = as_strided(
            self._padded,
            shape=window_shape,
            strides=(step[0], step[1] * stride, step[2] * stride, *step[1:]),
            writeable=False,
        )
        self._columns = np.ones((rows, self._positions, self._taps + 1), np.float32)
        self._gathered = self._columns[:, :, :-1].reshape(window_shape)
        self._output = np.empty((rows, self._positions, filters), np.float32)
        self._incoming = np.empty((rows, self._positions, filters), np.float32)
        kept = 0 if first else rows
        self._scattered = np.empty((kept, self._positions, self._taps), np.float32)
        self._back = np.empty((kept, *self._padded.shape[1:]), np.float32)
        self._scatter = list(self._scatter_pairs(window_shape)) if kept else []
        self._output_shape = (rows, down, across, filters)
        self._matrix = self._transposed = np.empty((0, 0), np.float32)

    def load(self, weights: Floats) -> None:
        self._matrix = weights[self._start : self._stop].reshape(self._taps + 1, self._filters)
        if not self._first:
            self._transposed = np.ascontiguousarray(self._matrix[:-1].T)

    def forward(self, values: Floats) -> Floats:
        np.copyto(self._image, values)
        np.copyto(self._gathered, self._windows)
        np.matmul(self._columns, self._matrix, out=self._output)
        return self._output.reshape(self._output_shape)

    def backward(self, gradient: Floats, jacobian: Floats) -> Floats | None:
        block = jacobian[:, self._start : self._stop].reshape(-1, self._taps + 1, self._filters)
        np.copyto(self._incoming.reshape(self._output_shape), gradient)
        np.matmul(self._columns.swapaxes(1, 2), self._incoming, out=block)
        if self._first:
            return None
        np.matmul(self._incoming, self._transposed, out=self._scattered)
        self._back.fill(0)
        for target, part in self._scatter:
            target += part
        height, width = self._back.shape[1:3]
        padding = self._layer.padding
        return self._back[:, padding : height - padding, padding : width - padding]

    def _scatter_pairs(self, window_shape: Shape) -> Iterator[tuple[Floats, Floats]]:
        """Views (pixels of the image, gradients by those pixels) whose sums are the input gradient.

        Neighbouring windows overlap, so not all taps can be added at once. Taps of one kernel row
        that lie within one stride of each other can: their pixels differ from window to window,
        and side by side they make a longer run in memory.
        """
        rows, down, across, kernel, _, channels = window_shape
        stride = self._layer.stride
        parts = self._scattered.reshape(window_shape)
        step = self._back.strides
        for i in range(kernel):
            for j in range(0, kernel, stride):
                run = min(stride, kernel - j) * channels
                target = as_strided(
                    self._back[:, i:, j:],
                    shape=(rows, down, across, run),
                    strides=(step[0], step[1] * stride, step[2] * stride, step[3]),
                )
                yield target, parts[:, :, :, i, j : j + stride].reshape(rows, down, across, run)


class _MaxPoolStage(_Stage):
    """Maximum across each window, then down it; see the module's text for ties."""

    def __init__(self, rows: int, shape: Shape, output: Shape, layer: MaxPool2d) -> None:
        wide = (rows, *shape)
        narrow = (rows, shape[0], output[1], shape[2])
        self._across = _LineMaximum(wide, narrow, axis=2, layer=layer)
        self._down = _LineMaximum(narrow, (rows, *output), axis=1, layer=layer)

    def forward(self, values: Floats) -> Floats:
        return self._down.forward(self._across.forward(values))

    def backward(self, gradient: Floats, jacobian: Floats) -> Floats:
        return self._across.backward(self._down.backward(gradient))


class _LineMaximum:
    """Maximum over windows along one axis."""

    def __init__(self, shape: Shape, output: Shape, *, axis: int, layer: MaxPool2d) -> None:
        before = (slice(None),) * axis
        self._taps = [(*before, _tap(i, layer.stride, output[axis])) for i in range(layer.kernel)]
        self._values = np.empty(0, np.float32)
        self._output = np.empty(output, np.float32)
        self._chosen = np.empty(output, np.float32)
        self._left = np.empty(output, np.float32)
        self._back = np.empty(shape, np.float32)

    def forward(self, values: Floats) -> Floats:
        self._values = values
        np.copyto(self._output, values[self._taps[0]])
        for tap in self._taps[1:]:
            np.maximum(self._output, values[tap], out=self._output)
        return self._output

    def backward(self, gradient: Floats) -> Floats:
        np.copyto(self._left, gradient)
        self._back.fill(0)
        for tap in self._taps[:-1]:
            # The first tap that holds the maximum takes all that is left; the rest get zero.
            np.equal(self._values[tap], self._output, out=self._chosen, casting="unsafe")
            np.multiply(self._chosen, self._left, out=self._chosen)
            np.subtract(self._left, self._chosen, out=self._left)
            self._back[tap] += self._chosen
        self._back[self._taps[-1]] += self._left
        return self._back


def _stages(spec: ModelSpec, rows: int) -> list[_Stage]:
    """The architecture as stages, pooling moved before the tangent where the two meet."""
    layers = list(spec.layers)
    for index, (layer, following) in enumerate(zip(spec.layers, spec.layers[1:], strict=False)):
        if isinstance(layer, Tanh) and isinstance(following, MaxPool2d):
            layers[index], layers[index + 1] = following, layer
    weights = iter(block for block in spec.parameter_shapes if len(block.shape) > 1)
    stages: list[_Stage] = []
    shape: Shape = spec.input_shape
    first = True
    for layer, output in zip(layers, _shapes_of(spec, layers), strict=True):
        match layer:
            case Conv2d():
                stages.append(_ConvStage(rows, shape, output, layer, next(weights), first=first))
                first = False
            case Dense():
                stages.append(_DenseStage(rows, shape, next(weights), first=first))
                first = False
            case MaxPool2d():
                stages.append(_MaxPoolStage(rows, shape, output, layer))
            case Tanh():
                stages.append(_TanhStage(rows, shape))
        shape = output
    return stages


def _shapes_of(spec: ModelSpec, layers: list[Layer]) -> list[Shape]:
    """Shapes after each of the reordered layers: pooling and tangent swapped, so are they."""
    shapes = list(spec.output_shapes)
    for index, (ours, theirs) in enumerate(zip(layers, spec.layers, strict=True)):
        if isinstance(ours, MaxPool2d) and isinstance(theirs, Tanh):
            shapes[index] = shapes[index + 1]
    return shapes


def _tap(start: int, stride: int, count: int) -> slice:
    """Every ``stride``-th index from ``start``, ``count`` of them."""
    return slice(start, start + stride * (count - 1) + 1, stride)


def _round_up(size: int) -> int:
    """The least multiple of a whole vector that holds ``size`` floats."""
    return -(-size // _VECTOR) * _VECTOR
