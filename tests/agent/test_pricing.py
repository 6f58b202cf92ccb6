"""Rounds are priced and ledgers replayed in a process that ends: the same prices, and never an uncharged
round."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import Future
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from brokers import PATIENCE_S, wait_until
from devices import PERIOD_S, WEIGHTS, Device, open_device
from fleets import make_plan, terms
from ledgers import AT, DATA, DATASET, LIMITS, charge_and_spool, charge_for, fragments

from agent.admission import JobPrices, admit
from agent.charges import Charge
from agent.declined import Declined, OverBudget, TooLate
from agent.errand import ErrandError
from agent.ledger import read_entries
from agent.limits import BeyondLimitError
from agent.opening_program import form_of
from agent.priced_charges import charge_of
from agent.pricing import Pricing, Verdict, replay_apart
from agent.pricing_messages import JobPrice, PriceQuestion
from agent.spooling import RETRY_S
from agent.state import AgentState
from agent.underway import Deciding
from dpagent.errors import DpagentError, LedgerError, PlanError
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask


def question_of(state: AgentState, plan: Plan, **changes: Any) -> PriceQuestion:
    asked = PriceQuestion(plan, WEIGHTS, form_of(DATA), DATASET, state.ledger.books, LIMITS, 0.0, {})
    return replace(asked, **changes)


def asked(state: AgentState, plan: Plan, **changes: Any) -> Verdict:
    return Pricing().ask(question_of(state, plan, **changes)).result(PATIENCE_S)


def here(state: AgentState, plan: Plan) -> tuple[Charge, ...]:
    task = RoundTask.of(plan)
    prices = admit(task, DATA, state.ledger.books, DATASET, LIMITS, now=0.0)
    return tuple(charge_of(task, price, charged_at="") for price in prices)


def test_the_price_is_that_of_admission_to_the_last_bit_in_each_round(state: AgentState) -> None:
    pricing = Pricing()
    jobs: list[dict[str, Any]] = [{}, terms(noise_multipliers=[2.0, 2.1, 2.2], rate=0.3)]
    for tag, (job, number) in enumerate(product(range(len(jobs)), (1, 2, 3))):
        plan = make_plan(round=number, job=bytes([job]) * 16, **jobs[job])
        verdict = pricing.ask(question_of(state, plan)).result(PATIENCE_S)
        assert verdict.why_not is None
        assert verdict.charges == here(state, plan)
        assert verdict.spent_s > 0
        (charge,) = verdict.charges
        charge_and_spool(state, replace(charge, charged_at=AT.isoformat()), fragments(tag))
    replay_apart([entry.record for entry in read_entries(state.connection)])


def test_a_question_that_comes_again_is_answered_at_once_until_something_is_charged(
    state: AgentState, monkeypatch: pytest.MonkeyPatch
) -> None:
    pricing, plan = Pricing(), make_plan()
    first = pricing.ask(question_of(state, plan)).result(PATIENCE_S)
    with monkeypatch.context() as patch:
        patch.setattr("agent.pricing.Errand", None)
        later = plan.with_values({"deadline": plan.deadline + 1})
        assert pricing.ask(question_of(state, later)).result(0).charges == first.charges
    charge_and_spool(state, charge_for(plan, DATA, state.ledger), fragments(1))
    again = pricing.ask(question_of(state, plan)).result(PATIENCE_S)
    assert "arrived after the charge" in str(again.why_not)


def test_a_process_that_stays_answers_again_until_it_has_had_nothing_to_do(state: AgentState) -> None:
    pricing = Pricing(stays_s=3_600.0)
    answers = []
    processes = set()
    for number in (1, 2, 3):
        plan = make_plan(round=number)
        verdict = pricing.ask(question_of(state, plan)).result(PATIENCE_S)
        answers.append(verdict)
        assert verdict.charges == here(state, plan)
        assert pricing._errand is not None
        processes.add(pricing._errand._process.pid)
        charge_and_spool(state, replace(verdict.charges[0], charged_at=AT.isoformat()), fragments(number))
        pricing.tend()
    (process,) = processes
    assert answers[0].spent_s > answers[1].spent_s > 0, "the start counts once"
    pricing._stays_s = 1e-9
    pricing.tend()
    wait_until(lambda: not Path(f"/proc/{process}").exists(), "the end of the process")
    below = LIMITS.with_values({"maximum_sampling_rate": 1e-3})
    refused = pricing.ask(question_of(state, make_plan(job=b"o" * 16), limits=below)).result(PATIENCE_S)
    assert isinstance(refused.why_not, BeyondLimitError)
    pricing.end()


def test_another_process_answers_where_one_that_stayed_was_ended(state: AgentState) -> None:
    pricing = Pricing(stays_s=3_600.0)
    assert pricing.ask(question_of(state, make_plan())).result(PATIENCE_S).charges
    assert pricing._errand is not None
    pricing._errand._process.kill()
    pricing._errand._process.wait()
    verdict = pricing.ask(question_of(state, make_plan(round=2))).result(PATIENCE_S)
    assert verdict.charges == here(state, make_plan(round=2))
    pricing.end()


def test_the_price_of_a_whole_job_is_remembered_from_round_to_round(state: AgentState) -> None:
    """A job that the budget has no room for is priced once, and not in each of its rounds."""
    prices = JobPrices()
    task = RoundTask.of(make_plan())
    admit(task, DATA, state.ledger.books, DATASET, LIMITS, now=0.0, known=prices)
    ((key, known),) = prices.items()
    told = {key: JobPrice(known.accountant, known.loss_grid, 1e3)}
    verdict = asked(state, make_plan(), known=told)
    assert verdict.why_not is None, "what Pricing itself remembers is what counts"
    pricing = Pricing()
    pricing._known = told
    refused = pricing.ask(question_of(state, make_plan())).result(PATIENCE_S)
    assert "would bring ε to 1000" in str(refused.why_not)
    # A job of the same rounds at another δ has another price.
    less_delta = RoundTask.of(make_plan(delta=1e-9))
    (price,) = admit(less_delta, DATA, state.ledger.books, DATASET, LIMITS, now=0.0, known=prices)
    assert price.job_epsilon > 1.1 * known.epsilon


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"limits": LIMITS.with_values({"maximum_sampling_rate": 1e-3})}, BeyondLimitError),
        ({"limits": LIMITS.with_values({"maximum_job_epsilon": 1e-6})}, BeyondLimitError),
        ({"dataset": "others"}, OverBudget),
        ({"now": 1e12}, TooLate),
        ({"weights": WEIGHTS[:-4] + b"\0\0\xc0\x7f"}, Declined),
        ({"plan": make_plan(method="ldp-fl")}, PlanError),
        ({"weights": b""}, DpagentError),
    ],
)
def test_a_refusal_is_of_the_kind_and_in_the_words_of_admission(
    state: AgentState, changes: dict[str, Any], kind: type[DpagentError]
) -> None:
    verdict = asked(state, **({"plan": make_plan()} | changes))
    assert type(verdict.why_not) is kind
    assert str(verdict.why_not)
    assert verdict.charges == ()


def test_a_charged_round_is_only_asked_to_keep_to_the_limits(state: AgentState) -> None:
    charge_and_spool(state, charge_for(make_plan(), DATA, state.ledger), fragments(1))
    assert asked(state, make_plan(), is_charged=True).why_not is None
    below = LIMITS.with_values({"maximum_sampling_rate": 1e-3})
    assert isinstance(asked(state, make_plan(), is_charged=True, limits=below).why_not, BeyondLimitError)


def test_a_ledger_is_replayed_there_and_an_entry_that_is_wrong_is_named(state: AgentState) -> None:
    charge = charge_for(make_plan(), DATA, state.ledger)
    charge_and_spool(state, charge, fragments(1))
    records = [entry.record for entry in read_entries(state.connection)]
    replay_apart(records)
    assert isinstance(records[-1], Charge)
    records[-1] = replace(records[-1], cumulative_epsilon=records[-1].cumulative_epsilon / 2)
    with pytest.raises(LedgerError, match=r"^Entry 2 states a cumulative ε"):
        replay_apart(records)


# --- the process does not answer -----------------------------------------------------------------


@pytest.fixture
def none_starts(monkeypatch: pytest.MonkeyPatch, executed: None) -> None:
    monkeypatch.setattr(sys, "executable", "/none")


def test_a_process_that_cannot_be_started_declines_the_round(
    device: Device, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("none_starts")  # Not before the device's ledger has been replayed.
    device.cycle._questions._prices = Pricing()
    device.take_plan(make_plan())
    device.give()
    device.advance()
    ((_, reason, _),) = device.declined()
    assert "agent.pricing_program cannot be started" in reason
    assert (device.charged(), device.pending()) == ([], {})


def test_a_charged_round_waits_until_it_is_known_that_it_keeps_to_the_limits(tmp_path: Path) -> None:
    with open_device(tmp_path) as device:
        device.take_plan(make_plan())
        device.give()
        while not device.charged():
            device.clock.advance(PERIOD_S)
            device.cycle.advance()
    with open_device(tmp_path) as device:  # after a power cut
        prices, questions = device.cycle._questions._prices, device.cycle._questions
        asked = []

        def fails(question: PriceQuestion) -> Future[Verdict]:
            asked.append(question)
            answer = Future[Verdict]()
            answer.set_result(Verdict((), ErrandError("the process ended")))
            return answer

        failing: Any = SimpleNamespace(ask=fails, tend=prices.tend, end=prices.end)
        questions._prices = failing
        device.take_plan(make_plan())
        device.give()
        for _ in range(4):
            device.clock.advance(RETRY_S)
            device.cycle.advance()
        assert len(asked) > 1
        assert not device.pending()
        questions._prices = prices
        device.clock.advance(RETRY_S)
        device.advance()
        assert device.pending()
        assert device.charged() == [1]


@pytest.mark.usefixtures("none_starts")
def test_a_ledger_that_cannot_be_checked_is_no_ledger_to_start_with() -> None:
    with pytest.raises(ErrandError, match=r"cannot be checked: the process .* cannot be started"):
        replay_apart([])


class Asked:
    """Prices that come when the test says, from the real process."""

    def __init__(self, device: Device) -> None:
        self.pricing, self.answer, self.ended = Pricing(), Future[Verdict](), 0
        device.cycle._questions._prices = self

    def ask(self, question: PriceQuestion) -> Future[Verdict]:
        self.answer = Future()
        return self.answer

    def end(self) -> None:
        self.ended += 1

    def tend(self) -> None:
        pass


def test_a_process_that_is_killed_declines_the_round(device: Device) -> None:
    pricing = Pricing()
    device.cycle._questions._prices = pricing
    sigmas = [float(each) for each in np.geomspace(10.0, 100.0, 499)]
    slow = terms(noise_multipliers=sigmas, rate=0.9999, local_steps=64)
    device.take_plan(make_plan(**slow))
    device.give()
    device.cycle.advance()
    assert isinstance(device.cycle._at_work, Deciding)
    assert pricing._errand is not None
    process = pricing._errand._process
    process.send_signal(signal.SIGKILL)
    wait_until(lambda: device.cycle.advance() or device.declined(), "the end")  # type: ignore[func-returns-value]
    ((_, reason, _),) = device.declined()
    assert "agent.pricing_program ended: signal 9" in reason
    assert (device.charged(), device.pending()) == ([], {})


def test_the_agent_goes_on_while_a_round_is_priced_and_another_replaces_it(device: Device) -> None:
    prices, plan = Asked(device), make_plan()
    device.take_plan(plan)
    device.give()
    device.cycle.advance()
    device.take_plan(plan.with_values({"deadline": plan.deadline + 1}))
    assert device.announcements.current is not None
    assert isinstance(device.cycle._at_work, Deciding), "it is being decided on"
    device.take_plan(make_plan(round=2))
    device.cycle.advance()
    assert device.charged() == []
    prices.answer.set_result(Verdict(here(device.state, plan), spent_s=0.5))
    device.cycle.advance()
    assert (device.charged(), device.cycle._at_work) == ([], None)
    assert device.announcements.current.plan.round == 2
    assert device.announcements.current.begins_at >= device.clock.monotonic() + 4.5, "nine times as long"


def test_a_price_that_came_is_charged_with_the_time_of_the_charge(device: Device) -> None:
    prices, plan = Asked(device), make_plan()
    device.take_plan(plan)
    device.give()
    device.cycle.advance()
    prices.answer.set_result(Verdict(here(device.state, plan)))
    device.clock.advance(1.0)
    device.cycle.advance()
    device.advance()
    assert device.charged() == [1]
    (body,) = device.state.connection.execute(
        "SELECT body ->> 'charged_at' FROM entries WHERE kind = 'charge'"
    )
    assert body[0].startswith("1970-01-01T01:23:2")


def test_a_board_that_may_not_train_now_gives_up_the_price_and_asks_again(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices, plan, reasons = Asked(device), make_plan(), list[str]()
    monkeypatch.setattr(device.cycle._governor, "why_not", lambda *, begins: reasons[0] if reasons else None)
    device.take_plan(plan)
    device.give()
    device.cycle.advance()
    reasons.append("it is hot")
    device.cycle.advance()
    assert (prices.ended, device.cycle._at_work) == (1, None)
    reasons.clear()
    device.cycle.advance()
    prices.answer.set_result(Verdict(here(device.state, plan)))
    device.advance()
    assert device.charged() == [1]


def test_a_process_that_cannot_be_ended_is_ended_once(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """It may hang in the system. Before, the log had a line each time that the agent looked."""
    prices = Asked(device)
    device.take_plan(make_plan())
    device.give()
    device.cycle.advance()
    for _ in range(10):
        device.clock.advance(3_600.0)
        device.cycle.advance()
    assert prices.ended == 1
    assert caplog.text.count("does not answer") == 1
    prices.answer.set_result(Verdict((), ErrandError("it ended")))
    device.cycle.advance()
    assert device.cycle._at_work is None
