"""ONNX files of a job's model without its weights, made by a program that ends.

The package ``onnx`` makes them, and stays in memory: a fifth of all that a coordinator would take. So it is
loaded by :mod:`coordinator.model_program` alone, once for each file. Weights are filled in without it
(:mod:`dpagent.learning.inference.model_bytes`).
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeAlias

from dpagent.errors import DpagentError
from dpagent.learning.models.spec import ModelSpec

_PROGRAM: Final = "coordinator.model_program"


class ModelMakingError(DpagentError):
    """The program that makes a model's files was ended."""


@dataclass(frozen=True, slots=True)
class TrainingGraph:
    """As the arguments of ``build_training_graph``."""

    spec: ModelSpec
    views: int
    per_layer: bool


@dataclass(frozen=True, slots=True)
class Unfilled:
    """As the arguments of ``export_onnx``, with weights that are all zero."""

    spec: ModelSpec
    assets: tuple[tuple[str, bytes], ...]


Request: TypeAlias = TrainingGraph | Unfilled
"""What the program reads, pickled, from standard input. Pickled on standard output, it answers the file, or
the error."""


@lru_cache(maxsize=4)
def training_graph(spec: ModelSpec, *, views: int, per_layer: bool) -> bytes:
    """See :func:`~dpagent.learning.training.onnx_graph.build.build_training_graph`. Kept for the next job.

    Raises:
        ParameterError: as there.
        ModelMakingError: there is not enough memory.
    """
    return _made(TrainingGraph(spec, views, per_layer))


def unfilled_model(spec: ModelSpec, assets: Mapping[str, bytes]) -> bytes:
    """The model's file with weights that are all zero, and without metadata; see
    :func:`~dpagent.learning.inference.export.model.export_onnx`. Without assets, kept for the next job.

    Raises:
        ConfigurationError: as there.
        ModelMakingError: there is not enough memory.
    """
    return _made(Unfilled(spec, tuple(sorted(assets.items())))) if assets else _unfilled(spec)


@lru_cache(maxsize=4)
def _unfilled(spec: ModelSpec) -> bytes:
    return _made(Unfilled(spec, ()))


def _made(request: Request) -> bytes:
    # From where this program imports, and not from the directory that it runs in.
    places = os.pathsep.join(place or str(Path.cwd()) for place in sys.path)
    # A service manager's SIGTERM goes to all programs: a job would be paused because this one is stopped.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": places},
            process_group=0,  # A terminal's Ctrl-C ends this program, which ends that one.
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with process:
        try:
            said, complaint = process.communicate(pickle.dumps(request))
        except BaseException:
            process.kill()
            raise
    if process.returncode < 0:
        raise ModelMakingError(
            f"The program that makes the model's ONNX files was ended by signal {-process.returncode}; the "
            "system may have run out of memory. Free some, and start the coordinator again."
        )
    if process.returncode:
        raise RuntimeError(
            f"{_PROGRAM} ended with {process.returncode}: {complaint.decode(errors='replace')}"
        )
    answer: bytes | DpagentError = pickle.loads(said)
    if isinstance(answer, DpagentError):
        raise answer
    return answer
