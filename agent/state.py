"""The agent's durable state: each step of a round is one transaction, durable before the next."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from agent.charges import Budget, Charge
from agent.database import StateDatabase, ledger_errors, no_ledger, no_second_head
from agent.energy import Energy
from agent.heads import LedgerFiles, SecondHead, read_head, read_second_head, require_head
from agent.ledger import Check, Ledger
from agent.ledger_room import LedgerRoom
from agent.pricing import replay_apart
from agent.rounds import KnownRound, RoundState
from agent.spool import SpooledFragment
from agent.token_store import Request
from dpagent import faults
from dpagent.errors import LedgerError
from dpagent.faults import FaultPoint
from dpagent.notation import plain_bounds
from dpagent.protocol.issuing import Verdict

_WRITTEN: Final = "written"
_WRITTEN_DAY: Final = "written_day"


class BudgetRaisedError(LedgerError):
    """The configuration has a larger lifetime budget than the ledger."""


class AgentState(StateDatabase):
    """The agent's state directory, opened and locked.

    Args:
        files: The directory and the second head.
        budgets: The lifetime budgets of the device's own configuration, by account.
        room, check: As of :class:`StateDatabase`.

    Raises:
        StateInUseError: Another agent uses it.
        StorageError: It cannot be used.
        LedgerError: There is no ledger, it does not verify, or it is older than its second head.
        BudgetRaisedError: The budget is larger than the ledger's.
    """

    def __init__(
        self,
        files: LedgerFiles,
        budgets: Mapping[str, Budget],
        room: LedgerRoom | None = None,
        *,
        check: Check = replay_apart,
    ) -> None:
        second = read_second_head(files.second_head)
        if not files.database.exists():
            raise no_ledger(files, second)
        super().__init__(files, room, check=check)
        try:
            self._take_over(second, budgets)
        except BaseException:
            self.close()
            raise

    def _take_over(self, second: SecondHead | None, budgets: Mapping[str, Budget]) -> None:
        require_head(self.ledger.digests, read_head(self.files.head), self.files.head)
        if not self.ledger.digests:
            raise no_ledger(self.files, second)
        if second is None:
            raise no_second_head(self.files)
        self.require_kept(second)
        # A crash may have left the heads one entry behind; and what cannot be written should fail here.
        self.save_heads()
        for name, budget in budgets.items():
            known = self.ledger.budget(name) if name in self.ledger.datasets else None
            if known is None or budget.epsilon > known.epsilon or budget.delta > known.delta:
                raise BudgetRaisedError(_raised(self.ledger, name, known, budget))
        for name, budget in budgets.items():
            if budget != self.ledger.budget(name):
                with self.entry():
                    self.ledger.set_budget(name, budget)

    def save_second_head(self) -> None:
        """As of :class:`StateDatabase`, unless another agent has written the second head since.

        Two agents with copies of one state directory would spend its budget twice: each has a lock of its
        own, but they share the second head. Nor may one call a charge unsent again under which the other has
        sent.

        Raises:
            LedgerError: It is not the one that this agent wrote.
            StorageError: It cannot be written.
        """
        with self.holding_second_head():
            self._require_second_head()
            super().save_second_head()

    def _require_second_head(self) -> None:
        if (second := read_second_head(self.files.second_head)) is not None:
            self.require_kept(second)

    def round(self, job: str, number: int) -> KnownRound | None:
        """A round on record, or None."""
        with ledger_errors(self.file):
            return self.rounds.find(job, number)

    def latest_round(self, job: str) -> int:
        """The greatest number of a job's rounds on record; 0 if there is none."""
        with ledger_errors(self.file):
            return self.rounds.latest(job)

    def is_decided(self, job: str, number: int) -> bool:
        """Whether a round of a job, or a later one, was ever decided on."""
        with ledger_errors(self.file):
            return number <= self.rounds.last_decided(job)

    def jobs_beside(self, job: str) -> int | None:
        """The number of jobs of which a round was ever decided on; None if this is one of them."""
        with ledger_errors(self.file):
            return None if self.rounds.last_decided(job) else self.rounds.jobs_decided()

    def sitting_out(self, job: str, number: int) -> str | None:
        """Why the device is sitting a round out; None if it is not."""
        known = self.round(job, number)
        return known.reason if known is not None and known.state is RoundState.SITTING_OUT else None

    def awaits_receipt(self, job: str, *, by_probe: bool) -> bool:
        """See :meth:`Rounds.awaits_receipt`."""
        return self.rounds.awaits_receipt(job, by_probe=by_probe)

    def offer(self, job: str, number: int, plan: bytes, now: float) -> None:
        """A plan with the SHA-256 ``plan`` has arrived, at the Unix time ``now``."""
        with self.written():
            self.rounds.offer(job, number, plan, now)
        faults.reached(FaultPoint.AGENT_OFFERED)

    def decline(
        self, job: str, number: int, reason: str, now: float, dummies: Sequence[SpooledFragment] = ()
    ) -> None:
        """The device does not take part in a round; dummies, if any, leave in place of its fragments."""
        state = RoundState.SAT_OUT if dummies else RoundState.DECLINED
        with self.written():
            self.rounds.move(job, number, state, now, reason)
            self._put(job, number, dummies)

    def sit_out(self, job: str, number: int, plan: bytes, reason: str, now: float) -> None:
        """The device sits a round out, and hides that. As much is written, as durably, as by a charge.

        Args:
            job: its job, in hexadecimal.
            number: its number.
            plan: the SHA-256 of its plan.
            reason: why, for the owner.
            now: Unix time.
        """
        with self.entry():
            self.rounds.move(job, number, RoundState.SITTING_OUT, now, reason, plan)

    def give_up(self, job: str, number: int, now: float, dummies: Iterable[SpooledFragment]) -> None:
        """The device runs a charged round no more, of which nothing has left; dummies leave in its place."""
        with self.holding_second_head():
            with self.written():
                self.rounds.move(job, number, RoundState.EXPIRED, now)
                self._put(job, number, dummies)
            # From here on, an older copy of the state may not run the round.
            self.save_second_head()

    def charge(self, charges: Sequence[Charge], now: float) -> None:
        """Charge for a round. Only then may a record be read for it.

        Args:
            charges: all of one round, at least one; each in an account of its own.
            now: Unix time.

        Raises:
            StorageError: The charges are not durable, none of them; or, if only a head could not be written,
                all are.
        """
        faults.reached(FaultPoint.AGENT_ADMITTED)
        with self.entry():
            for charge in charges:
                self.ledger.charge(charge)
            one = charges[0]
            self.rounds.move(one.job, one.round, RoundState.CHARGED, now, plan=bytes.fromhex(one.plan))
            faults.reached(FaultPoint.AGENT_CHARGE_WRITTEN)
        faults.reached(FaultPoint.AGENT_HEAD_SAVED)

    def spool_round(
        self, job: str, number: int, fragments: Iterable[SpooledFragment], now: float, failure: str | None
    ) -> None:
        """Spool the fragments of a charged round, which spends its tokens. Only then may a byte leave.

        Args:
            job: its job, in hexadecimal.
            number: its number.
            fragments: all of its update.
            now: Unix time.
            failure: why no record counts in it, if none does.

        Raises:
            LedgerError: another agent, with a copy of the directory or in the same one, has spooled it under
                the same charge.
            StorageError: it cannot be written.
        """
        self._spool(job, number, fragments, RoundState.SPOOLED, now, failure)

    def spool_dummies(self, job: str, number: int, dummies: Iterable[SpooledFragment], now: float) -> None:
        """Spool the dummies of a round that the device sits out, as :meth:`spool_round` does fragments."""
        self._spool(job, number, dummies, RoundState.SAT_OUT, now, None)

    def _spool(
        self, job: str, number: int, fragments: Iterable[SpooledFragment], state: RoundState, now: float,
        reason: str | None,
    ) -> None:  # fmt: skip
        faults.reached(FaultPoint.AGENT_TRAINED)
        # To the end: two agents with copies would else both find that nothing has left, and both send.
        with self.holding_second_head():
            self._require_second_head()
            with self.written():
                known = self.rounds.find(job, number)
                if known is None or known.state not in (RoundState.CHARGED, RoundState.SITTING_OUT):
                    raise LedgerError(
                        f"Round {number} of job {job[:8]} is over in {self.file}: another agent works with "
                        "the same directory, whose lock was deleted. Stop one of them."
                    )
                self._put(job, number, fragments)
                self.rounds.move(job, number, state, now, reason)
                self.tokens.spend(bytes.fromhex(job), number)
                faults.reached(FaultPoint.AGENT_SPOOL_WRITTEN)
            faults.reached(FaultPoint.AGENT_SPOOLED)
            # From here on, an older copy of the state may not run the round again.
            self.save_second_head()

    def has_probes(self, job: str, number: int) -> bool:
        """See :meth:`Probes.are_there`."""
        with ledger_errors(self.file):
            return self.probes.are_there(job, number)

    def keep_probes(self, job: str, number: int, probes: Sequence[SpooledFragment]) -> None:
        """Keep a round's probes, which leave from now on; those of others do no more.

        A note (:meth:`noted`): if it is lost, others leave in their place.
        """
        with self.noted():
            self.probes.put(job, number, probes)

    def _put(self, job: str, number: int, fragments: Iterable[SpooledFragment]) -> None:
        if fragments := list(fragments):
            self.spool.put(job, number, fragments)
            self.rounds.note_leaving(job, number)

    def keep_token_requests(self, job: bytes, number: int, requests: Iterable[Request]) -> None:
        """Keep requests for tokens, before they leave; those of the job's rounds before one go."""
        with self.written():
            self.tokens.forget_before(job, number)
            for request in requests:
                self.tokens.put(request)
        faults.reached(FaultPoint.TOKENS_ASKED)

    def settle_tokens(
        self, job: bytes, number: int, verdict: Verdict, tokens: Sequence[bytes], reason: str | None
    ) -> None:
        """Keep the answer to a request for tokens."""
        with self.written():
            self.tokens.settle(job, number, verdict, tokens, reason)
        faults.reached(FaultPoint.TOKENS_TAKEN)

    def keep_token_list(self, job: bytes, message: bytes, spared: Collection[bytes] = ()) -> None:
        """Keep a signed list of keys that was seen; see :meth:`TokenStore.put_list`."""
        with self.written():
            self.tokens.put_list(job, message, spared)

    def keep_token_conflict(self, job: bytes, number: int, one: bytes, other: bytes, now: float) -> None:
        """Keep two signed lists that disagree on a round's key."""
        with self.written():
            self.tokens.put_conflict(job, number, one, other, now)

    def forget_token_conflicts(self, jobs: Iterable[bytes]) -> None:
        """Drop what was kept of a coordinator that this board does not have any more."""
        with self.written():
            self.tokens.drop_conflicts(jobs)

    def note_energy(self, job: str, number: int, energy: Energy) -> None:
        """Add to the energy that the board has taken for a round, a note for the owner."""
        with self.noted():
            self.rounds.add_energy(job, number, energy.joules, energy.source)

    def mark_sent(self, resend_at: Mapping[bytes, float], now: float) -> None:
        """Note published fragments, with the resend time of each by digest.

        A note (:meth:`noted`): waiting for the disk would delay the next fragment, and bursts of fragments
        could be distinguished from those of other devices. If a note is lost, a fragment is sent
        twice and counted once.
        """
        with self.noted():
            for digest, again_at in resend_at.items():
                self.spool.mark_sent(digest, now, again_at)
            self.rounds.follow_fragments(now)
            faults.reached(FaultPoint.AGENT_SENT_WRITTEN)
        faults.reached(FaultPoint.AGENT_SENT_NOTED)

    def mark_counted(self, digests: Sequence[bytes], now: float) -> int:
        """Drop the fragments and probes in a receipt; return the number of ours.

        A note, for the same reason: a forgotten fragment is sent and receipted again.
        """
        faults.reached(FaultPoint.AGENT_RECEIPT_ARRIVED)
        with ledger_errors(self.file):
            if not (self.spool.known(digests) or self.probes.known(digests)):
                return 0
        with self.noted():
            counted = self.spool.mark_counted(digests)
            if counted:
                self.rounds.note_receipts()
            counted += self.probes.mark_counted(digests)
            self.rounds.follow_fragments(now)
            faults.reached(FaultPoint.AGENT_RECEIPT_WRITTEN)
        faults.reached(FaultPoint.AGENT_RECEIPTED)
        return counted

    def mark_own_counted(self, place: str, digest: bytes, now: float) -> int:
        """Drop the fragment or probe in a receipt on a topic of its own; return the number of ours.

        On the topic of any other it is none. The coordinator could else say of one fragment on the topic of
        another that it counts: were it not sent again, both would be of the board that hears that topic.

        Args:
            place: where the receipt came: the last level of its topic.
            digest: what it says.
            now: Unix time.
        """
        message = self.spool.message(digest) or self.probes.message(digest)
        if message is None or SpooledFragment(digest, message).receipt_place != place:
            return 0
        return self.mark_counted([digest], now)

    def reschedule(self, times: Iterable[tuple[float | None, bytes]]) -> None:
        """Give pending fragments new times."""
        self.spool.reschedule(times)
        faults.reached(FaultPoint.AGENT_TIMES_DRAWN)

    def expire_other_rounds(self, job: str, round_number: int, now: float) -> int:
        """Give up all other rounds and their fragments; return the number of fragments."""
        with self.written():
            self.rounds.expire_others(job, round_number, now)
            self.rounds.forget_dummies_of_others(job, round_number)
            expired = self.spool.expire_others(job, round_number)
        faults.reached(FaultPoint.AGENT_OTHERS_EXPIRED)
        return expired

    def expire_earlier_rounds(self, job: str, round_number: int, now: float) -> int:
        """Give up the earlier rounds of a job and their fragments; return the number of fragments."""
        with self.written():
            self.rounds.expire_earlier(job, round_number, now)
            self.rounds.forget_earlier_dummies(job, round_number)
            return self.spool.expire_earlier(job, round_number)

    def expire_job(self, job: str, now: float) -> None:
        """Give up the rounds of a job, their fragments and their probes."""
        with self.written():
            self.rounds.expire_job(job, now)
            self.spool.expire_job(job)
            self.probes.end_job(job)

    def forget_other_jobs(self, job: str) -> None:
        """Drop the spool's rows of other jobs; the ledger keeps all of its entries."""
        with self.written():
            self.spool.forget_other_jobs(job)

    def add_to_counters(self, **amounts: int) -> None:
        """Add to the operator's running totals (bytes up and down, rejections)."""
        changed = {name: amount for name, amount in amounts.items() if amount}
        if not changed:
            return
        with self.noted():
            self.connection.executemany(
                "INSERT INTO counters VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
                list(changed.items()),
            )

    def written_on(self, day: int) -> int:
        """What :meth:`keep_written` has kept of a day: bytes."""
        with ledger_errors(self.file):
            known = dict(self.connection.execute("SELECT name, value FROM counters").fetchall())
        return int(known.get(_WRITTEN, 0)) if known.get(_WRITTEN_DAY) == day else 0

    def keep_written(self, day: int, written: int) -> None:
        """Keep what was written to the disk on a day, in place of what is known of another.

        Args:
            day: since 1970.
            written: bytes.
        """
        with self.noted():
            self.connection.executemany(
                "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                [(_WRITTEN_DAY, day), (_WRITTEN, written)],
            )


def _raised(ledger: Ledger, dataset: str, known: Budget | None, budget: Budget) -> str:
    if known is None:
        names = ", ".join(map(repr, ledger.datasets))
        had = f"has none for them, but for {names}. One more name is one more budget"
    else:
        had = f"has {plain_bounds(known.epsilon, known.delta)}"
    return (
        f"The configuration sets a lifetime budget of {plain_bounds(budget.epsilon, budget.delta)} for "
        f"{dataset!r}; the ledger {had}. A budget grows only by `dpagent budget raise`; otherwise put the "
        "old value back."
    )
