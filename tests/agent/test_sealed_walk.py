"""Whatever comes between, of each round one noisy sum is sealed, under a charge for its very plan: by random
walks.

A coordinator announces plans of several methods and jobs, one for another's round too, and confirms or does
not; the owner restarts the agent, changes budgets, trust and the name of the data; power cuts come at fault
points; a thief puts older copies of the state directory back. After each step, an account of the tests' own
looks at what was sealed. (Mutants that it finds: a start, or a spool, that does not ask the second head; a
window that is opened for whatever plan comes.)
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import devices
import pytest
from devices import PERIOD_S, Device, Mortal, open_device
from fleets import make_plan, report_plan, terms, update_plan
from ledgers import files_of

from agent.charges import Budget, digest_of
from agent.custody import begin_ledger, raise_budget
from agent.replay import replay
from agent.state import AgentState, BudgetRaisedError
from dpagent import faults
from dpagent.errors import DpagentError, LedgerError
from dpagent.faults import FaultPoint
from dpagent.protocol.codec import MessageError, decode
from dpagent.protocol.messages import Fragment, Plan, Receipts
from dpagent.protocol.receipts import receipt_digest

NAMES = "digits", "renamed"
PLANS: dict[str, Callable[..., Plan]] = {
    "sum": lambda **of: make_plan(**of, **terms(noise_multipliers=[4.0, 3.0, 2.0])),
    "less noise": lambda **of: make_plan(**of, wire={"block": 700}, **terms(noise_multipliers=[1.0] * 3)),
    "cheap": lambda **of: make_plan(**of, wire={"block": 900}, **terms(noise_multipliers=[400.0] * 3)),
    "reports": report_plan,
    "trusting": lambda **of: update_plan(**of, block=150),
    "two accounts": lambda **of: update_plan(**of, device_noise=[18.0, 15.0, 12.0]),
}
POINTS = [point for point in FaultPoint if point.startswith("agent") or point is FaultPoint.FILE_WRITTEN]
STEPS: dict[str, float] = {
    "announce": 10, "time": 8, "all": 8, "publish": 10, "confirm": 4, "receipts": 4, "fault": 6, "ends": 2,
    "finish": 1, "reopen": 2, "copy": 2, "put_back": 2, "budget": 2, "trust": 2, "rename": 2,
}  # fmt: skip


class _PowerCut(BaseException):
    pass


class Walk:
    """A device, what happens to it, and what it has sealed.

    Args:
        path: for its files.
        seed: of what happens.
        patch: until the end of the test.
    """

    def __init__(self, path: Path, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.path, self._choices, self._patch = path / "device", random.Random(seed), patch
        self.path.mkdir()
        self._copies: list[Path] = []
        self._budget, self._trust, self._name = Budget(60.0, 1e-3), ["none", "coordinator"], NAMES[0]
        self._plan: Plan | None = None
        self._last: Counter[bytes] = Counter()
        """The round of each job that was announced last."""
        self._sealed: list[tuple[Fragment, Plan]] = []
        self.left: defaultdict[tuple[str, int, int], set[bytes]] = defaultdict(set)
        """Ids of what was sealed, by job, round and position."""
        self.done: Counter[str] = Counter()
        patch.setattr(devices, "open_state", self._open_state)
        self._stack = ExitStack()
        self._device = self._opened()

    def _open_state(self, state_dir: Path) -> AgentState:
        files = files_of(state_dir)
        budgets = {f"{name}{mark}": self._budget for name in NAMES for mark in ("", "@coordinator")}
        if not files.second_head.exists():
            begin_ledger(files, budgets)
        with suppress(BudgetRaisedError):
            return AgentState(files, budgets, check=replay)
        raise_budget(files, budgets)
        return AgentState(files, budgets, check=replay)

    def _opened(self) -> Device:
        self._patch.setattr(devices, "DATASET", self._name)
        limits = {"methods": ["dp-sgd", "incrementing", "ldp-fl", "central"], "trust": self._trust}
        budget = {"coordinator": {"epsilon": 4.0, "delta": 1e-4}}
        device = self._stack.enter_context(open_device(self.path, budget=budget, limits=limits))
        device.cycle._publisher._departures._seal = self._seal
        device.give()
        self._device = device
        self.confirm(is_confirmed=False)
        return device

    def _seal(self, message: bytes, plan: Plan) -> bytes:
        self._sealed.append((decode(message, Fragment), plan))
        return bytes(8)

    def step(self) -> None:
        """Let something happen, and look at what was sealed."""
        (what,) = self._choices.choices(list(STEPS), list(STEPS.values()))
        try:
            getattr(self, what)()
        except DpagentError:  # Of the disk, or of a second agent: the program ends.
            self.reopen()
        self.done[what] += 1
        self._check()

    def _check(self) -> None:
        rows = self._device.state.connection.execute("SELECT body FROM entries WHERE kind = 'charge'")
        charges: defaultdict[tuple[str, int], dict[str, str]] = defaultdict(dict)
        for (body,) in rows:
            charge = json.loads(body)
            charges[charge["job"], charge["round"]][charge["dataset"]] = charge["plan"]
        for fragment, plan in self._sealed:
            if fragment.payload.startswith((Fragment.PROBE, Fragment.DUMMY)):
                continue
            job, number = plan.job.hex(), fragment.round
            accounts = charges[job, number]
            assert set(accounts.values()) == {digest_of(plan).hex()}
            trusts = {name.partition("@")[2] for name in accounts if name.partition("@")[0] == self._name}
            assert "" in trusts or ("coordinator" in trusts and "coordinator" in self._trust)
            ids = self.left[job, number, fragment.position]
            ids.add(fragment.id)
            assert len(ids) == 1, "a second noisy sum for one round"
            self.done["sealed"] += 1
        self._sealed.clear()

    # What may happen.

    def announce(self) -> None:
        job = self._choices.choice([b"j", b"k", b"l", self._choices.randbytes(1)]) * 16
        number, kind = (
            min(3, self._last[job] + self._choices.randint(0, 1)),
            self._choices.choice(list(PLANS)),
        )
        self._last[job] = number = max(1, number)
        self._plan = PLANS[kind](job=job, round=number, deadline=self._choices.choice([4e9, 4.1e9]))
        self.confirm()
        self._device.give()

    def confirm(self, *, is_confirmed: bool = True) -> None:
        if self._plan is not None:
            with suppress(MessageError):  # An earlier round is refused.
                self._device.take_plan(self._plan, confirmed=is_confirmed)

    def finish(self) -> None:
        if self._plan is not None:
            self._plan = self._plan.with_values({"state": "finished"})
            self.confirm()

    def time(self) -> None:
        for _ in range(self._choices.randint(1, 30)):
            self._device.clock.advance(PERIOD_S / 2)
            self._device.cycle.advance()

    def all(self) -> None:
        for _ in range(40):
            if not self._device.is_ready:
                break
            self._device.clock.advance(max(self._device.cycle.due_in_s(), 1e-6))
            self._device.cycle.advance()

    def publish(self) -> None:
        for _ in range(self._choices.randint(1, 20)):
            self._device.clock.advance(self._choices.choice([0.05, 0.3, 3.0]))
            self._device.cycle._publisher.publish_due()

    def receipts(self) -> None:
        ids = [each for known in self.left.values() for each in known]
        some = self._choices.sample(ids, min(len(ids), 20))
        self._device.take_receipts(Receipts(b"".join(map(receipt_digest, some))))

    def ends(self) -> None:
        Mortal(self._device, prepares=self._choices.randint(0, 1), updates=self._choices.randint(0, 3))

    def fault(self) -> None:
        """The power is cut where a fault point is reached, if it is."""
        point, left = self._choices.choice(POINTS), self._choices.randint(1, 3)

        def reached(at: FaultPoint) -> None:
            nonlocal left
            left -= at is point
            if at is point and not left:
                raise _PowerCut

        with self._patch.context() as patch, suppress(DpagentError):
            patch.setattr(faults, "reached", reached)
            try:
                for work in (self.all, self.publish, self.receipts, self.confirm, self.all, self.publish):
                    work()
            except _PowerCut:
                self.done["power cuts"] += 1
        # What was not durable is gone; the files stay as they are.
        cut = self.path.with_name("cut")
        shutil.copytree(self.path / "state", cut)
        self._close()
        shutil.rmtree(self.path / "state")
        cut.rename(self.path / "state")
        self._opened()

    def reopen(self) -> None:
        self._close()
        self._opened()

    def _close(self) -> None:
        with suppress(DpagentError):
            self._stack.close()

    def copy(self) -> None:
        self._close()
        self._copies.append(self.path.with_name(f"copy-{len(self._copies)}"))
        shutil.copytree(self.path / "state", self._copies[-1])
        self._opened()

    def put_back(self) -> None:
        """Of an older copy; if it is refused, the newest comes back."""
        if not self._copies:
            return
        self._close()
        newest = self.path.with_name("newest")
        (self.path / "state").rename(newest)
        shutil.copytree(self._choices.choice(self._copies), self.path / "state")
        try:
            self._opened()
        except LedgerError:
            self._close()
            shutil.rmtree(self.path / "state")
            newest.rename(self.path / "state")
            self._opened()
        else:
            shutil.rmtree(newest)

    def budget(self) -> None:
        self._budget = Budget(self._choices.choice([1.0, 20.0, 60.0, 100.0]), 1e-3)
        self.reopen()

    def trust(self) -> None:
        self._trust = self._choices.choice([["none"], ["none", "coordinator"]])
        self.reopen()

    def rename(self) -> None:
        self._name = NAMES[self._name == NAMES[0]]
        self.reopen()

    def end(self) -> None:
        """It is over."""
        self._close()


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))]


@pytest.mark.parametrize("seed", SEEDS)
def test_of_each_round_one_noisy_sum_is_sealed_under_its_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    walk = Walk(tmp_path, seed, monkeypatch)
    for _ in range(150 if seed else 50):
        walk.step()
    walk.end()
    assert walk.done["sealed"] > 0
