"""Jobs under the ``bounded`` noise cap on a device: as planned, and under a hostile coordinator."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import DIGITS, SEALING_KEY, records, write_fleet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledgers import DATASET, LIMITS, body_of, charge_and_spool, open_state, rechain
from numpy.typing import NDArray

from agent.admission import admit
from agent.audit import audit, verify
from agent.charges import Budget, Charge
from agent.declined import Declined
from agent.noisy_sums import noisy_gradients
from agent.priced_charges import charge_of, event_of, rebuilt
from agent.state import AgentState
from coordinator.planning import Planner, new_job
from coordinator.settings import FleetSettings, load_fleet_settings
from coordinator.store import OpenRound
from dpagent.errors import ConfigurationError, DpagentError, LedgerError, PlanError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.norm import Norm
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.mechanisms.bounded import CapNotMetError
from dpagent.privacy.mechanisms.truncated_laplace import TruncatedLaplace
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask
from dpagent.protocol.terms import BoundedTerms
from dpagent.protocol.weights import weights_to_bytes

ROUNDS, EPSILON, LOT = 4, 16.0, 25.0
DATA = records(3)
SHAPE = DIGITS.initial_weights(0)
SHAPE /= np.abs(SHAPE).max()
WIDE, TIGHT = 1e6, 0.088
"""Largest weights: with γ = 1, a lot of 25 and a clip norm of 1, caps of 2.5·10⁷ and 2.2 clip norms."""


def fleet(directory: Path, **changes: Any) -> FleetSettings:
    privacy = {
        "epsilon": EPSILON,
        "delta": 1e-4,
        "method": "incrementing",
        "noise": "laplace",
        "sampling_rate": 0.5,
    }
    values: dict[str, Any] = {"rounds": ROUNDS, "privacy": privacy | changes.pop("privacy", {})}
    cap = {"kind": "bounded", "regularisation": 1.0, "floor": 1e-6} | changes.pop("cap", {})
    model = {"name": "digits", "precision": "float32"}
    return load_fleet_settings(write_fleet(directory, None, **values, cap=cap, model=model, **changes))


class Coordinator:
    """It chooses the weights of each round after it has seen all earlier ones."""

    def __init__(self, settings: FleetSettings) -> None:
        self.planner = Planner(settings, DIGITS, new_job(settings), SEALING_KEY)
        self.spent = 0.0

    def task(self, number: int, scale: float, *, spent: float | None = None) -> RoundTask:
        sent = weights_to_bytes(self.weights(scale), "float32")
        spent = self.spent if spent is None else spent
        return self.planner.task(OpenRound(number, 0.0, 4e9), sent, spent=spent)

    def close(self, task: RoundTask) -> None:
        self.spent = self.planner.epsilon_after(task.release)

    @staticmethod
    def weights(scale: float) -> NDArray[np.float32]:
        return (SHAPE * np.float32(scale)).astype(np.float32)


def take(state: AgentState, task: RoundTask, weights: NDArray[np.float32] | None = None) -> Charge:
    """What the agent does with a plan up to its charge.

    Raises:
        DpagentError: it declines.
    """
    if weights is not None:
        task.release.require_derived(weights)
    (price,) = admit(task, DATA, state.ledger.books, DATASET, LIMITS, now=0.0)
    charge = charge_of(task, price, charged_at="2026-11-23T00:00:00+00:00")
    charge_and_spool(state, charge, [])
    return charge


def changed(task: RoundTask, **terms: Any) -> RoundTask:
    """The task of a plan with another cap section, or other noise."""
    values = task.plan.as_dict()
    release = values["release"]
    release["mechanism"]["noise_multipliers"] = terms.pop(
        "noise_multipliers", release["mechanism"]["noise_multipliers"]
    )
    release["mechanism"]["parameters"] |= terms.pop("parameters", {})
    release["cap"] |= terms
    return RoundTask.of(Plan.checked(values))


# --- as planned -----------------------------------------------------------------------------------


def test_a_job_is_charged_what_its_rounds_are_and_the_rest_goes_over_the_rounds_left(tmp_path: Path) -> None:
    coordinator = Coordinator(fleet(tmp_path / "fleet"))
    scales = [WIDE, TIGHT, WIDE, WIDE]
    charges = []
    with closing(open_state(tmp_path / "device", Budget(EPSILON, 1e-3))) as state:
        for number, scale in enumerate(scales, 1):
            task = coordinator.task(number, scale)
            charges.append(take(state, task, coordinator.weights(scale)))
            coordinator.close(task)
            assert charges[-1].cumulative_epsilon == pytest.approx(coordinator.spent)
            assert isinstance(task.release.mechanism, TruncatedLaplace)
            bound = LOT * max(float(np.abs(coordinator.weights(scale)).max()), 1e-6)
            assert task.release.mechanism.cap <= bound
    costs = [composed(event_of(charge)).epsilon for charge in charges]
    assert 0.999 * EPSILON < math.fsum(costs) <= EPSILON
    planned = EPSILON * fleet(tmp_path / "again").privacy.spending.shares(ROUNDS)
    # The tight cap costs more than its share; the rounds after it get less, and still rise.
    assert costs[0] == pytest.approx(planned[0])
    assert costs[1] > planned[1]
    assert costs[2] < planned[2]
    assert costs[2] < costs[3] < planned[3]
    assert {charge.job_epsilon for charge in charges} == {EPSILON}
    found = audit(tmp_path / "device")
    assert [charge.accountant for charge in found.charges] == ["basic"] * ROUNDS
    assert [rebuilt(charge.charged) for charge in found.charges] == [
        rebuilt(charge.charged) for charge in charges
    ]


def test_noise_stays_within_the_cap(tmp_path: Path) -> None:
    nobody = ArrayDataset(np.full((1, 8, 8, 1), np.nan, np.float32), np.zeros(1, np.int64), 10)
    coordinator = Coordinator(fleet(tmp_path))
    task, engine = coordinator.task(1, TIGHT), NumpyEngine(DIGITS, microbatch=4, norm=Norm.L1)
    update = np.concatenate([noisy_gradients(task.release, SHAPE, nobody, engine) for _ in range(20)])
    mechanism, unit = task.release.mechanism, task.release.wire_unit
    assert isinstance(mechanism, TruncatedLaplace)
    assert 0.5 * mechanism.cap < np.abs(update).max() * unit <= mechanism.cap + unit / 2
    assert mechanism.cap <= LOT * TIGHT


def test_a_job_whose_next_cap_nothing_meets_says_which_cap_would_do(tmp_path: Path) -> None:
    coordinator = Coordinator(fleet(tmp_path))
    with pytest.raises(CapNotMetError, match=r"Round 2 of 4.*has to reach"):
        coordinator.task(2, TIGHT, spent=EPSILON - 1.0)
    with pytest.raises(CapNotMetError, match="3 of 4 rounds have spent 16 of 16"):
        coordinator.task(4, WIDE, spent=EPSILON)


def test_settings_that_do_not_go_together_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cap\.kind is bounded and privacy\.noise is gaussian"):
        fleet(tmp_path / "noise", privacy={"noise": "gaussian"})
    with pytest.raises(ConfigurationError, match=r"cap\.kind is bounded; expected clamp or none"):
        fleet(tmp_path / "method", privacy={"method": "dp-sgd", "noise": "gaussian"})
    below = fleet(tmp_path / "cap", cap={"regularisation": 1e-3, "floor": 1e-3})
    with pytest.raises(PlanError, match="cannot be met: the L1 sensitivity is"):
        Planner(below, DIGITS, new_job(below), SEALING_KEY).require_acceptable()


# --- a hostile coordinator ------------------------------------------------------------------------


@given(scales=st.lists(st.sampled_from([0.0, 0.1, TIGHT, 1.0, 3e38]), min_size=1, max_size=ROUNDS))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_wide_and_tight_caps_in_any_order_spend_no_more_than_the_reservation(
    scales: list[float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("job")
    coordinator, charged = Coordinator(fleet(directory / "fleet")), []
    with closing(open_state(directory / "device", Budget(EPSILON, 1e-3))) as state:
        for number, scale in enumerate(scales, 1):
            try:
                # It states that nothing is spent, and gets the noise of a whole job for each round.
                task = coordinator.task(number, scale, spent=0.0)
                charged.append(composed(event_of(take(state, task, coordinator.weights(scale)))))
            except DpagentError:
                continue
        reserved = state.ledger.accounts.reserved(DATASET)
    assert math.fsum(cost.epsilon for cost in charged) <= EPSILON
    assert math.fsum(cost.delta for cost in charged) <= 1e-4
    assert not charged or reserved == Budget(EPSILON, 1e-4)


def test_a_spent_of_its_own_gets_a_coordinator_the_reservation_and_no_more(tmp_path: Path) -> None:
    """Each round is planned as if it were the first to spend, so that it may take all that is left."""
    coordinator = Coordinator(fleet(tmp_path / "fleet"))
    charges, declined = list[Charge](), list[str]()
    with closing(open_state(tmp_path / "device", Budget(1_000.0, 1e-3))) as state:
        for number in range(1, ROUNDS + 1):
            task = coordinator.task(number, WIDE, spent=0.0)
            try:
                charges.append(take(state, task, coordinator.weights(WIDE)))
            except Declined as error:
                declined.append(str(error))
        assert declined
        assert all("it reserved 16" in each for each in declined)
        # The rest of the budget is there, for others.
        assert state.ledger.accounts.reserved(DATASET).epsilon == EPSILON
    assert len(charges) >= 2
    assert audit(tmp_path / "device").charges[-1].cumulative_epsilon <= EPSILON


def test_a_round_again_with_other_weights_is_declined(tmp_path: Path) -> None:
    """As after a restart that lost its memory: the first noise of a round is the only one."""
    coordinator = Coordinator(fleet(tmp_path / "fleet"))
    with closing(open_state(tmp_path / "device", Budget(EPSILON, 1e-3))) as state:
        take(state, coordinator.task(1, WIDE), coordinator.weights(WIDE))
        with pytest.raises(Declined, match="round 1 arrived after the charge for round 1"):
            take(state, coordinator.task(1, TIGHT), coordinator.weights(TIGHT))
    assert len(audit(tmp_path / "device").charges) == 1


def test_noise_that_does_not_follow_from_the_weights_is_declined(tmp_path: Path) -> None:
    coordinator = Coordinator(fleet(tmp_path))
    task, weights = coordinator.task(1, TIGHT), coordinator.weights(TIGHT)
    task.release.require_derived(weights)
    mechanism = task.release.mechanism
    bound = int(mechanism.announced["bound_units"])
    for other, named in (
        (changed(task, noise_multipliers=[mechanism.noise_multiplier * 1.01]), "noise multiplier"),
        (changed(task, parameters={"bound_units": bound * 2}), "bound units"),
        (changed(task, regularisation=2.0), "noise multiplier"),
    ):
        with pytest.raises(PlanError, match=named):
            other.release.require_derived(weights)
    with pytest.raises(PlanError, match="noise multiplier"):
        changed(coordinator.task(1, WIDE), spent=8.0).release.require_derived(coordinator.weights(WIDE))
    with pytest.raises(PlanError):
        task.release.require_derived(coordinator.weights(TIGHT * 0.9))


def test_terms_of_a_job_that_change_after_its_first_round_are_declined(tmp_path: Path) -> None:
    coordinator = Coordinator(fleet(tmp_path / "fleet"))
    with closing(open_state(tmp_path / "device", Budget(1_000.0, 1e-3))) as state:
        first = coordinator.task(1, WIDE)
        take(state, first, coordinator.weights(WIDE))
        coordinator.close(first)
        second = coordinator.task(2, WIDE)
        cap = second.release.terms.cap
        assert isinstance(cap, BoundedTerms)
        schedule = cap.schedule.as_dict()
        for change in (
            {"epsilon": 50.0}, {"rounds": 5}, {"floor": 1.0}, {"regularisation": 2.0},
            {"schedule": schedule | {"kind": "linear"}}, {"parameters": {"resolution": 1 << 20}},
        ):  # fmt: skip
            altered = changed(second, **change)
            with pytest.raises(Declined, match="changed after its first round"):
                take(state, altered)
        take(state, second, coordinator.weights(WIDE))


def test_truncated_noise_without_its_cap_and_its_cap_without_it_are_refused(tmp_path: Path) -> None:
    task = Coordinator(fleet(tmp_path)).task(1, WIDE)
    values = task.plan.as_dict()
    clamp = {"kind": "clamp", "where": "coordinator", "regularisation": 1.0, "floor": 1.0}
    laplace = values["release"]["mechanism"] | {
        "name": "discrete-laplace", "parameters": {"resolution": 1 << 24},
    }  # fmt: skip
    for change in ({"cap": clamp}, {"mechanism": laplace}):
        with pytest.raises(PlanError, match="do not go together"):
            RoundTask.of(Plan.checked(values | {"release": values["release"] | change}))
    with pytest.raises(PlanError, match="do not go together"):
        RoundTask.of(Plan.checked(values | {"method": "dp-sgd"}))


# --- its ledger -----------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [{"accountant": "rdp"}, {"accountant": "pld", "loss_grid": 1e-4}])
def test_a_ledger_that_prices_such_a_job_otherwise_is_refused(tmp_path: Path, terms: dict[str, Any]) -> None:
    """A sum that was fixed in advance costs less; the rounds of this job were not."""
    coordinator = Coordinator(fleet(tmp_path / "fleet"))
    with closing(open_state(tmp_path / "device", Budget(EPSILON, 1e-3))) as state:
        take(state, coordinator.task(1, WIDE), coordinator.weights(WIDE))
    database = tmp_path / "device/ledger.db"
    rechain(database, 2, json.dumps(body_of(database, 2) | terms))
    with pytest.raises(LedgerError, match="expected basic"):
        verify(tmp_path / "device")


def test_a_ledger_whose_rounds_exceed_the_reservation_is_refused(tmp_path: Path) -> None:
    coordinator = Coordinator(fleet(tmp_path / "fleet"))
    with closing(open_state(tmp_path / "device", Budget(EPSILON, 1e-3))) as state:
        take(state, coordinator.task(1, WIDE), coordinator.weights(WIDE))
    database = tmp_path / "device/ledger.db"
    body = body_of(database, 2)
    body |= {"job_epsilon": body["cumulative_epsilon"] / 2}
    rechain(database, 2, json.dumps(body))
    with pytest.raises(LedgerError, match="the reservation is"):
        verify(tmp_path / "device")
