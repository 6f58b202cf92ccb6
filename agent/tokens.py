"""The device's tokens: asked for ahead of rounds, waited for before a charge, used by the spool.

A request leaves when the device has decided whether it would take part, and before it charges anything. Where
it declines, a request of the same size leaves at such a time too, with a public reason; and both wait for the
answer before they go on. So tokens change nothing in what a broker can tell of a device that sits a round
out. No record is read before all that.

Requests are of a known device, and fragments must not be. So requests leave at random times that tell nothing
of the device's grid, on which its windows open; and a round that was asked for on the spot begins a fixed
time after its plan, not when the answer comes.

A request is made once for each round, and is final: what is answered stays, whatever the device would do by
then.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from agent.declined import OverBudget
from agent.key_watch import KeyWatch
from agent.limits import BeyondLimitError
from agent.publisher import Publisher
from agent.state import AgentState
from agent.token_store import Request
from dpagent.clock import Clock
from dpagent.errors import ConfigurationError, DpagentError
from dpagent.protocol.blind_signatures import PREFIX_BYTES, BlindSignatureError, blind, finalize
from dpagent.protocol.codec import MessageError
from dpagent.protocol.issuing import (
    Answer,
    AnswerOpener,
    Ask,
    Statement,
    Verdict,
    Wish,
    blinded_digest,
    padding,
    seal_ask,
)
from dpagent.protocol.messages import Fragment, Plan, Sealed
from dpagent.protocol.sealing import new_sealing_secret
from dpagent.protocol.signing import Verifier
from dpagent.protocol.tokens import RoundKey, TokenKeys, key_digest, with_token
from dpagent.protocol.topics import Topics
from dpagent.transport.session import MqttSession
from dpagent.wording import counted

if TYPE_CHECKING:
    from agent.identity import Identity

log = logging.getLogger(__name__)

_WITHIN_S: Final = 10.0
"""A round that is asked for on the spot begins so long after its plan, or three periods of the device's grid
where that is longer: requests and answers have so much time."""
_AGAIN_S: Final = 10.0
"""A request without an answer leaves again after this time, and then after twice as long each time."""
_LONGEST_S: Final = 600.0
_TO_DECIDE: Final = 0.25
"""Of a period of the grid: a decision that takes no longer does not show."""
_DRAWS: Final = 64
"""Attempts at a message that no factor of the modulus divides. With a true key the first one is."""


class NoTokens(DpagentError):
    """The device has no tokens for a round, and will get none; the text gives the reason."""


def wish_of(error: Exception) -> Wish:
    """The public reason for which a device declines."""
    match error:
        case OverBudget():
            return Wish.BUDGET
        case BeyondLimitError():
            return Wish.LIMITS
        case _:
            return Wish.UNABLE


class Tokens:
    """The tokens of one device.

    Args:
        fleet: its fleet.
        identity: by which the fleet knows it; None if it has not enrolled.
        verifier: of the coordinator's signature.
        topics: of the fleet.
        state: keeps requests and tokens.
        session: to publish by.
        publisher: knows the device's grid.
        clock: the program's.
    """

    def __init__(
        self,
        fleet: str,
        identity: Identity | None,
        *,
        verifier: Verifier,
        topics: Topics,
        state: AgentState,
        session: MqttSession,
        publisher: Publisher,
        clock: Clock,
    ) -> None:
        self._fleet, self._identity, self._verifier = fleet, identity, verifier
        self._topics, self._state, self._session = topics, state, session
        self._publisher, self._clock = publisher, clock
        self._random = random.SystemRandom()
        self.watch = KeyWatch(
            fleet, verifier=verifier, topics=topics, state=state, session=session, clock=clock
        )
        self._due: dict[tuple[bytes, int], tuple[float, float]] = {}
        """By job and round of a request without an answer: when it leaves (monotonic), and the pause then."""

    # What a round needs.

    @property
    def is_member(self) -> bool:
        """Whether the device may ask for tokens at all."""
        return self._identity is not None

    def is_awaited(self, plan: Plan) -> bool:
        """Whether a round waits for the answer to its request, or for the keys to make one."""
        if plan.linkability == "none" or self._identity is None or self._conflict(plan) is not None:
            return False
        request = self._request(plan)
        if request is None:
            keys = self.watch.keys(plan.job)
            return keys is None or plan.round not in keys.rounds
        if request.verdict is None:
            self._schedule(request, self._clock.monotonic())
        return request.verdict is None

    def require(self, plan: Plan, blocks: int) -> None:
        """See that the device has tokens for a round, or may still ask for them.

        Args:
            plan: the round's.
            blocks: fragments of an update.

        Raises:
            NoTokens: it has none, and will get none.
        """
        if plan.linkability == "none":
            return
        if self._identity is None:
            raise NoTokens(
                "the round asks for tokens of enrolled boards, and this one has no certificate: set "
                "mqtt.cert_file and mqtt.key_file, or enrol with `dpagent enrol`"
            )
        if (number := self._conflict(plan)) is not None:
            raise NoTokens(f"the coordinator has signed two different keys for tokens of round {number}")
        request = self._request(plan)
        said = self.watch.keys(plan.job) if request is None else request.key
        assert said is not None, "a round without keys is awaited"
        linkability, tokens = said.linkability, said.tokens
        if linkability != plan.linkability:
            raise NoTokens(f"the plan's linkability is {plan.linkability}; that of its keys is {linkability}")
        if linkability == "fragment" and tokens < blocks:
            raise NoTokens(
                f"an update has {counted(blocks, 'fragment')}; a board is given {counted(tokens, 'token')}"
            )

    def refusal(self, plan: Plan) -> NoTokens | None:
        """Why a round whose tokens were asked for has none; None where it has them, or none were asked for.

        It says nothing of later rounds: what the device declined by then may have been mended since.
        """
        request = None if plan.linkability == "none" else self._request(plan)
        if request is None or request.verdict is Verdict.GRANTED:
            return None
        return NoTokens(request.reason or "no tokens were granted")

    def require_there(self, plan: Plan) -> None:
        """See that the tokens of a round that is charged are there still.

        Raises:
            NoTokens: they are not, as in a copy of the state directory.
        """
        if plan.linkability != "none" and not self._state.tokens.tokens(plan.job, plan.round):
            raise NoTokens("its tokens are gone")

    def carried(self, fragments: Iterable[Fragment], plan: Plan) -> list[Fragment]:
        """A round's fragments, each with its token, which :meth:`AgentState.spool_round` spends."""
        if plan.linkability == "none":
            return list(fragments)
        tokens = self._state.tokens.tokens(plan.job, plan.round)
        return [
            with_token(fragment, tokens[fragment.position if plan.linkability == "fragment" else 0])
            for fragment in fragments
        ]

    # Requests.

    def ask(self, plan: Plan, wish: Wish, reason: str | None, decided_from: float) -> bool:
        """Ask for the tokens of a round and of those that are announced after it, as far as that is not done.

        Args:
            plan: the round's.
            wish: whether the device takes part, or the public reason why not.
            reason: the same for its owner.
            decided_from: when the decision on the round began, or would have on any grid (monotonic).

        Returns:
            Whether this very round was asked for now: it waits for the answer.
        """
        keys = self.watch.keys(plan.job)
        if plan.linkability == "none" or self._identity is None or self._conflict(plan) is not None:
            return False
        if keys is None:
            return False
        missing = [
            number
            for number in range(max(plan.round, keys.first_round), keys.rounds.stop)
            if self._state.tokens.request(plan.job, number, self._fleet) is None
        ]
        if not missing:
            return False
        requests = [self._made(keys, number, wish, reason) for number in missing]
        self._state.keep_token_requests(plan.job, plan.round, requests)
        self.watch.note_asked(keys, missing, decided_from)
        for place, request in enumerate(requests):
            # One a period, the open round's first.
            self._schedule(request, decided_from + (_TO_DECIDE + place) * self._publisher.period_s)
        return missing[0] == plan.round

    def begins_at(self, decided_from: float) -> float:
        """When a round goes on that waits for its tokens, if they are there (monotonic)."""
        return decided_from + max(_WITHIN_S, 3 * self._publisher.period_s)

    def _made(self, keys: TokenKeys, number: int, wish: Wish, reason: str | None) -> Request:
        key, digest = RoundKey.of(keys, number, self._fleet), key_digest(keys, number, self._fleet)
        # Where the device declines too: the work would tell, and what is written.
        try:
            made = [_blinded(key, place) for place in range(key.tokens)]
        except BlindSignatureError as error:
            wish, reason = Wish.UNABLE, f"the key of round {number} is no key: {error}"
            made = [(b"", message, b"") for message in padding(key.tokens)]
        nonces, blinded, inverses = zip(*made, strict=True)
        return Request(
            key, digest, keys.sealing_key, wish, reason, nonces, blinded, inverses, new_sealing_secret()
        )

    def _schedule(self, request: Request, earliest: float) -> None:
        at = earliest + self._random.uniform(0.0, self._publisher.period_s)
        self._due.setdefault((request.key.job, request.key.number), (at, _AGAIN_S))

    def due_in_s(self) -> float:
        """Seconds until something is to be published; infinite if there is nothing."""
        if not self._session.has_room:
            return math.inf
        at = min((at for at, _ in self._due.values()), default=math.inf)
        return min(max(0.0, at - self._clock.monotonic()), self.watch.due_in_s())

    def tend(self) -> None:
        """Publish what is due."""
        if self._identity is None or not self._session.has_room:
            return
        self.watch.tend()
        now = self._clock.monotonic()
        for (job, number), (at, pause_s) in list(self._due.items()):
            if at > now:
                continue
            request = self._state.tokens.request(job, number, self._fleet)
            if request is None or request.verdict is not None:
                del self._due[job, number]
            elif self._send(request):
                again_at = now + pause_s * self._random.uniform(1.0, 2.0)
                self._due[job, number] = again_at, min(2 * pause_s, _LONGEST_S)

    def _send(self, request: Request) -> bool:
        assert self._identity is not None
        entries = self._state.ledger.digests
        statement = Statement(
            device=bytes.fromhex(self._identity.device_id),
            job=request.key.job,
            round=request.key.number,
            wish=request.wish,
            keys=request.keys,
            entries=len(entries),
            head=self._state.tokens.stated(entries[-1]),
            reply_key=AnswerOpener(request.reply_secret, self._fleet).public_key,
            blinded=blinded_digest(request.blinded),
        )
        try:
            ask = Ask(statement, self._identity.sign(statement.signed), request.blinded)
        except ConfigurationError as error:  # of a key in hardware
            log.warning("no request for tokens can be signed; it will be tried again: %s", error)
            return True
        try:
            message = seal_ask(ask, request.sealing_key, self._fleet)
        except ValueError as error:
            log.warning("no request for tokens can be sealed: %s", error)
            return True
        return self._session.publish(self._topics.ask(self._identity.device_id), message) is not None

    # Answers.

    def take_answer(self, payload: bytes) -> None:
        """Take the answer to a request.

        Raises:
            MessageError: the coordinator did not sign it, or it answers none that waits.
        """
        sealed = self._verifier.open(payload, Sealed, "answer")
        for request in self._state.tokens.unanswered(self._fleet):
            opener = AnswerOpener(request.reply_secret, self._fleet)
            blinded = blinded_digest(request.blinded)
            try:
                answer = opener.open(sealed, request.key.job, request.key.number, blinded)
            except MessageError:
                continue
            self._take(request, answer)
            return
        raise MessageError("no such request", "an answer to none of the requests that wait")

    def _take(self, request: Request, answer: Answer) -> None:
        key, verdict = request.key, answer.verdict
        tokens: tuple[bytes, ...] = ()
        reason = request.reason
        match verdict:
            case Verdict.GRANTED if request.wish is Wish.TAKES_PART:
                try:
                    tokens = _finalized(request, answer)
                except BlindSignatureError as error:
                    verdict, reason = Verdict.NOTED, f"the coordinator's answer is no tokens: {error}"
            case Verdict.WENT_BACK:
                if not self._has_gone_back(answer.later):
                    return  # Not so, or no longer: the request leaves again.
                reason = (
                    "this board has signed that its ledger had more entries than it has: its state is an "
                    "older copy. Put the newest back, or run `dpagent budget restored --write-off-all` and "
                    "enrol the board again as a replacement"
                )
            case Verdict.OVER_LIMIT:
                reason = "the fleet grants this board no more budget (tokens.device_epsilon in fleet.yaml)"
            case Verdict.EXCLUDED:
                reason = "the fleet's operator leaves this board out for now"
            case Verdict.ASKED_OTHERWISE:
                reason = "the coordinator has granted this round's tokens for another request of this board"
            case Verdict.CLOSED:
                reason = "the round was closed before its tokens were asked for"
            case _:
                verdict = Verdict.NOTED
        self._state.settle_tokens(key.job, key.number, verdict, tokens, reason)
        self._due.pop((key.job, key.number), None)
        if verdict is Verdict.GRANTED:
            log.info("round %d of job %s: has its tokens", key.number, key.job.hex()[:8])
        elif request.wish is Wish.TAKES_PART:
            log.warning("round %d of job %s: no tokens: %s", key.number, key.job.hex()[:8], reason)

    def _has_gone_back(self, later: bytes) -> bool:
        """Whether this device has signed a statement that its ledger does not bear out."""
        from dpagent.protocol.device_signing import is_signed

        assert self._identity is not None
        try:
            statement = Statement.from_bytes(later[: Statement.LENGTH])
        except ValueError:
            return False
        signature, certificate = later[Statement.LENGTH :], self._identity.certificate
        if statement.device.hex() != self._identity.device_id:
            return False
        if not is_signed(certificate, signature, statement.signed):
            return False
        digests = self._state.ledger.digests
        if not 0 < statement.entries <= len(digests):
            return True
        return self._state.tokens.stated(digests[statement.entries - 1]) != statement.head

    def _request(self, plan: Plan) -> Request | None:
        return self._state.tokens.request(plan.job, plan.round, self._fleet)

    def _conflict(self, plan: Plan) -> int | None:
        return self._state.tokens.conflicting_round(plan.job)


def _blinded(key: RoundKey, place: int) -> tuple[bytes, bytes, bytes]:
    """A nonce, its message blinded, and what takes the blinding off."""
    problem: BlindSignatureError | None = None
    for _ in range(_DRAWS):
        nonce = os.urandom(PREFIX_BYTES)
        try:
            made = blind(key.public(place), key.message(place, nonce))
        except BlindSignatureError as error:
            problem = error
        else:
            return nonce, made.message, made.inverse
    assert problem is not None
    raise problem


def _finalized(request: Request, answer: Answer) -> tuple[bytes, ...]:
    """The tokens in an answer.

    Raises:
        BlindSignatureError: one is none: none of them may be shown.
    """
    key = request.key
    if len(answer.signatures) != key.tokens:
        raise BlindSignatureError(f"{len(answer.signatures)} signatures; expected {key.tokens}")
    parts = zip(request.nonces, answer.signatures, request.inverses, strict=True)
    return tuple(
        nonce + finalize(key.public(place), key.message(place, nonce), signature, inverse)
        for place, (nonce, signature, inverse) in enumerate(parts)
    )
