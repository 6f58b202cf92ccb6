"""The brokers that ``dpagent coordinator broker-config`` can configure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from coordinator.brokers.deployment import BrokerSoftware
from coordinator.brokers.emqx import Emqx
from coordinator.brokers.mosquitto import Mosquitto
from coordinator.brokers.nats import Nats
from coordinator.brokers.rabbitmq import RabbitMq

BROKERS: Final[Mapping[str, BrokerSoftware]] = MappingProxyType(
    {each.name: each for each in (Mosquitto(), RabbitMq(), Nats(), Emqx())}
)
"""By name."""
