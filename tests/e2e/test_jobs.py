"""Whole jobs, as an operator would ask for them: real broker, coordinator and agents, a few rounds each.

The daemons run in threads, on a clock that moves while they have nothing to wait for.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import onnx
import pytest
import yaml
from brokers import Broker
from clocks import MovableClock
from commands import dpagent, dpagent_process
from daemons import agent_thread, attentive_daemons, coordinator_thread
from fleets import digits, write_agent, write_fleet
from observers import Observer
from onnx import TensorProto, helper, numpy_helper

from agent.audit import audit
from agent.latest_model import previous_of
from coordinator.keys import load_signer
from coordinator.reader import StoreReader
from coordinator.settings import FIRST_JOB, load_fleet_settings
from dpagent.learning.data.dataset import to_float32
from dpagent.learning.inference.onnx_evaluator import OnnxEvaluator
from dpagent.learning.inference.prediction.exported_model import ExportedModel
from dpagent.protocol.messages import Plan
from dpagent.protocol.signing import Verifier

ROUNDS = 3
DEVICES = 2


def features_file(path: Path) -> str:
    """An ONNX file that a frozen stage can name: means over two by two pixels. Returns its SHA-256."""
    nodes = [
        helper.make_node("Reshape", ["pixels", "blocks"], ["apart"]),
        helper.make_node("ReduceMean", ["apart", "axes"], ["features"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes, "pooling",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["n", 8, 8, 1])],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", 4, 4, 1])],
        [
            numpy_helper.from_array(np.array([0, 4, 2, 4, 2, 1]), "blocks"),
            numpy_helper.from_array(np.array([2, 4]), "axes"),
        ],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, str(path))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def model_file(directory: Path, front_end: list[Any]) -> str:
    """The model ``mine.yaml``, and the network it may name. Returns the SHA-256 of that."""
    directory.mkdir(parents=True, exist_ok=True)
    digest = features_file(directory / "pooling.onnx")
    model = {
        "name": "mine", "input_shape": [8, 8, 1], "classes": 10, "front_end": front_end,
        "layers": [{"dense": 12}, "tanh", {"dense": 10}],
    }  # fmt: skip
    (directory / "mine.yaml").write_text(yaml.safe_dump(model))
    return digest


class Job:
    """What a finished job left behind."""

    def __init__(
        self,
        directory: Path,
        broker: Broker,
        *,
        trusted: Sequence[str] = (),
        engine: str = "numpy",
        **changes: Any,
    ) -> None:
        self.name = directory.name
        self.coordinator = directory / "coordinator"
        budget = {"epsilon": 35.0, "delta": 1e-4, "sampling_rate": 0.8, "schedule": {"kind": "uniform"}}
        privacy = budget | changes.pop("privacy", {})
        file = write_fleet(
            self.coordinator, broker, fleet=self.name, rounds=ROUNDS, devices=DEVICES, privacy=privacy,
            round={"deadline_s": 86_400.0}, **changes,
        )  # fmt: skip
        self.settings = load_fleet_settings(file)
        key = load_signer(self.settings.keys_dir, self.name).public_key
        devices = [directory / f"device-{number}" for number in range(DEVICES)]
        files = [
            write_agent(
                device,
                broker,
                key,
                number,
                fleet=self.name,
                budget={"epsilon": 35.0},
                engine=engine,
                trusted_graphs=list(trusted),
                data={"features_mib": 1},
                model={"keep": "current"},
            )
            for number, device in enumerate(devices)
        ]
        clock = MovableClock()
        with (
            attentive_daemons(),
            Observer(broker, self.name) as observer,
            coordinator_thread(file, clock) as coordinator,
            agent_thread(files[0], clock) as first,
            agent_thread(files[1], clock) as second,
        ):
            clock.advance_until(lambda: not coordinator.is_running, "the end of the job")
            assert coordinator.result is True
            self.models = [device / "state" / "model.onnx" for device in devices]
            finished = (self.settings.directory_of(FIRST_JOB) / "model.onnx").read_bytes()
            # Before it, a board may have the model of an open round there.
            clock.advance_until(
                lambda: all(model.exists() and model.read_bytes() == finished for model in self.models),
                "the finished model on each board",
            )
            for agent in (first, second):
                assert agent.is_running
                agent.stop()
            verifier = Verifier(key, self.name)
            opened = [verifier.open(message, Plan, "plan") for message in observer.plans]
        self.plans = {plan.round: plan for plan in opened if plan.state == "open"}
        self.ledgers = [audit(device / "state") for device in devices]

    @property
    def evaluator(self) -> OnnxEvaluator:
        return OnnxEvaluator((self.settings.directory_of(FIRST_JOB) / "model.onnx").read_bytes())

    def require_sound(self) -> None:
        """Every round charged, every ledger whole, the model able to look at a record."""
        assert sorted(self.plans) == [1, 2, 3]
        for ledger in self.ledgers:
            assert [charge.round for charge in ledger.charges] == [1, 2, 3]
            assert ledger.charges[-1].cumulative_epsilon <= 35.0
        inputs, _ = digits(100, 110).batch(np.arange(10))
        assert np.isfinite(self.evaluator.logits(to_float32(inputs))).all()


VARIANTS: dict[str, dict[str, Any]] = {
    "layers": {"privacy": {"clipping": {"kind": "layers"}}},
    "layers with norms": {
        "privacy": {"clipping": {"kind": "layers", "norms": [0.5, 0.7, 0.2]}},
        "current_models": True, "model": {"name": "digits", "precision": "float32"},
    },
    "local steps": {"privacy": {"local_steps": 2, "local_learning_rate": 0.05}},
    "adam": {
        "optimiser": {
            "kind": "adam", "learning_rate": 0.01, "final_learning_rate": 0.001, "decay_rounds": 2,
        }
    },
    "views": {"model": {"name": "digits", "augmentation": {"views": 3, "shift": 1, "flip": True}}},
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("layers", "local steps") else ())
        for name in VARIANTS
    ],
)
def test_a_job_of_each_kind_ends_well(name: str, tmp_path: Path, mosquitto: Broker) -> None:
    job = Job(tmp_path / f"job-{list(VARIANTS).index(name)}", mosquitto, **VARIANTS[name])
    job.require_sound()
    assert len(list((job.settings.directory_of(FIRST_JOB) / "models").glob("round-*.onnx"))) == ROUNDS
    plan = job.plans[1]
    if name == "layers with norms":
        assert plan.release.clipping.norms == [0.5, 0.7, 0.2]
        assert math.fsum(plan.release.clipping.shares) == pytest.approx(1.0)
        # The finished model has just replaced it.
        ours = ExportedModel(previous_of(job.models[0]))
        theirs = ExportedModel(job.settings.directory_of(FIRST_JOB) / "models" / "round-0001.onnx")
        inputs = np.zeros((1, 8, 8, 1), np.float32)
        assert (ours.round, ours.privacy) == (theirs.round, theirs.privacy)
        assert np.array_equal(ours.probabilities(inputs), theirs.probabilities(inputs))
    if name == "adam":
        answered = dpagent(
            "predict",
            "--latest",
            "--config",
            job.models[0].parents[1] / "agent.yaml",
            job.coordinator.parent / "device-1" / "data.npz",
            "--summary",
        )
        assert answered.returncode == 0, answered.stderr
        assert "of 50 " in answered.stdout
        personal = dpagent_process("personalise", "--config", job.models[0].parents[1] / "agent.yaml")
        assert personal.returncode == 0, personal.stderr
        assert "Accuracy on 10 records held out" in personal.stdout
    if name == "views":
        assert plan.release.augmentation is not None
        assert plan.release.augmentation.views == 3


def test_a_bounded_cap_is_charged_and_the_rest_goes_over_the_rounds_left(
    tmp_path: Path, mosquitto: Broker
) -> None:
    """The first round's share of ε cannot keep its noise within the cap; the others' can."""
    privacy = {
        "method": "incrementing", "noise": "laplace", "schedule": {"kind": "incrementing", "step": 0.9},
    }  # fmt: skip
    cap = {"kind": "bounded", "regularisation": 1e-3, "floor": 0.057}
    job = Job(tmp_path / "bounded", mosquitto, privacy=privacy, cap=cap)
    job.require_sound()
    shares = 35.0 * job.settings.privacy.spending.shares(ROUNDS)
    for ledger in job.ledgers:
        spent = [0.0, *(charge.cumulative_epsilon for charge in ledger.charges)]
        costs = [after - before for before, after in itertools.pairwise(spent)]
        assert {charge.mechanism for charge in ledger.charges} == {"truncated-laplace"}
        assert costs[0] > 3 * shares[0]
        assert costs[1] < costs[2] < shares[2]
        assert spent[-1] > 34.99
        assert [job.plans[number].release.cap.spent for number in (1, 2, 3)] == pytest.approx(spent[:3])
    reader = StoreReader(job.settings.state_dir)
    assert [each.epsilon for each in reader.rounds()] == pytest.approx(spent[1:])
    reader.close()


def test_a_clip_norm_follows_the_quantile(tmp_path: Path, mosquitto: Broker) -> None:
    clipping = {"kind": "quantile", "quantile": 0.5, "rate": 1.0}
    job = Job(tmp_path / "quantile", mosquitto, privacy={"clip_norm": 1000.0, "clipping": clipping})
    job.require_sound()
    norms = [job.plans[number].release.clipping.norms[0] for number in (1, 2, 3)]
    # All records are within 1,000: the share is near 1, and the norm falls by nearly e^(−1/2) a round.
    assert norms[0] == 1000.0
    for before, after in itertools.pairwise(norms):
        assert after / before == pytest.approx(math.exp(-0.5), rel=0.2)
    connection = sqlite3.connect(job.settings.state_dir / "coordinator.db")
    (kept,) = connection.execute("SELECT clip_norm FROM models").fetchone()
    connection.close()
    assert kept < norms[-1]


def test_a_projection_is_found_in_the_first_round(tmp_path: Path, mosquitto: Broker) -> None:
    directory = tmp_path / "projection"
    model_file(directory / "coordinator", [{"projection": 6}])
    job = Job(directory, mosquitto, model={"name": "mine.yaml"}, privacy={"record_norm": 6.0})
    job.require_sound()
    assert [asset.role for asset in job.plans[1].assets] == ["training-graph"]
    assert [asset.role for asset in job.plans[2].assets] == ["training-graph", "projection"]
    assert not (job.settings.directory_of(FIRST_JOB) / "models" / "round-0001.onnx").exists()
    found = np.fromfile(job.settings.directory_of(FIRST_JOB) / "projection.f32", "<f4").reshape(64, 6)
    inputs = np.concatenate([digits(50 * n, 50 * n + 50).batch(np.arange(50))[0] for n in range(DEVICES)])
    _, _, directions = np.linalg.svd(to_float32(inputs).reshape(-1, 64), full_matrices=False)
    # With little noise the leading direction, the mean image nearly, is beyond doubt.
    assert abs(float(found[:, 0] @ directions[0])) > 0.9
    assert np.linalg.norm(found, axis=0) == pytest.approx(np.ones(6), abs=1e-5)


def test_a_front_end_is_computed_on_the_board_and_exported(
    tmp_path: Path, mosquitto: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    directory = tmp_path / "front-end"
    stages = [
        {"random": {"layers": [{"conv2d": {"channels": 1, "kernel": 3, "padding": 1}}, "relu"], "seed": 1}},
        {"onnx": {"file": "pooling.onnx"}},
    ]
    digest = model_file(directory / "coordinator", stages)
    job = Job(directory, mosquitto, trusted=[digest], engine="auto", model={"name": "mine.yaml"})
    job.require_sound()
    description = cbor2.loads(job.plans[1].model.description)
    assert description["front_end"][1]["onnx"]["output_shape"] == [4, 4, 1]
    for number in range(DEVICES):
        (features,) = (directory / f"device-{number}" / "state").glob("features.f32")
        assert features.stat().st_size == 1 << 20
    kept = json.loads((directory / "device-0" / "state" / "engine.json").read_text())
    # A model of the operator's own has a graph that no board knows.
    assert kept["engine"] == "numpy"
    assert "trusted_graphs" in caplog.text
