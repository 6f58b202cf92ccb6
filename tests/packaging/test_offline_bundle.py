"""The bundle of wheels: an environment without any network gets the agent from it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def bundle() -> Path | None:
    found = sorted((HERE / "dist").glob(f"dpagent-*-python{VERSION}-{platform.machine()}.tar"))
    return found[-1] if found else None


BUNDLE = bundle()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BUNDLE is None or os.geteuid() != 0 or shutil.which("unshare") is None,
        reason=f"needs root, unshare, and make bundle MACHINE={platform.machine()} BOARD_PYTHON={VERSION}",
    ),
]


def test_an_environment_without_a_network_gets_the_agent(tmp_path: Path) -> None:
    assert BUNDLE is not None
    with tarfile.open(BUNDLE) as archive:
        archive.extractall(tmp_path, filter="data")
    (wheels,) = (path for path in tmp_path.iterdir() if path.is_dir())
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=120)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))} | {
        "PIP_CONFIG_FILE": os.devnull
    }
    subprocess.run(
        ["unshare", "--net", environment / "bin/pip", "install", "--quiet", "--no-index", "--find-links",
         wheels, "dpagent"],
        check=True, env=clean, timeout=250,
    )  # fmt: skip
    said = subprocess.run(
        [environment / "bin/dpagent", "--version"], check=True, env=clean, cwd=tmp_path, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert said.stdout.startswith("dpagent ")
