"""The published cap: Algorithm 1 to the letter, and proof that it is not private."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dpagent.errors import ParameterError, PlanError
from dpagent.privacy.events import NonPrivateEvent
from dpagent.privacy.mechanisms.published import PublishedCap, PublishedLaplace, PublishedState


def cap(**changes: Any) -> PublishedCap:
    arguments: dict[str, Any] = {
        "epsilon": 1.0,
        "rounds": 100,
        "step": 1e-4,
        "sensitivity": 0.002,
        "regularisation": 0.5,
        "allow_unproven": True,
    }
    return PublishedCap(**arguments | changes)


def test_two_neighbouring_data_sets_are_told_apart_with_certainty_from_one_release() -> None:
    """The attacker knows the weights, γ and both candidates; a single coordinate decides.

    No (ε, δ) with δ < 1 allows this. Each of 200 attacks, 100 on either data set, has to be right.
    """
    rng = np.random.default_rng(11)
    weights = rng.normal(scale=0.05, size=650)
    with_record = np.clip(rng.normal(scale=0.001, size=650), -0.002, 0.002)
    without = with_record - np.clip(rng.normal(scale=1e-5, size=650), -1e-5, 1e-5)  # one in many
    pull = 0.5 * weights
    settings = cap()
    for attempt in range(200):
        truth = (without, with_record)[attempt % 2]
        noisy = settings.noisy_step(truth, weights, settings.start(650)).gradient
        matches = [int(np.count_nonzero(noisy == g + pull)) for g in (without, with_record)]
        assert sorted(matches)[0] == 0  # the other data set cannot have produced a single coordinate
        assert sorted(matches)[1] > 500
        assert matches.index(max(matches)) == attempt % 2


def test_nothing_is_guaranteed_and_everything_says_so() -> None:
    settings = cap()
    mechanism = PublishedLaplace(clip_norm=1.0, noise_multiplier=2.0, sampling_rate=0.5, dimension=650)
    assert mechanism.event == NonPrivateEvent()
    assert not mechanism.is_private
    mechanism.require_noise_as_priced(100, math.inf, 1e-5)
    statement = mechanism.job_statement(4.0, 1e-5)
    assert not mechanism.statement().is_guarantee
    assert not statement.is_guarantee
    assert (statement.epsilon, statement.delta) == (math.inf, 1.0)
    assert statement.as_dict()["guarantee"] == "none"
    assert "no guarantee" in statement.sentence()
    result = settings.noisy_step(np.zeros(3), np.ones(3), settings.start(3))
    assert settings.guarantee == result.guarantee == result.state.guarantee == "none"


@pytest.mark.parametrize("value", [False, None, 1, "yes"])
def test_it_is_refused_unless_asked_for_outright(value: object) -> None:
    with pytest.raises(PlanError, match="allow_unproven: true"):
        cap(allow_unproven=value)
    with pytest.raises(PlanError, match="guarantees no privacy"):
        PublishedCap(1.0, 100, 0.0, 0.002, 0.5)


def test_small_noise_is_added_and_the_schedule_goes_on() -> None:
    """With weights so large that no noise is above γ·w, rounds cost what was scheduled."""
    settings = cap(epsilon=10.0, rounds=4, step=1.5)
    state, weights, costs = settings.start(1000), np.full(1000, 1e6), []
    for _ in range(4):
        scheduled = settings.scheduled(state)
        step = settings.noisy_step(np.zeros(1000), weights, state)
        assert not step.capped.any()
        # Laplace of scale Δ/ε_t: the mean magnitude is the scale
        assert np.abs(step.gradient).mean() == pytest.approx(0.002 / scheduled[0], rel=0.2)
        costs.append(scheduled[0])
        state = step.state
    np.testing.assert_allclose(costs, [0.25, 1.75, 3.25, 4.75])  # ε/T + (t − (T+1)/2)·d
    np.testing.assert_allclose(state.remainder, 0.0, atol=1e-12)


def test_large_noise_is_replaced_and_its_epsilon_charged_and_the_rest_reallocated() -> None:
    settings = cap(epsilon=1.0, rounds=10, step=0.01)
    weights = np.full(2000, -0.02)  # a pull of −0.01; noise has a scale of 0.002/0.055
    state = settings.start(2000)
    step = settings.noisy_step(np.full(2000, 0.001), weights, state)
    pull, first = -0.01, 0.1 - 4.5 * 0.01
    np.testing.assert_array_equal(step.gradient[step.capped], 0.001 + pull)
    noise = step.gradient[~step.capped] - 0.001
    assert (np.abs(noise) < 0.01).all()
    # capped where |n| ≥ 0.01: with probability exp(−0.01·ε/Δ)
    assert step.capped.mean() == pytest.approx(math.exp(-0.01 * first / 0.002), abs=0.06)
    used = 1.0 - step.state.remainder
    np.testing.assert_allclose(used[~step.capped], first)
    assert (used[step.capped] >= first).all()
    # ε′ = Δ|z|/|pull| with |z| exponential, beyond the threshold: mean of ε_t + Δ/|pull|
    assert used[step.capped].mean() == pytest.approx(first + 0.002 / 0.01, rel=0.15)
    expected = step.state.remainder / 9 - 8 * 0.01 / 2
    np.testing.assert_allclose(settings.scheduled(step.state), expected)


def test_a_spent_parameter_and_a_weight_of_zero_take_the_second_branch() -> None:
    settings = cap(rounds=5, step=0.0)
    state = PublishedState(1, np.array([-0.5, 0.8, -np.inf]))
    with np.errstate(all="raise"):
        step = settings.noisy_step(np.array([1.0, 2.0, 3.0]), np.array([1e9, 0.0, 1e9]), state)
    np.testing.assert_array_equal(step.gradient, [1.0 + 5e8, 2.0, 3.0 + 5e8])
    assert step.capped.all()
    assert step.overspent == 2
    assert step.state.remainder[1] == step.state.remainder[2] == -np.inf


def test_bad_values_are_named() -> None:
    for changes, name in (
        ({"epsilon": 0.0}, "epsilon"),
        ({"rounds": 0}, "rounds"),
        ({"step": -1e-9}, "step"),
        ({"step": 2.1 / 9900}, "step"),
        ({"step": math.nan}, "step"),
        ({"sensitivity": 0.0}, "sensitivity"),
        ({"regularisation": math.inf}, "regularisation"),
    ):
        with pytest.raises(ParameterError, match=name):
            cap(**changes)
    settings = cap(rounds=1, step=0.0)
    with pytest.raises(ParameterError, match="dimension"):
        settings.start(0)
    state = settings.start(2)
    with pytest.raises(ParameterError, match="gradient"):
        settings.noisy_step(np.zeros(3), np.zeros(2), state)
    with pytest.raises(ParameterError, match="weights"):
        settings.noisy_step(np.zeros(2), np.array([0.0, np.nan]), state)
    with pytest.raises(ParameterError, match="rounds are 1"):
        settings.noisy_step(np.zeros(2), np.ones(2), PublishedState(1, np.ones(2)))
