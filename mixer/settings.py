"""``mixer.yaml``: the settings of a mixer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from dpagent.configuration import load_settings, resolve
from dpagent.overrides import Override
from dpagent.protocol.signing import CoordinatorKey
from dpagent.protocol.topics import FleetName
from dpagent.schema.base import rule
from dpagent.schema.limits import Limits
from dpagent.settings import FilePath, Settings
from dpagent.transport.settings import MqttSettings


class MixerSettings(Settings):
    """Everything in ``mixer.yaml``."""

    fleet: FleetName
    """The fleet whose fragments it mixes."""
    coordinator_key: CoordinatorKey
    """The coordinator's public key, as ``dpagent coordinator key`` prints it: messages are held for plans
    that it signed."""
    keys_dir: FilePath = Path("mixer-keys")
    """Directory of the mixer's key, mode 0600, and of digests of the messages that have left, relative to
    this file; created at the first start. Neither the coordinator nor the broker's operator may read it, or
    put an older copy in its place."""
    batch: Annotated[int, Limits(ge=2, le=1_000_000)] = 256
    """Messages of one plan that leave together, in random order, as soon as there are so many. Choose several
    times the fragments of an update: among its own, a device hides nothing."""
    least: Annotated[int, Limits(ge=2, le=1_000_000)] = 64
    """Fewest messages of one plan that leave after ``longest_s``; fewer stay until there are so many, so a
    round that lacks fewer may have to wait for its deadline."""
    longest_s: Annotated[float, Limits(gt=0, le=86_400)] = 2.0
    """Seconds after which ``least`` messages are enough, counted from the first. A device sends a fragment
    again that has no receipt 5 s after its jitter window; longer times cost traffic, and tell who waits."""
    messages_per_second: Annotated[float, Limits(gt=0, le=100_000)] = 500.0
    """Maximum publications per second."""
    memory_mib: Annotated[int, Limits(ge=1, le=65_536)] = 64
    """Most memory of held messages. When it is full, a message takes the place of those of an older plan, or
    is dropped; devices send it again."""
    remembered: Annotated[int, Limits(ge=0, le=10_000_000)] = 200_000
    """Messages that are known again, at least, after they have left, also after a restart, so that a message
    that the broker delivers twice leaves once. Each takes up to 200 bytes of memory and 32 on disk."""
    mqtt: MqttSettings = MqttSettings()

    @rule
    def _least_is_a_part(self) -> None:
        if self.least > self.batch:
            raise ValueError(f"least is {self.least}; expected at most batch = {self.batch}")


def load_mixer_settings(file: Path, overrides: Sequence[Override] = ()) -> MixerSettings:
    """Read ``mixer.yaml`` with its paths, and those of overrides, made relative to it.

    Raises:
        ConfigurationError: The file or an override is invalid.
    """
    settings = load_settings(file, MixerSettings, overrides=overrides)
    return settings.with_values(
        {"keys_dir": resolve(settings.keys_dir, file), "mqtt": settings.mqtt.resolved(file)}
    )
