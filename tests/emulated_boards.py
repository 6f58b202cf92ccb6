"""The emulated ARM boards that `make arm-root` makes, and commands on them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parents[1]
ENTER: Final = HERE / "packaging" / "arm" / "enter"
DPAGENT: Final = "/opt/dpagent/bin/dpagent"
PATIENCE_S: Final = 300.0
"""For a command: an emulator takes a while to start Python."""

Result = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class EmulatedBoard:
    """A root of Debian with the board's own install, run by QEMU.

    Attributes:
        architecture: as Debian names it.
        machine: as ``uname -m`` does.
        profile: that its agent takes by itself.
        processors: as QEMU names them; the first is the least.
        tests: of the project, that must pass on each of them.
    """

    architecture: str
    machine: str
    profile: str
    processors: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def root(self) -> Path:
        return HERE / "build" / self.architecture

    @property
    def is_made(self) -> bool:
        return (self.root / DPAGENT[1:]).exists() and shutil.which("unshare") is not None

    def command(self, processor: str, *command: str | Path) -> list[str]:
        """What runs a command on the board."""
        return ["env", f"QEMU_CPU={processor}", str(ENTER), str(self.root), *map(str, command)]

    def run(
        self, *command: str | Path, processor: str | None = None, patience_s: float = PATIENCE_S
    ) -> Result:
        """Run a command on the board, to its end."""
        return subprocess.run(
            self.command(processor or self.processors[0], *command),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=patience_s, check=False,
        )  # fmt: skip


_COMMON: Final = ("tests/privacy/noise", "tests/agent/test_ledger.py", "tests/protocol/test_codec.py")
ARM64: Final = EmulatedBoard(
    "arm64", "aarch64", "generic-arm64", ("cortex-a53", "cortex-a72", "cortex-a76"),
    ("tests/learning/training", *_COMMON),
)  # fmt: skip
ARMHF: Final = EmulatedBoard(
    # Cortex-A7: Raspberry Pi 2; A8: BeagleBone Black, which divides no integers.
    "armhf", "armv7l", "generic-armv7", ("cortex-a7", "cortex-a8"),
    (
        "tests/learning/training/test_numpy_engine.py", "tests/learning/training/test_engines.py",
        "tests/learning/training/test_batch_invariance.py", *_COMMON,
    ),
)  # fmt: skip
_ALL: Final = {board.architecture: board for board in (ARM64, ARMHF)}


def boards() -> Sequence[EmulatedBoard]:
    """Those that a run is for: ``ARM_BOARD``, or all."""
    chosen = os.environ.get("ARM_BOARD")
    return tuple(_ALL.values()) if chosen is None else (_ALL[chosen],)
