"""Convolutions, as products of gathered windows.

With U the windows of one record, a row each and a one at the end for the bias (im2col), W the weights with
the bias as last row, and G the gradient of the loss by the output:

* the output is U·W;
* the record's gradient by the parameters is Uᵀ·G, for all its views at once. Writing it out costs as many
  operations as training without privacy, and no form of its norm costs less at these sizes;
* the gradient by the input is a convolution of G with the flipped weights.

A convolution of stride s is one of stride one over a *folded* image, in which s·s pixels are the channels of
one. That gives the gradient by the input for every stride, and where the kernel is a multiple of the
stride it gives a first layer fewer and longer runs of memory to gather.

A convolution that feeds a pooling layer without overlap lays out its positions by their place in the
pooling window (``grouping``), so that pooling compares whole blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.models.spec import Node
from dpagent.learning.models.windows import Windows
from dpagent.learning.training.numpy_engine.gathering import (
    GatheredProduct,
    SlidingProduct,
    as_runs,
    windows_of,
)
from dpagent.learning.training.numpy_engine.products import SMALL_PRODUCT, Choice, Product
from dpagent.learning.training.numpy_engine.stages import RecordGradients, WrittenOutStage
from dpagent.learning.training.numpy_engine.workspaces import Floats, Memory, Signal, aligned
from dpagent.norm import Norm


class ConvolutionStage(WrittenOutStage):
    """One- and two-dimensional convolution.

    Args:
        node: the layer in its place.
        over: where its windows lie, with as many as are needed.
        source: ``(height, width, channels)``, or the same without a height of one.
        target: ``(down, across, filters)``, or, grouped, ``(*grouping, down, across, filters)``.
        grouping: of the positions, down and across.
        norm: in which records are clipped.
    """

    def __init__(
        self,
        node: Node,
        over: Windows,
        source: Signal,
        target: Signal,
        grouping: tuple[int, int],
        norm: Norm,
        memory: Memory,
    ) -> None:
        super().__init__(node)
        if target.gradient is None:
            raise AssertionError("what has parameters has a gradient")
        records, views = source.values.values.shape[:2]
        filters = target.values.values.shape[-1]
        rows = (records, views * over.positions, filters)
        image = source.values.values.reshape((records, views, *over.image), copy=False)
        fold = over.stride if source.gradient is None and _is_multiple(over) else (1, 1)
        pixels, self._copies = _padded(image, over, fold, memory)
        windows = windows_of(
            pixels,
            kernel=(over.kernel[0] // fold[0], over.kernel[1] // fold[1]),
            stride=(over.stride[0] // fold[0], over.stride[1] // fold[1]),
            count=over.count,
            grouping=grouping,
        )
        self._weights = aligned((over.taps + 1) * filters).reshape(over.taps + 1, filters)
        output = target.values.values.reshape(rows, copy=False)
        self._output = GatheredProduct(windows, self._weights, output, memory, again=True)
        self._tap_axes = (*windows.shape[-2:-1], fold[0], over.kernel[1] // fold[1], fold[1], over.image[2])
        self._gradients = RecordGradients(records, self._weights.shape, norm)
        incoming = target.gradient.values.reshape(rows, copy=False)
        self._weight_gradient = _WeightGradient(self._output, incoming, self._gradients.matrices)
        choices: dict[str, Choice] = {
            "forward": self._output.product,
            "weight gradient": self._weight_gradient.product,
        }
        self._back, self._zeros = None, None
        spans = _reached(over)
        if source.gradient is not None and not all(spans):
            self._zeros = source.gradient.values
        elif source.gradient is not None:
            outgoing = target.gradient.values.reshape(
                (
                    records,
                    views,
                    *grouping,
                    over.count[0] // grouping[0],
                    over.count[1] // grouping[1],
                    filters,
                ),
                copy=False,
            )
            back = source.gradient.values.reshape(image.shape, copy=False)
            self._back = _InputGradient(over, spans, outgoing, back, memory)
            choices["input gradient"] = self._back.product
        self.choices = choices

    def load(self, weights: Floats) -> None:
        self._gradients.begin()
        matrix = weights.reshape(self._weights.shape)
        self._weights[-1] = matrix[-1]
        self._in_order(self._weights)[...] = self._as_agreed(matrix)
        if self._back is not None:
            self._back.load(matrix[:-1])

    def forward(self) -> None:
        for place, part in self._copies:
            np.copyto(place, part)
        self._output.compute()

    def backward(self) -> None:
        self._weight_gradient.compute()
        if self._back is not None:
            self._back.compute()
        elif self._zeros is not None:
            self._zeros.fill(0)

    def total(self) -> NDArray[np.float64]:
        ours = self._gradients.total
        matrix = ours.copy()
        self._as_agreed(matrix)[...] = self._in_order(ours)
        return matrix.reshape(-1)

    def _as_agreed(self, matrix: NDArray[np.floating]) -> NDArray[np.floating]:
        """A view of the taps of a matrix in the order of the flat vector, its axes in the order of ours."""
        return matrix[:-1].reshape((*self._tap_axes, matrix.shape[1]), copy=False).transpose(0, 2, 1, 3, 4, 5)

    def _in_order(self, matrix: NDArray[np.floating]) -> NDArray[np.floating]:
        """A view of the taps of a matrix in the order of our windows."""
        down, fold_down, across, fold_across, channels = self._tap_axes
        shape = (down, across, fold_down, fold_across, channels, matrix.shape[1])
        return matrix[:-1].reshape(shape, copy=False)


def _is_multiple(over: Windows) -> bool:
    return over.stride != (1, 1) and all(k % s == 0 for k, s in zip(over.kernel, over.stride, strict=True))


def _padded(
    image: Floats, over: Windows, fold: tuple[int, int], memory: Memory
) -> tuple[Floats, list[tuple[Floats, Floats]]]:
    """The image with zeros around it, folded, and the copies that fill it."""
    records, views, height, width, channels = image.shape
    if over.padding == (0, 0) and fold == (1, 1):
        return image, []
    down, across = (
        -(-(size + 2 * padding) // by)
        for size, padding, by in zip((height, width), over.padding, fold, strict=True)
    )
    padded = memory.workspace((down, across, *fold, channels)).values
    copies = []
    for phase_down in range(fold[0]):
        for phase_across in range(fold[1]):
            rows, to_rows = _phase(phase_down, over.padding[0], fold[0], range(down), height)
            columns, to_columns = _phase(phase_across, over.padding[1], fold[1], range(across), width)
            place = padded[:, :, to_rows, to_columns, phase_down, phase_across]
            copies.append((place, image[:, :, rows, columns]))
    pixels = padded.reshape((records, views, down, across, fold[0] * fold[1] * channels), copy=False)
    return pixels, copies


class _WeightGradient:
    """Uᵀ·G of each record.

    Where that is a large product, its rows are cut into tiles (:class:`Product`), and the bias, which would
    make their number odd, has a product of its own.

    Args:
        windows: U, gathered again for this.
        outgoing: G, ``(records, windows, filters)``.
        matrices: where Uᵀ·G goes, ``(records, taps + 1, filters)``.
    """

    def __init__(self, windows: GatheredProduct, outgoing: Floats, matrices: Floats) -> None:
        self._windows = windows
        rows = matrices.shape[1]
        self._bias = None
        if rows * outgoing[0].size > SMALL_PRODUCT:
            rows -= 1
            self._bias = (np.ones((1, outgoing.shape[1]), np.float32), outgoing, matrices[:, rows:])
        taps = windows.columns[..., :rows].swapaxes(1, 2)
        parts = list(windows.parts())
        self.product = Product(taps, outgoing[parts[0]], matrices[parts[0], :rows])
        self._products = [
            Product(taps, outgoing[part], matrices[part, :rows], like=self.product) for part in parts
        ]

    def compute(self) -> None:
        for _, product in zip(self._windows.parts(), self._products, strict=True):
            product()
        if self._bias is not None:
            ones, outgoing, gradients = self._bias
            np.matmul(ones, outgoing, out=gradients)


class _InputGradient:
    """The gradient by the input of a convolution.

    Row Y of the folded image lies under rows Y - k + 1 to Y of the windows, k the number of folded rows of a
    kernel; a kernel that is no multiple of the stride is filled up with zeros.

    Args:
        over: the windows of the convolution.
        spans: by :func:`_reached`; neither is empty.
        outgoing: ``(records, views, *grouping, down, across, filters)``, the gradient by its output.
        incoming: ``(records, views, height, width, channels)``, where the gradient by its input goes.

    Attributes:
        product: that can be computed in several forms.
    """

    def __init__(
        self, over: Windows, spans: list[range], outgoing: Floats, incoming: Floats, memory: Memory
    ) -> None:
        records, views, group_down, group_across, down, across, filters = outgoing.shape
        fold, channels = over.stride, incoming.shape[-1]
        self._kernel = (-(-over.kernel[0] // fold[0]), -(-over.kernel[1] // fold[1]))
        before = [max(k - 1 - span.start, 0) for span, k in zip(spans, self._kernel, strict=True)]
        after = [max(span.stop - windows, 0) for span, windows in zip(spans, over.count, strict=True)]
        size = [b + windows + a for b, windows, a in zip(before, over.count, after, strict=True)]
        padded = memory.workspace((*size, filters)).values
        inside = padded[:, :, before[0] : before[0] + over.count[0], before[1] : before[1] + over.count[1]]
        ungrouped = inside.reshape(
            (records, views, down, group_down, across, group_across, filters), copy=False
        )
        self._fill = (ungrouped, outgoing.transpose(0, 1, 4, 2, 5, 3, 6))
        skipped = [max(span.start - (k - 1), 0) for span, k in zip(spans, self._kernel, strict=True)]
        count = (len(spans[0]), len(spans[1]))
        windows = windows_of(
            padded[:, :, skipped[0] :, skipped[1] :], kernel=self._kernel, stride=(1, 1), count=count
        )
        self._over = over
        numbers = fold[0] * fold[1] * channels
        self._weights = aligned(self._kernel[0] * self._kernel[1] * filters * numbers).reshape(-1, numbers)
        self._copies: list[tuple[NDArray[np.void], NDArray[np.void]]] = []
        self._uncovered: list[Floats] = []
        rows = (records, views * count[0] * count[1], numbers)
        if fold == (1, 1) and count == over.image[:2] and incoming[0].flags.c_contiguous:
            out = incoming.reshape(rows, copy=False)
        else:
            result = memory.workspace((*count, *fold, channels), shared="mask").values
            out = result.reshape(rows, copy=False)
            self._unfold(result, incoming, spans)
        gathered = GatheredProduct(windows, self._weights, out, memory, again=False)
        self._compute = gathered.compute
        self.product: Choice = gathered.product
        if SlidingProduct.takes(windows):
            sliding = SlidingProduct(gathered, windows, self._weights, out)
            self._compute, self.product = sliding.compute, sliding

    def _unfold(self, result: Floats, incoming: Floats, spans: list[range]) -> None:
        """Plan the copies from the folded rows to the image; places under no window are zero."""
        over = self._over
        fold, numbers = over.stride, over.stride[1] * over.image[2]
        columns = len(spans[1]) * fold[1]
        for phase_down in range(fold[0]):
            rows, from_rows = _phase(phase_down, over.padding[0], fold[0], spans[0], over.image[0])
            pixels, folded = incoming[:, :, rows], result[:, :, from_rows, :, phase_down]
            if over.padding[1] == 0 and columns <= over.image[1]:
                # The phases across lie side by side in both: they are copied together.
                runs = folded.reshape((*folded.shape[:4], numbers), copy=False)
                place = pixels[:, :, :, :columns].reshape(runs.shape, copy=False)
                self._copies.append((as_runs(place), as_runs(runs)))
                continue
            for phase_across in range(fold[1]):
                to, by = _phase(phase_across, over.padding[1], fold[1], spans[1], over.image[1])
                self._copies.append(
                    (as_runs(pixels[:, :, :, to]), as_runs(folded[:, :, :, by, phase_across]))
                )
        ends = [
            span.stop * s - padding for span, s, padding in zip(spans, over.stride, over.padding, strict=True)
        ]
        for rest in (incoming[:, :, max(ends[0], 0) :], incoming[:, :, :, max(ends[1], 0) :]):
            if rest.size:
                self._uncovered.append(rest)

    def load(self, taps: Floats) -> None:
        """Take over the weights, flipped and folded."""
        over = self._over
        down, across = self._kernel
        channels, filters = over.image[2], taps.shape[1]
        full = np.zeros((down * over.stride[0], across * over.stride[1], channels, filters), np.float32)
        full[: over.kernel[0], : over.kernel[1]] = taps.reshape(*over.kernel, channels, filters)
        folded = full.reshape(down, over.stride[0], across, over.stride[1], channels, filters)[::-1, :, ::-1]
        self._weights[...] = folded.transpose(0, 2, 5, 1, 3, 4).reshape(self._weights.shape)

    def compute(self) -> None:
        np.copyto(*self._fill)
        self._compute()
        for place, part in self._copies:
            np.copyto(place, part)
        for rest in self._uncovered:
            rest.fill(0)


def _reached(over: Windows) -> list[range]:
    """Folded rows that hold a pixel of the image and lie under a window, and the same of columns."""
    return [
        range(padding // s, min((padding + size - 1) // s, windows + -(-kernel // s) - 2) + 1)
        for padding, s, size, windows, kernel in zip(
            over.padding, over.stride, over.image[:2], over.count, over.kernel, strict=True
        )
    ]


def _phase(phase: int, padding: int, fold: int, span: range, size: int) -> tuple[slice, slice]:
    """Pixels whose padded place is ``phase`` modulo ``fold`` and lies in the folded ``span``.

    Returns:
        The pixels, and their folded places from the start of the span.
    """
    places = [place for place in span if 0 <= place * fold + phase - padding < size]
    if not places:
        return slice(0, 0), slice(0, 0)
    first, last = places[0], places[-1]
    pixels = slice(first * fold + phase - padding, last * fold + phase - padding + 1, fold)
    return pixels, slice(first - span.start, last - span.start + 1)
