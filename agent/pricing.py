"""The pricing process, as the agent sees it: whether a round may run, what it costs, and whether a ledger is
right.

All of that takes numpy, and tens of MiB for distributions of privacy losses. So a process of its own answers
(:mod:`agent.pricing_program`), and ends: at once, or on a board with memory to spare some time after its last
answer, since its start takes more of the processor than the price of most rounds. It gets the plan, the
weights, what the ledger adds up to and the device's limits; it has no record, nor a file that holds any, and
the agent charges what it answers before anybody reads one. A process that cannot be started, or ends without
an answer, is a round that the device declines.

A schedule that is slow to price costs that process its time, and the agent goes on meanwhile. What the last
round costs, or why it may not run, as long as nothing else was charged, and what the last jobs cost is
remembered here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from agent.charges import Charge, Record, digest_of
from agent.declined import TooLate
from agent.errand import Answer, Errand, ErrandError, Refusal, ask
from agent.pricing_messages import JobPrice, Priced, PriceQuestion, ReplayQuestion
from dpagent.errors import DpagentError, LedgerError

_PROGRAM: Final = "agent.pricing_program"


class Verdict(NamedTuple):
    """What came of a question. Public: it follows from no record.

    Attributes:
        charges: to be made before a record is read, of no time yet; none if there is a reason why not.
        why_not: why the round may not run, or None.
        spent_s: processor time that the answer took elsewhere, in seconds.
        started_s: that it took by the clock until the process had started, and had the question.
    """

    charges: tuple[Charge, ...]
    why_not: DpagentError | None = None
    spent_s: float = 0.0
    started_s: float = 0.0


class Prices(Protocol):
    """Whoever prices rounds for a :class:`~agent.cycle.Cycle`: one at a time."""

    def ask(self, question: PriceQuestion) -> Future[Verdict]:
        """Price a round. The answer raises nothing."""
        ...

    def end(self) -> None:
        """End what goes on; nobody waits for its answer."""
        ...

    def tend(self) -> None:
        """End what has had nothing to do for long; call it now and then."""
        ...


class Pricing:
    """Starts, asks and ends pricing processes. Implements :class:`Prices`.

    Args:
        stays_s: how long a process stays after an answer, in seconds.
    """

    def __init__(self, stays_s: float = 0.0) -> None:
        self._errand: Errand | None = None
        self._awaited: Future[Answer | Refusal] | None = None
        self._stays_s, self._asked_at = stays_s, 0.0
        self._known: Mapping[str, JobPrice] = {}
        self._last: tuple[tuple[bytes, int, bool], Verdict] | None = None
        """For which plan and how many charges the last answer holds, whether the round may run or not; and
        the answer, which takes no time from then on."""

    def ask(self, question: PriceQuestion) -> Future[Verdict]:
        """As of :class:`Prices`."""
        if self._awaited is not None and not self._awaited.done():
            self.end()
        verdict: Future[Verdict] = Future()
        key = digest_of(question.plan), question.books.number_of_charges, question.is_charged
        if self._last is not None and self._last[0] == key:
            verdict.set_result(self._last[1])
            return verdict
        self._asked_at = began_at = time.monotonic()
        try:
            if self._errand is None or not self._stays_s or not self._errand.may_be_asked:
                self.end()
                self._errand = Errand(_PROGRAM, stays=self._stays_s > 0)
        except ErrandError as error:
            verdict.set_result(Verdict((), error))
            return verdict

        def take(answer: Future[Answer | Refusal]) -> None:
            said = answer.result()
            found = verdict_of(said)
            if isinstance(said, Answer):
                self._known = said.value.known
            if not isinstance(found.why_not, ErrandError | TooLate):
                self._last = key, found._replace(spent_s=0.0)
            started_s = 0.0 if said.asked_at is None else said.asked_at - began_at
            verdict.set_result(found._replace(started_s=started_s))

        self._awaited = self._errand.ask(replace(question, known=self._known))
        self._awaited.add_done_callback(take)
        return verdict

    def end(self) -> None:
        """As of :class:`Prices`; the process is killed."""
        if self._errand is not None:
            self._errand.end()
            self._errand = self._awaited = None

    def tend(self) -> None:
        """As of :class:`Prices`."""
        is_idle = self._awaited is not None and self._awaited.done()
        if is_idle and time.monotonic() >= self._asked_at + self._stays_s:
            self.end()


def verdict_of(said: Answer | Refusal) -> Verdict:
    """What the pricing process said to a :class:`~agent.pricing_messages.PriceQuestion`."""
    if isinstance(said, Refusal):
        return Verdict((), said.error(), said.spent_s)
    priced: Priced = said.value
    return Verdict(priced.charges, spent_s=said.spent_s)


def replay_apart(records: Sequence[Record]) -> None:
    """Have the records of a ledger replayed (:func:`agent.replay.replay`) in a process that ends.

    Raises:
        LedgerError: as there.
        ErrandError: they cannot be checked on this board now.
    """
    replay_by(lambda question: ask(_PROGRAM, question), records)


def replay_by(answer: Callable[[ReplayQuestion], object], records: Sequence[Record]) -> None:
    """As :func:`replay_apart`, in whatever process answers.

    Args:
        answer: the process's, or raises.
        records: of the ledger.
    """
    try:
        answer(ReplayQuestion(tuple(records)))
    except LedgerError:
        raise
    except DpagentError as error:
        kind = ErrandError if isinstance(error, ErrandError) else LedgerError
        raise kind(
            f"The ledger cannot be checked: {error}. It is as it was; start the agent again."
        ) from error
