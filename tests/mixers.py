"""Mixers for the tests: their ``mixer.yaml`` and their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from brokers import Broker

from dpagent.protocol.mixing import OuterOpener, key_text
from mixer.keys import load_outer_opener
from mixer.settings import load_mixer_settings


def write_mixer(directory: Path, broker: Broker | None, fleet: str, key: str, **changes: Any) -> Path:
    """A ``mixer.yaml``; ``key`` is the coordinator's."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "mixer.yaml"
    values: dict[str, Any] = {"fleet": fleet, "coordinator_key": key} | changes
    if broker is not None:
        values["mqtt"] = broker.values
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def opener_of(file: Path) -> OuterOpener:
    """With the key of the mixer in that file, created if need be."""
    settings = load_mixer_settings(file)
    return load_outer_opener(settings.keys_dir, settings.fleet)


def key_of(file: Path) -> str:
    """As ``dpagent mixer key`` prints it."""
    return key_text(opener_of(file).public_key)
