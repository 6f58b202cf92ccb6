"""What the agent asks the pricing process about a round, after what it can see for itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from agent.announcements import Model
from agent.charges import digest_of
from agent.data_form import DataForm
from agent.limit_settings import LimitSettings
from agent.limits import require_key, require_receipts, require_time_left
from agent.pricing import Prices, Verdict
from agent.pricing_messages import PriceQuestion
from agent.sitting_out import SittingOut
from agent.state import AgentState
from agent.tokens import Tokens
from dpagent.clock import Clock
from dpagent.errors import DpagentError, said
from dpagent.protocol.messages import Plan
from dpagent.protocol.update_size import blocks_of

log = logging.getLogger(__name__)


class PriceQuestions:
    """Asks for the prices of rounds.

    Args:
        dataset: the ledger's name for the device's records.
        limits: the device's own.
        form: of the records, which is declared.
        state: ledger, rounds and spool.
        prices: answers.
        tokens: that fragments carry, where a plan asks for them.
        sitting_out: knows whether a decision stays on record.
        clock: the program's.

    Attributes:
        kept_to: the digest of the round that is charged, or sat out, and need not be asked about again: that
            it keeps to the device's limits, or how it is sat out, is known since this program's start.
    """

    def __init__(
        self,
        dataset: str,
        limits: LimitSettings,
        form: DataForm,
        *,
        state: AgentState,
        prices: Prices,
        tokens: Tokens,
        sitting_out: SittingOut,
        clock: Clock,
    ) -> None:
        self._dataset, self._limits, self._form, self._state = dataset, limits, form, state
        self._prices, self._tokens, self._sitting_out, self._clock = prices, tokens, sitting_out, clock
        self.kept_to = b""

    def price(self, plan: Plan, model: Model) -> Future[Verdict]:
        """What a round costs, or why the device declines it; the answer raises nothing."""

        def require() -> None:
            self._sitting_out.require_room(plan)
            require_receipts(plan, is_member=self._tokens.is_member)
            self._tokens.require(plan, blocks_of(plan))
            require_key(plan)  # Before the price: dummies do not hide how long that takes.
            require_time_left(plan, self._clock.unix(), plan.compute_slot_s)

        return self._asked(plan, model, require)

    def keeps_to_limits(self, plan: Plan, model: Model, *, is_rehearsal: bool) -> Future[Verdict]:
        """Whether a charged round keeps to the device's limits, which may be others since a restart.

        Args:
            plan: the round's.
            model: that it names.
            is_rehearsal: whether the round is not charged, but sat out: nothing comes of the answer but the
                time that it takes.
        """
        if digest_of(plan) == self.kept_to:
            return _answered(None)

        def require() -> None:
            if not is_rehearsal:
                require_receipts(plan, is_member=self._tokens.is_member)
                self._tokens.require_there(plan)

        return self._asked(plan, model, require, is_charged=True)

    def _asked(
        self, plan: Plan, model: Model, require: Callable[[], None], *, is_charged: bool = False
    ) -> Future[Verdict]:
        try:
            require()
            books, now = self._state.ledger.books, self._clock.unix()
            return self._prices.ask(
                PriceQuestion(
                    plan, model.weights, self._form, self._dataset, books, self._limits, now, {}, is_charged
                )
            )
        except DpagentError as error:
            return _answered(error)
        except Exception as error:
            # No plan ends the agent.
            log.debug("the details", exc_info=True)
            return _answered(DpagentError(said(error)))

    def end(self) -> None:
        """End what goes on."""
        self._prices.end()

    def tend(self) -> None:
        """As :meth:`agent.pricing.Prices.tend`."""
        self._prices.tend()


def _answered(why_not: DpagentError | None) -> Future[Verdict]:
    answer: Future[Verdict] = Future()
    answer.set_result(Verdict((), why_not))
    return answer
