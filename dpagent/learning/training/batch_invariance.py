"""Does this machine compute a record alike at every place of a microbatch, and beside any other?

A library may add up a matrix product in another order for the last rows of a matrix: ONNX Runtime 1.31
does so on x86-64 where a product has one column and its rows are no multiple of four. Weights that cancel
make a difference in the last bit as large as the result, so an engine is not used where a record's place
shows at all.

**What is compared.** One microbatch after the other is drawn, with weights of its own, and computed three
times: as it is; with all records moved along one ring of all places; and moved again, with half of them
replaced by blank, enormous or equal records. Every record that is left must have the same bits as before
in all that the engine knows of it, and one of them in its clipped gradient too, which is the sum where it
alone counts. A microbatch always has the same number of rows, blank ones included, so these are the
kernels that training runs.

**Its power.** Records move along one ring of all places, so if places fall into kinds that are computed in
different ways, at least two records pass from one kind to another in each move. In half of the microbatches
the terms of a sum nearly cancel, which shows its order best. Of what was planted
(``tests/learning/training/test_batch_invariance.py``), hardest to find is a product of one column and few
terms of which one row in five is added up in another order: one microbatch shows it with p = 1/4 or more,
so that 32 of them miss it with (1 − p)^32 = 10⁻⁴, and the two checks of an engine that is chosen by
trial (when it is tried, and when it is made) with 10⁻⁸. Wide products have a p near 1. The order of the last
sum of squares, in float64, hardly shows, since that adds up its float32 terms exactly as a rule; nothing
follows it that could magnify a difference.

**What it cannot show.** The order of a summation does not depend on the numbers, so weights which a
coordinator chooses meet no other order than drawn ones. But a kernel may treat some numbers apart. Zeros,
subnormal numbers and records that are not finite are among what is drawn; a kernel that treats others apart
would pass. The draws are of the system's entropy: nobody can look for a model that passes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.trial_numbers import TrialNumbers

TRIALS: Final = 32
"""Microbatches that are drawn, each of which is computed three times."""

CLIP_NORM: Final = 1e-3
"""Below nearly every norm, so that the clip factors are tried as well."""

_FILLS: Final = (0.0, 3e38, None)
"""What takes the place of half of the records: the number, or a copy of the record that counts."""
_TINY: Final = 1e-39
"""Subnormal in float32."""


class Computed(NamedTuple):
    """A microbatch in which one record counts.

    Attributes:
        evidence: of each record, ``(rows, bytes)`` uint8: all that its clipped gradient depends on.
        total: the clipped sum, ``(d,)``.
    """

    evidence: NDArray[np.uint8]
    total: NDArray[Any]


Compute: TypeAlias = Callable[[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64], int], Computed]
"""Of weights ``(d,)``, inputs ``(rows, *record)``, labels ``(rows,)``, and the place that counts."""


def is_invariant(
    spec: ModelSpec,
    record: tuple[int, ...],
    rows: int,
    compute: Compute,
    seed: int | None = None,
    *,
    trials: int = TRIALS,
) -> bool:
    """Whether ``compute`` computes a record alike at every place and beside any other.

    An experiment, not a proof; the module's text says how much one that passes is worth.

    Args:
        spec: the architecture, without a front end.
        record: the shape of a record, its views included.
        rows: records of a microbatch.
        compute: as of the engine.
        seed: of the draws; of the system's entropy if None.
        trials: microbatches that are drawn.
    """
    if rows == 1:
        return True  # There is no other place, and nobody else.
    numbers = TrialNumbers(seed)
    return all(_is_alike(spec, (rows, *record), compute, numbers, trial) for trial in range(trials))


def _is_alike(
    spec: ModelSpec, shape: tuple[int, ...], compute: Compute, numbers: TrialNumbers, trial: int
) -> bool:
    """Whether the records of one drawn microbatch, of this shape, come out alike three times."""
    rows, fill = shape[0], _FILLS[trial % len(_FILLS)]
    weights = _weights(spec, numbers, cancel=trial % 2 == 0)
    inputs = _records(shape, numbers, cancel=trial % 2 == 0)
    labels = numbers.integers(spec.classes, rows)
    counted = numbers.integer(rows)
    first = compute(weights, inputs, labels, counted)
    places, kept = np.arange(rows), np.ones(rows, np.bool_)
    for is_replaced in (False, True):
        places = _moved(places, numbers)
        if is_replaced:
            kept[numbers.order(rows)[: rows // 2]] = False
            kept[counted] = True
            inputs = inputs.copy()
            inputs[~kept] = inputs[counted] if fill is None else fill
        moved, moved_labels = np.empty_like(inputs), np.empty_like(labels)
        moved[places], moved_labels[places] = inputs, labels
        found = compute(weights, moved, moved_labels, int(places[counted]))
        if not np.array_equal(found.evidence[places][kept], first.evidence[kept]):
            return False
        # The sign of a zero may be that of a zero of another record.
        if (found.total + 0).tobytes() != (first.total + 0).tobytes():
            return False
    return True


def _moved(places: NDArray[np.intp], numbers: TrialNumbers) -> NDArray[np.intp]:
    """Where the records of ``places`` are after a move along one ring of all places, in random order."""
    ring = numbers.order(len(places))
    following = np.empty_like(ring)
    following[ring] = np.roll(ring, -1)
    moved: NDArray[np.intp] = following[places]
    return moved


def _weights(spec: ModelSpec, numbers: TrialNumbers, *, cancel: bool) -> NDArray[np.float32]:
    """``(d,)``: each layer gives numbers of about the size that it takes, so that no bit is lost on the way.

    Of equal inputs, sums in which terms ``cancel`` are nearly zero.
    """
    weights = numbers.normal((spec.parameter_count,))
    for block in spec.parameter_shapes:
        matrix = weights[block.offset : block.offset + block.size].reshape(-1, block.shape[-1])
        if cancel and len(matrix) > 1:
            matrix -= matrix.mean(axis=0)
        matrix *= np.float32(10 ** numbers.number(-0.5, 0.5) / len(matrix) ** 0.5)
    return weights


def _records(shape: tuple[int, ...], numbers: TrialNumbers, *, cancel: bool) -> NDArray[np.float32]:
    """Nearly equal numbers in each record, if they are to ``cancel``; else of several magnitudes, and some
    are zero, so that windows tie, or subnormal."""
    records = numbers.normal(shape)
    if cancel:
        levels = numbers.normal((len(records), *(1 for _ in shape[1:])))
        records /= 16
        records += 2 * levels
        return records
    records *= np.float32(10) ** numbers.uniform(shape, -1, 0.5)
    kind = numbers.uniform(shape)
    records[kind < 0.1] = 0
    records[(kind >= 0.1) & (kind < 0.12)] = _TINY
    return records
