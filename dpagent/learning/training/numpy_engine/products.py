"""Matrix products over the records of a microbatch, in the form that is fast and safe on this machine.

``left[i] @ right`` for every record i can run in several forms:

* *stacked*: a product for each record, one call of the BLAS, all of one shape;
* *tiles of t*: the same with the rows of each record cut into tiles of t. Some libraries have faster
  kernels for small products (OpenBLAS with AVX-512 runs those of up to 10⁶ multiplications up to half as
  fast again);
* *flat*: one product over the rows of all records, often faster where a record has few rows;
* *groups of t*: the same for t records at a time: products that are small, but not as small as a record's.

In the last two a BLAS may compute a row differently at another place of the matrix (other tiles, other
edges), and then a record's bits would depend on its position, which the proof in
:mod:`dpagent.learning.training.engine` forbids. So they are tried on the spot, at every position, before they
are taken.

:meth:`Product.calibrate` times them all and takes the fastest that passes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from dpagent.learning.training.numpy_engine.workspaces import Floats
from dpagent.learning.trial_numbers import TrialNumbers

STACKED = "stacked"
FLAT = "flat"

SMALL_PRODUCT = 1_000_000
"""Multiplications up to which a product may be worth to be cut off from a larger one."""

_TRIALS = 5
_TILES = 3
_LEAST_TILE = 4
_COMPARED = 2048

GAIN = 0.97
"""The share of the plain form's time below which another form is chosen."""


class Choice(Protocol):
    """A computation that has several forms.

    Attributes:
        form: in which it is.
    """

    form: str

    def calibrate(self, numbers: TrialNumbers) -> None:
        """Try all forms and take the fastest. Overwrites its operands and its result."""
        ...


class Product:
    """``out = left @ right``, record by record.

    Args:
        left: ``(records, rows, k)``.
        right: ``(k, n)``, or ``(records, k, n)``.
        out: ``(records, rows, n)``.
        like: a product of the same shapes, whose form this one takes.
    """

    def __init__(self, left: Floats, right: Floats, out: Floats, *, like: Product | None = None) -> None:
        self._like = like
        self._form = STACKED
        self._operands = {STACKED: (left, right, out)}
        records, rows, k = left.shape
        n = out.shape[-1]
        for tile in _tiles(rows, k * n):
            shape = (records, rows // tile, tile)
            operand = right if right.ndim == 2 else right[:, np.newaxis]
            self._operands[f"tiles of {tile}"] = (
                left.reshape((*shape, k), copy=False),
                operand,
                out.reshape((*shape, n), copy=False),
            )
        self._mixed: set[str] = set()
        if right.ndim == 2 and _are_rows_even(left) and _are_rows_even(out):
            groups = {f"groups of {size}": size for size in _tiles(records, rows * k * n, least=2)}
            for form, size in {FLAT: records, **groups}.items():
                self._operands[form] = (
                    left.reshape((-1, size * rows, k), copy=False),
                    right,
                    out.reshape((-1, size * rows, n), copy=False),
                )
                self._mixed.add(form)

    @property
    def form(self) -> str:
        """How it runs; stacked until it is calibrated."""
        return self._like.form if self._like else self._form

    @form.setter
    def form(self, form: str) -> None:
        self._form = form

    def __call__(self) -> None:
        left, right, out = self._operands[self.form]
        np.matmul(left, right, out=out)

    def calibrate(self, numbers: TrialNumbers) -> None:
        """Choose the form. Overwrites ``right`` and ``out``."""
        left, right, _ = self._operands[STACKED]
        kept = left.copy()
        left[...] = numbers.normal(left.shape)
        right[...] = numbers.normal(right.shape)
        seconds = {}
        for form in self._operands:
            self.form = form
            seconds[form] = fastest(self)
        # The fastest first: to see that a form is invariant takes longer than all the rest.
        for form in sorted(seconds, key=lambda form: seconds[form]):
            self.form = form if seconds[form] < GAIN * seconds[STACKED] else STACKED
            if self.form not in self._mixed or self._is_invariant(numbers):
                break
        left[...] = kept

    def _is_invariant(self, numbers: TrialNumbers) -> bool:
        """Whether a record's product has the same bits at each position, beside itself and beside others.

        Two ways to add up may well round alike: many numbers are compared, of as many records as that takes.
        """
        left, _, out = self._operands[STACKED]
        # Drawn once, which takes longer than the products; what changes is the record, and its place.
        company = numbers.normal(left.shape)
        for _ in range(-(-_COMPARED // out[0].size)):
            record = numbers.normal(left.shape[1:])
            left[...] = record
            self()
            expected = out[0].copy()
            if not _same_bits(out, expected):
                return False
            place = numbers.integer(len(left))
            left[...] = company
            left[place] = record
            self()
            if not _same_bits(out[place], expected):
                return False
        return True


def fastest(function: Callable[[], None]) -> float:
    """The shortest of a few runs, in seconds."""
    best = math.inf
    for _ in range(_TRIALS):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def _same_bits(found: Floats, expected: Floats) -> bool:
    return bool(np.all(found.view(np.int32) == expected.view(np.int32)))


def _tiles(rows: int, multiplications: int, *, least: int = _LEAST_TILE) -> list[int]:
    """The largest tiles of ``rows`` that make small products, given the multiplications of a row."""
    most = min(rows - 1, SMALL_PRODUCT // multiplications)
    return [tile for tile in range(most, least - 1, -1) if rows % tile == 0][:_TILES]


def _are_rows_even(stack: Floats) -> bool:
    """Whether the rows of all records are equally far apart in memory."""
    return bool(stack.shape[1] == 1 or stack.strides[0] == stack.shape[1] * stack.strides[1])
