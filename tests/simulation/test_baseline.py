"""A fleet's training in one process, against softmax regression by hand; and the program of the baseline."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demos import settled

from coordinator.settings import FleetSettings
from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.data.formats.npz import open_npz
from dpagent.learning.front_end.features import FeatureSet, FrontEnd
from dpagent.learning.models.layers import Dense, GroupNorm
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import Projection, Scattering
from simulation.data.shards import prepare_data, write_model
from simulation.data.source import Source
from simulation.layout import Layout
from simulation.planning import trial_job
from simulation.programs.baseline import read_baseline, run_baseline
from simulation.programs.broker import BrokerAddress
from simulation.programs.configurations import fleet_settings, write_configurations
from simulation.settings import DataForm
from simulation.training_loop import TrainingLoop

NOBODY = BrokerAddress("mqtt://127.0.0.1:1", None, None, "auto", "none")


def records(count: int, shape: tuple[int, ...] = (5,), seed: int = 0) -> ArrayDataset:
    """Three classes, each with a pattern of its own."""
    generator = np.random.default_rng(seed)
    labels = np.arange(count, dtype=np.int64) % 3
    patterns = np.random.default_rng(99).normal(size=(3, *shape))
    inputs = (patterns[labels] + generator.normal(size=(count, *shape))).astype(np.float32)
    return ArrayDataset(inputs, labels, 3)


def settings_for(spec: ModelSpec, **privacy: Any) -> FleetSettings:
    settings = fleet_settings(
        settled(DataForm(60, 30, spec.input_shape, 3), spec, devices=2, sampling_rate=1.0, rounds=3)
    )
    changed = settings.privacy.with_values(privacy)
    exact = settings.model.with_values({"precision": "float32"})
    return settings.with_values({"privacy": changed, "model": exact})


def gradients(weights: np.ndarray, inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Of each record, for weights then biases of one dense layer, in float64."""
    features, classes = inputs.shape[1], 3
    matrix, bias = weights[: features * classes].reshape(features, classes), weights[features * classes :]
    logits = inputs.astype(np.float64) @ matrix + bias
    errors = np.exp(logits - logits.max(axis=1, keepdims=True))
    errors /= errors.sum(axis=1, keepdims=True)
    errors[np.arange(len(labels)), labels] -= 1
    outer = inputs[:, :, np.newaxis].astype(np.float64) * errors[:, np.newaxis, :]
    return np.concatenate([outer.reshape(len(inputs), -1), errors], axis=1)


@pytest.mark.parametrize("kind", ["whole", "layers", "quantile"])
def test_steps_are_those_of_softmax_regression_with_clipped_gradients(kind: str) -> None:
    spec = ModelSpec("line", (5,), 3, (Dense(3),))
    settings = settings_for(spec)
    clipping = settings.privacy.clipping.with_values({"kind": kind})
    settings = settings_for(spec, clipping=clipping, clip_norm=0.8)
    shards, test = [records(40, seed=1), records(20, seed=2)], records(30, seed=3)
    loop = TrainingLoop(settings, spec, shards, test, noise=False)
    weights = spec.initial_weights(0).astype(np.float64)
    velocity, norm = np.zeros(len(weights)), 0.8
    for number in range(1, 4):
        mean, within = np.zeros(len(weights)), []
        for shard in shards:
            each = gradients(weights, *shard.batch(np.arange(len(shard))))
            norms = np.linalg.norm(each, axis=1)
            clipped = each * np.minimum(1, norm / norms)[:, np.newaxis]
            # Divided by the public estimate of a shard, 30, and not by its true size.
            mean += clipped.sum(axis=0) / 30 / 2
            within.append((norms <= norm).sum() / 30 - len(shard) / 30 / 2 + 0.5)
        if kind == "quantile":
            norm *= math.exp(-0.2 * (np.clip(np.mean(within), 0, 1) - 0.5))
        velocity = 0.9 * velocity + mean
        weights = weights - settings.optimiser.learning_rate * velocity
        loop.round(number)
        inputs, labels = test.batch(np.arange(len(test)))
        scores = inputs @ weights[:15].reshape(5, 3) + weights[15:]
        assert loop.accuracy() == pytest.approx((scores.argmax(axis=1) == labels).mean())
        np.testing.assert_allclose(loop.weights, weights, rtol=1e-4, atol=1e-6)


def prepared(root: Path, spec: ModelSpec, train: Dataset, test: Dataset) -> Layout:
    """The directory of a run that has not begun."""
    form = DataForm(len(train), len(test), train.shape, 3)
    settings = settled(form, spec, devices=2, rounds=3, engine="numpy")
    layout = Layout(root)
    settings.save(root)
    write_model(settings, layout, spec)
    prepare_data(settings, layout, Source(train, test))
    write_configurations(settings, layout, NOBODY)
    return layout


def test_features_that_agents_have_computed_are_used(tmp_path: Path) -> None:
    spec = ModelSpec("wave", (8, 8, 1), 3, (GroupNorm(3), Dense(3)), front_end=(Scattering(1, 8),))
    train, test = records(60, (8, 8, 1)), records(20, (8, 8, 1), seed=5)
    layout = prepared(tmp_path, spec, train, test)
    front_end = FrontEnd(spec)
    for file, state in (
        *((layout.shard_file(n), layout.agent_state(n)) for n in (1, 2)),
        (layout.test_file, layout.coordinator_state),
    ):
        state.mkdir(parents=True)
        FeatureSet(open_npz(file), front_end, state).close()
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("features.*")}
    assert len(before) == 6
    run_baseline(tmp_path)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("features.*")} == before
    history = read_baseline(layout.baseline_file)
    assert len(history) == 3
    assert history[-1] > 0.5


def test_a_projection_takes_a_round_of_its_own(tmp_path: Path) -> None:
    spec = ModelSpec("projected", (12,), 3, (Dense(3),), front_end=(Projection(4),))
    layout = prepared(tmp_path, spec, records(300, (12,)), records(60, (12,), seed=5))
    run_baseline(tmp_path)
    first, *rest = read_baseline(layout.baseline_file)
    assert math.isnan(first)
    assert len(rest) == 2
    assert rest[-1] > 0.6


def test_the_first_step_after_a_projection_is_the_first() -> None:
    """Adam corrects its bias by the number of the step, which a round without a step does not raise."""
    plain = ModelSpec("line", (4,), 3, (Dense(3),))
    projected = ModelSpec("line", (12,), 3, (Dense(3),), front_end=(Projection(4),))
    features = records(60, (4,))
    weights = []
    for spec in (plain, projected):
        settings = settings_for(spec)
        optimiser = settings.optimiser.with_values({"kind": "adam"})
        settings = settings.with_values({"optimiser": optimiser})
        loop = TrainingLoop(settings, spec, [features], features, noise=False)
        assert loop.first_round == 1 + (spec is projected)
        loop.round(loop.first_round)
        weights.append(loop.weights)
    np.testing.assert_allclose(*weights, rtol=1e-5, atol=1e-7)


def test_with_noise_the_mean_is_the_exact_one_and_noise_of_the_size_that_is_priced() -> None:
    """Two devices' updates, decoded by the coordinator, against the same loop without noise."""
    spec = ModelSpec("line", (5,), 3, (Dense(3),))
    # A step of length 1 along the mean: no momentum, no cap.
    settings = settings_for(spec, clip_norm=0.8)
    optimiser = settings.optimiser.with_values({"learning_rate": 1.0, "momentum": 0.0})
    settings = settings.with_values({"optimiser": optimiser})
    shards, test = [records(400, seed=1), records(400, seed=2)], records(30, seed=3)
    steps = []
    without, with_noise = (TrainingLoop(settings, spec, shards, test, noise=noise) for noise in (False, True))
    # The first round again and again: a new loop would price the job each time.
    first = with_noise._model
    for loop in (without, *[with_noise] * 40):
        loop._model = first
        start = loop.weights
        loop.round(1)
        steps.append(start - loop.weights)
    exact, noisy = steps[0], np.array(steps[1:])
    multiplier = trial_job(settings, spec).noise.multipliers[0]
    deviation = multiplier * 0.8 / (math.sqrt(2) * settings.records_per_device)
    spread = np.sqrt(np.mean((noisy - exact) ** 2))
    # 720 draws, and noise of rounding below a hundredth of the variance.
    assert spread == pytest.approx(deviation, rel=0.12)


def test_a_missing_or_damaged_file_is_no_baseline(tmp_path: Path) -> None:
    assert read_baseline(tmp_path / "none.json") == ()
    (tmp_path / "cut.json").write_text('{"accuracy": [0.5, ')
    assert read_baseline(tmp_path / "cut.json") == ()
