"""Runs the project's programs as a user would, and ends them in every case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import BenchmarkError
from dpagent.overrides import without_overrides

ROOT = Path(__file__).resolve().parent.parent
_STOP_S = 20.0


def python(*arguments: str) -> list[str]:
    """A command of the interpreter that runs us."""
    return [sys.executable, *arguments]


def environment() -> dict[str, str]:
    """The surroundings of a child: one BLAS thread, as the programs themselves set it."""
    return without_overrides(os.environ) | {"OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def run_program(command: Sequence[str], *, timeout_s: float) -> str:
    """Run a program in the project's directory; its progress goes to standard error.

    Returns:
        Its standard output.

    Raises:
        BenchmarkError: It fails, or does not end in time.
    """
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(
            f"`{_shown(command)}` did not end within {timeout_s:g} s. Is the machine overloaded?"
        ) from None
    finally:
        stop(process)
    if process.returncode != 0:
        raise BenchmarkError(
            f"`{_shown(command)}` ended with code {process.returncode}; its messages stand above."
        )
    return output


def run_json(command: Sequence[str], *, timeout_s: float) -> Any:
    """Like :func:`run_program`, for a program that writes JSON to standard output."""
    output = run_program(command, timeout_s=timeout_s)
    try:
        return json.loads(output)
    except ValueError as error:
        raise BenchmarkError(f"`{_shown(command)}` did not write JSON ({error}).") from error


def stop(process: subprocess.Popen[Any]) -> None:
    """Ask a program to stop if it runs, and insist after a while."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def memory_mib(field: str, pid: int | str = "self") -> float:
    """A memory figure of a process, MiB: ``VmRSS`` (resident now) or ``VmHWM`` (at most so far).

    Raises:
        BenchmarkError: The kernel does not tell; only Linux does.
    """
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1024
    except OSError as error:
        raise BenchmarkError(
            f"The memory of process {pid} cannot be read ({error}); it needs Linux."
        ) from error
    raise BenchmarkError(f"The kernel does not tell {field} of process {pid}; this benchmark needs Linux.")


def _shown(command: Sequence[str]) -> str:
    name, *arguments = command
    return " ".join(["python" if name == sys.executable else name, *arguments])
