"""The job's plan: that every round fits its fragments, and what no device would accept is found before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fleets import DIGITS, write_fleet

from coordinator.job import Job
from coordinator.planning import Planner, job_noise
from coordinator.settings import FleetSettings, load_fleet_settings
from coordinator.store import OpenRound
from dpagent.errors import PlanError
from dpagent.learning.models.layers import Dense
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.protocol.messages import MAX_PAYLOAD_BYTES
from dpagent.protocol.weights import weights_to_bytes


def settings_of(directory: Path, **changes: Any) -> FleetSettings:
    return load_fleet_settings(write_fleet(directory, None, **changes))


def planner_of(settings: FleetSettings, spec: ModelSpec, noise: JobNoise | None = None) -> Planner:
    planned, epsilons, device = job_noise(settings, DIGITS)
    return Planner(settings, spec, Job(b"j" * 16, {}, noise or planned, epsilons, device), bytes(32))


def test_an_update_needs_as_many_fragments_as_hold_it(tmp_path: Path) -> None:
    spec = ModelSpec("wide", (123_000,), 3, (Dense(3),))
    settings = settings_of(tmp_path, records_per_device=500)
    planner = planner_of(settings, spec)
    needed = planner.fragments_needed()
    assert needed == 3
    for fragments in (needed - 1, needed):
        changed = settings.with_values({"fragments_per_update": fragments})
        planner = planner_of(changed, spec)
        if fragments == needed:
            planner.require_acceptable()
            assert planner.task(OpenRound(1, 0, 0), b"").plan.wire.bytes > 0.9 * MAX_PAYLOAD_BYTES
        else:
            with pytest.raises(PlanError, match=f"fragments_per_update is {fragments}; expected at least 3"):
                planner.require_acceptable()


@pytest.mark.parametrize("dimension", [1, 2, 100])
def test_a_small_update_needs_one_fragment(tmp_path: Path, dimension: int) -> None:
    spec = ModelSpec("small", (dimension,), 2, (Dense(2),))
    assert planner_of(settings_of(tmp_path), spec).fragments_needed() == 1


def test_a_plan_is_refused_if_some_round_of_the_job_would_be(tmp_path: Path) -> None:
    """A round with less noise takes more bytes, so a job could die in the middle."""
    settings = settings_of(tmp_path, rounds=3)
    for multipliers in ([4.0, 3.0, 0.04], [4.0, 10_001.0, 3.0]):
        noise = JobNoise.announced("discrete-gaussian", multipliers, {"resolution": 65_536})
        number = 1 + next(index for index, value in enumerate(multipliers) if not 0.05 <= value <= 10_000)
        with pytest.raises(PlanError, match=f"round {number}: noise multiplier is {multipliers[number - 1]}"):
            planner_of(settings, DIGITS, noise).require_acceptable()


def test_a_task_is_derived_from_the_plan_that_is_announced(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    weights = weights_to_bytes(DIGITS.initial_weights(0), "float32")
    planner = planner_of(settings, DIGITS)
    first, second = (planner.task(OpenRound(number, 5.0, 9.0), weights) for number in (1, 2))
    assert (first.plan.round, first.plan.deadline, first.plan.state) == (1, 9.0, "open")
    assert first.schedule_digest == second.schedule_digest
    assert first.release.blocks == settings.fragments_per_update
    assert first.release.sampling.expected_lot == 0.5 * 50
    assert first.release.mechanism.noise_multiplier == first.release.terms.mechanism.noise_multipliers[0]
    assert planner.task(OpenRound(2, 5.0, 9.0), weights, state="finished").plan.state == "finished"


def test_a_value_that_no_plan_can_state_is_named(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, records_per_device=1e9)
    with pytest.raises(PlanError, match="expected_lot"):
        planner_of(settings, DIGITS).task(OpenRound(1, 0, 0), b"")


@pytest.mark.parametrize("rounds", [1, 3, 10, 30, 100])
@pytest.mark.parametrize("kind", ["uniform", "incrementing", "linear"])
def test_a_bounded_job_costs_what_devices_reserve_for_it(tmp_path: Path, rounds: int, kind: str) -> None:
    settings = settings_of(
        tmp_path, rounds=rounds, cap={"kind": "bounded"},
        privacy={"method": "incrementing", "noise": "laplace", "epsilon": 20.0, "schedule": {"kind": kind}},
    )  # fmt: skip
    _, epsilons, _ = job_noise(settings, DIGITS)
    assert (len(epsilons), epsilons[-1]) == (rounds, 20.0)
    assert list(epsilons) == sorted(epsilons)
