"""Board profiles: the resources that training may use."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from agent.limit_settings import LimitSettings
from dpagent.configuration import Settings, load_settings
from dpagent.errors import ConfigurationError
from dpagent.learning.data.dataset import MAX_RECORDS


class Profile(Settings):
    """One YAML file of ``firmware_profiles/``."""

    description: str
    """The board, in words."""
    memory_mib: Annotated[int, Field(ge=64)]
    """Installed memory; the agent refuses a profile with more memory than the board has."""
    microbatch: Annotated[int, Field(ge=1, le=64)]
    """Records whose gradients are in memory at once; small caches need few."""
    threads: Annotated[int, Field(ge=1, le=64)] = 1
    """Cores that training may use."""
    niceness: Annotated[int, Field(ge=0, le=19)] = 10
    """The agent's nice value; a higher value gives way to the board's own work."""
    max_records: Annotated[int, Field(ge=1, le=MAX_RECORDS)] | None = None
    """Of data that do not declare ``data.max_records``."""
    limits: LimitSettings = LimitSettings()
    """As ``limits`` of ``agent.yaml``, where a key that is set there replaces the one here."""


def profile_names() -> list[str]:
    """The profiles that come with the package."""
    folder = importlib.resources.files("firmware_profiles")
    return sorted(
        entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")
    )


def is_profile_path(name: str) -> bool:
    """Whether ``name`` is the path of a profile and not the name of one in the package."""
    return name.endswith((".yaml", ".yml"))


def load_profile(name: str) -> Profile:
    """Load a profile by name, or from a path when ``name`` ends in ``.yaml``.

    Raises:
        ConfigurationError: There is no such profile, or it is malformed.
    """
    if is_profile_path(name):
        return load_settings(Path(name), Profile)
    if name not in profile_names():
        raise ConfigurationError(
            f"profile is {name!r}; expected one of {', '.join(profile_names())}, or the path of a .yaml file."
        )
    with importlib.resources.as_file(importlib.resources.files("firmware_profiles") / f"{name}.yaml") as path:
        return load_settings(path, Profile)


def check_board(profile: Profile) -> None:
    """Refuse a profile made for a bigger board than this one.

    Raises:
        ConfigurationError: The board has less than 80 % of the profile's memory
            (firmware and kernel reserve some of the installed memory).
    """
    fitted_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    if fitted_mib < 0.8 * profile.memory_mib:
        raise ConfigurationError(
            f"The profile is for a board of {profile.memory_mib} MiB ({profile.description}); this one has "
            f"{fitted_mib} MiB. Choose another profile: {', '.join(profile_names())}."
        )
