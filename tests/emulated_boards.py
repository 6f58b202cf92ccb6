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
PYTHON: Final = "/opt/dpagent/bin/python"
SOURCE: Final = "/opt/source"
"""What is under version control, tests too."""
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
        engines: that can train on it.
        tests: modules of the project's, that must pass on each of them.
    """

    architecture: str
    machine: str
    profile: str
    processors: tuple[str, ...]
    engines: tuple[str, ...]
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


def _modules(directory: str) -> list[str]:
    """The modules of tests in it."""
    return sorted(str(each.relative_to(HERE)) for each in (HERE / directory).glob("test_*.py"))


_COMMON: Final = (
    *_modules("tests/privacy/noise"), "tests/agent/test_ledger.py", "tests/protocol/test_codec.py",
)  # fmt: skip
_TRAINING: Final = "tests/learning/training/test_"
MEMORY: Final = (
    f"{_TRAINING}numpy_engine.py::test_a_process_that_trains_is_small",
    f"{_TRAINING}onnx_engine.py::test_a_device_needs_little_memory_and_no_onnx",
    f"{_TRAINING}engine_choice.py::test_no_more_processes_are_taken_than_fit_into_the_memory",
    f"{_TRAINING}process_memory.py::test_memory_is_counted_for_whom_it_is",
    "tests/privacy/noise/test_discrete_gaussian.py::"
    "test_the_largest_table_is_built_in_the_memory_that_it_keeps",
)
"""Tests that measure a process's memory find QEMU's in it."""
ARM64: Final = EmulatedBoard(
    "arm64", "aarch64", "generic-arm64", ("cortex-a53", "cortex-a72", "cortex-a76"),
    ("numpy", "onnx"), (*_modules("tests/learning/training"), *_COMMON),
)  # fmt: skip
ARMHF: Final = EmulatedBoard(
    # Cortex-A7: Raspberry Pi 2; A8: BeagleBone Black, which divides no integers.
    "armhf", "armv7l", "generic-armv7", ("cortex-a7", "cortex-a8"), ("numpy",),
    (
        "tests/learning/training/test_numpy_engine.py", "tests/learning/training/test_engines.py", *_COMMON,
    ),
)  # fmt: skip
_ALL: Final = {board.architecture: board for board in (ARM64, ARMHF)}


def boards() -> Sequence[EmulatedBoard]:
    """Those that a run is for: ``ARM_BOARD``, or all."""
    chosen = os.environ.get("ARM_BOARD")
    return tuple(_ALL.values()) if chosen is None else (_ALL[chosen],)
