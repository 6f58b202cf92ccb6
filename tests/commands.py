"""The ``dpagent`` command: in this process, which is quick, or in one of its own, where that is the point."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_interrupt = signal.getsignal(signal.SIGINT)
from cli.main import main  # noqa: E402 - it takes the signal while it starts
from dpagent.errors import ExitCode  # noqa: E402

signal.signal(signal.SIGINT, _interrupt)

TIMEOUT_S = 120
_WIDTH = {"COLUMNS": "80"}  # as without a terminal
_LOG = re.compile(r"The details are in (\S+)\.$", re.MULTILINE)

Result = subprocess.CompletedProcess[str]


def dpagent(*arguments: str | Path, **environment: str) -> Result:
    """Run a command in this process, as its entry point would: the exit code and what it wrote."""
    words = ["dpagent", *map(str, arguments)]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code, policy = 0, os.sched_getscheduler(0)
    with (
        _undone(_WIDTH | environment, words),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    # `dpagent run` takes some niceness for good, too, which costs the tests little.
    assert os.sched_getscheduler(0) == policy, (
        "all later tests would run behind others: use `dpagent_process`"
    )
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    if code == ExitCode.INTERNAL:
        print(*texts, *(Path(log).read_text() for log in _LOG.findall(texts[1])))  # shown where a test fails
    return subprocess.CompletedProcess(words, code, *texts)


def dpagent_process(*arguments: str | Path, before: str = "", **options: Any) -> Result:
    """Run a command in a process of its own.

    Args:
        arguments: Of the command.
        before: Python statements that the process executes first.
        options: Of :func:`subprocess.run`.
    """
    return subprocess.run(
        command_line(*arguments, before=before),
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options,
    )  # fmt: skip


def command_line(*arguments: str | Path, before: str = "") -> list[str]:
    """How a process of its own is started."""
    start = ["-c", f"{before}\nfrom cli.main import main; main()"] if before else ["-m", "cli.main"]
    return [sys.executable, *start, *map(str, arguments)]


@contextlib.contextmanager
def _undone(environment: dict[str, str], words: list[str]) -> Iterator[None]:
    """What a command changes in its process, put back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(sys, "argv", words)
        for name, value in environment.items():
            patch.setenv(name, value)
        root.handlers.clear()  # pytest's: with them there, a command would not log to its standard error
        try:
            yield
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
            for number, handler in signals.items():
                signal.signal(number, handler)
