"""A ledger through years of misfortune: no walk at random through what happens to one refunds anything.

An accountant of the tests' own notes every job of which the last round has been charged, in whichever of the
lives of the ledger: what is lost with a disk has left the device all the same. After each step the ledger
must have reserved at least as much in each account, and no more than the owner's budgets. Of a job whose
noise is chosen as it goes (``bounded``), by a coordinator that does so at random, it notes each round, at a
price by a formula of its own.
"""

from __future__ import annotations

import math
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fleets import bounded_plan, make_plan, records, report_plan, terms, update_plan
from ledgers import LIMITS, files_of

from agent.admission import admit
from agent.audit import verify
from agent.charges import Budget
from agent.custody import back_up, begin_ledger, go_on_after_restore, put_back, raise_budget
from agent.declined import Declined
from agent.priced_charges import charge_of
from agent.replay import replay
from agent.state import AgentState, BudgetRaisedError
from dpagent.errors import LedgerError
from dpagent.privacy.mechanisms.truncated_laplace import TruncatedLaplace
from dpagent.privacy.statement import Trust
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask

DATA = records(20)
ACCOUNTS = ("digits", "digits@coordinator")
READY = LIMITS.with_values(
    {
        "methods": ("dp-sgd", "incrementing", "ldp-fl", "central"),
        "trust": (Trust.NONE, Trust.COORDINATOR),
    }
)
AT = datetime(2026, 11, 23, 12, tzinfo=UTC)
PLANS: dict[str, Callable[..., Plan]] = {
    "one round": lambda **of: make_plan(**of, **terms(noise_multipliers=[16.0])),
    "three rounds": lambda **of: make_plan(**of, **terms(noise_multipliers=[24.0, 20.0, 16.0])),
    "reports": report_plan,
    "bounded": bounded_plan,
    "two accounts": lambda **of: update_plan(**of, device_noise=[18.0, 15.0, 12.0]),
}


def cost(noise_multiplier: float, bound_units: int, sensitivity: int, rate: float) -> tuple[float, float]:
    """(ε, δ) of truncated Laplace noise on a sampled lot: within the support, the densities differ by a
    factor of e^ε at most, and δ is the mass that the shift takes out of it."""
    decay = math.exp(-1 / (noise_multiplier * sensitivity))
    all_of_it = 1 + 2 * decay * (1 - decay**bound_units) / (1 - decay)
    out_of_it = decay ** (bound_units - sensitivity + 1) * (1 - decay**sensitivity) / (1 - decay)
    return math.log1p(rate * math.expm1(1 / noise_multiplier)), rate * out_of_it / all_of_it


@dataclass
class Walk:
    """A device, and what happens to its ledger."""

    path: Path
    choices: random.Random
    budgets: dict[str, Budget] = field(
        default_factory=lambda: dict.fromkeys(ACCOUNTS, Budget(epsilon=30.0, delta=1e-3))
    )
    jobs: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    """By id: which plan, and the last round that was charged."""
    left: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """ε of the jobs that were charged in whole, by account; of a bounded one, of its rounds."""
    rounds: dict[bytes, dict[int, tuple[float, float]]] = field(default_factory=dict)
    """Of each job that the ledger knows: its rounds, and of a bounded one what they cost."""
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.files = files_of(self.path)
        self.backups: list[Path] = []
        self.images: list[tuple[Path, Path]] = []
        begin_ledger(self.files, self.budgets)
        self.state = AgentState(self.files, self.budgets, check=replay)

    def step(self) -> None:
        """Let something happen, and look at the ledger."""
        steps: dict[Callable[[], Any], float] = {
            self.charge: 60, self.reopen: 4, self.back_up: 4, self.take_image: 4, self.raise_budgets: 6,
            self.lose_head: 2, self.put_back: 2, self.restore_image: 3, self.lose_directory: 0.4,
            self.lose_disk: 0.8, self.lose_second_head: 0.5,
        }  # fmt: skip
        (what,) = self.choices.choices(list(steps), list(steps.values()))
        what()
        self.done[what.__name__] += 1
        self.state.close()
        try:
            self.state = AgentState(self.files, self.budgets, check=replay)
        except BudgetRaisedError:
            raise_budget(self.files, self.budgets)
            self.state = AgentState(self.files, self.budgets, check=replay)
        verify(self.path)
        for account in ACCOUNTS:
            reserved = self.state.ledger.accounts.reserved(account)
            assert self.left[account] <= reserved.epsilon * (1 + 1e-9), (what.__name__, account)
            assert reserved.epsilon <= self.budgets[account].epsilon * (1 + 1e-9), (what.__name__, account)

    def charge(self) -> None:
        """Take part in the next round of a new or an old job, if the device accepts it."""
        if self.jobs and self.choices.random() < 0.6:
            job = self.choices.choice(list(self.jobs))
        else:
            job = self.choices.randbytes(16)
            self.jobs[job] = self.choices.choice(list(PLANS)), 0
        kind, last = self.jobs[job]
        number = last + 1 if self.choices.random() < 0.8 else self.choices.randint(1, last + 1)
        chosen: dict[str, Any] = {}
        if kind == "bounded":
            chosen = {
                "noise_multiplier": self.choices.choice([0.2, 0.5, 1.0, 4.0]),
                "bound_units": 1 << self.choices.choice([26, 27, 28]),
            }
        try:
            task = RoundTask.of(PLANS[kind](job=job, round=number, **chosen))
            prices = admit(task, DATA, self.state.ledger.books, "digits", READY, now=0.0)
        except (Declined, LedgerError):
            self.done["declined"] += 1
            return
        except ValueError:  # There is no such round any more.
            del self.jobs[job]
            return
        charges = [charge_of(task, price, charged_at="2026-11-23T00:00:00+00:00") for price in prices]
        if self.state.ledger.accounts.job("digits", job.hex()) is None:
            # Or it was lost with its ledger, and written off: then it is paid for once more.
            self.rounds[job] = {}
        assert number not in self.rounds[job]
        self.state.offer(job.hex(), number, bytes(32), 0.0)
        self.state.charge(charges, 0.0)
        self.state.spool_round(job.hex(), number, [], 0.0, None)
        self.jobs[job] = kind, number
        self.done["charged"] += 1
        self.rounds[job][number] = 0.0, 0.0
        if kind == "bounded":
            self._count(task, chosen)
        elif number == task.plan.rounds:
            for each in charges:
                self.left[each.dataset] += each.job_epsilon

    def _count(self, task: RoundTask, chosen: dict[str, Any]) -> None:
        """The rounds of a bounded job cost no more than its plans reserve."""
        mechanism = task.priced[0].mechanism
        assert isinstance(mechanism, TruncatedLaplace)
        price = cost(**chosen, sensitivity=mechanism.sensitivity_units, rate=mechanism.sampling_rate)
        self.rounds[task.plan.job][task.plan.round] = price
        self.left["digits"] += price[0]
        epsilons, deltas = zip(*self.rounds[task.plan.job].values(), strict=True)
        assert math.fsum(epsilons) <= 6.0
        assert math.fsum(deltas) <= task.plan.delta
        self.done["bounded"] += 1

    def reopen(self) -> None:
        """What follows every step."""

    def back_up(self) -> None:
        file = self.path.with_name(f"backup-{len(self.backups)}.db")
        back_up(self.path, file)
        self.backups.append(file)

    def take_image(self) -> None:
        """Copy the whole disk."""
        self.state.close()
        number = len(self.images)
        self.images.append((self.path.with_name(f"image-{number}"), self.path.with_name(f"second-{number}")))
        shutil.copytree(self.path, self.images[-1][0])
        shutil.copy(self.files.second_head, self.images[-1][1])

    def raise_budgets(self) -> None:
        self.state.close()
        more = self.choices.choice([1.0, 10.0, 60.0])
        self.budgets = {
            name: Budget(budget.epsilon + more, budget.delta) for name, budget in self.budgets.items()
        }
        raise_budget(self.files, self.budgets)

    def lose_head(self) -> None:
        self.files.head.unlink(missing_ok=True)

    def put_back(self) -> None:
        self.state.close()
        if self.backups:
            try:
                put_back(self.choices.choice(self.backups), self.files)
            except LedgerError:
                self.done["put back nothing"] += 1
            else:
                self._go_on()

    def restore_image(self) -> None:
        """Of the state directory, behind the owner's back: the second head is elsewhere."""
        self.state.close()
        if self.images:
            shutil.rmtree(self.path)
            shutil.copytree(self.choices.choice(self.images)[0], self.path)
            self._go_on()

    def lose_directory(self) -> None:
        self.state.close()
        shutil.rmtree(self.path)
        self._go_on()

    def lose_disk(self) -> None:
        """The second head with it; the owner knows, and says so."""
        self.state.close()
        if self.images:
            image, second = self.choices.choice(self.images)
            shutil.rmtree(self.path)
            shutil.copytree(image, self.path)
            shutil.copy(second, self.files.second_head)
            self._go_on(write_off_all=True)

    def lose_second_head(self) -> None:
        self.state.close()
        self.files.second_head.unlink()
        with pytest.raises(LedgerError):
            AgentState(self.files, self.budgets, check=replay)
        self._go_on(write_off_all=True)

    def _go_on(self, *, write_off_all: bool = False) -> None:
        go_on_after_restore(
            self.files, self.budgets, write_off_all=write_off_all, allows_unproven=False, at=AT
        )


LONG = [1, *range(3, 12), 13, 14]
"""Seeds of long walks. Those of 2 and 12 write off all that there is before a second charge."""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in LONG)])
def test_nothing_that_happens_to_a_ledger_refunds_anything(tmp_path: Path, seed: int) -> None:
    walk = Walk(tmp_path / "state", random.Random(seed))
    for _ in range(20 if seed == 0 else 150):
        walk.step()
    walk.state.close()
    assert walk.done["charged"] > 1
