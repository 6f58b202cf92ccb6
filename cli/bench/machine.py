"""A description of the machine, without its name or addresses."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dpagent import __version__

PACKAGES = ("numpy", "onnxruntime", "onnx")


def machine() -> dict[str, str | int | None]:
    """Board, processor, usable cores, system and versions; None where unknown."""
    return {
        "board": _text(Path("/proc/device-tree/model")),
        "processor": _processor(),
        "cores": _cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "dpagent": __version__,
        "python": platform.python_version(),
        **{package: version_of(package) for package in PACKAGES},
    }


def _processor() -> str:
    for line in (_text(Path("/proc/cpuinfo")) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return " ".join(value.split())
    return platform.processor() or platform.machine()


def _cores() -> int:
    # A container, or taskset, may leave fewer than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip("\0\n ") or None
    except OSError:
        return None


def version_of(package: str) -> str | None:
    """Of an installed package; None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
