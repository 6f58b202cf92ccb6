"""The section ``cifar`` of the settings."""

from __future__ import annotations

from typing import Literal

from dpagent.settings import Settings


class CifarSettings(Settings):
    """Which of the two the files are laid out as. Public."""

    layout: Literal["cifar-10", "cifar-100"] | None = None
    """How a record is stored, and what its files are called: with one label, or with two."""
