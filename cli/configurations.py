"""Which configuration a command reads: its file, the variables and options over it, what it configures."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from dpagent.errors import ConfigurationError

if TYPE_CHECKING:
    from agent.settings import AgentSettings
    from coordinator.settings import CoordinatorSettings, FleetSettings
    from dpagent.overrides import Override
    from dpagent.settings import Settings
    from mixer.settings import MixerSettings

log = logging.getLogger(__name__)

Kind = Literal["agent", "coordinator", "mixer", "job"]

FILES: Final[dict[Kind, str]] = {"agent": "agent.yaml", "coordinator": "fleet.yaml", "mixer": "mixer.yaml"}
"""What the file of each daemon is called."""
_OWN_KEYS: Final[dict[Kind, set[str]]] = {
    "agent": {"data", "budget"}, "coordinator": {"devices"}, "job": {"rounds", "privacy"},
}  # fmt: skip
"""What only one kind of file has, and must have. A fleet.yaml may have what a job has besides."""
_EXAMPLES: Final[dict[Kind, str]] = {
    "agent": "`dpagent init` writes a board's",
    "coordinator": "README.md shows one",
    "mixer": "docs/configuration.md has its keys",
}
"""Where one that is missing is to be had."""
ETC: Final = Path("/etc/dpagent")
"""Where it is if it is not in the working directory."""
CONFIG_VARIABLE: Final = "DPAGENT_CONFIG"
"""It names the file of a command that is given none."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a command was given to read.

    Attributes:
        file: the YAML file.
        kind: what it configures.
        overrides: what stands over it.
    """

    file: Path
    kind: Kind
    overrides: tuple[Override, ...]

    def load(self) -> Settings:
        """The settings, checked as the program would check them.

        Raises:
            ConfigurationError: something in them is wrong.
        """
        match self.kind:
            case "agent":
                from agent.settings import load_agent_settings

                return load_agent_settings(self.file, self.overrides)
            case "coordinator":
                from coordinator.settings import load_coordinator_settings

                return load_coordinator_settings(self.file, self.overrides)
            case "job":
                from coordinator.settings import load_job_settings

                return load_job_settings(self.file, self.overrides)
            case "mixer":
                from mixer.settings import load_mixer_settings

                return load_mixer_settings(self.file, self.overrides)


def agent_settings(config: Path | None, options: Sequence[str] | None = None) -> AgentSettings:
    """The settings of a board, for a command.

    Args:
        config: the file that it was given.
        options: its ``--set``.

    Raises:
        ConfigurationError: there is no file, or something is wrong in it or over it.
        UsageError: an option cannot be read.
    """
    from agent.settings import load_agent_settings

    return load_agent_settings(*_given("agent", config, options))


def coordinator_settings(config: Path | None, options: Sequence[str] | None = None) -> CoordinatorSettings:
    """The settings of a coordinator, with the job that its file may hold; see :func:`agent_settings`."""
    from coordinator.settings import load_coordinator_settings

    return load_coordinator_settings(*_given("coordinator", config, options))


def fleet_settings(config: Path | None, options: Sequence[str] | None = None) -> FleetSettings:
    """The settings of a coordinator whose file holds a job; see :func:`agent_settings`."""
    from coordinator.settings import load_fleet_settings

    return load_fleet_settings(*_given("coordinator", config, options))


def mixer_settings(config: Path | None, options: Sequence[str] | None = None) -> MixerSettings:
    """The settings of a mixer; see :func:`agent_settings`."""
    from mixer.settings import load_mixer_settings

    return load_mixer_settings(*_given("mixer", config, options))


def _given(
    kind: Kind, config: Path | None, options: Sequence[str] | None
) -> tuple[Path, tuple[Override, ...]]:
    file, overrides = find(config, kind), over(options)
    # A daemon logs this: variables and options are nowhere else on record.
    log.info("configuration %s", stated(file, overrides))
    return file, overrides


def stated(file: Path, overrides: Sequence[Override]) -> str:
    """A file, and the names of what stands over it, in words."""
    return ", ".join([str(file), *dict.fromkeys(each.source for each in overrides)])


def configuration(config: Path | None, options: Sequence[str] | None = None) -> Configuration:
    """The configuration of whatever daemon.

    Raises:
        ConfigurationError: there is no file, or it configures nothing that is known.
        UsageError: an option cannot be read.
    """
    file, overrides = find(config, *FILES), over(options)
    return Configuration(file, kind_of(file, overrides), overrides)


def over(options: Sequence[str] | None = None) -> tuple[Override, ...]:
    """What stands over a file: variables of this program's environment, and options.

    Raises:
        UsageError: an option cannot be read.
    """
    from dpagent.overrides import overrides_of

    settings = {name: value for name, value in os.environ.items() if name != CONFIG_VARIABLE}
    return overrides_of(settings, options or ())


def find(config: Path | None, *kinds: Kind) -> Path:
    """The file that a command reads.

    Args:
        config: the one that it was given, by option or variable.
        kinds: what it may configure.

    Raises:
        ConfigurationError: it was given none, and none is in its places.
    """
    if config is not None:
        return config
    places = [folder / FILES[kind] for folder in (Path(), ETC) for kind in kinds]
    for place in places:
        if _is_there(place):
            return place
    looked = ", ".join(str(place.absolute()) for place in places)
    raise ConfigurationError(
        f"There is no configuration: none of {looked} is there. Name the file with --config or "
        f"{CONFIG_VARIABLE}; {_EXAMPLES[kinds[0]]}."
    )


def _is_there(place: Path) -> bool:
    try:
        place.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # Who opens it says why it cannot be read.
    return True


def kind_of(config: Path, overrides: Sequence[Override] = ()) -> Kind:
    """What a file configures, by the keys that only one of them has.

    Raises:
        ConfigurationError: it cannot be read, or configures nothing that is known.
    """
    from dpagent.yaml_file import load_yaml

    in_file = set(load_yaml(config, example="fleet: meadow"))
    keys = in_file | {each.key[0] for each in overrides}
    for kind, own in _OWN_KEYS.items():
        if own & in_file or own <= keys:
            return "coordinator" if kind == "job" and "fleet" in keys else kind
    if "coordinator_key" in keys:
        return "mixer"
    raise ConfigurationError(
        f"{config} is no agent.yaml, fleet.yaml, mixer.yaml or job file. The first has the keys data and "
        "budget, the second fleet and devices, the third coordinator_key, the last rounds and privacy."
    )


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
        case "job":
            from coordinator.settings import JobSettings

            return JobSettings
        case "profile":
            from agent.profile import Profile

            return Profile
