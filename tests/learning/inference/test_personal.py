"""A model trained on with a board's own records: better for them, private, and refused where it cannot be."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import digits

from dpagent.errors import DataError, ParameterError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.inference.export.model import export_onnx
from dpagent.learning.inference.model_bytes import metadata_of, weights_of, with_metadata
from dpagent.learning.inference.onnx_evaluator import OnnxEvaluator
from dpagent.learning.inference.personal import Personalised, Recipe, personalise
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.description import ARCHITECTURE_KEY
from dpagent.learning.models.layers import Dense
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import Projection, Scattering
from dpagent.learning.training.local_sgd import LocalSgd
from dpagent.learning.training.numpy_engine.engine import NumpyEngine

SPEC = built_in("digits")
FLEET = {
    "dpagent.model": "digits", "dpagent.privacy": "ε = 2", "dpagent.spent": "[]",
    "dpagent.epsilon_spent": "2.0", "dpagent.privacy_statement": "{}",
    ARCHITECTURE_KEY: json.dumps(SPEC.describe()),
}  # fmt: skip


@cache
def of_the_fleet() -> bytes:
    """A model of upright digits."""
    engine = NumpyEngine(SPEC)
    weights = LocalSgd(400, 32, 0.1, 1e6).train(engine, SPEC.initial_weights(0), digits(0, 1000))
    return export_onnx(SPEC, weights, metadata=FLEET)


def mirrored(start: int, stop: int) -> ArrayDataset:
    """Digits as one board's camera sees them."""
    data = digits(start, stop)
    inputs, labels = data.batch(np.arange(len(data)))
    return ArrayDataset(inputs[:, :, ::-1], labels, 10)


def made(tmp_path: Path, recipe: Recipe, data: ArrayDataset | None = None) -> Personalised:
    return personalise(of_the_fleet(), data or mirrored(1000, 1400), recipe, tmp_path)


@pytest.mark.parametrize("layers", ["last", "all"])
def test_a_model_becomes_better_for_its_board(tmp_path: Path, layers: Any) -> None:
    found = made(tmp_path, Recipe(layers, epochs=20, learning_rate=0.1, seed=1))
    assert (found.trained, found.held_out, found.left_out) == (320, 80, 0)
    assert found.after > found.before + 0.1
    # Also on records that it has never met, whoever counts.
    others = mirrored(1400, 1797)
    before, after = (OnnxEvaluator(file).accuracy(others) for file in (of_the_fleet(), found.model))
    assert after > before + 0.1
    changed = weights_of(found.model, SPEC) != weights_of(of_the_fleet(), SPEC)
    last = SPEC.nodes[-1].parameters.start
    assert changed[last:].any()
    assert changed[:last].any() == (layers == "all")


def test_the_file_says_that_it_is_private_and_has_no_guarantee(tmp_path: Path) -> None:
    found = metadata_of(made(tmp_path, Recipe(epochs=1)).model)
    assert found["dpagent.personal"] == "true"
    assert found["dpagent.privacy"].startswith("none: trained without noise on the private records")
    assert set(found) == {"dpagent.model", "dpagent.privacy", "dpagent.personal", ARCHITECTURE_KEY}
    again = made(tmp_path, Recipe(epochs=1)).model
    with pytest.raises(DataError, match="a personal one already"):
        personalise(again, mirrored(1000, 1100), Recipe(), tmp_path)


def test_records_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    data = mirrored(1000, 1050)
    inputs, labels = data.batch(np.arange(50))
    inputs = inputs.copy()
    inputs[3], inputs[7, 0, 0] = np.inf, np.nan
    found = made(tmp_path, Recipe(), ArrayDataset(inputs, labels, 10))
    assert (found.trained + found.held_out, found.left_out) == (48, 2)


def test_a_front_end_without_files_is_gone_through(tmp_path: Path) -> None:
    spec = ModelSpec("waves", (8, 8, 1), 10, (Dense(10),), front_end=(Scattering(scales=1, angles=4),))
    model = export_onnx(
        spec, spec.initial_weights(0), metadata={ARCHITECTURE_KEY: json.dumps(spec.describe())}
    )
    found = personalise(model, mirrored(0, 600), Recipe(epochs=10, learning_rate=0.5, seed=1), tmp_path)
    assert found.before < 0.4
    assert found.after > max(0.4, found.before)


def described(spec: ModelSpec | None, **changes: str) -> bytes:
    """The fleet's file with another architecture in its metadata."""
    metadata = {key: value for key, value in FLEET.items() if key != ARCHITECTURE_KEY}
    told = {} if spec is None else {ARCHITECTURE_KEY: json.dumps(spec.describe())}
    return with_metadata(of_the_fleet(), metadata | told | changes)


PROJECTED = ModelSpec("p", (8, 8, 1), 10, (Dense(10),), front_end=(Projection(5),))
SHIFTED = ModelSpec("digits", SPEC.input_shape, 10, SPEC.layers, input_offset=0.3)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: b"no model", "no ONNX file"),
        (lambda: described(None), "does not say of what layers it is made"),
        (lambda: described(None, **{ARCHITECTURE_KEY: "[" * 9_999}), "is no JSON"),
        (lambda: described(None, **{ARCHITECTURE_KEY: "[]"}), "expected keys and values"),
        (lambda: described(PROJECTED), "a front end with projection"),
        (lambda: described(built_in("mnist-cnn")), "expects (28, 28, 1)"),
        (lambda: described(ModelSpec("d", (8, 8, 1), 10, (Dense(10),))), "no weights '0.dense.weight'"),
        (lambda: described(SHIFTED), "computes something else than the layers that it names"),
        (
            lambda: described(SPEC, **{"dpagent.classes": json.dumps(list("abcdefghij"))}),
            "those of the model a, b",
        ),
    ],
)
def test_models_that_cannot_be_trained_on_are_refused(tmp_path: Path, model: Any, said: str) -> None:
    data = mirrored(1000, 1100)
    named = ArrayDataset(*data.batch(np.arange(100)), 10, [f"digit {number}" for number in range(10)])
    with pytest.raises(DataError) as caught:
        personalise(model(), named, Recipe(), tmp_path)
    assert said in str(caught.value)


def test_too_few_records_and_training_that_runs_away_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There are 9 records"):
        made(tmp_path, Recipe(), mirrored(0, 9))
    assert made(tmp_path, Recipe(), mirrored(0, 10)).held_out == 2
    for wrong in ({"epochs": 0.0}, {"batch": 0}, {"learning_rate": 11.0}, {"held_out": 0.95}):
        with pytest.raises(ParameterError):
            Recipe(**wrong)  # type: ignore[arg-type]
