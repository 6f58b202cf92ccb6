"""Clients beside the fleet: one that sees what the broker sees, one that stands in for a coordinator."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import paho.mqtt.client as paho
from brokers import USER, Broker, wait_until
from children import PATIENCE_S
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from dpagent.protocol.chunks import chunked
from dpagent.protocol.messages import Plan, Receipts
from dpagent.protocol.receipts import receipt_digest
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.topics import Topics


class Observer:
    """Subscribed to everything of a fleet over MQTT 5, with all properties."""

    def __init__(self, broker: Broker, fleet: str) -> None:
        self.topics = Topics(fleet)
        self.seen: list[paho.MQTTMessage] = []
        self._client = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
        self._client.username_pw_set(USER, broker.password_file.read_text().strip())
        self._subscribed: list[Any] = []
        self._client.on_connect = lambda client, *_: client.subscribe(f"dpagent/v1/{fleet}/#", 1)
        self._client.on_subscribe = lambda *_: self._subscribed.append(1)
        self._client.on_message = lambda _client, _data, message: self.seen.append(message)
        self._client.connect("127.0.0.1", broker.port)
        self._client.loop_start()
        wait_until(lambda: self._subscribed, "the observer's subscription")

    @property
    def fragments(self) -> list[bytes]:
        return [bytes(message.payload) for message in self.seen if message.topic == self.topics.fragments]

    @property
    def plans(self) -> list[bytes]:
        return [bytes(message.payload) for message in self.seen if message.topic == self.topics.plan]

    @property
    def receipts(self) -> list[bytes]:
        return [bytes(message.payload) for message in self.seen if message.topic == self.topics.receipts]

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        self._client.publish(topic, payload, qos=1, retain=retain).wait_for_publish(PATIENCE_S)

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.disconnect()
        self._client.loop_stop()


class Announcer(Observer):
    """Announces hand-made plans as the coordinator of a fleet would."""

    def __init__(self, broker: Broker, fleet: str) -> None:
        super().__init__(broker, fleet)
        self.signer = Signer(new_signing_secret(), fleet)

    def announce_model(self, weights: bytes) -> None:
        for chunk in chunked(weights):
            self.publish(self.topics.model_chunk(chunk.index), self.signer.sign(chunk, "model"), retain=True)

    def confirm(self, fragment_id: bytes) -> None:
        """Say that a fragment is counted."""
        receipts = Receipts(receipt_digest(fragment_id))
        self.publish(self.topics.receipts, self.signer.sign(receipts, "receipts"))

    def announce(self, plan: Plan, signer: Signer | None = None) -> None:
        self.publish(self.topics.plan, (signer or self.signer).sign(plan, "plan"), retain=True)


def in_an_hour() -> float:
    return time.time() + 3_600
