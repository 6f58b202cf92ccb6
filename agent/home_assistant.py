"""A board's status in its owner's Home Assistant, over the owner's own broker: opt-in.

Home Assistant finds entities by retained messages at ``PREFIX/COMPONENT/BOARD/ENTITY/config`` and reads their
values at a topic that these name (https://www.home-assistant.io/integrations/mqtt/#mqtt-discovery). What is
told is :mod:`agent.disclosed`, no more than metrics hold. It is published at fixed intervals, whatever has
changed: read ahead of its time, which is a whole number of intervals after the first, so that the times of
messages do not tell how busy the board is. Nothing is subscribed to, so nobody can order anything.

The fleet's broker is refused: there, an entity's name and its values would tell the fleet's operator, and
whoever else reads the broker, which board this is and in which rounds it takes part.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from agent.disclosed import Disclosed, Look, disclosed
from agent.home_assistant_settings import HomeAssistantSettings
from agent.other_brokers import are_one
from agent.settings import AgentSettings
from dpagent import __version__
from dpagent.errors import BrokerError, ConfigurationError
from dpagent.notation import upwards
from dpagent.service_manager import ServiceManager
from dpagent.structured_log import Event, about
from dpagent.transport.events import Acknowledged, Connected, Disconnected
from dpagent.transport.session import MqttSession

log = logging.getLogger(__name__)

_MACHINE: Final = Path("/etc/machine-id")
_LOOK_S: Final = 0.5
_FAREWELL_S: Final = 10.0
_AHEAD_S: Final = 2.0
"""Before its time, what is told is read: how long that takes is a matter of what else the board does."""
_EXPIRES: Final = 3
"""Intervals after which Home Assistant shows what it was told last as unavailable."""


@dataclass(frozen=True, slots=True)
class Entity:
    """One value in Home Assistant.

    Attributes:
        key: its name in topics and in the message of values.
        name: for a person.
        component: ``binary_sensor`` or ``sensor``.
        value: as its message has it; None where it is not known.
        device_class: of Home Assistant, if there is one that fits.
        is_diagnostic: whether it is shown among diagnostics.
    """

    key: str
    name: str
    component: str
    value: str | float | None
    device_class: str | None = None
    is_diagnostic: bool = False


def entities_of(board: Disclosed) -> Iterator[Entity]:
    """What Home Assistant is told of a board. What is hidden has no entity."""
    yield Entity("running", "Agent runs", "binary_sensor", _switch(board.runs), "running")
    yield Entity(
        "connected", "Connected to the fleet", "binary_sensor", _switch(board.is_connected), "connectivity"
    )
    yield Entity(
        "ledger", "Privacy ledger", "binary_sensor", _switch(not board.is_ledger_readable), "problem",
        is_diagnostic=True,
    )  # fmt: skip
    yield Entity("round", "Announced round", "sensor", board.round)
    yield Entity("rounds", "Rounds of the job", "sensor", board.rounds, is_diagnostic=True)
    for number, each in enumerate(board.accounts):
        # A name may hold whatever an integrator wrote; a key of a topic may not.
        key = f"account_{number}"
        yield Entity(f"{key}_budget", f"ε for life ({each.name})", "sensor", _bounded(each.budget))
        for what, epsilon in (("reserved", each.reserved), ("spent", each.spent)):
            if epsilon is not None:
                yield Entity(f"{key}_{what}", f"ε {what} ({each.name})", "sensor", _bounded(epsilon))
    for key, name, at in (
        ("receipt", "Last receipt", board.last_receipt_at),
        ("certificate", "Certificate ends", board.certificate_ends_at),
    ):
        if at is not None:
            stamp = f"{datetime.fromtimestamp(int(at), UTC):%Y-%m-%dT%H:%M:%SZ}"
            yield Entity(key, name, "sensor", stamp, "timestamp", is_diagnostic=key != "receipt")


def board_id(settings: AgentSettings) -> str:
    """By which Home Assistant knows the board, the same after each start: a keyed hash, from which neither
    the machine's id nor anything of the fleet follows."""
    try:
        machine = _MACHINE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        machine = socket.gethostname()
    what = f"dpagent home assistant\0{settings.fleet}\0{settings.state_dir}".encode()
    return f"dpagent_{hmac.new(machine.encode(), what, hashlib.sha256).hexdigest()[:16]}"


class HomeAssistant:
    """Tells Home Assistant what the board does, until it is stopped.

    Args:
        settings: ``agent.yaml``, with the profile's and the section ``home_assistant``.
        look: at the board.

    Raises:
        ConfigurationError: The section is missing, its broker is the fleet's, or a file of the credentials
            cannot be read.
    """

    def __init__(self, settings: AgentSettings, look: Look) -> None:
        if settings.home_assistant is None:
            raise ConfigurationError(
                "home_assistant is not set in agent.yaml; expected at least home_assistant.mqtt.url, the "
                "broker of your Home Assistant."
            )
        self._own: HomeAssistantSettings = settings.home_assistant
        self._settings, self._look = settings, look
        self._id = board_id(settings)
        self._topic = f"dpagent/{self._id}/status"
        self._require_own()
        self._session = MqttSession(self._own.mqtt, client_id=None, subscriptions=[], persistent=False)
        self._known: dict[str, bytes] = {}
        """What this connection has announced, by topic; nothing where there is no such entity."""

    def _require_own(self) -> None:
        """Refuse the fleet's broker. Its name may lead there only later, so this is asked at each connection.

        Raises:
            ConfigurationError: It is that.
        """
        if are_one(self._own.mqtt, self._settings.mqtt):
            raise ConfigurationError(
                f"home_assistant.mqtt.url is {self._own.mqtt.url}, the broker of the fleet "
                f"({self._settings.mqtt.url}), or one on its host: whoever runs it would see in which rounds "
                "this board takes part. Take the broker of your own Home Assistant."
            )

    def run(self, stop: threading.Event) -> None:
        """Publish the status again and again until ``stop`` is set.

        Raises:
            BrokerError: The broker refuses the board.
            ConfigurationError: Its name leads to the fleet's broker by now.
            StorageError: The board's state is another user's.
        """
        manager, due, told = ServiceManager(), time.monotonic() + _AHEAD_S, None
        with self._session:
            manager.ready()
            log.info("tells Home Assistant at %s of this board", self._own.mqtt.url,
                     extra=about(event=Event.STARTED, fleet=self._settings.fleet))  # fmt: skip
            while not stop.is_set():
                manager.alive()
                left_s = due - time.monotonic()
                match self._session.next_event(min(_LOOK_S, left_s) if left_s > 0 else _LOOK_S):
                    case Connected():
                        log.info("connected to %s", self._own.mqtt.url,
                                 extra=about(event=Event.CONNECTED, broker=self._own.mqtt.url))  # fmt: skip
                        self._require_own()
                        self._known.clear()
                        due, told = time.monotonic() + _AHEAD_S, None
                    case Disconnected(reason):
                        log.warning(
                            "%s; reconnecting", reason, extra=about(event=Event.DISCONNECTED, reason=reason)
                        )
                if not self._session.connected:
                    continue
                if told is None and time.monotonic() >= due - _AHEAD_S:
                    told = self._told()
                    if (now := time.monotonic()) > due:  # How late it is must not show: it waits.
                        due = next_due(due, self._own.every_s, now)
                if told is not None and (now := time.monotonic()) >= due:
                    self._publish(told)
                    due, told = next_due(due, self._own.every_s, now), None

    def remove(self) -> int:
        """Have Home Assistant forget the board: its entities are retained until then.

        Returns:
            How many entities were removed.

        Raises:
            BrokerError: The broker refuses the board, or does not answer.
            ConfigurationError: Its name leads to the fleet's broker by now.
        """
        until = time.monotonic() + _FAREWELL_S
        waiting: set[int | None] = set()
        topics = self._all_topics()
        with self._session:
            while time.monotonic() < until:
                match self._session.next_event(_LOOK_S):
                    case Connected():
                        self._require_own()
                        # What was not sent is never acknowledged: the next connection sends all again.
                        waiting = {self._session.publish(topic, b"", retain=True) for topic in topics}
                    case Acknowledged(handle):
                        waiting.discard(handle)
                        if not waiting:
                            return len(topics)
        raise BrokerError(f"{self._own.mqtt.url} has not taken the messages within {_FAREWELL_S:g} s.")

    def _entities(self) -> list[Entity]:
        return list(entities_of(disclosed(self._settings, self._look())))

    def _all_topics(self) -> list[str]:
        """Of all entities that the board may ever have announced."""
        board = disclosed(self._settings, self._look())
        whole = replace(
            board,
            accounts=tuple(replace(each, reserved=0.0, spent=0.0) for each in board.accounts),
            last_receipt_at=0.0, certificate_ends_at=0.0,
        )  # fmt: skip
        return [self._config_topic(each) for each in entities_of(whole)]

    def _told(self) -> dict[str, bytes]:
        """What is to be told, by topic: values last."""
        found = self._entities()
        announced = {self._config_topic(each): json.dumps(self._config(each)).encode() for each in found}
        # What is hidden by now may have been announced before: the broker still has it.
        told = {topic: announced.get(topic, b"") for topic in self._all_topics()}
        return told | {self._topic: json.dumps({each.key: each.value for each in found}).encode()}

    def _publish(self, told: dict[str, bytes]) -> None:
        for topic, message in told.items():
            if topic == self._topic:
                self._session.publish(topic, message)
            elif self._known.get(topic) != message and self._session.publish(topic, message, retain=True):
                self._known[topic] = message

    def _config_topic(self, entity: Entity) -> str:
        return f"{self._own.discovery_prefix}/{entity.component}/{self._id}/{entity.key}/config"

    def _config(self, entity: Entity) -> dict[str, Any]:
        """What Home Assistant is told of an entity: the keys of its documentation."""
        prefix = f"{self._own.mqtt.topic_prefix}/" if self._own.mqtt.topic_prefix else ""
        values: dict[str, Any] = {
            "name": entity.name,
            "unique_id": f"{self._id}_{entity.key}",
            "state_topic": prefix + self._topic,
            "value_template": f"{{{{ value_json.{entity.key} }}}}",
            "expire_after": math.ceil(_EXPIRES * self._own.every_s),
            "device": {
                "identifiers": [self._id], "name": self._own.name, "manufacturer": "dpagent",
                "model": "board of a fleet", "sw_version": __version__,
            },
        }  # fmt: skip
        if entity.device_class is not None:
            values["device_class"] = entity.device_class
        if entity.is_diagnostic:
            values["entity_category"] = "diagnostic"
        return values


def next_due(due: float, every_s: float, now: float) -> float:
    """The first time after now that is a whole number of intervals after another.

    Args:
        due: that time.
        every_s: the interval.
        now: not before ``due``.
    """
    return due + (math.floor((now - due) / every_s) + 1) * every_s


def _switch(is_on: bool | None) -> str | None:
    return None if is_on is None else "ON" if is_on else "OFF"


def _bounded(epsilon: float) -> float | str:
    """A bound, rounded up. JSON has no infinity: rounds without a guarantee."""
    return float(upwards(epsilon, 6)) if math.isfinite(epsilon) else "no bound"
