"""The step from counted reports: unbiased, and nothing moves of which nothing was said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fleets import DIGITS, report_plan
from numpy.typing import NDArray

from coordinator.model_state import ModelState
from coordinator.report_step import ReportStep, take_report_step
from dpagent.learning.training.optimiser import Sgd
from dpagent.protocol.fragments import cut, read_tally
from dpagent.protocol.reports import Reports
from dpagent.protocol.task import RoundTask

WEIGHTS = DIGITS.initial_weights(0)
DIMENSION = DIGITS.parameter_count
MODEL = ModelState(WEIGHTS, np.zeros((1, DIMENSION)), 1.0)


def release_of(coordinates: int = DIMENSION) -> Reports:
    release = RoundTask.of(report_plan(coordinates=coordinates, block=-(-coordinates // 5))).release
    assert isinstance(release, Reports)
    return release


def counted(release: Reports, devices: list[NDArray[np.float32]]) -> dict[int, tuple[int, Any]]:
    sums: dict[int, tuple[int, Any]] = {}
    mechanism = release.two_point(WEIGHTS)
    for weights in devices:
        for fragment in cut(release.update_of(mechanism.report(weights)), release.plan):
            count, total = sums.get(fragment.position, (0, 0))
            tally = read_tally(fragment, release.plan, release.terms, release.blocks)
            sums[fragment.position] = (count + 1, total + tally)
    return sums


def step(release: Reports, sums: dict[int, tuple[int, Any]], learning_rate: float = 1.0) -> ReportStep:
    return take_report_step(release, sums, MODEL, Sgd(0.0), learning_rate)


def test_weights_go_to_the_mean_over_the_devices() -> None:
    """Over many devices, and few enough to leave no weight cut: 6 standard errors of the mean of all."""
    release = release_of()
    moved = (WEIGHTS * np.float32(0.5)).astype(np.float32)
    found = step(release, counted(release, [moved] * 60), 0.02)
    change = (WEIGHTS - found.model.weights.astype(np.float64)) / 0.02
    wanted = WEIGHTS - moved
    share = float(change @ wanted) / float(wanted @ wanted)
    spread = found.standard_error / float(np.linalg.norm(wanted))
    assert abs(share - 1) < 6 * spread + 0.01
    assert found.reported == DIMENSION


def test_weights_that_nobody_reported_stay() -> None:
    release = release_of(40)
    found = step(release, counted(release, [WEIGHTS] * 2))
    moved = np.flatnonzero(found.model.weights != WEIGHTS)
    assert 0 < len(moved) <= found.reported <= 80
    nothing = step(release, {})
    np.testing.assert_array_equal(nothing.model.weights, WEIGHTS)
    assert (nothing.reported, nothing.standard_error, nothing.out_of_range) == (0, 0.0, ())


@pytest.mark.parametrize("learning_rate", [1.0, 100.0])
def test_weights_never_leave_the_ranges_of_the_round(learning_rate: float) -> None:
    release = release_of()
    found = step(release, counted(release, [WEIGHTS] * 3), learning_rate)
    start = 0
    for layer in release.two_point(WEIGHTS).layers:
        part = found.model.weights[start : start + layer.size]
        start += layer.size
        assert np.abs(part - layer.centre).max() <= layer.radius * (1 + 1e-6)


def test_a_layer_at_the_ends_of_its_range_is_named_and_others_are_not() -> None:
    release = release_of()
    largest = max(DIGITS.parameter_shapes, key=lambda block: block.size)
    away, part = WEIGHTS.copy(), slice(largest.offset, largest.offset + largest.size)
    away[part] = np.where(WEIGHTS[part] >= 0, 10.0, -10.0)
    assert step(release, counted(release, [away] * 20)).out_of_range == (largest.name,)
    assert step(release, counted(release, [WEIGHTS] * 20)).out_of_range == ()
