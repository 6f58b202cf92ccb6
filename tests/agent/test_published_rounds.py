"""Rounds of Algorithm 1, which guarantee nothing: only where the owner allows it, and for good."""

from __future__ import annotations

import json
import math
import shutil
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commands import dpagent
from devices import started_trainer
from executed import executed
from fleets import DIGITS, digits, make_plan, published_plan, records, update_plan, write_agent
from ledgers import DATASET, LIMITS, charge_and_spool, files_of

from agent.admission import admit
from agent.audit import audit, verify
from agent.charges import Budget, BudgetChange, Charge
from agent.custody import begin_ledger, go_on_after_restore, raise_budget
from agent.declined import Declined
from agent.heads import read_second_head
from agent.limits import BeyondLimitError
from agent.overview import overview_of
from agent.priced_charges import charge_of
from agent.published_state import PublishedStateFile, try_in_memory
from agent.replay import replay
from agent.sensors import Sensors
from agent.settings import load_agent_settings
from agent.state import AgentState
from dpagent.errors import LedgerError, PlanError
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.norm import Norm
from dpagent.privacy.mechanisms.published import PublishedState
from dpagent.privacy.statement import Trust
from dpagent.protocol.messages import Plan
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.task import RoundTask

ACCOUNT = f"{DATASET}@coordinator"
BUDGETS = {DATASET: Budget(8.0, 1e-3), ACCOUNT: Budget(20.0, 1e-3)}
ALLOWING = LIMITS.with_values(
    {
        "methods": ("dp-sgd", "incrementing", "ldp-fl", "central"),
        "trust": (Trust.NONE, Trust.COORDINATOR),
        "allow_unproven": True,
    }
)
OTHER_JOB = b"k" * 16
WEIGHTS = DIGITS.initial_weights(0)
KEY = Signer(new_signing_secret(), "testers").public_key


def opened(path: Path, budgets: dict[str, Budget] = BUDGETS) -> AgentState:
    files = files_of(path)
    if not files.database.exists():
        begin_ledger(files, budgets)
    return AgentState(files, budgets, check=replay)


@pytest.fixture
def state(path: Path) -> Iterator[AgentState]:
    state = opened(path)
    yield state
    state.close()


def take_part(state: AgentState, plan: Plan) -> Charge:
    task = RoundTask.of(plan)
    (price,) = admit(task, records(20), state.ledger.books, DATASET, ALLOWING, now=0.0)
    charge = charge_of(task, price, charged_at="2026-11-23T00:00:00+00:00")
    charge_and_spool(state, charge, [])
    return charge


def test_a_device_declines_unless_its_owner_allows_it(state: AgentState) -> None:
    limits = ALLOWING.with_values({"allow_unproven": False})
    with pytest.raises(BeyondLimitError, match=r"the guarantee is none.*limits\.allow_unproven"):
        admit(RoundTask.of(published_plan()), records(20), state.ledger.books, DATASET, limits, now=0.0)
    assert not LIMITS.allow_unproven


def test_its_rounds_are_entries_of_infinite_epsilon(path: Path, state: AgentState) -> None:
    first = take_part(state, published_plan())
    take_part(state, published_plan(round=2))
    assert (first.job_epsilon, first.cumulative_epsilon) == (math.inf, math.inf)
    assert "no guarantee" in state.ledger.spending(DATASET)
    state.close()
    assert verify(path, files_of(path).second_head).charges == 2
    bodies = [json.loads(line) for line in exported(path)]
    assert [body["job_epsilon"] for body in bodies] == [None, None]
    assert audit(path).charges[0] == first


def exported(path: Path) -> list[str]:
    document = json.loads(dpagent("budget", "export", "--state-dir", path, "--json", "-").stdout)
    return [json.dumps(charge) for charge in document["charges"]]


@pytest.mark.parametrize(
    "plan", [make_plan(job=OTHER_JOB), update_plan(job=OTHER_JOB)], ids=["sum", "update"]
)
def test_no_job_with_a_guarantee_follows_ever(path: Path, state: AgentState, plan: Plan) -> None:
    """In no account of the data set, and no budget is large enough."""
    take_part(state, make_plan(job=b"b" * 16))
    take_part(state, published_plan())
    state.close()
    larger = {name: Budget(1e6, 0.5) for name in BUDGETS}
    raise_budget(files_of(path), larger)
    state = opened(path, larger)
    with pytest.raises(Declined, match="guarantee nothing have been run on 'digits"):
        take_part(state, plan)
    take_part(state, published_plan(job=OTHER_JOB))
    state.close()


def test_a_backup_does_not_forget_them(path: Path, state: AgentState) -> None:
    take_part(state, make_plan(job=b"b" * 16))
    state.close()
    older = Path(shutil.copytree(path, path.with_name("older")))
    state = opened(path)
    take_part(state, published_plan())
    state.close()
    second = read_second_head(files_of(path).second_head)
    assert second is not None
    assert second.datasets[DATASET].epsilon_reserved == math.inf
    shutil.rmtree(path)
    shutil.copytree(older, path)
    lost = go_on_after_restore(
        files_of(path), BUDGETS, write_off_all=False, allows_unproven=False, at=datetime.now(UTC)
    )
    assert [each.epsilon for each in lost if each.dataset == DATASET] == [math.inf]
    assert audit(path).accounts.is_exposed(ACCOUNT)
    state = opened(path)
    with pytest.raises(Declined, match="guarantee nothing"):
        take_part(state, make_plan(job=OTHER_JOB))
    state.close()


def test_what_nothing_shows_any_more_may_have_been_them(path: Path, state: AgentState) -> None:
    """The whole disk was restored, the second head too: what the owner has allowed has no bound."""
    take_part(state, make_plan(job=b"b" * 16))
    state.close()
    second = files_of(path).second_head
    older, older_second = Path(shutil.copytree(path, path.with_name("older"))), second.read_bytes()
    state = opened(path)
    take_part(state, published_plan())
    state.close()
    shutil.rmtree(path)
    shutil.copytree(older, path)
    second.write_bytes(older_second)
    go_on_after_restore(
        files_of(path), BUDGETS, write_off_all=True, allows_unproven=True, at=datetime.now(UTC)
    )
    verify(path, second)
    for account in BUDGETS:
        assert audit(path).accounts.is_exposed(account)
    larger = {name: Budget(1e3, 0.5) for name in BUDGETS}
    raise_budget(files_of(path), larger)
    state = opened(path, larger)
    with pytest.raises(Declined, match="guarantee nothing"):
        take_part(state, make_plan(job=OTHER_JOB))
    state.close()


def test_a_second_head_that_knows_of_them_is_enough_where_all_is_written_off(
    path: Path, state: AgentState
) -> None:
    """The owner has switched them off since, and gives up the rest though the second head is the newest."""
    state.close()
    older = Path(shutil.copytree(path, path.with_name("older")))
    state = opened(path)
    take_part(state, published_plan())
    state.close()
    shutil.rmtree(path)
    shutil.copytree(older, path)
    go_on_after_restore(
        files_of(path), BUDGETS, write_off_all=True, allows_unproven=False, at=datetime.now(UTC)
    )
    for account in BUDGETS:
        assert audit(path).accounts.is_exposed(account)


def test_the_books_say_that_nothing_is_guaranteed(path: Path, state: AgentState) -> None:
    take_part(state, published_plan())
    state.close()
    shown = dpagent("budget", "show", "--state-dir", path)
    assert "No guarantee for 'digits'." in shown.stdout
    document = json.loads(dpagent("budget", "show", "--state-dir", path, "--json").stdout)
    for account in (DATASET, ACCOUNT):
        assert document["datasets"][account]["statement"]["guarantee"] == "none"
        assert document["datasets"][account]["epsilon_left"] == 0.0, "no job is taken there any more"
    assert document["datasets"][DATASET]["epsilon_reserved"] is None


def test_no_figure_of_any_account_is_shown_as_a_bound(tmp_path: Path) -> None:
    """By the status and the metrics either, which take them from the second head (before, ε of the account
    that trusts the coordinator stood there as if nothing had been)."""
    budget = {"epsilon": 8.0, "delta": 1e-3, "coordinator": {"epsilon": 20.0, "delta": 1e-3}}
    file = write_agent(tmp_path, None, KEY, budget=budget)
    settings = load_agent_settings(file)
    state = AgentState(settings.ledger_files, settings.lifetime_budgets, check=replay)
    take_part(state, update_plan(job=OTHER_JOB))
    before = overview_of(settings, Sensors(tmp_path)).accounts
    take_part(state, published_plan())
    state.close()
    assert [each.name for each in before] == [DATASET, ACCOUNT]
    assert 0 < before[1].epsilon_spent <= before[1].epsilon_reserved < 20.0
    for each in overview_of(settings, Sensors(tmp_path)).accounts:
        assert (each.epsilon_spent, each.epsilon_reserved, each.epsilon_left) == (math.inf, math.inf, 0.0)
    found = json.loads(dpagent("doctor", "--config", file, "--no-broker", "--json", "-").stdout)["checks"]
    budgets = [each for each in found if each["check"] == "budget"]
    assert len(budgets) == 2
    for each in budgets:
        assert "nothing is left" in each["finding"]
        assert "rounds that guarantee nothing" in each["finding"]
        assert "budget raise" not in each["remedy"], "admission takes no job then either"


def test_a_ledger_that_says_otherwise_is_found(path: Path, state: AgentState) -> None:
    private, exact = take_part(state, make_plan(job=b"b" * 16)), take_part(state, published_plan())
    budgets = [BudgetChange(name, budget.epsilon, budget.delta) for name, budget in BUDGETS.items()]
    replay([*budgets, private, exact])
    for wrong, words in (
        ([replace(exact, job_epsilon=4.0, cumulative_epsilon=4.0)], "reserves ε = 4"),
        ([replace(private, job_epsilon=math.inf)], "reserves ε = inf"),
        ([replace(exact, cumulative_epsilon=4.0)], "cumulative ε of 4"),
        (
            [
                replace(exact, cumulative_delta=1e-5),
                replace(private, cumulative_epsilon=math.inf, cumulative_delta=2e-5),
            ],
            "guarantee nothing",
        ),
    ):
        with pytest.raises(LedgerError, match=words):
            replay([*budgets, *wrong])


@pytest.mark.parametrize(
    ("method", "mechanism"),
    [("incrementing", "discrete-laplace"), ("dp-sgd", "discrete-gaussian"), ("dp-sgd", "published-laplace")],
)
def test_algorithm_1_goes_with_no_mechanism_that_has_a_price(method: str, mechanism: str) -> None:
    """Else a device that allows no unproven round would run it, and charge what its noise would have cost."""
    values = published_plan().as_dict() | {"method": method}
    values["release"]["mechanism"]["name"] = mechanism
    with pytest.raises(PlanError, match=r"cap published and mechanism .* do not go together"):
        RoundTask.of(Plan.checked(values))


@pytest.mark.parametrize(
    "changes", [{"release": {"sampling": {"local_steps": 2}}}, {"release": {"cap": {"step": 999.0}}}]
)
def test_a_plan_beyond_the_paper_is_refused(changes: dict[str, dict[str, dict[str, float]]]) -> None:
    values = published_plan().as_dict()
    for section, keys in changes["release"].items():
        values["release"][section] |= keys
    with pytest.raises(PlanError):
        RoundTask.of(Plan.checked(values))


def test_the_exact_sum_leaves_where_noise_is_replaced(tmp_path: Path) -> None:
    """With hardly any regularisation nearly all noise is replaced, by next to nothing: the update is the sum.

    A device's own records against those without the first: the update fits one of the two alone.
    """
    values = published_plan(release={"sampling": {"rate": 1.0, "expected_lot": 50.0}}).as_dict()
    values["release"]["cap"]["regularisation"] = 1e-9
    task = RoundTask.of(Plan.checked(values))
    agent = write_agent(tmp_path, None, KEY, engine="numpy")
    board = started_trainer(load_agent_settings(agent))
    update = board.noisy_update(board.prepare(task, {}, WEIGHTS))
    assert update.failure is None
    engine, data = NumpyEngine(DIGITS, norm=Norm.L1), digits(0, 50)
    sums = []
    for first in (0, 1):
        inputs, labels = data.inputs[first:], data.labels[first:]
        sums.append(engine.clipped_sum(WEIGHTS, inputs, labels, [1.0]).total / task.release.wire_unit)
    apart = [float(np.abs(update.values - each).max()) for each in sums]
    assert apart[0] < 2.0, "units of a millionth of a clip norm"
    assert apart[1] > 1_000.0


# --- the schedules ------------------------------------------------------------------------------


def test_a_rounds_schedules_begin_where_the_one_before_ended(tmp_path: Path) -> None:
    kept, plans = PublishedStateFile(tmp_path), [published_plan(round=number) for number in (1, 2, 3)]
    cap = RoundTask.of(plans[0]).release.published_cap
    start = cap.start(DIGITS.parameter_count).remainder
    assert kept.before(plans[0], cap).remainder == pytest.approx(start)
    kept.save(plans[0], PublishedState(1, start - 1))
    kept.save(plans[1], PublishedState(2, start - 2))
    # One whose update was lost begins again where it began; one that was missed costs nothing.
    assert kept.before(plans[1], cap).remainder == pytest.approx(start - 1)
    assert kept.before(plans[2], cap).remainder == pytest.approx(start - 2)
    assert kept.before(plans[2], cap).rounds_done == 2
    other = published_plan(job=OTHER_JOB, round=3)
    assert kept.before(other, cap).remainder == pytest.approx(start)
    file = tmp_path / "published.npz"
    archive = file.read_bytes()
    for damaged in (b"no archive", archive[:-30], archive[:40] + bytes(len(archive) - 40)):
        file.write_bytes(damaged)
        assert kept.before(plans[2], cap).remainder == pytest.approx(start)
        kept.save(plans[1], PublishedState(2, start - 2))
        assert kept.before(plans[2], cap).remainder == pytest.approx(start - 2), "it is mended"


def test_no_memory_for_the_schedules_costs_them_alone_and_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, kept, peaks = 100_000, PublishedStateFile(tmp_path), []
    model = SimpleNamespace(parameters=large)
    plans: Any = [SimpleNamespace(job=bytes(16), round=number, model=model) for number in (1, 2, 3)]
    state = PublishedState(1, np.zeros(large))
    kept.save(plans[0], state)
    kept.save(plans[1], state)
    for work in (kept.save, try_in_memory):
        tracemalloc.start()
        work(plans[2], state)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] > 0.95 * peaks[0]

    def none_left(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "savez", none_left)
    kept.save(plans[2], state)


def test_what_keeps_the_schedules_is_tried_before_the_charge_and_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a round that the device sat out wrote no file, or, later, one with less in it than those have
    who take part, by which a broker could tell it from others; and memory for the file had not been had."""
    board = started_trainer(load_agent_settings(write_agent(tmp_path, None, KEY, engine="numpy")))
    tasks = [RoundTask.of(published_plan(round=number)) for number in (1, 2, 3, 3)]
    steps, kept, save, file = [], [], np.savez, tmp_path / "state" / "published.npz"

    def saving(stream: Any, **arrays: Any) -> None:
        kept.append(arrays["remainders"].nbytes)
        save(stream, **arrays)

    monkeypatch.setattr(np, "savez", saving)
    for task, is_rehearsal in zip(tasks, (False, False, True, False), strict=True):
        work = board.prepare(task, {}, WEIGHTS, is_rehearsal=is_rehearsal)
        tried, before = max(kept), file.read_bytes() if file.exists() else b""
        steps.append(executed(partial(board.noisy_update, work)))
        assert tried == 16 * DIGITS.parameter_count >= kept[-1]
        if is_rehearsal:
            assert is_same_after_both(file), "it has used up nothing"
            file.write_bytes(before)
    assert steps[2] == steps[3], [steps[3] - steps[2], steps[2] - steps[3]]
    assert not is_same_after_both(file)


def is_same_after_both(file: Path) -> bool:
    """Whether the schedules are the same after both rounds that a file holds."""
    with np.load(file) as kept:
        after_one, after_other = kept["remainders"]
    return bool(np.array_equal(after_one, after_other))
