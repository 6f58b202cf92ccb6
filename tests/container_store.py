"""Containers of the images that `make containers` builds, in the store where it puts them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
from brokers import wait_until

HERE: Final = Path(__file__).parents[1]
STORE: Final = Path(os.environ.get("CONTAINER_STORE", HERE / "build" / "containers"))
IN_STORE: Final = HERE / "packaging" / "containers" / "in-store"
TOOLS: Final = ("podman", "runc", "podman-compose", "catatonit")
IMAGES: Final = ("localhost/dpagent", "localhost/dpagent-coordinator", "localhost/dpagent-mixer")
UID: Final = 10_001
PATIENCE_S: Final = 180.0
"""For a command: a busy machine takes a while to make a container."""

Result = subprocess.CompletedProcess[str]


def missing() -> str | None:
    """What is missing for containers to run here."""
    if os.geteuid() != 0:
        return "containers are run by root here"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(absent)}"
    if not (STORE / "storage").exists():
        return "no images: make containers"
    return None


def in_store(*command: str | Path, directory: Path | None = None, check: bool = True) -> Result:
    """A command that sees the store, such as podman."""
    ended = subprocess.run(
        [IN_STORE, STORE, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False, cwd=directory,
    )  # fmt: skip
    assert not check or ended.returncode == 0, f"{command}: {ended.stdout[-2_000:]}{ended.stderr[-4_000:]}"
    return ended


def podman(*arguments: str | Path, check: bool = True) -> Result:
    """A command of podman."""
    return in_store("podman", *arguments, check=check)


def inspected(name: str, kind: str = "container") -> dict[str, Any]:
    """What podman knows of a container or an image."""
    (found,) = json.loads(podman(kind, "inspect", name).stdout)
    return dict(found)


class Container:
    """A container that runs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def dpagent(self, *arguments: str, check: bool = True) -> Result:
        """The ``dpagent`` command inside of it."""
        return podman("exec", self.name, "dpagent", *arguments, check=check)

    @property
    def said(self) -> str:
        """Its log."""
        result = podman("logs", self.name)
        return result.stdout + result.stderr

    def wait_to_say(self, words: str, patience_s: float = PATIENCE_S) -> None:
        """Wait until its log has some words; fails with the log, also when it ends before."""

        def says() -> bool:
            said, state = self.said, self.state
            if words not in said and not state["Running"] and not state["Restarting"]:
                pytest.fail(f"{self.name} ended with {state['ExitCode']} and not {words!r}: {said[-2_000:]}")
            return words in said

        wait_until(says, f"{words!r} of {self.name}", patience_s)

    @property
    def state(self) -> dict[str, Any]:
        """Of its process, and of its health."""
        return dict(inspected(self.name)["State"])

    def is_healthy(self) -> bool:
        """What its image's health check finds, now: without systemd, nobody else runs it."""
        return podman("healthcheck", "run", self.name, check=False).returncode == 0

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        podman("stop", "--time", "60", self.name)
        return int(self.state["ExitCode"])
