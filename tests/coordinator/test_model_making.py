"""A model's files are made in a program that ends, and hold what the same functions make here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coordinator.model_making import ModelMakingError, training_graph, unfilled_model
from dpagent.errors import ParameterError
from dpagent.learning.inference.export.model import export_onnx
from dpagent.learning.inference.model_bytes import with_metadata, with_weights
from dpagent.learning.models.built_ins import BUILT_IN, built_in
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import Projection
from dpagent.learning.training.onnx_graph.build import build_training_graph

PROJECTED = ModelSpec(
    "projected", (8, 8, 1), 10, built_in("digits").layers[-1:], front_end=(Projection(components=6),)
)
DIRECTIONS = {"projection": np.linspace(-1, 1, 384, dtype="<f4").tobytes()}
"""With assets, nothing that another test has made is at hand."""


@pytest.mark.parametrize(
    ("spec", "assets"),
    [
        (BUILT_IN["mnist-cnn"], {}),
        (BUILT_IN["scattering"], {}),
        (PROJECTED, DIRECTIONS),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_file_with_weights_filled_in_is_the_exported_one(spec: ModelSpec, assets: dict[str, bytes]) -> None:
    weights, metadata = spec.initial_weights(seed=1), {"b": "π", "a": "1"}
    filled = with_weights(unfilled_model(spec, assets), spec, weights)
    assert with_metadata(filled, metadata) == export_onnx(spec, weights, metadata=metadata, assets=assets)


def test_a_training_graph_is_the_same_and_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = built_in("digits")
    graph = training_graph(spec, views=2, per_layer=True)
    assert graph == build_training_graph(spec, views=2, per_layer=True)
    monkeypatch.setattr("coordinator.model_making._PROGRAM", "nothing.of.that.name")
    assert training_graph(spec, views=2, per_layer=True) == graph


def test_what_is_wrong_is_said_as_if_the_file_were_made_here() -> None:
    with pytest.raises(ParameterError, match="views is 0"):
        training_graph(built_in("digits"), views=0, per_layer=False)


def test_a_program_that_is_ended_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ended_program.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("coordinator.model_making._PROGRAM", "ended_program")
    with pytest.raises(ModelMakingError, match="ended by signal 9; the system may have run out of memory"):
        unfilled_model(PROJECTED, DIRECTIONS)


def test_a_stop_of_the_service_does_not_end_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service manager's signal goes to all programs: the job was paused, as if memory had run out."""
    stopped = "import os, pickle, sys\nfor number in (2, 15):\n    os.kill(os.getpid(), number)\n"
    (tmp_path / "stopped_program.py").write_text(stopped + "sys.stdout.buffer.write(pickle.dumps(b'made'))\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("coordinator.model_making._PROGRAM", "stopped_program")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert unfilled_model(PROJECTED, DIRECTIONS) == b"made"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_coordinator_loads_neither_onnx_nor_its_runtime() -> None:
    """Of 106 MiB of a coordinator of a hundred devices, they were 38; who has test data loads the second."""
    command = [sys.executable, "-c", "import cli.coordinator, coordinator.daemon, sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert not {"onnx", "onnxruntime"} & set(done.stdout.split())
