"""The coordinator's publications: signed plans, models, assets and receipts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from coordinator.measurements import Traffic
from coordinator.own_receipts import OwnReceipts
from dpagent import faults
from dpagent.clock import Clock
from dpagent.faults import FaultPoint
from dpagent.protocol.chunks import chunked
from dpagent.protocol.messages import (
    RECEIPT_DIGEST_BYTES,
    RECEIPTS_PER_MESSAGE,
    Plan,
    Receipts,
    ReceiptTopics,
    Sealed,
)
from dpagent.protocol.receipts import receipt_digest
from dpagent.protocol.signing import Signer
from dpagent.protocol.tokens import TokenKeys
from dpagent.protocol.topics import Topics
from dpagent.transport.events import Acknowledged, Disconnected, Event, Received
from dpagent.transport.session import MqttSession

_FAREWELL_S: Final = 5.0


class Announcer:
    """Publishes the coordinator's messages. Without a connection it publishes nothing; the caller retries.

    Args:
        session: to publish with.
        signer: the coordinator's key.
        topics: of the fleet.
        clock: the program's.

    Attributes:
        own_receipts: receipts on topics of their own, until they leave.
    """

    def __init__(self, session: MqttSession, signer: Signer, topics: Topics, clock: Clock) -> None:
        self._session, self._signer, self._topics = session, signer, topics
        self.own_receipts = OwnReceipts(session, topics, clock)
        self._assets_are_out = False
        self._farewell, self._end_of_round = _Awaited(), _Awaited()

    def traffic(self) -> Traffic:
        """What has gone through the session since it began."""
        return Traffic(self._session.bytes_down, self._session.bytes_up)

    def announce(self, plan: Plan, weights: bytes, assets: Mapping[str, bytes]) -> bool:
        """Publish the assets (once per connection), the model, and then the plan, all retained.

        Returns:
            Whether the plan is on its way to the broker.
        """
        if not self._session.connected:
            return False
        self._end_of_round = _Awaited()  # The plan that the broker keeps is this one.
        if not self._assets_are_out:
            self._publish_assets(assets)
            self._assets_are_out = True
        for chunk in chunked(weights):
            topic = self._topics.model_chunk(chunk.index)
            self._session.publish(topic, self._signer.sign(chunk, "model"), retain=True)
        faults.reached(FaultPoint.COORDINATOR_MODEL_PUBLISHED)
        return self._publish_plan(plan) is not None

    def _publish_plan(self, plan: Plan) -> int | None:
        """Publish the plan of an open round, retained; return the message's handle."""
        message = self._signer.sign(plan, "plan")
        handle = self._session.publish(self._topics.plan, message, retain=True)
        faults.reached(FaultPoint.COORDINATOR_PLAN_PUBLISHED)
        return handle

    def _publish_assets(self, assets: Mapping[str, bytes]) -> None:
        for role, data in assets.items():
            for chunk in chunked(data):
                topic = self._topics.asset_chunk(role, chunk.index)
                self._session.publish(topic, self._signer.sign(chunk, "model"), retain=True)

    def assets_changed(self) -> None:
        """Publish the assets with the next plan: they changed, or the broker may lack them."""
        self._assets_are_out = False

    def acknowledge(self, fragment_ids: Sequence[bytes], receipts: ReceiptTopics, taken_at: float) -> None:
        """Publish receipts for fragments that are durably counted: for all devices at once, and on topics of
        their own when it is time (:attr:`own_receipts`).

        Without a connection a receipt is lost: the device resends, and then gets another receipt.

        Args:
            fragment_ids: in an order that does not tell dummies from others.
            receipts: where they go.
            taken_at: when the work on the fragments began (monotonic seconds).
        """
        if receipts == "fleet":
            self.publish_receipts(b"".join(map(receipt_digest, fragment_ids)))
        else:
            self.own_receipts.put(fragment_ids, taken_at)

    def publish_receipts(self, digests: bytes) -> None:
        """Publish receipts for all devices, of the digests of ids one after the other."""
        size = RECEIPTS_PER_MESSAGE * RECEIPT_DIGEST_BYTES
        for start in range(0, len(digests), size):
            receipts = Receipts(digests[start : start + size])
            self._session.publish(self._topics.receipts, self._signer.sign(receipts, "receipts"))
            faults.reached(FaultPoint.COORDINATOR_RECEIPTS_PUBLISHED)

    @property
    def is_connected(self) -> bool:
        """Whether what is published is on its way to the broker."""
        return self._session.connected

    def announce_keys(self, keys: TokenKeys) -> None:
        """Publish the keys of tokens, retained."""
        self._session.publish(self._topics.token_keys, self._signer.sign(keys, "token-keys"), retain=True)

    def answer(self, device: str, answer: Sealed) -> None:
        """Publish an answer to a device's request. One that is lost is asked for again."""
        self._session.publish(self._topics.answer(device), self._signer.sign(answer, "answer"))

    def end_round(self, plan: Plan) -> bool:
        """Publish that the time of the open round is over; return whether the broker has taken that.

        To be called again until it has: a message that is under way goes with its connection.

        Args:
            plan: of that round, whose model is out.
        """
        if self._end_of_round.is_taken:
            self._end_of_round = _Awaited()
            return True
        if self._end_of_round.handle is None and self._session.connected:
            self._end_of_round.handle = self._publish_plan(plan)
        return False

    def say_goodbye(self, plan: Plan, assets: Mapping[str, bytes]) -> bool:
        """Publish what came of the job, and its end; return whether the broker took it within a few seconds.

        An acknowledgement that takes longer counts at a later call (:meth:`take`). Fragments that come
        meanwhile are dropped: no round of the job is left for them.
        """
        message = self._signer.sign(plan, "plan")
        # The session waits in real time, so this does too.
        until = time.monotonic() + _FAREWELL_S
        while not self._farewell.is_taken and time.monotonic() < until:
            if self._farewell.handle is None and self._session.connected:
                self._publish_assets(assets)
                self._farewell.handle = self._session.publish(self._topics.plan, message, retain=True)
            event = self._session.next_event(0.2)
            if isinstance(event, Received):
                # The broker sends only so many that nobody acknowledges: the next job would get none.
                self._session.acknowledge([event])
            self.take(event)
        return self._farewell.is_taken

    def take(self, event: Event | None) -> None:
        """Note what an event of the session says of messages that are waited for."""
        for each in (self._farewell, self._end_of_round):
            each.take(event)


class _Awaited:
    """A message that the broker has to have before the program goes on.

    Attributes:
        handle: of the message that is under way.
        is_taken: whether the broker has acknowledged it.
    """

    def __init__(self) -> None:
        self.handle: int | None = None
        self.is_taken = False

    def take(self, event: Event | None) -> None:
        match event:
            case Acknowledged(handle) if handle == self.handle:
                self.is_taken = True
            case Disconnected():
                self.handle = None
