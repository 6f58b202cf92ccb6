"""Records clipped in L1: the same gradients as in L2, and sums within the slack in that norm."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learning.engines import architectures, engine_of, singly
from learning.small_models import SPECS, close, records, small

from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.layers import Dense, Relu
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import LARGEST_SUM, NORM_RUN, accumulation_slack
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.numpy_engine.power_sums import PowerSums
from dpagent.learning.training.numpy_engine.workspaces import aligned
from dpagent.norm import Norm


@cache
def l1_engine(spec: ModelSpec, **options: Any) -> NumpyEngine:
    return NumpyEngine(spec, norm=Norm.L1, **{"microbatch": 4, **options})


def length(total: Any) -> float:
    return float(np.abs(total).sum())


def ident(spec: ModelSpec) -> str:
    return spec.name


@pytest.mark.parametrize("size", [1, 15, 512, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("norm", Norm)
def test_power_sums_are_those_of_the_definition(norm: Norm, size: int) -> None:
    pitch = -(-size // 16) * 16
    rows = aligned(7 * pitch).reshape(7, pitch)[:, :size]
    rows[...] = np.random.default_rng(size).normal(size=rows.shape) * 10.0 ** np.arange(-3, 4)[:, np.newaxis]
    exact = (np.abs(rows.astype(np.float64)) ** norm.power).sum(axis=1)
    for run in (NORM_RUN, NORM_RUN // 2):
        np.testing.assert_allclose(PowerSums(rows, norm, run)(), exact, rtol=run * 2.0**-24)


def test_magnitudes_too_large_or_not_finite_leave_a_record_out() -> None:
    rows = aligned(5 * 16).reshape(5, 16)
    rows[:, 0] = [LARGEST_SUM, 0.99 * LARGEST_SUM, np.nan, -np.inf, 3e38]
    rows[4, 1] = 3e38
    with np.errstate(all="ignore"):
        assert np.isfinite(PowerSums(rows, Norm.L1)()).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("spec", [*SPECS, built_in("digits"), built_in("sensor-cnn")], ids=ident)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_lots_are_clipped_and_added_up(spec: ModelSpec, count: int) -> None:
    weights, inputs, labels = records(spec, count)
    gradients = singly(engine_of("numpy", spec), weights, inputs, labels)
    lengths = np.abs(gradients).sum(axis=1)
    clip_norm = float(np.median(lengths)) * 1.01 if count else 1.0
    found = l1_engine(spec).clipped_sum(weights, inputs, labels, [clip_norm])
    close(found.total, gradients.T @ np.minimum(1, clip_norm / lengths))
    assert found.within.tolist() == [np.count_nonzero(lengths <= clip_norm)]
    assert found.excluded == 0


@pytest.mark.parametrize("spec", [*SPECS[:7], built_in("digits")], ids=ident)
def test_views_are_averaged_before_they_are_clipped(spec: ModelSpec) -> None:
    weights, inputs, labels = records(spec, 5 * 3)
    labels = labels[:5]
    gradients = singly(engine_of("numpy", spec), weights, inputs, np.repeat(labels, 3))
    gradients = gradients.reshape(5, 3, -1).mean(axis=1)
    lengths = np.abs(gradients).sum(axis=1)
    clip_norm = float(np.median(lengths)) * 1.01
    subject = l1_engine(spec, views=3, microbatch=2)
    found = subject.clipped_sum(weights, inputs.reshape(5, 3, *spec.input_shape), labels, [clip_norm])
    close(found.total, gradients.T @ np.minimum(1, clip_norm / lengths))
    assert found.within.tolist() == [np.count_nonzero(lengths <= clip_norm)]
    assert subject.is_batch_invariant()


@pytest.mark.parametrize("examples", [10, pytest.param(25, marks=pytest.mark.slow)])
def test_no_record_of_any_architecture_adds_more_than_the_clip_norm(examples: int) -> None:
    @settings(max_examples=examples)
    @given(spec=architectures(), seed=st.integers(0, 1000))
    def holds(spec: ModelSpec, seed: int) -> None:
        weights, inputs, labels = records(spec, 3, seed)
        subject = NumpyEngine(spec, norm=Norm.L1, microbatch=2)
        gradients = singly(subject, weights, inputs, labels)
        lengths = np.abs(gradients).sum(axis=1)
        clip_norm = float(np.median(lengths)) + 1e-6
        expected = (gradients * np.minimum(1, clip_norm / np.maximum(lengths, 1e-30))[:, np.newaxis]).sum(
            axis=0
        )
        close(subject.clipped_sum(weights, inputs, labels, [clip_norm]).total, expected)
        for x, y in zip(inputs[:, np.newaxis], labels[:, np.newaxis], strict=True):
            alone = subject.clipped_sum(weights, x, y, [clip_norm]).total
            assert length(alone) <= clip_norm * (1 + accumulation_slack(1))
        assert subject.is_batch_invariant(seed)

    holds()


@pytest.mark.parametrize("seed", range(4))
def test_no_weights_let_a_record_add_more_than_the_clip_norm(seed: int) -> None:
    generator = np.random.default_rng(seed)
    counted = 0
    for spec in SPECS[:6]:
        for _ in range(25):
            weights, inputs, labels = records(spec, 1, int(generator.integers(100)))
            for block in spec.parameter_shapes:
                weights[block.offset : block.offset + block.size] *= np.float32(
                    10 ** generator.uniform(-38, 38)
                )
            if generator.random() < 0.7:
                last = spec.parameter_shapes[-1]
                weights[last.offset : last.offset + last.size] = 0
                weights[last.offset] = generator.uniform(20, 90)
                labels[:] = 0
            clip_norm = float(10 ** generator.uniform(-9, 3))
            with np.errstate(all="ignore"):
                found = l1_engine(spec).clipped_sum(weights, inputs, labels, [clip_norm])
            assert length(found.total) <= clip_norm * (1 + accumulation_slack(1))
            counted += not found.excluded
    assert counted > 30


@pytest.mark.parametrize("exponent", range(30, 128, 6))
def test_a_subnormal_factor_is_not_rounded_up_by_an_enormous_one(exponent: int) -> None:
    """A dense layer's clipped factor of about 0.6·2⁻¹⁴⁹ is rounded up to 2⁻¹⁴⁹, and times 2¹²⁷ that shows."""
    spec = small("certain", (1,), Dense(2), Relu())
    weights = np.zeros(spec.parameter_count, np.float32)
    weights[:2] = np.ldexp(np.float32(1), exponent)  # activations of the hidden layer, which are inputs
    weights[-spec.classes :] = [60.0, 0.0, 0.0]  # the first class is nearly certain
    inputs, labels = np.ones((1, 1), np.float32), np.zeros(1, np.int64)
    for clip_norm in (1e-9, *np.ldexp(0.6, np.arange(exponent - 149, exponent - 145))):
        if clip_norm < 1e-9:
            continue
        with np.errstate(all="ignore"):
            found = l1_engine(spec).clipped_sum(weights, inputs, labels, [float(clip_norm)])
        assert length(found.total) <= clip_norm * (1 + accumulation_slack(1))


@pytest.mark.parametrize("model", ["digits", "mnist-cnn", "sensor-cnn"])
def test_a_record_of_a_built_in_model_is_the_same_in_any_company(model: str) -> None:
    spec = built_in(model)
    for options in ({"microbatch": 13}, {"microbatch": 8, "views": 2}):
        subject = NumpyEngine(spec, norm=Norm.L1, **options)
        assert subject.is_batch_invariant()
    weights, inputs, labels = records(spec, 13)
    subject, clip_norm = l1_engine(spec, microbatch=13), 5.0
    nobody = np.full_like(inputs, np.nan)
    alone = set()
    for place in range(13):
        nobody[:] = np.nan
        nobody[place] = inputs[4]
        found = subject.clipped_sum(weights, nobody, np.full(13, labels[4]), [clip_norm])
        alone.add(found.total.tobytes())
    assert len(alone) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", [*SPECS[:8], built_in("mnist-cnn")], ids=ident)
def test_records_that_are_not_finite_add_exact_zeros(spec: ModelSpec, value: float) -> None:
    weights, inputs, labels = records(spec, 7)
    spoilt = inputs.copy()
    spoilt[[2, 5]] = value
    found = l1_engine(spec).clipped_sum(weights, spoilt, labels, [0.5])
    kept = [0, 1, 3, 4, 6]
    rest = l1_engine(spec).clipped_sum(weights, inputs[kept], labels[kept], [0.5])
    assert (found.excluded, found.within.tolist()) == (2, rest.within.tolist())
    close(found.total, rest.total, 1e-6)
    alone = l1_engine(spec).clipped_sum(weights, spoilt[2:3], labels[2:3], [0.5])
    assert (alone.excluded, np.any(alone.total)) == (1, False)


@pytest.mark.parametrize("model", ["digits", "mnist-cnn"])
def test_sums_are_as_exact_as_the_slack_says(model: str) -> None:
    spec, clip_norm, microbatch = built_in(model), 0.01, 64
    weights, inputs, labels = records(spec, 128)
    alone = l1_engine(spec)  # In microbatches of four: an emulated board takes minutes for 128 of 64.
    singles = [
        alone.clipped_sum(weights, inputs[i : i + 1], labels[i : i + 1], [clip_norm]) for i in range(128)
    ]
    lengths = np.array([length(single.total) for single in singles])
    assert np.all(lengths <= clip_norm * (1 + accumulation_slack(1)))
    assert lengths.min() > clip_norm * 0.999
    subject = l1_engine(spec, microbatch=microbatch)
    total = subject.clipped_sum(weights, inputs, labels, [clip_norm]).total
    exact = np.sum([single.total for single in singles], axis=0)
    # A lot of two microbatches is off by two of the errors of which the slack holds four.
    assert length(total - exact) <= accumulation_slack(microbatch) * clip_norm / 2
