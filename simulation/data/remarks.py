"""Remarks on the data for their owner before training, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.data.balance import hint_of_imbalance
from dpagent.learning.data.checking import groups_of, sentence_of_non_finite
from dpagent.learning.data.classes import doubt_about_labels, unlisted
from dpagent.learning.data.columns import ColumnTally, hint_of_growth
from dpagent.learning.data.dataset import Dataset, to_float32
from dpagent.learning.models.spec import ModelSpec
from dpagent.wording import counted, named
from simulation.data.source import Source

_LOOKED_AT: Final = 2000
_LARGEST_INPUT: Final = 20.0
_FEW_TEST_RECORDS: Final = 100
_MOST_NAMED: Final = 5


def remarks_on(source: Source, spec: ModelSpec) -> Iterator[str]:
    """The sentences, for a run with the model ``spec``."""
    train, test = source.train, source.test
    if left_out := train.origin.left_out:
        shown = "; ".join(sentence.rstrip(".") for sentence in left_out[:_MOST_NAMED])
        more = f"; and {len(left_out) - _MOST_NAMED:,} more" if len(left_out) > _MOST_NAMED else ""
        yield f"Left out: {shown}{more}. `dpagent data check` lists all of them."
    if train.origin.kind == "csv":
        # That boards could number the classes unlike is of no concern here: one table is for all.
        yield from (warning for warning in train.origin.warnings if warning != unlisted())
    if source.not_counted:
        yield sentence_of_non_finite(source.not_counted)
    yield from _on_classes(train, test)
    yield from _on_inputs(source, spec)
    if len(test) < _FEW_TEST_RECORDS:
        there = f"{'is' if len(test) == 1 else 'are'} {counted(len(test), 'test record')}"
        yield f"There {there}: the accuracy is uncertain by about {100 * 0.5 / len(test) ** 0.5:.0f} points."


def _on_classes(train: Dataset, test: Dataset) -> Iterator[str]:
    trained, tested = train.class_counts() > 0, np.bincount(test.labels, minlength=train.classes) > 0
    if missing := _classes(train, ~trained):
        yield f"No training record is of {_some(missing)}: the model cannot learn that."
    if untested := _classes(train, trained & ~tested):
        which = "Class" if len(untested) == 1 else "Classes"
        have = "has" if len(untested) == 1 else "have"
        yield f"{which} {_some(untested)} {have} no test record: the accuracy says nothing of that."
    if doubt := doubt_about_labels(train):
        yield doubt
    if uneven := hint_of_imbalance(train):
        yield uneven


def _on_inputs(source: Source, spec: ModelSpec) -> Iterator[str]:
    train = source.train
    inputs = to_float32(train.batch(np.arange(min(len(train), _LOOKED_AT)))[0])
    if source.columns:
        tally = ColumnTally(source.columns)
        tally.add(inputs, groups_of(train)[: len(inputs)])
        if hint := hint_of_growth(tally.ranges()):
            yield hint
    with np.errstate(all="ignore"):
        values = np.abs((inputs - np.asarray(spec.input_offset)) / np.asarray(spec.input_scale))
    largest = np.max(
        values, axis=tuple(range(values.ndim - 1)), where=np.isfinite(values), initial=0.0
    )  # of each column or channel
    if largest.max() > _LARGEST_INPUT:
        large = [name for name, value in zip(source.columns, largest, strict=False) if value > _LARGEST_INPUT]
        where = f" ({_some(large)})" if large else ""
        yield (
            f"Inputs reach {largest.max():,.4g}{where}, and networks learn badly from numbers beyond about "
            f"±10. Give {named('offset')} and {named('scale')}: constants that are public, such as the range "
            "of a sensor, and no figures computed from the data."
        )


def _classes(dataset: Dataset, which: NDArray[np.bool_]) -> list[str]:
    return [dataset.class_label(int(number)) for number in np.flatnonzero(which)]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")
