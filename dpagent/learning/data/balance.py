"""A word on classes of very different size, before anything is trained on them.

The measure is the imbalance ratio: how many records the commonest class has for each one of a rarer class.
The KEEL repository of benchmarks calls data with a ratio above 9 highly imbalanced (Alcalá-Fdez et al.,
2011), and so do we. Beyond it, two things mislead: accuracy, because always answering the commonest class
looks good; and the rare class itself, because training with noise has to learn it from the few clipped
gradients of its records in a lot. Neither is a question of the model or of the settings, so it is said
before a budget is spent.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from dpagent.learning.data.dataset import Dataset

_HIGH_RATIO: Final = 9
_MOST_NAMED: Final = 5


def hint_of_imbalance(dataset: Dataset) -> str:
    """A sentence about classes that are rare beside the commonest one, or nothing.

    Classes without any record are left out: that is a warning of its own.
    """
    counts = dataset.class_counts()
    present = np.flatnonzero(counts > 0)
    commonest = int(counts.argmax())
    rare = [int(number) for number in present if counts[number] * _HIGH_RATIO < counts[commonest]]
    if not rare:
        return ""
    rare.sort(key=lambda number: int(counts[number]))
    shown = ", ".join(f"{dataset.class_label(number)} ({counts[number]:,})" for number in rare[:_MOST_NAMED])
    more = f" and {len(rare) - _MOST_NAMED:,} more" if len(rare) > _MOST_NAMED else ""
    share = counts[commonest] / counts.sum()
    return (
        f"Classes differ much in size. Rare beside {dataset.class_label(commonest)} ({counts[commonest]:,}): "
        f"{shown}{more}. A model that always answers {dataset.class_label(commonest)} is right for "
        f"{share:.1%} of the records, so compare accuracy with that. Training with noise learns little of a "
        "rare class: collect more records of it, or merge classes."
    )
