"""What the coordinator announces: a plan, which *offers* a round, and the model that it names, in chunks.

A plan is announced many times: it is retained, and the coordinator announces it again when it restarts or
puts its deadline off. Here each announcement is compared with what is known of its round, in memory and on
disk, so that a round is decided on once and charged once; :mod:`agent.cycle` takes it through its phases.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from agent.charges import digest_of
from agent.columns import account_name
from agent.limit_settings import LimitSettings
from agent.limits import BeyondLimitError, may_send, require_size
from agent.publisher import Publisher, Slots
from agent.rounds import RoundState
from agent.state import AgentState
from dpagent.clock import Clock
from dpagent.protocol.chunks import Assembler
from dpagent.protocol.codec import MessageError
from dpagent.protocol.messages import AssetTerms, ModelChunk, Plan
from dpagent.protocol.topics import Topics
from dpagent.structured_log import Event, about
from dpagent.wording import counted

log = logging.getLogger(__name__)

_ASK_AGAIN_S: Final = 10.0
"""The agent requests a model again if no chunk of it has come for this time."""
_CHUNKS_AT_ONCE: Final = 5
"""Topics of chunks that a device is subscribed to at a time: EMQX Serverless allows ten to a client."""


class Phase(Enum):
    """What a device has to do for the announced round."""

    DECIDE = auto()
    """Admit it, or decline it."""
    REPEAT = auto()
    """It is charged, and nothing has left: a crash came between. Run it under that charge. Or the device is
    sitting it out, and the same has come between: rehearse it again."""
    PREPARE = auto()
    """Wait until it is prepared; then charge it, unless it is."""
    TRAIN = auto()
    """Wait for its update, or where it is sat out, for the end of what is rehearsed in its place."""
    SETTLED = auto()
    """Nothing more: spooled, declined, or given up."""


@dataclass(slots=True)
class Announced:
    """The last round that the coordinator announced. Times are monotonic."""

    plan: Plan
    digest: bytes
    """See :func:`~agent.charges.digest_of`."""
    phase: Phase
    begins_at: float
    """No work on it begins before; once it trains, the point of the grid from which its slots are counted."""
    ask_again_at: float
    attempts: int = 0
    """How often it was run without an update."""
    failure: str | None = None
    """Why the last attempt failed."""
    waits: bool = False
    """For a receipt of an earlier round, before it is decided on."""
    has_probes: bool = False
    """It was seen to that it has the probes that it needs."""
    why_not: str | None = None
    """Why it is sat out, if dummies leave when an update would."""
    fixed_until: float = -math.inf
    """Until its slots are about to end, no announcement changes when it sends."""


@dataclass(frozen=True, slots=True)
class Model:
    """The inputs of a round besides its plan."""

    weights: bytes
    assets: dict[str, bytes]
    """By role."""


class Announcements:
    """The coordinator's announcements, of which the last is the current one.

    Args:
        dataset: the ledger's name for the device's records.
        fleet: the fleet's name.
        limits: the device's own.
        takes_graphs: whether a training graph may be of use.
        is_member: whether the device has a certificate.
        state: ledger, rounds and spool.
        publisher: sends the spooled fragments.
        ask_again: requests the broker's retained messages again.
        clock: the program's.
    """

    def __init__(
        self,
        dataset: str,
        fleet: str,
        limits: LimitSettings,
        *,
        takes_graphs: bool,
        is_member: bool,
        state: AgentState,
        publisher: Publisher,
        ask_again: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._dataset, self._fleet, self._limits = dataset, fleet, limits
        self._topics = Topics(fleet)
        self._takes_graphs, self._is_member = takes_graphs, is_member
        self._state, self._publisher = state, publisher
        self._ask_again, self._clock = ask_again, clock
        self._assembler = Assembler()
        self._declined: tuple[bytes, float] | None = None
        """Digest and deadline of the last plan that was declined, so that it is not priced at each
        announcement."""
        self.current: Announced | None = None
        """The last round announced."""
        self._busy_until = -math.inf
        """No work on another round begins before (monotonic), which may be a point of the grid."""
        self._busy_on_any_grid = -math.inf
        """The same, whatever the grid is."""
        self.finished_model: AssetTerms | None = None
        """The model of the job that was finished last, until whoever keeps it has it or gives it up: the next
        job may begin before."""
        self._underway: Announced | None = None
        """The last round whose slots have begun, and the slots: it trains, or is sat out."""
        self._slots = Slots(-math.inf, 1, -math.inf)

    # A plan arrives: the round is offered.

    def take_plan(self, plan: Plan) -> bool:
        """Take an announcement of the coordinator.

        Returns:
            Whether it announces a new round, or the end of the job for the first time.

        Raises:
            MessageError: it is for another fleet, or for an earlier round.
        """
        if plan.fleet != self._fleet:
            raise MessageError("wrong fleet", plan.fleet)
        known = None if self.current is None else self.current.plan
        # Also after a restart: a broker with an older store retains an older plan, and taking that would give
        # up the fragments of the open round.
        latest = self._state.latest_round(plan.job.hex())
        if known is not None and known.job == plan.job:
            latest = max(latest, known.round)
        if plan.round < latest:
            raise MessageError("replayed", f"round {plan.round} after round {latest}")
        is_new = known is None or (known.job, known.round, known.state) != (plan.job, plan.round, plan.state)
        if self.too_large(plan) is None:
            self.finished_model = plan.finished_model or self.finished_model
            self._assembler.keep_for(plan, self.finished_model)
        if plan.state == "finished":
            self._end_job(plan, is_new=is_new)
            return is_new
        if is_new:
            # Rounds of another job only when this one is charged: a broker with an older store retains plans
            # of a job that has ended.
            log_expired(self._state.expire_earlier_rounds(plan.job.hex(), plan.round, self._clock.unix()))
        self._offer(plan, is_new=is_new)
        return is_new

    def _offer(self, plan: Plan, *, is_new: bool) -> None:
        digest, now = digest_of(plan), self._clock.monotonic()
        before = self.current
        if not is_new and before is not None:
            if before.phase is Phase.TRAIN or now < before.fixed_until:
                return  # It will send in the window of the plan that was decided on, whatever that is.
            if before.phase in (Phase.PREPARE, Phase.REPEAT) and before.digest == digest:
                before.plan = plan  # Its deadline may be another.
                return
        underway = self._underway
        if is_new and underway is not None and underway.digest == digest and self._has_slots_left(now):
            # A plan of another job came between, and broke nothing off.
            self.current = underway
            self._publisher.open_window(underway.plan, self._slots.begins_at, self._slots)
            self._publisher.draw_times_again()
            self.draw_probe_times()
            return
        phase = self._phase_of(plan, digest)
        if is_new or before is None or before.plan != plan:
            begins_at = max(now, self._busy_until)
            self.current = before = Announced(plan, digest, phase, begins_at, now + _ASK_AGAIN_S)
        before.phase = phase
        if phase is Phase.REPEAT:
            before.why_not = self._state.sitting_out(plan.job.hex(), plan.round)
        if phase is Phase.DECIDE:
            self._state.offer(plan.job.hex(), plan.round, digest, self._clock.unix())
        self._schedule(before)

    def _has_slots_left(self, now: float) -> bool:
        """Whether the slots of the last round that had some are not over."""
        underway = self._underway
        return underway is not None and now < max(
            underway.fixed_until, self._publisher.end_of(underway.plan, self._slots)
        )

    def _phase_of(self, plan: Plan, digest: bytes) -> Phase:
        """What is left to do, by what is on disk.

        A round that is charged and one that is sat out are in the same phase at the same time. The ledger
        says for which plan a round was charged; one that is charged for other records is over for these.
        """
        job, ledger = plan.job.hex(), self._state.ledger
        known = self._state.round(job, plan.round)
        state = None if known is None else known.state
        if charged_for := ledger.plans_charged(job, plan.round):
            is_ours = bool(ledger.trusts_of(self._dataset, job, plan.round))
            is_this = is_ours and charged_for == {digest.hex()}
            return Phase.REPEAT if is_this and state is RoundState.CHARGED else Phase.SETTLED
        if known is not None and state is RoundState.SITTING_OUT:
            return Phase.REPEAT if known.plan == digest else Phase.SETTLED
        if state not in (None, RoundState.OFFERED, RoundState.DECLINED):
            return Phase.SETTLED
        if self._state.is_decided(job, plan.round):
            return Phase.SETTLED  # Long ago.
        return Phase.SETTLED if self._declined == (digest, plan.deadline) else Phase.DECIDE

    def _schedule(self, announced: Announced) -> None:
        """Give pending fragments of the round new random times, unless they have some for this very plan.

        This program has restarted, or another plan came between: at their old times, all would leave at once.
        """
        publisher = self._publisher
        if not (may_send(announced.plan, self._limits, is_member=self._is_member) and self._is_of(announced)):
            publisher.close_window()  # Not the plan that was charged, or not the limits.
        elif not publisher.is_open_for(announced.plan):
            publisher.open_window(announced.plan, publisher.grid_time(announced.begins_at))
            publisher.draw_times_again()
            self.draw_probe_times()

    def _is_of(self, announced: Announced) -> bool:
        """Whether what is spooled for the round was made for this very plan, and by a job that the owner
        still allows: for a party that is trusted, in one of its accounts, and with a guarantee unless none is
        required.

        Of two plans for one round, the second could give dummies another length than it gives an update that
        was cut by the first.
        """
        job, number = announced.plan.job.hex(), announced.plan.round
        known = self._state.round(job, number)
        if known is None:
            return True
        if known.plan != announced.digest:
            return False
        if known.state not in (RoundState.SPOOLED, RoundState.PUBLISHED):
            return True  # Dummies trust nobody.
        # Without a charge of these records it was spooled for others, under another configuration.
        ledger, limits = self._state.ledger, self._limits
        trusts = ledger.trusts_of(self._dataset, job, number)
        charged = [ledger.accounts.job(account_name(self._dataset, trust), job) for trust in trusts]
        is_proven = all(account is None or math.isfinite(account.epsilon) for account in charged)
        return any(trust in limits.trust for trust in trusts) and (is_proven or limits.allow_unproven)

    def _end_job(self, plan: Plan, *, is_new: bool) -> None:
        now = self._clock.monotonic()
        self.current = Announced(plan, b"", Phase.SETTLED, now, now)
        if self._underway is not None and self._underway.plan.job == plan.job:
            self._underway = None
        # Only its own rounds: a broker with an older store retains the end of the job before the open one.
        self._state.expire_job(plan.job.hex(), self._clock.unix())
        if is_new:
            spent = self._state.ledger.spending_of(self._dataset)
            log.info(
                "job %s is finished, %s", plan.job.hex()[:8], spent,
                extra=about(event=Event.JOB_OVER, job=plan.job.hex()),
            )  # fmt: skip

    def settle_declined(self, announced: Announced) -> None:
        """The device has declined a round: the same plan, announced again, is not decided on again."""
        announced.phase = Phase.SETTLED
        self._declined = announced.digest, announced.plan.deadline

    def begin_slots(self, announced: Announced, slots: Slots) -> None:
        """The slots of a round begin, and work on another only after them.

        From here on, the device does the same with an announcement whether it takes part or sits out.
        """
        announced.begins_at = slots.begins_at
        announced.fixed_until = self._publisher.training_ends_at(announced.plan, slots)
        self._underway, self._slots = announced, slots
        self._busy_until = self._publisher.end_of(announced.plan, slots)
        self._busy_on_any_grid = self._publisher.end_on_any_grid(announced.plan, slots)
        self._publisher.open_window(announced.plan, slots.begins_at, slots)

    def put_off(self, announced: Announced, slots: Slots) -> None:
        """The slots of a round have become more: its training was paused.

        What was announced meanwhile waits until they are over, as it would for the slots of before.
        """
        announced.fixed_until = self._publisher.training_ends_at(announced.plan, slots)
        if self._underway is announced:
            self._slots = slots
            self.wait_until(
                self._publisher.end_of(announced.plan, slots),
                self._publisher.end_on_any_grid(announced.plan, slots),
            )
        if self.current is announced:
            self._publisher.open_window(announced.plan, slots.begins_at, slots)

    def training_is_over(self, announced: Announced) -> None:
        """What training left is taken. Where that is later than its slots end, what is asked for by name
        leaves whole slots later: how long training took does not show beyond them."""
        slot_s = self._publisher.slot_s(announced.plan)
        late_s = self._clock.monotonic() - self._busy_on_any_grid
        if late_s > 0:
            self._busy_on_any_grid += math.ceil(late_s / slot_s) * slot_s

    def on_any_grid(self, time: float) -> float:
        """A time at which work on a round may begin, or when it might have on any grid, if that is later
        (monotonic). What is known to be this device's counts from here, and so tells nothing of its grid."""
        return max(time, self._busy_on_any_grid)

    def draw_probe_times(self) -> None:
        """See :meth:`Publisher.draw_probe_times`."""
        self._publisher.draw_probe_times(self.on_any_grid(self._clock.monotonic()))

    def wait_until(self, time: float, on_any_grid: float | None = None) -> None:
        """No work on a round begins before a time (monotonic), unless it has begun already.

        Args:
            time: the time.
            on_any_grid: what bounds it on any grid, if it is a point of the device's own.
        """
        self._busy_until = max(self._busy_until, time)
        self._busy_on_any_grid = max(self._busy_on_any_grid, time if on_any_grid is None else on_any_grid)
        if self.current is not None and self.current.phase in (Phase.DECIDE, Phase.REPEAT):
            self.current.begins_at = max(self.current.begins_at, time)

    # The model arrives, in chunks, before or after the plan.

    def take_chunk(self, chunk: ModelChunk) -> None:
        """Take a part of the weights or of an asset."""
        if self._assembler.add(chunk) and self.current is not None:
            self.current.ask_again_at = self._clock.monotonic() + _ASK_AGAIN_S

    def too_large(self, plan: Plan) -> str | None:
        """Why nothing is kept of a plan's weights and assets, before they have come; or None."""
        try:
            require_size(plan, self._limits)
        except BeyondLimitError as error:
            return str(error)
        return None

    def model_for(self, plan: Plan) -> Model | None:
        """Weights and assets of a plan, or None while a part of them is missing."""
        weights = self._assembler.get(plan.model.digest, plan.model.size)
        if weights is None:
            return None
        assets: dict[str, bytes] = {}
        for asset in self._assets_of(plan):
            data = self._assembler.get(asset.digest, asset.size)
            if data is None:
                return None
            assets[asset.role] = data
        return Model(weights, assets)

    def _assets_of(self, plan: Plan) -> list[AssetTerms]:
        """What a round needs besides the weights, on this device."""
        unused = ("export",) if self._takes_graphs else ("export", "training-graph")
        return [each for each in plan.assets if each.role not in unused]

    def topics_of_chunks(self, beside: AssetTerms | None) -> list[str]:
        """The topics of chunks to be subscribed to now, which follow from the plan and what has come of it.

        By their exact names, and only once the plan names them: RabbitMQ sends nothing that it retains to a
        subscription with wildcards, and access rules can then allow these topics alone.

        Args:
            beside: what is to be fetched besides what the round needs, if anything.
        """
        if self.current is None or self.too_large(plan := self.current.plan) is not None:
            return []
        named: list[tuple[AssetTerms | None, bytes, int]] = []
        if plan.state == "open":
            named = [(None, plan.model.digest, plan.model.size)]
            named += [(asset, asset.digest, asset.size) for asset in self._assets_of(plan)]
        if beside is not None:
            named.append((beside, beside.digest, beside.size))
        names = (
            self._topics.model_chunk(index) if asset is None else self._topics.asset_chunk(asset.role, index)
            for asset, digest, size in named
            for index in self._assembler.missing(digest, size)
        )
        return list(itertools.islice(names, _CHUNKS_AT_ONCE))

    def asset(self, asset: AssetTerms) -> bytes | None:
        """An asset, or None while a part of it is missing."""
        return self._assembler.get(asset.digest, asset.size)

    def current_model(self, plan: Plan) -> tuple[bytes, bytes] | None:
        """The file that the weights of a round's plan are filled into, and the weights; or None while a part
        of them is missing."""
        if plan.export is None:
            return None
        export = self._assembler.get(plan.export.digest, plan.export.size)
        weights = self._assembler.get(plan.model.digest, plan.model.size)
        return None if export is None or weights is None else (export, weights)

    def wait_for_model(self, announced: Announced) -> bool:
        """Chunks are still arriving, or one was lost: then, after a while, request all, which the broker has.

        Returns:
            Whether they were requested now.
        """
        now = self._clock.monotonic()
        if now < announced.ask_again_at:
            return False
        announced.ask_again_at = now + _ASK_AGAIN_S
        self._assembler.fetch_again()
        self._ask_again()
        return True


def log_expired(fragments: int) -> None:
    """Warn of fragments that were given up, if there are any."""
    if fragments:
        log.warning("%s expired: the round closed before it counted them", counted(fragments, "fragment"))
