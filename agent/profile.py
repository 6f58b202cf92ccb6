"""Board profiles: what a board is, and the resources that training may use on it.

A profile is a YAML file. It may build on another (``extends``), whose values it keeps where it gives none of
its own: so a fleet's own profile is a few lines over one of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from agent.board import Board
from agent.governor_settings import GovernorSettings
from agent.limit_settings import LimitSettings
from dpagent.configuration import load_settings
from dpagent.errors import ConfigurationError
from dpagent.learning.data.declared import MAX_RECORDS
from dpagent.learning.training.bounds import MAX_PROCESSES
from dpagent.overrides import overlaid
from dpagent.schema.limits import Limits
from dpagent.settings import Settings
from dpagent.yaml_file import load_yaml

AUTO: Final = "auto"
"""In place of a profile's name: the one that fits this board."""
_GENERIC: Final = {"aarch64": "generic-arm64", "armv7l": "generic-armv7", "x86_64": "generic-x86-64"}
_MEMORY_SHARE: Final = 0.8
"""Of a board's installed memory: firmware and kernel keep some for themselves."""

Text = Annotated[str, Limits(min_length=1)]
Texts = tuple[Text, ...]


class BoardFacts(Settings):
    """What the board is. Facts for people and for ``dpagent profiles detect``."""

    architecture: Literal["aarch64", "armv6l", "armv7l", "x86_64"]
    """Of its processor, as `uname -m` names it."""
    processor: Text
    """Cores and clock, in words."""
    cores: Annotated[int, Limits(ge=1, le=1024)]
    """Number of them."""
    memory_mib: Annotated[int, Limits(ge=64)]
    """Installed memory, in the smallest variant; the agent refuses a profile with more than the board has."""
    storage: Text
    """Where its system and state lie, in words."""
    heat: Text
    """From when on it slows down, in words."""
    power: Text
    """Its supply, in words."""
    compatible: Texts = ()
    """Names of the board in the root of its device tree (`/proc/device-tree/compatible`)."""
    cannot: Text | None = None
    """What does not run on it, in words."""
    sources: Texts = ()
    """Where these facts are from."""


class Profile(Settings):
    """One YAML file of ``firmware_profiles/``."""

    extends: Text | None = None
    """Another profile: its name in the package, or the path of its file, relative to this one. Its values
    hold where this file has none."""
    description: Text
    """The board, in words."""
    board: BoardFacts
    engine: Literal["auto", "numpy", "onnx"] = "auto"
    """As ``engine`` of ``agent.yaml``, which replaces it."""
    microbatch: Annotated[int, Limits(ge=1, le=64)]
    """Records whose gradients are in memory at once; small caches need few."""
    processes: Annotated[int, Limits(ge=1, le=MAX_PROCESSES)] = 1
    """Cores that training may use at most, each by a process of its own. The agent tries how many pay."""
    engine_memory_mib: Annotated[int, Limits(ge=1, le=1_048_576)] | None = None
    """Most memory that computing gradients may take, with all its processes, besides what the agent takes
    anyway. In the trial, an engine that takes more is left out, and so are more processes than fit; a plan
    for which none is left is declined."""
    processes_stay_s: Annotated[float, Limits(ge=0, le=3_600)] = 0.0
    """For how many seconds the processes that price rounds and train stay after an answer, in up to 80 MiB:
    rounds that follow soon begin earlier by their start, a second of a PC's processor. With 0 they end at
    once."""
    niceness: Annotated[int, Limits(ge=0, le=19)] = 10
    """The agent's nice value; a higher value gives way to the board's own work."""
    max_records: Annotated[int, Limits(ge=1, le=MAX_RECORDS)] | None = None
    """Of data that do not declare ``data.max_records``."""
    limits: LimitSettings = LimitSettings()
    """As ``limits`` of ``agent.yaml``, where a key that is set there replaces the one here."""
    governor: GovernorSettings = GovernorSettings()
    """As ``governor`` of ``agent.yaml``, likewise."""


_Chain = tuple[tuple[str, Mapping[str, Any]], ...]


@dataclass(frozen=True, slots=True)
class LoadedProfile:
    """A profile, and the files that it is from.

    Attributes:
        name: as it was asked for, or as it was detected.
        profile: its values, with those of all that it extends.
        chain: the names of the file and of those that it extends, nearest first, each with the values that
            stand in it.
    """

    name: str
    profile: Profile
    chain: _Chain


def profile_names() -> list[str]:
    """The profiles that come with the package."""
    return sorted(file.stem for file in _folder().glob("*.yaml"))


def is_profile_path(name: str) -> bool:
    """Whether ``name`` is the path of a profile and not the name of one in the package."""
    return name.endswith((".yaml", ".yml"))


def load_profile(name: str) -> Profile:
    """Load a profile by name, from a path when ``name`` ends in ``.yaml``, or this board's for ``auto``.

    Raises:
        ConfigurationError: There is no such profile, or it is malformed.
    """
    return open_profile(name).profile


def open_profile(name: str) -> LoadedProfile:
    """As :func:`load_profile`, with where each value is from.

    Raises:
        ConfigurationError: as there.
    """
    if name == AUTO:
        name = detect_profile(Board.this())
    profile, chain = _opened(name, Path(), ())
    return LoadedProfile(name, profile, chain)


def _opened(name: str, folder: Path, heirs: tuple[Path, ...]) -> tuple[Profile, _Chain]:
    """A profile and its chain; ``heirs`` are the files that extend it."""
    if is_profile_path(name):
        return _read(name, folder / name, heirs)
    if name not in profile_names():
        raise ConfigurationError(
            f"profile is {name!r}; expected {AUTO}, one of {', '.join(profile_names())}, or the path of a "
            ".yaml file."
        )
    return _read(name, _folder() / f"{name}.yaml", heirs)


def _folder() -> Path:
    """Of the profiles that come with the package: ``importlib.resources`` would take 1 MiB."""
    spec = find_spec("firmware_profiles")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _read(name: str, path: Path, heirs: tuple[Path, ...]) -> tuple[Profile, _Chain]:
    file = path.resolve()
    if file in heirs:
        raise ConfigurationError(f"{path}: extends: this profile builds on itself, by way of {heirs[-1]}.")
    values = load_yaml(path, example="extends: raspberry-pi-4")
    below: _Chain = ()
    parent = values.get("extends")
    if isinstance(parent, str) and parent:
        try:
            _, below = _opened(parent, path.parent, (*heirs, file))
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: extends {parent!r}. {error}") from error
    base: dict[str, Any] = {}
    for _, inherited in reversed(below):
        base = overlaid(base, inherited)
    return load_settings(path, Profile, base=base), ((name, values), *below)


def detect_profile(board: Board) -> str:
    """The name of the package's profile that fits a board best: its own, or the generic one.

    A system of 32 bits on a 64-bit board gets the generic one: the packages of its own need 64 bits.

    Raises:
        ConfigurationError: There is none for its architecture.
    """
    texts = {name: (_folder() / f"{name}.yaml").read_text("utf-8") for name in profile_names()}
    for known in board.compatible:
        for name, text in texts.items():
            if known not in text:
                continue  # Parsing all of them takes a small board a second.
            facts = load_profile(name).board
            if known in facts.compatible and board.architecture == facts.architecture:
                return name
    if (generic := _GENERIC.get(board.architecture)) is not None:
        return generic
    raise ConfigurationError(
        f"There is no profile for the architecture {board.architecture!r} of this board; expected one of "
        f"{', '.join(_GENERIC)}. Set profile to the path of your own .yaml file."
    )


def fits_memory(facts: BoardFacts, board: Board) -> bool:
    """Whether a board has the memory that a profile is for."""
    return board.memory_mib >= _MEMORY_SHARE * facts.memory_mib


def check_board(profile: Profile) -> None:
    """Refuse a profile made for a bigger board than this one.

    Raises:
        ConfigurationError: The board has less than 80 % of the profile's memory
            (firmware and kernel reserve some of the installed memory).
    """
    board = Board.this()
    if not fits_memory(profile.board, board):
        raise ConfigurationError(
            f"The profile is for a board of {profile.board.memory_mib} MiB ({profile.description}); this one "
            f"has {board.memory_mib} MiB. Choose another profile: {', '.join(profile_names())}."
        )
