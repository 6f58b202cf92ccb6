"""Size of the board's environment on the disk, with ONNX Runtime and without.

A virtual environment, ``pip install --no-compile`` of this tree with the versions of ``constraints.txt``,
``packaging/trim`` and ``packaging/compile``, as the Debian package is made. Without ONNX Runtime: the same,
with it and what nothing else needs removed (flatbuffers, protobuf, packaging). What ``du`` counts, in blocks
of the file system; 1 MB is a million bytes. Python itself is the system's.

Limits: wheels of this machine's architecture; those of ARM differ by some MB.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.figures import BenchmarkError, Figure
from benchmarks.programs import ROOT

_MB: Final = 1e6
_WANTED: Final = {"with ONNX Runtime": 190.0, "without": 105.0}
_OF_ONNX_RUNTIME: Final = ("onnxruntime", "flatbuffers", "google", "protobuf", "packaging")


def run() -> Iterator[Figure]:
    """The sizes."""
    with tempfile.TemporaryDirectory(prefix="dpagent-size-") as place:
        environment = Path(place, "environment")
        _make(environment, Path(place, "source"))
        yield Figure("as pip installs it", _size_mb(environment), "MB")
        _run([str(ROOT / "packaging" / "trim"), str(environment)])
        trimmed = _size_mb(environment)
        _run([str(ROOT / "packaging" / "compile"), str(environment)])
        yield Figure("bytecode of what the agent loads", _size_mb(environment) - trimmed, "MB")
        _require_use(environment)
        for which, wanted in _WANTED.items():
            if which == "without":
                _leave_out(environment)
            size = _size_mb(environment)
            yield Figure(f"trimmed, {which}", size, "MB", f"wanted: {wanted:g} MB", size / wanted)


def _make(environment: Path, source: Path) -> None:
    files = _run(["git", "-C", str(ROOT), "ls-files", "-z"]).split("\0")
    for name in filter(None, files):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    _run([sys.executable, "-m", "venv", str(environment)])
    _run(
        [
            str(environment / "bin" / "pip"), "install", "--quiet", "--no-compile",
            "--disable-pip-version-check", "--constraint", str(ROOT / "constraints.txt"), str(source),
        ]
    )  # fmt: skip


def _require_use(environment: Path) -> None:
    """See that the command works after the trimming."""
    python = str(environment / "bin" / "python")
    # -P: of the environment, and not of this directory.
    program = ["-P", "-B", "-m", "cli.main", "bench", "digits", "--lot", "8", "--json", "-"]
    _run([python, *program])


def _leave_out(environment: Path) -> None:
    (packages,) = environment.glob("lib/python3.*/site-packages")
    for name in _OF_ONNX_RUNTIME:
        for place in [packages / name, *packages.glob(f"{name}-*.dist-info")]:
            shutil.rmtree(place, ignore_errors=True)


def _size_mb(directory: Path) -> float:
    return int(_run(["du", "-s", "--block-size=1", str(directory)]).split()[0]) / _MB


def _run(command: list[str]) -> str:
    # Not what a developer has set for Python: the environment has to do without.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=own)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command[:4])} ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout
