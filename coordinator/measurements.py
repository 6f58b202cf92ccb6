"""What is measured of a round besides its result: the model's answers by class, its loss, and the traffic.

Of each round the numbers by class are kept. The confusion matrix is kept of the last round alone, and only up
to :data:`MOST_CLASSES` classes: that of a hundred classes takes some 30 kB.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coordinator.database.interface import Database, Reader
from dpagent.learning.inference.evaluation import Evaluation

MOST_CLASSES: Final = 100
"""Of a confusion matrix that is kept: nobody reads a larger one."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of MQTT payloads and topics, repeats included, while a round was open and this program ran."""

    received: int
    published: int


NO_TRAFFIC: Final = Traffic(0, 0)


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a round.

    Attributes:
        loss: mean cross-entropy on the test data, in nats; None where it was not measured or is not finite.
        by_class: of each class, its test records, those answered rightly, and how often it was the answer.
        confusion: ``(classes, classes)``, by label and by answer; None where it is not kept.
        received, published: bytes; see :class:`Traffic`.
    """

    loss: float | None
    by_class: tuple[tuple[int, int, int], ...]
    confusion: NDArray[np.int64] | None
    received: int
    published: int

    @property
    def majority_class_accuracy(self) -> float | None:
        """Accuracy of always answering the commonest class of the test records; None without any."""
        records = [each[0] for each in self.by_class]
        return max(records) / sum(records) if sum(records) else None


def note_measurements(
    database: Database, job: int, number: int, evaluation: Evaluation | None, traffic: Traffic
) -> None:
    """Keep what was measured of a round; inside a transaction."""
    loss = by_class = confusion = None
    if evaluation is not None:
        matrix = evaluation.confusion
        loss = evaluation.loss if math.isfinite(evaluation.loss) else None
        rows = zip(matrix.sum(axis=1), matrix.diagonal(), matrix.sum(axis=0), strict=True)
        by_class = json.dumps([[*map(int, row)] for row in rows])
        if len(matrix) <= MOST_CLASSES:
            confusion = json.dumps(matrix.tolist())
            database.execute("UPDATE measurements SET confusion = NULL WHERE job = ?", (job,))
    database.execute(
        "INSERT INTO measurements (job, round, loss, by_class, confusion, received, published) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (job, number, loss, by_class, confusion, traffic.received, traffic.published),
    )


def measured_in(database: Reader, job: int, after: int = 0) -> dict[int, Measured]:
    """What was measured of the rounds of a job after one of them, by number; a round may lack it."""
    rows = database.execute(
        "SELECT round, loss, by_class, confusion, received, published FROM measurements "
        "WHERE job = ? AND round > ? ORDER BY round",
        (job, after),
    )
    return {row["round"]: _read(row) for row in rows}


def _read(row: Any) -> Measured:
    matrix = None if row["confusion"] is None else np.array(json.loads(row["confusion"]), np.int64)
    by_class = tuple(tuple(each) for each in json.loads(row["by_class"] or "[]"))
    return Measured(row["loss"], by_class, matrix, row["received"], row["published"])
