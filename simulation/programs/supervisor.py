"""Starts programs, restarts those that die, and stops them all in every case.

It does on one machine what systemd does on a board: ``Restart=on-failure`` with a limit. On
Linux the kernel ends the children if their parent is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from dpagent.errors import ChildProcessError, ExitCode
from dpagent.overrides import without_overrides
from dpagent.storage import disk_errors

_PR_SET_PDEATHSIG = 1
_STOP_S = 10.0
_RESTART_PAUSE_S = 0.5
_MOST_DEATHS = 5
_DEATHS_WITHIN_S = 60.0
_HOPELESS = {
    ExitCode.USAGE, ExitCode.CONFIGURATION, ExitCode.DATA, ExitCode.LEDGER, ExitCode.BROKER, ExitCode.STORAGE,
    ExitCode.PLAN,
}  # fmt: skip
"""Exit codes that another start would only repeat."""


@dataclass(slots=True)
class _Child:
    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes]
    may_end: bool
    deaths: list[float] = field(default_factory=list)
    restart_at: float | None = None
    peak_kib: int = 0


class Supervisor:
    """The programs of a fleet, by name.

    Use as a context manager: leaving it stops everything.

    Args:
        logs: Directory for one log a program.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: dict[str, _Child] = {}
        self.restarts = 0
        """Programs that died and were started again."""
        with disk_errors(logs):
            logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: list[str], *, may_end: bool = False, nice: int = 0) -> int:
        """Start a program; ``may_end`` if exit code 0 means that its work is done. Returns its process id."""
        log = self._logs / f"{name}.log"
        if nice:
            command = ["nice", "-n", str(nice), *command]
        process = _spawn(command, log)
        self._children[name] = _Child(name, command, log, process, may_end)
        return process.pid

    def has_ended(self, name: str) -> bool:
        """Whether a program that may end has done its work."""
        child = self._children[name]
        return child.may_end and child.process.poll() == 0

    def peak_mib(self, name: str) -> float | None:
        """Peak resident memory over all of a program's lives, MiB, with the processes that it starts; None
        where not told."""
        child = self._children.get(name)
        return child.peak_kib / 1024 if child is not None and child.peak_kib else None

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Send a program a signal."""
        _signal(self._children[name].process, number)

    def watch(self) -> None:
        """Watch all programs: note their memory, restart those that died.

        Raises:
            ChildProcessError: A program keeps dying, or ended with a code that says why it
                will not run.
        """
        now = time.monotonic()
        for child in self._children.values():
            code = child.process.poll()
            if code is None:
                child.peak_kib = max(child.peak_kib, _peak_kib(child.process.pid))
            elif child.may_end and code == 0:
                continue
            elif child.restart_at is None:
                self._note_death(child, code, now)
            elif now >= child.restart_at:
                child.restart_at = None
                child.process = _spawn(child.command, child.log)
                self.restarts += 1

    def stop(self) -> None:
        """Ask everybody to stop, then insist. The broker, started first, goes last."""
        for child in reversed(self._children.values()):
            _signal(child.process, signal.SIGTERM)
        until = time.monotonic() + _STOP_S
        for child in self._children.values():
            try:
                child.process.wait(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(child.process, signal.SIGKILL)
                child.process.wait()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A second Ctrl-C must not leave programs behind.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.stop()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note_death(self, child: _Child, code: int, now: float) -> None:
        child.deaths = [moment for moment in child.deaths if now - moment < _DEATHS_WITHIN_S] + [now]
        if code in _HOPELESS or len(child.deaths) > _MOST_DEATHS:
            how = f"ended with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
            times = "" if len(child.deaths) == 1 else f" for the {len(child.deaths)}th time in a minute"
            raise ChildProcessError(
                f"{child.name} {how}{times}: {_last_line(child.log)} (all of it: {child.log})",
                ExitCode(code) if code in _HOPELESS else ExitCode.CHILD,
            )
        child.restart_at = now + _RESTART_PAUSE_S


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with the interpreter that runs us, and never one from here."""
    return [sys.executable, "-P", "-m", module, *arguments]


def _spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    # The file of each program holds as it is: a variable would be one setting for all of them.
    environment = without_overrides(os.environ) | {"PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"}
    with disk_errors(log), log.open("ab") as stream:
        try:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True, preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )  # fmt: skip
        except OSError as error:
            raise ChildProcessError(f"{command[0]} cannot be started ({error.strerror}).") from error


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        process.send_signal(number)


def _peak_kib(pid: int) -> int:
    """The peaks of a process and of those that it started and that run, added up."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        own = sum(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
        # A thread's file names the processes that it started.
        files = Path(f"/proc/{pid}/task").glob("*/children")
        return own + sum(_peak_kib(int(child)) for file in files for child in file.read_text().split())
    except (OSError, ValueError):
        return 0


def _last_line(log: Path) -> str:
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return "its log cannot be read"
    return lines[-1].strip() if lines else "it said nothing"
