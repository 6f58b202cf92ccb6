"""Which configuration a file is: of a board, a coordinator, a mixer, or a board's profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dpagent.errors import ConfigurationError

if TYPE_CHECKING:
    from dpagent.configuration import Settings

Kind = Literal["agent", "coordinator", "mixer"]


def kind_of(config: Path) -> Kind:
    """What a file configures, by the keys that only one of them has.

    Raises:
        ConfigurationError: it cannot be read, or configures nothing that is known.
    """
    from dpagent.configuration import load_yaml

    keys = load_yaml(config, example="fleet: meadow").keys()
    if "data" in keys or "budget" in keys:
        return "agent"
    if "rounds" in keys or "privacy" in keys:
        return "coordinator"
    if "coordinator_key" in keys:
        return "mixer"
    raise ConfigurationError(
        f"{config} is no agent.yaml, fleet.yaml or mixer.yaml. The first has the keys data and budget, the "
        "second rounds and privacy, the third coordinator_key."
    )


def load(config: Path) -> Settings:
    """The settings in a file, checked as the program would check it.

    Raises:
        ConfigurationError: as of :func:`kind_of`, or something in it is wrong.
    """
    match kind_of(config):
        case "agent":
            from agent.settings import load_agent_settings

            return load_agent_settings(config)
        case "coordinator":
            from coordinator.settings import load_fleet_settings

            return load_fleet_settings(config)
        case "mixer":
            from mixer.settings import load_mixer_settings

            return load_mixer_settings(config)


def schema_of(kind: Kind | Literal["profile"]) -> type[Settings]:
    """The schema of a kind of file."""
    match kind:
        case "agent":
            from agent.settings import AgentSettings

            return AgentSettings
        case "coordinator":
            from coordinator.settings import FleetSettings

            return FleetSettings
        case "mixer":
            from mixer.settings import MixerSettings

            return MixerSettings
        case "profile":
            from agent.profile import Profile

            return Profile
