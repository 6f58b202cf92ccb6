"""The supervised MQTT session: the only place that knows the MQTT library."""

from dpagent.transport.session import (
    Acknowledged,
    Connected,
    Disconnected,
    Event,
    MqttSession,
    Received,
    Subscription,
)
from dpagent.transport.settings import MqttSettings

__all__ = [
    "Acknowledged",
    "Connected",
    "Disconnected",
    "Event",
    "MqttSession",
    "MqttSettings",
    "Received",
    "Subscription",
]
