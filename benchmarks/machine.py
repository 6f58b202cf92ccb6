"""The machine of the figures in one line, without its name or addresses."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path

import numpy as np


def describe_machine() -> str:
    """Processor, cores, operating system, versions of Python and numpy, and today's date."""
    return (
        f"{_processor()}, {os.cpu_count()} cores, {_system()}, Python {platform.python_version()}, "
        f"numpy {np.__version__}; {date.today().isoformat()}"
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _system() -> str:
    try:
        release = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"
    return f"{release}, {platform.system()} {platform.release().partition('-')[0]}"
