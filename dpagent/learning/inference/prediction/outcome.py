"""The model's predictions for inputs, and the share that is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import require_count
from dpagent.learning.data.dataset import to_float32
from dpagent.learning.data.inputs import Input
from dpagent.learning.inference.prediction.exported_model import ExportedModel

_NOT_FINITE = "it holds NaN or infinity (or a missing value), so the model has no answer."


@dataclass(frozen=True, slots=True)
class Outcome:
    """One input, and the model's prediction.

    Attributes:
        input: without its values.
        probabilities: of each class, ``(classes,)``; None where there is no answer.
        problem: why there is none, or empty.
    """

    input: Input
    probabilities: NDArray[np.float64] | None
    problem: str = ""

    def top(self, count: int) -> list[tuple[int, float]]:
        """The most probable classes with their probabilities; of equal ones, the first."""
        if self.probabilities is None:
            return []
        order = np.argsort(-self.probabilities, kind="stable")[:count]
        return [(int(number), float(self.probabilities[number])) for number in order]


def predict(model: ExportedModel, inputs: Iterable[Input], *, batch: int = 64) -> Iterator[Outcome]:
    """The predictions of ``model`` for ``inputs``, in their order; ``batch`` of them are in memory at a time.

    Raises:
        DataError: the model cannot be run.
    """
    require_count("batch", batch)
    iterator = iter(inputs)
    while some := list(islice(iterator, batch)):
        readable = [one.values for one in some if one.values is not None]
        # One by one: bytes and floats may come together.
        values = np.empty((len(readable), *model.input_shape), np.float32)
        for row, record in zip(values, readable, strict=True):
            row[...] = to_float32(record)
        rows = iter(model.probabilities(values))
        for one in some:
            known = replace(one, values=None)
            if one.values is None:
                yield Outcome(known, None, one.problem)
                continue
            row = next(rows)
            finite = np.isfinite(one.values).all() and np.isfinite(row).all()
            yield Outcome(known, row, "") if finite else Outcome(known, None, _NOT_FINITE)


@dataclass(slots=True)
class Tally:
    """Counts over all outcomes.

    Attributes:
        inputs: how many there were.
        unanswered: how many of them have no answer.
        unread: paths among them that cannot be read as inputs.
        scaled: pictures that were made to fit.
        pairs: how often a class (first) was taken for another or for itself (second).
    """

    inputs: int = 0
    unanswered: int = 0
    unread: int = 0
    scaled: int = 0
    pairs: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count one."""
        self.inputs += 1
        self.unread += outcome.input.is_whole_path
        self.scaled += outcome.input.scaled_from is not None
        if outcome.probabilities is None:
            self.unanswered += 1
        elif outcome.input.label is not None:
            self.pairs[outcome.input.label, outcome.top(1)[0][0]] += 1

    @property
    def labelled(self) -> int:
        """Inputs whose class is known and that have an answer."""
        return self.pairs.total()

    @property
    def right(self) -> int:
        """Those of them whose answer is their class."""
        return sum(count for (label, answer), count in self.pairs.items() if label == answer)

    @property
    def accuracy(self) -> float | None:
        """The share of the labelled that are right; None without labels."""
        return self.right / self.labelled if self.pairs else None
