"""What the board keeps from round to round: the engine it chose or was told, and the features."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
from fleets import DIGITS, digits, make_plan, write_agent

from agent.decision import Declined
from agent.profile import load_profile
from agent.settings import load_agent_settings
from agent.training import Trainer
from dpagent.learning import describe, from_description
from dpagent.learning.training_graph.build import build_training_graph
from dpagent.protocol.messages import Plan
from dpagent.protocol.signing import Signer, new_signing_secret

KEY = Signer(new_signing_secret(), "testers").public_key
WEIGHTS = DIGITS.initial_weights(0)
GRAPH = {"training-graph": build_training_graph(DIGITS)}
PLAN = make_plan(mechanism={"sampling_rate": 1.0}, wire={"width": 24, "shift": 10})


def trainer(directory: Path, **changes: Any) -> Trainer:
    settings = load_agent_settings(write_agent(directory, None, KEY, **changes))
    settings.state_dir.mkdir(exist_ok=True)
    return Trainer(settings, load_profile("generic-linux"))


def choice(directory: Path) -> Any:
    return json.loads((directory / "state" / "engine.json").read_text())


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_a_choice_is_kept_for_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mechanism, update = trainer(tmp_path).release(PLAN, GRAPH, WEIGHTS)
    assert update.shape == (DIGITS.parameter_count,)
    assert mechanism.accumulation_slack == PLAN.mechanism.accumulation_slack
    assert "engine for digits" in caplog.text
    assert choice(tmp_path)["engine"] in ("numpy", "onnx")
    caplog.clear()
    again = trainer(tmp_path)
    again.release(PLAN, GRAPH, WEIGHTS)
    again.release(PLAN, GRAPH, WEIGHTS)
    assert "engine for" not in caplog.text
    # Without the graph it is another question.
    trainer(tmp_path).release(PLAN, {}, WEIGHTS)
    assert "the coordinator sent no training graph" in caplog.text
    assert choice(tmp_path)["engine"] == "numpy"


@pytest.mark.parametrize("kept", ["", "{", "[]", '{"engine": "abacus", "purpose": 1}'])
def test_a_damaged_choice_is_made_again(tmp_path: Path, kept: str) -> None:
    one = trainer(tmp_path)
    (tmp_path / "state" / "engine.json").write_text(kept)
    one.release(PLAN, GRAPH, WEIGHTS)
    assert choice(tmp_path)["engine"] in ("numpy", "onnx")


def test_an_engine_that_was_told_is_taken_or_the_round_declined(tmp_path: Path) -> None:
    told = trainer(tmp_path, engine="onnx")
    told.release(PLAN, GRAPH, WEIGHTS)
    assert not (tmp_path / "state" / "engine.json").exists()
    with pytest.raises(Declined, match="the coordinator sent no training graph"):
        trainer(tmp_path, engine="onnx").release(PLAN, {}, WEIGHTS)


def test_a_graph_is_asked_for_only_where_it_is_used(tmp_path: Path) -> None:
    asset = {"role": "training-graph", "digest": b"x" * 32, "size": 5}
    plan = make_plan(assets=[asset, asset | {"role": "projection"}])
    assert trainer(tmp_path).needed_assets(plan) == {"training-graph", "projection"}
    assert trainer(tmp_path, engine="numpy").needed_assets(plan) == {"projection"}


def test_a_plan_that_allows_too_little_for_float_sums_is_declined(tmp_path: Path) -> None:
    plan = make_plan(mechanism={"accumulation_slack": 1e-6})
    with pytest.raises(Declined, match=r"can add 0\.0003\d+ to a record's influence; the plan's"):
        trainer(tmp_path, engine="numpy").release(plan, {}, WEIGHTS)


def features_plan() -> Plan:
    """A plan whose model has a front end, which makes 4 features of a record."""
    spec = from_description(
        describe(DIGITS)
        | {
            "front_end": [{"random": {"layers": [{"average_pool2d": {"kernel": 4, "stride": 4}}]}}],
            "layers": [{"dense": 10}],
        }
    )
    return make_plan(
        model={
            "description": cbor2.dumps(describe(spec), canonical=True),
            "parameters": spec.parameter_count,
            "architecture": spec.digest(),
        },
        wire={"block": 50, "width": 24, "shift": 10},
    )


def test_features_are_computed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = features_plan()
    board = trainer(tmp_path, engine="numpy")
    for _ in range(2):
        _, update = board.release(plan, {}, np.zeros(50, np.float32))
        assert update.shape == (50,)
    assert caplog.text.count("computing features of 50 records") == 1
    (file,) = (tmp_path / "state").glob("features-*.f32")
    features = np.fromfile(file, np.float32).reshape(50, 2, 2)
    inputs, _ = digits(0, 50).batch(np.arange(50))
    pooled = inputs.reshape(50, 2, 4, 2, 4).mean(axis=(2, 4))
    np.testing.assert_allclose(features, (pooled - 0.3) / 0.37, rtol=1e-4, atol=1e-5)
