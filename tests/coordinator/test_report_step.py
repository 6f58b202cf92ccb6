"""The step from counted reports: unbiased, and nothing moves of which nothing was said."""

from __future__ import annotations

from typing import Any

import numpy as np
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
RADIUS = 0.5
RADII = (RADIUS,) * len(DIGITS.parameter_shapes)
MODEL = ModelState(WEIGHTS, np.zeros((1, DIMENSION)), 1.0, RADII)


def release_of(coordinates: int = DIMENSION) -> Reports:
    release = RoundTask.of(report_plan(coordinates=coordinates, block=-(-coordinates // 5))).release
    assert isinstance(release, Reports)
    return release


def counted(release: Reports, changes: list[NDArray[np.float32]]) -> dict[int, tuple[int, Any]]:
    sums: dict[int, tuple[int, Any]] = {}
    for change in changes:
        for fragment in cut(release.update_of(WEIGHTS + change, WEIGHTS), release.plan):
            count, total = sums.get(fragment.position, (0, 0))
            tally = read_tally(fragment, release.plan, release.terms, release.blocks)
            sums[fragment.position] = (count + 1, total + tally)
    return sums


def step(release: Reports, sums: dict[int, tuple[int, Any]], *, adapts: bool = True) -> ReportStep:
    return take_report_step(release, sums, MODEL, Sgd(0.0), 1.0, adapts=adapts)


NONE = np.zeros(DIMENSION, np.float32)


def test_weights_take_the_mean_change_over_the_devices() -> None:
    """Over many devices: 6 standard errors of the mean of all."""
    release = release_of()
    wanted = np.random.default_rng(1).uniform(-RADIUS, RADIUS, DIMENSION).astype(np.float32)
    found = step(release, counted(release, [wanted] * 60))
    change = found.model.weights.astype(np.float64) - WEIGHTS
    share = float(change @ wanted) / float(wanted @ wanted)
    assert abs(share - 1) < 6 * found.standard_error / float(np.linalg.norm(wanted)) + 1e-3
    assert found.reported == DIMENSION


def test_weights_that_nobody_reported_stay() -> None:
    release = release_of(40)
    found = step(release, counted(release, [NONE] * 2))
    moved = np.flatnonzero(found.model.weights != WEIGHTS)
    assert 0 < len(moved) <= found.reported <= 80
    nothing = step(release, {})
    np.testing.assert_array_equal(nothing.model.weights, WEIGHTS)
    assert (nothing.reported, nothing.standard_error, nothing.out_of_range) == (0, 0.0, ())
    assert nothing.model.radii == RADII


def test_a_layer_at_the_ends_of_its_range_is_named_and_gets_a_wider_one() -> None:
    release = release_of()
    largest = max(DIGITS.parameter_shapes, key=lambda block: block.size)
    place, away = DIGITS.parameter_shapes.index(largest), NONE.copy()
    away[largest.offset : largest.offset + largest.size] = np.resize([10.0, -10.0], largest.size)
    found = step(release, counted(release, [away] * 20))
    assert found.out_of_range == (largest.name,)
    assert RADIUS < found.model.radii[place] <= 2 * RADIUS
    assert step(release, counted(release, [away] * 20), adapts=False).model.radii == RADII


def test_a_layer_that_hardly_changes_gets_a_narrower_range() -> None:
    release = release_of()
    found = step(release, counted(release, [NONE] * 60))
    assert found.out_of_range == ()
    place = max(range(len(RADII)), key=lambda place: DIGITS.parameter_shapes[place].size)
    assert RADIUS / 2 <= found.model.radii[place] < RADIUS
    assert max(found.model.radii) <= RADIUS
