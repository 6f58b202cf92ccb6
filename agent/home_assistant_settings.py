"""The section ``home_assistant`` of ``agent.yaml``: the owner's own broker, and what the board is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dpagent.schema.base import rule
from dpagent.schema.limits import Limits
from dpagent.settings import Settings
from dpagent.transport.settings import MqttSettings

Prefix = Annotated[str, Limits(pattern=r"^[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*$", max_length=200)]


class HomeAssistantSettings(Settings):
    """The board's status in Home Assistant (``dpagent home-assistant``)."""

    mqtt: MqttSettings
    """The broker of the owner's Home Assistant. **Never the fleet's**: that is refused."""
    name: Annotated[str, Limits(min_length=1, max_length=64)] = "dpagent"
    """What the board is called there."""
    discovery_prefix: Prefix = "homeassistant"
    """As Home Assistant has it (``discovery_prefix`` of its MQTT integration)."""
    every_s: Annotated[float, Limits(ge=5, le=3_600)] = 60.0
    """How often the status is published, whatever has changed. After three times as long without one, Home
    Assistant shows the board as unavailable."""

    @rule
    def _is_no_topic_of_a_fleet(self) -> None:
        if self.discovery_prefix.startswith("dpagent/v1"):
            raise ValueError(
                f"discovery_prefix is {self.discovery_prefix!r}; expected one outside of dpagent/v1, the "
                "fleets'"
            )

    def resolved(self, file: Path) -> HomeAssistantSettings:
        """The same settings with paths resolved relative to the configuration ``file``."""
        return self.with_values({"mqtt": self.mqtt.resolved(file)})
