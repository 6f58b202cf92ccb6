"""The device decides: every reason for declining, and that nothing from outside raises a budget."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
from fleets import DIGITS, make_plan, make_task, model_section, records, terms, update_plan
from ledgers import DATASET, LIMITS, charge_and_spool, charge_for, open_state
from planted import plant

from agent.admission import admit
from agent.charges import Budget
from agent.declined import Declined
from agent.limits import BeyondLimitError
from agent.priced_charges import Price
from agent.state import AgentState
from dpagent.errors import ParameterError, PlanError
from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.description import from_description
from dpagent.notation import plain_bound
from dpagent.privacy.accounting.imperfect_noise import imperfect_delta
from dpagent.privacy.accounting.pld import PldAccountant
from dpagent.privacy.events import GaussianEvent, poisson_sampled
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.mechanism import NOISE_SHARE
from dpagent.privacy.statement import Adjacency, Trust, Unit
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask

DATA = records(20)
NOISE = [4.0, 3.0, 2.0]


def price_of(*noise: float, rate: float = 0.25, steps: int = 1, delta: float = 1e-5) -> float:
    accountant = PldAccountant()
    for sigma in noise:
        accountant.compose(poisson_sampled(GaussianEvent(sigma), rate, steps))
    return accountant.epsilon(delta * (1 - NOISE_SHARE))


WHOLE = price_of(*NOISE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def states(path: Path) -> Iterator[Any]:
    """Opens the one ledger under different budgets, one after the other."""
    opened: list[AgentState] = []

    def open_with(epsilon: float, delta: float = 1e-3, dataset: str = DATASET) -> AgentState:
        while opened:
            opened.pop().close()
        opened.append(open_state(path, Budget(epsilon, delta), dataset))
        return opened[-1]

    yield open_with
    while opened:
        opened.pop().close()


def accepted(state: AgentState, plan: Plan, dataset: str = DATASET, now: float = 0.0) -> Price:
    (price,) = admit(RoundTask.of(plan), DATA, state.ledger.books, dataset, LIMITS, now=now)
    return price


def declined(
    state: AgentState, plan: Plan, data: Dataset = DATA, dataset: str = DATASET, now: float = 0.0
) -> str:
    with pytest.raises((Declined, PlanError)) as caught:
        admit(RoundTask.of(plan), data, state.ledger.books, dataset, LIMITS, now=now)
    return str(caught.value)


def take_part(state: AgentState, plan: Plan, dataset: str = DATASET) -> None:
    charge_and_spool(state, charge_for(plan, DATA, state.ledger, dataset), [])


# --- fitting ------------------------------------------------------------------------------------


def test_a_deadline_that_has_passed_is_declined(states: Any) -> None:
    state = states(50.0)
    plan = make_plan(deadline=1_000.0)
    opens_after_s = plan.compute_slot_s
    accepted(state, plan, now=1_000.0 - opens_after_s)
    for now in (1_000.1 - opens_after_s, 1_005.0):
        assert "the device could not send before 0.5 s" in declined(state, plan, now=now)


def test_jobs_are_taken_one_after_another(states: Any) -> None:
    """Rounds of two jobs that alternate are not what the sum over jobs is proven for."""
    state = states(50.0, 1e-3)
    take_part(state, make_plan(round=1))
    newer = make_plan(job=b"k" * 16)
    take_part(state, newer)
    assert "a newer job" in declined(state, make_plan(round=2))
    take_part(state, make_plan(job=b"k" * 16, round=2))


@pytest.mark.parametrize(
    "description",
    [b"\xff", b"resnet", cbor2.dumps([1]), cbor2.dumps({"name": "x"}), b"\x81" * 5_000, b"\xa1\x61a" * 2_000],
    ids=["break", "text", "list", "short", "deep list", "deep map"],
)
def test_a_description_of_no_model_is_declined(states: Any, description: bytes) -> None:
    plan = make_plan(model={"description": description})
    assert "The model cannot be built: " in declined(states(50.0), plan)


@pytest.mark.parametrize("changes", [{"architecture": b"x" * 32}, {"parameters": 9_929}, {"parameters": 1}])
def test_a_model_that_is_built_differently_is_declined(states: Any, changes: dict[str, Any]) -> None:
    assert "built differently here" in declined(states(50.0), make_plan(model=changes))


def test_data_of_another_shape_and_labels_beyond_the_model_are_declined(states: Any) -> None:
    state = states(50.0)
    shape = ArrayDataset(np.zeros((2, 28, 28, 1), np.uint8), np.zeros(2, np.int64), 10)
    assert "shape" in declined(state, make_plan(), shape)
    labels = ArrayDataset(np.zeros((1, 8, 8, 1), np.uint8), np.array([10]), 11)
    assert "11 classes, 0 to 10" in declined(state, make_plan(), labels)
    spec = built_in("mnist-cnn")
    plan = make_plan(
        model={
            "description": cbor2.dumps(spec.describe(), canonical=True),
            "parameters": spec.parameter_count,
            "architecture": spec.digest(),
        }
    )
    assert "shape" in declined(state, plan)


def test_the_number_of_records_is_not_looked_at(states: Any) -> None:
    state = states(50.0)
    (price,) = admit(make_task(), records(1), state.ledger.books, DATASET, LIMITS, now=0.0)
    assert price == accepted(state, make_plan())


def test_views_of_records_and_a_front_end_exclude_each_other(states: Any) -> None:
    """Features are of records, not of their views, and may have no places to move."""
    layers = {"front_end": [{"random": {"layers": ["tanh"]}}], "layers": [{"dense": 10}]}
    spec = from_description(built_in("digits").describe() | layers)
    model = {
        "description": cbor2.dumps(spec.describe(), canonical=True),
        "parameters": spec.parameter_count,
        "architecture": spec.digest(),
    }
    views = {"views": 2, "shift": 1, "flip": False}
    state = states(50.0)
    accepted(state, make_plan(model=model))
    accepted(state, make_plan(augmentation=views))
    assert "views of records whose features" in declined(state, make_plan(model=model, augmentation=views))


# --- the budget ---------------------------------------------------------------------------------


def test_a_job_is_priced_whole_before_its_first_round(states: Any) -> None:
    price = accepted(states(WHOLE), make_plan())
    assert price.job_epsilon == pytest.approx(WHOLE, rel=1e-12)
    assert price.cumulative_epsilon == pytest.approx(price_of(NOISE[0]), rel=1e-3)
    assert price.cumulative_delta == 1e-5


def test_a_job_that_does_not_fit_as_a_whole_is_declined_at_its_first_round(states: Any) -> None:
    budget = WHOLE * (1 - 1e-7)
    assert price_of(NOISE[0]) < budget
    assert f"the lifetime budget for 'digits' is {plain_bound(budget)}" in declined(
        states(budget), make_plan()
    )


def test_a_job_that_fits_to_the_last_bit_is_run_to_its_end(states: Any) -> None:
    state = states(WHOLE, 1e-5)
    for number in (1, 2, 3):
        take_part(state, make_plan(round=number))
    assert state.ledger.epsilon_spent(DATASET) == pytest.approx(WHOLE, rel=1e-3)
    assert declined(state, make_plan(job=b"k" * 16))


def test_who_joins_late_pays_for_the_rounds_that_are_left(states: Any) -> None:
    rest = price_of(*NOISE[1:])
    state = states(rest)
    assert accepted(state, make_plan(round=2)).job_epsilon == pytest.approx(rest, rel=1e-12)
    assert declined(state, make_plan(round=1))


def test_rounds_before_the_one_that_was_reserved_cannot_be_had_afterwards(states: Any) -> None:
    """A coordinator that announces round 2 and then round 1 must not get round 1 for nothing."""
    state = states(price_of(*NOISE[1:]))
    take_part(state, make_plan(round=2))
    take_part(state, make_plan(round=3))
    declined(state, make_plan(round=1))


@pytest.mark.parametrize("order", [(3, 1, 2), (2, 1, 3), (3, 2, 1), (2, 3, 1), (1, 3, 2), (1, 2, 3)])
def test_no_order_of_announcements_spends_more_than_the_budget(states: Any, order: tuple[int, ...]) -> None:
    """Signed plans of any round, in any order, mixed with another job's."""
    state = states(price_of(*NOISE[order[0] - 1 :]))  # what its first round reserves
    for number in order:
        try:
            take_part(state, make_plan(round=number))
        except Declined:
            continue
    charged = [number for number in order if state.ledger.trusts_of(DATASET, (b"j" * 16).hex(), number)]
    spent = price_of(*(NOISE[number - 1] for number in charged)) if charged else 0.0
    assert spent <= state.ledger.budget(DATASET).epsilon * (1 + 1e-9)


def test_jobs_add_up_on_one_dataset(states: Any) -> None:
    state = states(1.5 * WHOLE)
    take_part(state, make_plan())
    text = declined(state, make_plan(job=b"k" * 16))
    assert f"of which {plain_bound(WHOLE)} is reserved" in text
    # The job that was accepted goes on nevertheless.
    take_part(state, make_plan(round=2))
    take_part(state, make_plan(round=3))


def test_a_job_is_reserved_whole_though_it_stopped_early(states: Any) -> None:
    state = states(1.5 * WHOLE)
    take_part(state, make_plan(round=1))
    cheap = make_plan(job=b"k" * 16, **terms(noise_multipliers=[NOISE[0]]))
    assert price_of(NOISE[0]) * 2 < 1.5 * WHOLE
    total = WHOLE + price_of(NOISE[0])
    if total <= 1.5 * WHOLE:
        assert accepted(state, cheap).cumulative_epsilon == pytest.approx(total, rel=1e-9)
    else:
        declined(state, cheap)


def test_deltas_of_jobs_add_up_too(states: Any) -> None:
    state = states(50.0, 1.5e-5)
    take_part(state, make_plan())
    assert "bring δ to 2e-5" in declined(state, make_plan(job=b"k" * 16))
    small = make_plan(job=b"k" * 16, delta=4e-6)
    assert accepted(state, small).cumulative_delta == pytest.approx(1.4e-5)
    assert "bring δ" in declined(states(50.0, 1e-5 * (1 - 1e-7), "fresh"), make_plan(), dataset="fresh")


def test_another_datasets_charges_do_not_count(states: Any) -> None:
    state = states(WHOLE, 1e-5)
    take_part(state, make_plan())
    other = states(WHOLE, 1e-5, "other")
    take_part(other, make_plan(job=b"o" * 16), "other")
    assert other.ledger.epsilon_spent("other") == pytest.approx(price_of(NOISE[0]), rel=1e-3)
    assert other.ledger.epsilon_spent(DATASET) == pytest.approx(price_of(NOISE[0]), rel=1e-3)


def test_other_coordinators_jobs_count(states: Any) -> None:
    state = states(WHOLE)
    take_part(state, make_plan(fleet="one", sealing_key=b"1" * 32))
    declined(state, make_plan(fleet="two", sealing_key=b"2" * 32, job=b"k" * 16))


def test_local_steps_are_paid_one_by_one(states: Any) -> None:
    price = price_of(*NOISE, steps=4)
    plan = make_plan(**terms(local_steps=4))
    assert accepted(states(price), plan).job_epsilon == pytest.approx(price, rel=1e-12)
    declined(states(price * 0.99), plan)


def test_a_budget_the_integrator_lowers_holds_at_once(states: Any) -> None:
    take_part(states(50.0), make_plan())
    lowered = states(WHOLE * 0.9)
    assert f"budget for {DATASET!r} is {plain_bound(WHOLE * 0.9)}" in declined(
        lowered, make_plan(job=b"k" * 16)
    )
    # The job that has begun was reserved whole.
    assert accepted(lowered, make_plan(round=2)).job_epsilon == pytest.approx(WHOLE)
    take_part(lowered, make_plan(round=2))
    accepted(states(50.0), make_plan(job=b"k" * 16))


def test_a_job_that_has_begun_goes_on_though_the_delta_of_the_budget_was_lowered(states: Any) -> None:
    take_part(states(50.0, 1e-3), make_plan())
    lowered = states(50.0, 0.9e-5)
    assert "bring δ to 2e-5" in declined(lowered, make_plan(job=b"k" * 16))
    take_part(lowered, make_plan(round=2))


def test_a_job_that_has_begun_ends_where_the_owner_lowers_the_limit_on_its_price(states: Any) -> None:
    state = states(50.0)
    take_part(state, make_plan())
    task = make_task(round=2)
    at_it, below = (LIMITS.with_values({"maximum_job_epsilon": WHOLE * factor}) for factor in (1.001, 0.999))
    admit(task, DATA, state.ledger.books, DATASET, at_it, now=0.0)
    with pytest.raises(BeyondLimitError, match=r"the job's ε is .*limits\.maximum_job_epsilon"):
        admit(task, DATA, state.ledger.books, DATASET, below, now=0.0)


def test_a_restart_does_not_refill_a_budget(states: Any) -> None:
    take_part(states(WHOLE), make_plan())
    for _ in range(2):
        declined(states(WHOLE), make_plan(job=b"k" * 16))


# --- the pinned schedule ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"noise_multipliers": [4.0, 3.0, 2.5]}, {"noise_multipliers": [4.0, 3.0, 2.0, 9.0]},
     {"clipping": {"norms": [2.0]}},
     {"rate": 0.2}, {"local_steps": 2}, {"local_learning_rate": 0.2}, {"expected_lot": 11.0},
     {"resolution": 4_096}, {"delta": 1e-6}],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_a_schedule_that_changes_after_its_first_round_is_declined(
    states: Any, changes: dict[str, Any]
) -> None:
    state = states(500.0)
    take_part(state, make_plan())
    accepted(state, make_plan(round=2))
    assert "changed after its first round" in declined(state, make_plan(round=2, **terms(**changes)))
    accepted(state, make_plan(round=2, job=b"k" * 16, **terms(**changes)))


def test_the_pin_survives_a_restart(states: Any) -> None:
    take_part(states(500.0), make_plan())
    assert "changed" in declined(states(500.0), make_plan(round=2, clipping={"norms": [2.0]}))


def test_what_differs_from_round_to_round_is_not_pinned() -> None:
    digest = make_task().schedule_digest
    later = make_task(
        round=2,
        deadline=5e9,
        jitter_window_s=9.0,
        step=3,
        model={"digest": b"x" * 32, "precision": "int8"},
    )
    assert later.schedule_digest == digest
    assert make_task(**terms(expected_lot=11.0)).schedule_digest != digest
    smaller = from_description({**DIGITS.describe(), "layers": [{"dense": 10}]})
    assert make_task(model=model_section(smaller)).schedule_digest != digest


def test_noise_on_too_coarse_a_grid_is_declined(states: Any) -> None:
    with pytest.raises(Declined, match=r"round 1's noise is .* grid units; its price holds from 2,122 on"):
        accepted(states(50.0), make_plan(**terms(resolution=256)))


def test_a_sampler_that_would_add_to_delta_is_declined() -> None:
    """At no ε that a budget may have: the sampler is that close. Beyond, it would be seen."""
    task = make_task()
    rounds, delta = task.plan.rounds, task.plan.delta
    limit = math.log(NOISE_SHARE * delta / (rounds * task.release.mechanism.statistical_distance))
    assert limit > 40
    task.release.mechanism.require_noise_as_priced(rounds, limit - 0.1, delta)
    with pytest.raises(ParameterError, match=r"would add .* to δ; set aside for that is 1e-11"):
        task.release.mechanism.require_noise_as_priced(rounds, limit + 0.1, delta)


def test_noise_that_would_add_to_delta_at_the_jobs_epsilon_is_declined(states: Any) -> None:
    """At ε = 0 it would not, and the check before the pricing finds nothing."""
    mechanism = make_task().release.mechanism
    delta = 2 * imperfect_delta(0.0, 0.0, 3 * mechanism.statistical_distance) / NOISE_SHARE
    mechanism.require_noise_as_priced(3, 0.0, delta)
    assert "round 1's noise as it is drawn would add" in declined(states(50.0), make_plan(delta=delta))


@pytest.mark.parametrize("delta", [1e-30, 1e-100, 1e-305, 5e-324])
def test_a_tiny_delta_is_declined_before_anything_is_priced(states: Any, delta: float) -> None:
    with pytest.raises(Declined, match=r"round 1's noise as it is drawn would add .* to δ"):
        accepted(states(50.0), make_plan(delta=delta))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mechanism": {"name": "laplace-of-tomorrow"}}, "laplace-of-tomorrow"),
        ({"mechanism": {"parameters": {"resolution": 255}}}, "255"),
        ({"mechanism": {"parameters": {"resolution": 65_536.0}}}, "65536.0"),
        ({"mechanism": {"parameters": {"colour": 1}}}, "colour"),
        ({"mechanism": {"noise_multipliers": [4.0, 0.01, 2.0]}}, "0.01"),
        ({"mechanism": {"noise_multipliers": [4.0, 2e4, 2.0]}}, "20000.0"),
    ],
)
def test_a_mechanism_that_this_device_cannot_run_is_declined(
    states: Any, changes: dict[str, Any], said: str
) -> None:
    """Unknown, or out of its ranges in this round or a later one: a reason, and no error of the protocol."""
    assert said in declined(states(50.0), make_plan(**changes))


def test_a_ledger_that_is_full_takes_no_more_charges(states: Any) -> None:
    """A round at a sampling rate of 10⁻³⁰ costs nothing, and its charge 1.4 kB."""
    free, state = terms(delta=1e-19, rate=1e-30), states(50.0)
    for number in (2, 3):
        take_part(state, make_plan(round=number, **free))
    task = make_task(job=b"n" * 16, **free)
    room = LIMITS.with_values({"maximum_charges": 5})
    (price,) = admit(task, DATA, state.ledger.books, DATASET, room, now=0.0)
    assert price.job_epsilon < 1e-6
    full = LIMITS.with_values({"maximum_charges": 4})
    with pytest.raises(BeyondLimitError, match=r"is 5; this device accepts at most 4 .*maximum_charges"):
        admit(task, DATA, state.ledger.books, DATASET, full, now=0.0)


def test_a_method_that_this_device_takes_no_part_in_is_declined(states: Any) -> None:
    limits = LIMITS.with_values({"methods": ("incrementing",)})
    with pytest.raises(
        BeyondLimitError, match=r"the method is dp-sgd.* accepts incrementing .*limits\.methods"
    ):
        admit(make_task(), DATA, states(50.0).ledger.books, DATASET, limits, now=0.0)
    admit(make_task(method="incrementing"), DATA, states(50.0).ledger.books, DATASET, limits, now=0.0)


def test_a_party_that_this_device_does_not_trust_is_declined(states: Any) -> None:
    task, state = RoundTask.of(update_plan()), states(50.0)
    limits = LIMITS.with_values({"methods": ("central",)})
    with pytest.raises(BeyondLimitError, match=r"coordinator; this device accepts none .limits\.trust"):
        admit(task, DATA, state.ledger.books, DATASET, limits, now=0.0)
    trusting = limits.with_values({"trust": (Trust.NONE, Trust.COORDINATOR)})
    with pytest.raises(Declined, match=r"no lifetime budget for 'digits@coordinator'.*budget\.coordinator"):
        admit(task, DATA, state.ledger.books, DATASET, trusting, now=0.0)


def test_an_unknown_method_and_a_mechanism_of_another_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="'of-tomorrow'"):
        make_task(method="of-tomorrow")
    other: Any = type("Other", (DiscretisedGaussian,), {"name": "of-another"})
    plant(monkeypatch, other)
    with pytest.raises(PlanError, match="incrementing, cap none and mechanism of-another do not go together"):
        make_task(method="incrementing", mechanism={"name": "of-another"})


@pytest.mark.parametrize(
    ("part", "value"),
    [("unit", Unit.DEVICE), ("adjacency", Adjacency.REPLACE_ONE)],
)
def test_a_guarantee_of_another_kind_is_declined(
    states: Any, monkeypatch: pytest.MonkeyPatch, part: str, value: Unit | Adjacency
) -> None:
    """A ledger adds up ε only where unit, neighbours and trust are alike."""
    other: Any = type("Other", (DiscretisedGaussian,), {"name": "other-guarantee", part: value})
    plant(monkeypatch, other)
    limits = LIMITS.with_values({"trust": tuple(Trust)})
    task, ledger = make_task(mechanism={"name": "other-guarantee"}), states(50.0).ledger
    with pytest.raises(Declined, match="other-guarantee") as caught:
        admit(task, DATA, ledger.books, DATASET, limits, now=0.0)
    assert value.meaning in str(caught.value)


@pytest.mark.parametrize("number", [1, 2])
def test_a_round_up_to_the_last_charged_one_is_declined(states: Any, number: int) -> None:
    """Its reservation covers each round once: the same round, announced anew, would be free."""
    state = states(500.0)
    take_part(state, make_plan(round=2))
    text = declined(state, make_plan(round=number))
    assert f"round {number}" in text
    assert "round 2" in text
    accepted(state, make_plan(round=3))


def test_the_check_before_the_pricing_declines_nothing_that_the_price_allows(states: Any) -> None:
    """At the least δ for ε = 0.1, a job that costs less is accepted; at half of it, it is declined."""
    cheap = terms(noise_multipliers=[200.0])
    distance = make_task(**cheap).release.mechanism.statistical_distance
    least = imperfect_delta(0.1, 0.0, distance) / NOISE_SHARE
    state = states(50.0)
    assert 0 < accepted(state, make_plan(**cheap, delta=least)).job_epsilon < 0.1
    assert "to δ" in declined(state, make_plan(**cheap, delta=least / 2))
