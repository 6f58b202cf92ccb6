"""The noise of a job: chosen, announced and taken up again as the same; and what every mechanism keeps to."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from dpagent.errors import ParameterError
from dpagent.privacy.accounting.choice import priced
from dpagent.privacy.calibration import calibrate
from dpagent.privacy.mechanisms.device_noise import DeviceNoise
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.job_noise import JobNoise, calibrated_noise
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE, PlannedMechanism, Query
from dpagent.privacy.mechanisms.registry import CALIBRATED, DEFAULT_MECHANISM, mechanism_named
from dpagent.privacy.mechanisms.wire import round_to_wire
from dpagent.privacy.schedules import Schedule

QUERY = Query(clip_norm=2.0, accumulation_slack=0.001, dimension=3_000, sampling_rate=0.2, steps=2)
MULTIPLIERS = [4.0, 3.0, 2.0]


def chosen(name: str = DEFAULT_MECHANISM) -> JobNoise:
    return JobNoise.chosen(name, MULTIPLIERS)


@pytest.fixture(params=sorted(CALIBRATED))
def mechanism(request: pytest.FixtureRequest) -> type[PlannedMechanism]:
    return CALIBRATED[request.param]


def query_of(mechanism: type[PlannedMechanism]) -> Query:
    """One that the mechanism answers: noise on one device's update has neither lots nor steps."""
    return replace(QUERY, sampling_rate=1.0, steps=1) if issubclass(mechanism, DeviceNoise) else QUERY


# --- every mechanism that a plan can name -------------------------------------------------------


def test_a_mechanism_goes_by_its_own_name(mechanism: type[PlannedMechanism]) -> None:
    assert mechanism_named(mechanism.name) is mechanism


def test_what_is_announced_makes_the_same_mechanism_again(mechanism: type[PlannedMechanism]) -> None:
    query = query_of(mechanism)
    noise = chosen(mechanism.name)
    again = JobNoise.announced(mechanism.name, noise.multipliers, noise.parameters)
    assert again == noise
    for number, multiplier in enumerate(MULTIPLIERS, start=1):
        built = noise.at(number, query)
        assert type(built) is mechanism
        assert {name: getattr(built, name) for name in asdict(query)} == asdict(query)
        assert (built.noise_multiplier, built.announced) == (multiplier, noise.parameters)
        assert mechanism.build(query, built.noise_multiplier, built.announced) == built


def test_parameters_are_those_of_the_mechanism_and_in_its_ranges(mechanism: type[PlannedMechanism]) -> None:
    query = query_of(mechanism)
    parameters = chosen(mechanism.name).parameters
    names = {each.name for each in mechanism.parameters}
    assert set(parameters) == names
    with pytest.raises(ParameterError, match="unknown_one"):
        mechanism.build(query, 1.0, {**parameters, "unknown_one": 1})
    for each in mechanism.parameters:
        with pytest.raises(ParameterError, match=mechanism.name):
            mechanism.build(query, 1.0, {name: parameters[name] for name in names - {each.name}})
        low, high = math.nextafter(each.least, -math.inf), math.nextafter(each.most, math.inf)
        beyond = (int(each.least) - 1, int(each.most) + 1) if each.whole else (low, high)
        for value in (*beyond, math.nan):
            with pytest.raises(ParameterError, match=each.name.replace("_", " ")):
                mechanism.build(query, 1.0, {**parameters, each.name: value})
    least, most = mechanism.noise_range
    for multiplier in (0.0, -1.0, math.nextafter(least, 0), math.nextafter(most, math.inf), math.nan):
        with pytest.raises(ParameterError, match="noise multiplier"):
            mechanism.build(query, multiplier, parameters)


def test_noise_is_as_announced_and_comes_through_the_wire(mechanism: type[PlannedMechanism]) -> None:
    query = query_of(mechanism)
    built = chosen(mechanism.name).at(1, query)
    total = np.linspace(-5, 5, query.dimension)
    quantized = built.quantize(total)
    np.testing.assert_allclose(quantized * built.granularity, total, atol=built.granularity)
    noisy = built.add_noise(quantized)
    assert np.std(noisy - quantized) == pytest.approx(built.deviation_units, rel=0.08)
    rounded = round_to_wire(noisy, built.wire_step) * built.wire_step
    np.testing.assert_allclose(rounded, noisy, atol=built.wire_step / 2)
    assert 2 <= built.deviation_units * math.sqrt(built.steps) / built.wire_step <= 4


def test_a_calibrated_job_is_accepted(mechanism: type[PlannedMechanism]) -> None:
    query = query_of(mechanism)
    family = mechanism.family(query.sampling_rate, query.steps)
    budget = calibrate(Schedule(), family, epsilon=2.0, delta=1e-5, rounds=5)
    noise = JobNoise.chosen(mechanism.name, budget.noise_multipliers)
    assert noise.rounds == 5
    noise.require_acceptable(lambda _: query, budget.epsilon_by_round[-1], 1e-5)
    # What the accountant was asked for is what the mechanisms say that they cost.
    assert [noise.at(number, query).event for number in range(1, 6)] == [
        family.event(multiplier) for multiplier in budget.noise_multipliers
    ]


# --- a job --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, -1, 4, True])
def test_a_job_has_its_rounds_and_no_others(number: int) -> None:
    with pytest.raises(ParameterError, match="round"):
        chosen().at(number, QUERY)


def test_a_job_without_rounds_is_refused() -> None:
    with pytest.raises(ParameterError, match="noise multipliers are empty"):
        JobNoise.announced(DEFAULT_MECHANISM, [], {})


@pytest.mark.parametrize("make", [JobNoise.chosen, lambda name, noise: JobNoise.announced(name, noise, {})])
def test_an_unknown_mechanism_is_named(make: object) -> None:
    assert callable(make)
    with pytest.raises(ParameterError, match="'published'"):
        make("published", MULTIPLIERS)


def test_one_grid_serves_the_greatest_noise_of_the_job() -> None:
    """A device pins it, so it cannot follow the round."""
    noise = JobNoise.chosen(DEFAULT_MECHANISM, [1.0, 9_000.0])
    assert noise.parameters["resolution"] < chosen().parameters["resolution"]
    query = replace(QUERY, accumulation_slack=0.01)
    assert noise.at(1, query).announced == noise.at(2, query).announced


@pytest.mark.parametrize(
    ("multipliers", "epsilon", "number", "offender"),
    [
        ((4.0, 0.04, 2.0), 1.0, 2, "noise multiplier is 0.04"),
        ((4.0, 3.0, 10_001.0), 1.0, 3, "noise multiplier is 10001.0"),
        ((4.0, 3.0, 2.0), 100.0, 1, "noise as it is drawn would add"),
    ],
)
def test_the_first_round_that_devices_would_decline_is_named(
    multipliers: tuple[float, ...], epsilon: float, number: int, offender: str
) -> None:
    noise = JobNoise.announced(DEFAULT_MECHANISM, multipliers, {"resolution": 65_536})
    asked: list[int] = []

    def query(round_number: int) -> Query:
        asked.append(round_number)
        return QUERY

    with pytest.raises(ParameterError) as caught:
        noise.require_acceptable(query, epsilon, 1e-5)
    assert str(caught.value).startswith(f"round {number}: ")
    assert offender in str(caught.value)
    assert asked == list(range(1, number + 1))


# --- what a coordinator says a job costs ----------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "delta", "rate", "rounds"),
    [
        (2.0, 1e-5, 0.1, 100),
        (1e-2, 1e-5, 0.01, 10),
        (1e-4, 1e-3, 0.01, 10),
        (1e-5, 1e-2, 0.1, 10),
        # The price of all rounds at once, on a grid of its own, is higher by 5e-8 than that after the last.
        (1.2344999, 1.2345641e-5, 0.5, 3),
    ],
)
def test_a_job_costs_no_more_than_its_target_with_noise_as_it_is_drawn(
    epsilon: float, delta: float, rate: float, rounds: int
) -> None:
    """Devices leave a millionth of δ for what the sampler lacks. The less ε is beside δ, the more that is."""
    plan = calibrated_noise(
        DiscretisedGaussian, Schedule("uniform"), epsilon=epsilon, delta=delta, rounds=rounds,
        sampling_rate=rate,
    )  # fmt: skip
    noise = JobNoise.chosen("discrete-gaussian", plan.noise_multipliers)
    query = replace(QUERY, sampling_rate=rate, steps=1)
    events = [noise.at(number, query).event for number in range(1, rounds + 1)]
    charged = priced(events, delta * (1 - NOISE_SHARE))[1]
    assert plan.delta == delta
    assert charged <= epsilon
    assert charged <= plan.epsilon_by_round[-1] <= epsilon
    assert charged >= priced(events, delta)[1]


@pytest.mark.parametrize("delta", [1.0, -1e-9, math.nan])
def test_a_delta_that_is_none_is_refused_as_it_was_given(delta: float) -> None:
    with pytest.raises(ParameterError, match=f"delta is {delta!r}"):
        calibrated_noise(DiscretisedGaussian, Schedule("uniform"), epsilon=1.0, delta=delta, rounds=3)
