"""Each record's gradient, never clipped, by each engine: a program for a board and for this machine.

``python single_gradients.py RECORDS GRADIENTS ENGINE...`` reads an ``.npz`` with ``NAME/weights``,
``NAME/inputs`` and ``NAME/labels`` of each model in :data:`MODELS`, and writes one with ``ENGINE/NAME``,
``(n, d)`` float32.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from learning.engines import engine_of, singly
from learning.small_models import SPECS

from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.spec import ModelSpec

MODELS: Final[Mapping[str, ModelSpec]] = {
    spec.name: spec
    for spec in (*SPECS[1:7], *(built_in(name).head for name in ("digits", "mnist-cnn", "sensor-cnn")))
}


def single_gradients(given: Mapping[str, Any], engines: Sequence[str]) -> dict[str, Any]:
    """Of the records of each model."""
    return {
        f"{engine}/{name}": singly(
            engine_of(engine, spec), *(given[f"{name}/{part}"] for part in ("weights", "inputs", "labels"))
        )
        for name, spec in MODELS.items()
        for engine in engines
    }


if __name__ == "__main__":
    source, target, *engines = sys.argv[1:]
    with np.load(source) as records:
        np.savez(Path(target), **single_gradients(records, engines))
