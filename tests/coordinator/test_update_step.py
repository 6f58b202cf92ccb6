"""The noise that the coordinator adds: as drawn, to exact sums, fresh at each step; and the plan for it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from clocks import MovableClock
from fleets import DIGITS, fleet_values, update_plan

from coordinator.aggregation import Step
from coordinator.cycle import Cycle
from coordinator.daemon import Coordinator
from coordinator.measurements import NO_TRAFFIC
from coordinator.model_state import ModelState
from coordinator.planning import Planner, new_job
from coordinator.queued_job import JobState
from coordinator.settings import FleetSettings
from coordinator.stepping import Stepper
from coordinator.store import OpenRound
from coordinator.update_planning import update_grid, update_resolution
from coordinator.update_step import take_update_step
from dpagent.errors import ParameterError, PlanError
from dpagent.learning.training.optimiser import Sgd
from dpagent.norm import Norm
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.calibration import BudgetPlan
from dpagent.privacy.mechanisms.central import CentralGaussian, CentralLaplace
from dpagent.privacy.mechanisms.device_noise import DeviceGaussian
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE, Query
from dpagent.privacy.schedules import Schedule
from dpagent.privacy.statement import Trust, Unit
from dpagent.protocol.task import RoundTask
from dpagent.protocol.updates import Updates
from dpagent.protocol.weights import weights_to_bytes
from dpagent.schema.problems import SchemaError

WEIGHTS = DIGITS.initial_weights(0)
DIMENSION = DIGITS.parameter_count
MODEL = ModelState(WEIGHTS, np.zeros((1, DIMENSION)), 1.0, ())


def release_of(name: str) -> Updates:
    release = RoundTask.of(update_plan(name=name)).release
    assert isinstance(release, Updates)
    return release


def settings_of(**changes: Any) -> FleetSettings:
    privacy = {"method": "central", "clip_norm": 0.5} | changes.pop("privacy", {})
    return FleetSettings.checked(
        fleet_values(None, cap={"kind": "none"}, privacy=privacy, devices=40, **changes)
    )


@pytest.mark.parametrize(
    ("name", "fourth"), [("central-gaussian", 3.0), ("central-laplace", 6.0)], ids=["gaussian", "laplace"]
)
def test_the_step_has_the_noise_of_its_price_and_the_mean_of_the_updates(name: str, fourth: float) -> None:
    """Twenty steps of 9,930 weights: variance and kurtosis within six standard errors."""
    release = release_of(name)
    rng = np.random.default_rng(0)
    total = rng.integers(-3, 4, DIMENSION) * int(release.mechanism.deviation_units)
    unit = release.mechanism.granularity / release.terms.expected_devices
    steps = [take_update_step(release, total, MODEL, Sgd(0.0), 1.0) for _ in range(20)]
    assert {step.share_within for step in steps} == {None}
    noise = np.concatenate(
        [(step.model.weights - WEIGHTS.astype(np.float64)) / unit - total for step in steps]
    )
    scaled = noise / release.mechanism.deviation_units
    assert abs(scaled.mean()) < 6 / math.sqrt(scaled.size)
    # The fourth moment of the square, at most that of a Laplace distribution, bounds its standard error.
    assert scaled.var() == pytest.approx(1.0, abs=6 * math.sqrt((fourth - 1) / scaled.size))
    assert np.mean(scaled**4) == pytest.approx(fourth, rel=0.1)


def test_each_step_draws_noise_of_its_own() -> None:
    release, nothing = release_of("central-gaussian"), np.zeros(DIMENSION, np.int64)
    one, other = (take_update_step(release, nothing, MODEL, Sgd(0.0), 1.0).model.weights for _ in range(2))
    assert np.count_nonzero(one != other) > 0.9 * DIMENSION


@pytest.mark.parametrize("kind", [CentralGaussian, CentralLaplace])
def test_a_job_spends_its_target_over_the_rounds(kind: type[CentralGaussian | CentralLaplace]) -> None:
    noise = "gaussian" if kind is CentralGaussian else "laplace"
    settings = settings_of(privacy={"noise": noise, "epsilon": 6.0}, rounds=4)
    job, spec = new_job(settings), settings.model.spec()
    planner = Planner(settings, spec, job, bytes(32))
    planner.require_acceptable()
    weights = weights_to_bytes(spec.initial_weights(0), settings.model.precision)
    releases = [planner.task(OpenRound(number, 0, 0), weights).release for number in (1, 2, 3, 4)]
    mechanisms = [release.mechanism for release in releases]
    assert {type(each) for each in mechanisms} == {kind}
    assert {(each.unit, each.trust) for each in mechanisms} == {(Unit.DEVICE, Trust.COORDINATOR)}
    assert {each.sampling_rate for each in mechanisms if isinstance(each, kind)} == {1.0}
    events = [each.event for each in mechanisms]
    spent = PldAccountant().epsilon_after(events, settings.privacy.delta * (1 - NOISE_SHARE))
    assert spent <= 6.0 * 1.001
    assert job.epsilon_by_round[-1] == pytest.approx(6.0, rel=1e-3)
    assert releases[0].plan.release.expected_devices == 40


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
@pytest.mark.parametrize("schedule", ["uniform", "linear"])
def test_noise_of_devices_spends_a_target_of_its_own(noise: str, schedule: str) -> None:
    """On the grid of the coordinator's noise, which spends its own as if there were none."""
    privacy = {"noise": noise, "epsilon": 6.0, "schedule": {"kind": schedule}}
    settings = settings_of(privacy=privacy | {"device_noise": {"epsilon": 30.0}}, rounds=4)
    job, spec = new_job(settings), settings.model.spec()
    planner = Planner(settings, spec, job, bytes(32))
    planner.require_acceptable()
    weights = weights_to_bytes(spec.initial_weights(0), settings.model.precision)
    tasks = [planner.task(OpenRound(number, 0, 0), weights) for number in (1, 2, 3, 4)]
    assert {len(task.priced) for task in tasks} == {2}
    for place, target in enumerate((30.0, 6.0)):
        events = [task.priced[place].mechanism.event for task in tasks]
        spent = PldAccountant().epsilon_after(events, settings.privacy.delta * (1 - NOISE_SHARE))
        assert spent == pytest.approx(target, rel=1e-3)
    assert len({task.schedule_digest for task in tasks}) == 1
    alone = new_job(settings_of(privacy=privacy, rounds=4))
    assert alone.noise.multipliers == job.noise.multipliers
    assert alone.device is None
    # A payload of a round with more noise is longer.
    assert (len({task.plan.wire.bytes for task in tasks}) == 1) == (schedule == "uniform")
    assert planner.fragments_needed() <= settings.fragments_per_update


def test_noise_whose_sum_could_not_be_exact_is_refused() -> None:
    """A million hostile devices may all send the largest value."""
    privacy = {"noise": "laplace", "epsilon": 1.0, "device_noise": {"epsilon": 0.02}}
    settings = settings_of(privacy=privacy, rounds=100)
    job, spec = new_job(settings), settings.model.spec()
    Planner(settings, spec, job, bytes(32)).require_acceptable()
    many = settings.with_values({"devices": 1_000_000})
    with pytest.raises(PlanError, match="1,000,000 devices"):
        Planner(many, spec, job, bytes(32)).require_acceptable()


def test_noise_whose_sum_could_not_be_exact_in_a_later_round_is_refused_before_the_first() -> None:
    privacy = {
        "noise": "laplace", "epsilon": 4.0, "device_noise": {"epsilon": 4.0},
        "schedule": {"kind": "custom", "weights": [30_000.0, 1.0]},
    }  # fmt: skip
    settings = settings_of(privacy=privacy, rounds=2, fragments_per_update=100)
    settings = settings.with_values({"devices": 20_000})
    with pytest.raises(PlanError, match="20,000 devices"):
        Planner(settings, settings.model.spec(), new_job(settings), bytes(32)).require_acceptable()


def test_rounding_adds_little_to_the_sensitivity() -> None:
    for norm in Norm:
        for dimension in (10, 650, 26_010, 550_000):
            units = update_resolution(norm, dimension, 0.5)
            kind = CentralGaussian if norm is Norm.L2 else CentralLaplace
            found = kind(1.0, 0.5, 1.0, dimension, resolution=units)
            assert found.sensitivity_units <= units * (1 + 1 / 100)


@pytest.mark.parametrize(("least", "units"), [(0.6, 2_048), (0.5, 4_096)])
def test_one_grid_is_as_fine_as_both_kinds_of_noise_need_and_no_finer(least: float, units: int) -> None:
    """The noise of devices is relative to twice the norm of an update. A finer grid costs a bit a value."""
    coordinators, devices = (
        BudgetPlan(Schedule("uniform"), each, (1.0, 2.0), 1e-5, "pld") for each in ((4.0, 3.0), (1.0, least))
    )
    assert update_grid(Norm.L2, 650, coordinators, None) == {"resolution": 2_048}
    grid = update_grid(Norm.L2, 650, coordinators, devices)
    assert grid == {"resolution": units}
    query = Query(1.0, None, 650, 1.0, 1)
    DeviceGaussian.build(query, least, grid).require_noise_as_priced(2, 2.0, 1e-5)
    with pytest.raises(ParameterError, match="its price holds from 2,122 on"):
        DeviceGaussian.build(query, least, {"resolution": units // 2}).require_noise_as_priced(2, 2.0, 1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cap": {"kind": "clamp"}}, "cap.kind is clamp"),
        ({"aggregation": {"kind": "median-of-means", "groups": 3}}, "aggregation.kind"),
        ({"privacy": {"clipping": {"kind": "layers"}}}, "clipping.kind is layers"),
        ({"privacy": {"clipping": {"kind": "quantile", "norms": [1.0]}}}, "norms are set for kind quantile"),
        ({"privacy": {"clipping": {"kind": "quantile", "span": 1.0}}}, "span"),
        ({"privacy": {"noise": "two-point"}}, "noise is 'two-point'"),
        (
            {"privacy": {"method": "dp-sgd", "device_noise": {"epsilon": 9.0}}},
            "device_noise is set and method",
        ),
        ({"privacy": {"device_noise": {"epsilon": 0.0}}}, "device_noise"),
        ({"model": {"name": "digits", "augmentation": {"views": 2}}}, "augmentation"),
    ],
)
def test_settings_that_do_not_go_with_it_are_named(changes: dict[str, Any], text: str) -> None:
    privacy = {"method": "central"} | changes.pop("privacy", {})
    with pytest.raises(SchemaError, match=text):
        FleetSettings.checked(
            fleet_values(None, **({"cap": {"kind": "none"}, "devices": 40, "privacy": privacy} | changes))
        )


def test_a_target_that_no_noise_meets_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot be met"):
        new_job(settings_of(privacy={"epsilon": 1e-5, "delta": 1e-12}, rounds=5_000))


@pytest.mark.parametrize("name", ["central-gaussian", "central-laplace"])
def test_the_step_tells_the_share_of_devices_within_the_norm_with_the_noise_of_its_price(name: str) -> None:
    """Forty steps; three of the four expected devices came, and two of them were within."""
    plan = update_plan(name=name, count_weight=1.0, clip_norm=3.0)
    release = RoundTask.of(plan).release
    assert isinstance(release, Updates)
    assert release.dimension == DIMENSION + 1
    changes = np.zeros((3, DIMENSION), np.float32)
    changes[:, 0] = (2.9, 3.1, 1.0)
    total = np.sum([release.update_of(WEIGHTS + each, WEIGHTS) for each in changes], axis=0)
    shares = [take_update_step(release, total, MODEL, Sgd(0.0), 1.0).share_within for _ in range(40)]
    deviation = release.mechanism.deviation_units * release.mechanism.granularity / (4 * 3.0)
    assert np.mean(np.array(shares, float)) == pytest.approx(0.5 + 0.5 / 4, abs=6 * deviation / math.sqrt(40))
    assert 0.4 < np.std(np.array(shares, float)) / deviation < 1.8


def test_the_clip_norm_follows_the_quantile_and_stops_at_its_bounds(caplog: pytest.LogCaptureFixture) -> None:
    clipping = {"kind": "quantile", "quantile": 0.25, "rate": 1.0, "span": 4.0}
    settings = settings_of(privacy={"epsilon": 1000.0, "clipping": clipping}, rounds=9)
    job, spec = new_job(settings), settings.model.spec()
    planner, stepper = Planner(settings, spec, job, bytes(32)), Stepper(settings, spec)
    model, norms, digests, is_told = stepper.initial(), list[float](), set[str](), list[int]()
    for number in range(1, 10):
        weights = weights_to_bytes(model.weights, settings.model.precision)
        task = planner.task(OpenRound(number, 0, 0), weights, clip_norm=model.clip_norm)
        release = task.release
        assert isinstance(release, Updates)
        digests.add(task.schedule_digest)
        norms.append(release.terms.clip_norm)
        total = np.zeros(release.dimension, np.int64)
        # All devices are within, until the last rounds, and then none is.
        assert release.largest_vote is not None
        total[-1] = (1 if number < 6 else -1) * settings.devices * release.largest_vote
        stepped = stepper.step_by_update(release, model, total).model
        told = len(caplog.records)
        stepper.tell_of_norm(model.clip_norm, stepped.clip_norm)
        is_told.append(len(caplog.records) - told)
        model = stepped
    # Each step multiplies the norm by exp(noise of the share); six deviations of three steps are 4 %.
    deviation = release.mechanism.deviation_units / (2 * settings.devices * release.largest_vote)
    tolerance = 6 * math.sqrt(3) * deviation
    assert tolerance < 0.05
    falling, rising = math.exp(-0.75), math.exp(0.25)
    assert norms[:3] == pytest.approx([0.5, 0.5 * falling, 0.125], rel=tolerance)
    assert norms[3:6] == [0.125] * 3
    assert norms[6:] == pytest.approx([0.125 * rising**power for power in (1, 2, 3)], rel=tolerance)
    assert len(digests) == 1  # devices charge the same
    # Not with the step: after a crash before it is kept, other noise is drawn, and two answers show both.
    assert is_told == [0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert caplog.text.count("the clip norm has come to 0.125, the least") == 1


def test_nothing_is_said_of_a_step_that_failed_before_the_job_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reason may tell of the noise that was drawn, such as how many weights it made infinite. After a
    crash before the failure is on disk, other noise would be drawn for the same updates."""

    class Cut(BaseException):
        pass

    def cut(number: int, trouble: str) -> None:
        raise Cut

    coordinator = object.__new__(Coordinator)
    coordinator._queue = SimpleNamespace(fail=cut)  # type: ignore[assignment]
    coordinator._failures, coordinator._version = {}, 0
    job = SimpleNamespace(id=bytes(16))
    queued = SimpleNamespace(state=JobState.RUNNING, number=1, name="first", job=job)
    running: Any = SimpleNamespace(queued=queued)
    with pytest.raises(Cut), coordinator._failing_alone(running):
        raise ParameterError("3 of the weights are not finite; expected none.")
    assert caplog.records == []
    kept: list[str] = []
    coordinator._queue = SimpleNamespace(fail=lambda number, why: kept.append(why))  # type: ignore[assignment]
    with coordinator._failing_alone(running):
        raise ParameterError("3 of the weights are not finite; expected none.")
    assert (len(kept), len(caplog.records)) == (1, 1)


def test_nothing_of_a_step_is_said_before_it_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """A clip norm at its bound tells of the noise, too."""

    class Cut(BaseException):
        pass

    def cut(*values: object, **more: object) -> None:
        raise Cut

    settings: Any = SimpleNamespace(
        privacy=SimpleNamespace(clipping=SimpleNamespace(kind="quantile"), clip_norms=(0.125, 8.0))
    )
    stepper = object.__new__(Stepper)
    stepper._settings = settings
    cycle: Any = object.__new__(Cycle)
    cycle._settings, cycle._stepper = settings, stepper
    cycle._planner = SimpleNamespace(epsilon_after=lambda release: 1.0)
    cycle._traffic = lambda: NO_TRAFFIC
    before = ModelState(np.zeros(DIMENSION, np.float32), np.zeros((1, DIMENSION)), 1.0, ())
    cycle._model, after = before, replace(before, clip_norm=0.125)
    cycle._store, cycle._clock = SimpleNamespace(close_round=cut), MovableClock()
    with caplog.at_level(logging.DEBUG), pytest.raises(Cut):
        cycle._keep(release_of("central-gaussian"), Step(after), None)
    assert caplog.records == []


@pytest.mark.filterwarnings("error")
def test_no_warning_says_what_the_noise_made_of_the_weights() -> None:
    release = release_of("central-gaussian")
    model = ModelState(np.full(DIMENSION, 3e38, np.float32), np.zeros((1, DIMENSION)), 1.0, ())
    total = np.zeros(release.dimension, np.int64)
    step = take_update_step(release, total, model, Sgd(), 1e38)
    assert not np.isfinite(step.model.weights).all()
