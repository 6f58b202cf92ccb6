"""Windows of images as rows of a matrix (im2col), gathered for as many records at a time as a cache holds.

The rows take a multiple of the memory of the image, and are read once or twice: gathering them again
costs less than fetching them from main memory. Windows of a series need not be gathered to be multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dpagent.learning.training.numpy_engine.products import GAIN, Product, fastest
from dpagent.learning.training.numpy_engine.workspaces import Floats, Memory, round_up
from dpagent.learning.trial_numbers import TrialNumbers

SLIDING = "sliding"

# Floats of gathered rows: kept if there are no more than 2 MiB of them; else gathered again when they are
# needed again, a quarter of a MiB at a time, which stays in a core's cache.
_KEPT = 1 << 19
_AT_ONCE = 1 << 16
# A product of fewer rows costs more than gathering many.
_LEAST_ROWS = 8


class GatheredProduct:
    """``out = windows @ weights``, record by record.

    Args:
        windows: ``(records, …, kernel rows, numbers of a row)``, a view as of :func:`windows_of`.
        weights: ``(taps, n)``, or with a bias one row more: that of the bias, the last.
        out: ``(records, windows of a record, n)``.
        memory: for the gathered rows.
        again: whether they are needed once more.

    Attributes:
        columns: the gathered rows, ``(records at a time, windows of a record, len(weights))``.
        product: of these records.
    """

    def __init__(self, windows: Floats, weights: Floats, out: Floats, memory: Memory, *, again: bool) -> None:
        records, rows = out.shape[:2]
        taps = windows.shape[-2] * windows.shape[-1]
        floats = rows * len(weights)
        parts = 1 if again and records * floats <= _KEPT else -(-records // max(1, _AT_ONCE // floats))
        at_once = -(-records // parts)
        pitch = round_up(floats)
        columns = memory.floats(at_once * pitch, shared=None if again else "columns")
        columns.fill(1)  # The column that is not overwritten is the constant input of the bias.
        self.columns = columns.reshape(at_once, pitch)[:, :floats].reshape(
            (at_once, rows, len(weights)), copy=False
        )
        self._gathered = as_runs(self.columns[..., :taps].reshape((at_once, *windows.shape[1:]), copy=False))
        self.product = Product(self.columns, weights, out[:at_once])
        # All parts are of one size, so that a record is computed alike in each; the last may overlap another.
        starts = sorted({min(start, records - at_once) for start in range(0, records, at_once)})
        self._parts = [slice(start, start + at_once) for start in starts]
        self._windows = [as_runs(windows[part]) for part in self._parts]
        self._products = [
            Product(self.columns, weights, out[part], like=self.product) for part in self._parts
        ]

    def compute(self) -> None:
        """Gather and multiply."""
        for windows, product in zip(self._windows, self._products, strict=True):
            np.copyto(self._gathered, windows)
            product()

    def parts(self) -> Iterator[slice]:
        """Gathers the rows once more, and says for which records."""
        for part, windows in zip(self._parts, self._windows, strict=True):
            if len(self._parts) > 1:
                np.copyto(self._gathered, windows)
            yield part


class SlidingProduct:
    """``out = windows @ weights``, record by record, for windows that slide along a series.

    Such a window is one run of memory, and begins a pixel after the one before it. Those that begin where
    another ends are the rows of a matrix as they lie: a product for each pixel of a window, and nothing is
    gathered. These are small products, which not every BLAS is quick at: :meth:`calibrate` tries.

    Args:
        gathered: the same by gathering.
        windows: as :class:`GatheredProduct` takes them, and :meth:`takes` these.
        weights: ``(taps, n)``.
        out: ``(records, windows of a record, n)``.
    """

    def __init__(self, gathered: GatheredProduct, windows: Floats, weights: Floats, out: Floats) -> None:
        records, views, *_, across, _, taps = windows.shape
        runs = windows.reshape((records, views, across, taps), copy=False)
        results = out.reshape((records, views, across, -1), copy=False)
        pixels = _pixels(windows)
        # Windows that begin at one of the first pixels may be followed by one more than the others.
        firsts = (range(across % pixels), range(across % pixels, pixels))
        self._operands = [
            (_every(pixels, runs, first), weights, _every(pixels, results, first))
            for first in firsts
            if first
        ]
        self._gathered, self._slides = gathered, False

    @staticmethod
    def takes(windows: Floats) -> bool:
        """Whether windows are those of a series, and enough of them."""
        *_, group_down, group_across, down, across, kernel_rows, _ = windows.shape
        if group_down * group_across * down * kernel_rows > 1:
            return False
        return bool(across >= _LEAST_ROWS * _pixels(windows))

    @property
    def form(self) -> str:
        """How it runs: :data:`SLIDING`, or how the gathered product does."""
        return SLIDING if self._slides else self._gathered.product.form

    @form.setter
    def form(self, form: str) -> None:
        self._slides = form == SLIDING
        if not self._slides:
            self._gathered.product.form = form

    def compute(self) -> None:
        """Multiply in the form chosen."""
        if self._slides:
            self.slide()
        else:
            self._gathered.compute()

    def slide(self) -> None:
        """Multiply the windows where they lie."""
        for windows, weights, out in self._operands:
            np.matmul(windows, weights, out=out)

    def calibrate(self, numbers: TrialNumbers) -> None:
        """Choose the form. Overwrites ``weights`` and ``out``."""
        self._gathered.product.calibrate(numbers)
        self._slides = fastest(self.slide) < GAIN * fastest(self._gathered.compute)


def _pixels(windows: Floats) -> int:
    """How many pixels a window's run of memory holds."""
    return int(windows.shape[-1] * windows.itemsize // windows.strides[-3])


def _every(step: int, rows: Floats, first: range) -> Floats:
    """Every ``step``-th of rows ``(records, views, rows, n)`` from each of ``first`` on.

    Returns:
        ``(records, views, first, rows, n)``, a view.
    """
    records, views, count, numbers = rows.shape
    to_record, to_view, to_row, to_number = rows.strides
    return as_strided(
        rows[:, :, first.start :],
        shape=(records, views, len(first), -(-(count - first.start) // step), numbers),
        strides=(to_record, to_view, to_row, step * to_row, to_number),
    )


def windows_of(
    pixels: Floats,
    *,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    count: tuple[int, int],
    grouping: tuple[int, int] = (1, 1),
) -> Floats:
    """All windows of images ``(records, views, height, width, channels)`` as a view.

    Its shape is ``(records, views, *grouping, down, across, kernel rows, numbers of a row)``: the
    windows ordered by their place in groups of ``grouping`` windows first.
    """
    records, views, _, _, channels = pixels.shape
    to_record, to_view, row, column, number = pixels.strides
    down, across = row * stride[0], column * stride[1]
    return as_strided(
        pixels,
        shape=(
            *(records, views, *grouping),
            *(count[0] // grouping[0], count[1] // grouping[1]),
            *(kernel[0], kernel[1] * channels),
        ),
        strides=(to_record, to_view, down, across, down * grouping[0], across * grouping[1], row, number),
        writeable=False,
    )


def as_runs(array: Floats) -> NDArray[np.void]:
    """Each run along the last axis as one item, which copies faster than its numbers one by one."""
    return array.view(f"V{array.shape[-1] * array.itemsize}")[..., 0]
