"""Answers of the latest model, one at a time, by a process that may be ended (:mod:`agent.serving.program`).

A process knows one model. When the file changes, another is started beside it, and takes over once it is
ready: no request is dropped, and a file that cannot be read changes nothing.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from agent.child_programs import environment
from agent.serving.lines import READS_FILES, READS_NONE, error_line
from dpagent.errors import DataError

log = logging.getLogger(__name__)

_PROGRAM: Final = "agent.serving.program"
_LOAD_S: Final = 120.0
_READ_BYTES: Final = 1 << 16
_TRY_AGAIN_S: Final = 5.0


class Answers:
    """What the latest model answers.

    Args:
        model: its file, which may come later, and change.
        timeout_s: that an answer may take.
    """

    def __init__(self, model: Path, timeout_s: float) -> None:
        self._model, self._timeout_s = model, timeout_s
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._known: tuple[int, ...] | None = None
        """The file that the process, or the last attempt to start one, was given."""
        self._not_before = 0.0
        self.status = ""
        """What is answered, in a line."""

    def answer(self, line: bytes, *, reads_files: bool) -> bytes:
        """The answer to a request, both without a line break. Raises nothing.

        Args:
            line: of bounded length.
            reads_files: whether who asks may name files of this board.
        """
        with self._lock:
            self._refresh()
            if self._process is None:
                return error_line(f"There is no model to ask: {self.status}")
            try:
                letter = READS_FILES if reads_files else READS_NONE
                return self._process.ask(letter + line.replace(b"\n", b" "), self._timeout_s)
            except DataError as error:
                self._process.end()
                self._process, self._known, self._not_before = None, None, 0.0
                log.warning("a request was given up: %s", error)
                return error_line(str(error))

    def refresh(self) -> None:
        """See whether there is another model, unless an answer is being made; call it now and then."""
        if self._lock.acquire(blocking=False):
            try:
                self._refresh()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the process, once the answer that it may be making is made."""
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._process is not None and self._process.has_ended:
            log.warning("the process that answers has ended; another is started")
            self._process.end()
            self._process, self._known = None, None
        state = _state_of(self._model)
        if state == self._known and (self._process is not None or now < self._not_before):
            return
        self._known, self._not_before = state, now + _TRY_AGAIN_S
        if state is None:
            if self._process is None:
                self.status = f"{self._model} is not there yet; it comes when a job of the fleet is finished."
            return
        try:
            process = _Process(self._model)
        except DataError as error:
            # The model before goes on, if there is one.
            self.status = self.status if self._process is not None else str(error)
            log.error("the model is not taken: %s", error)
            return
        if self._process is not None:
            self._process.end()
        self._process, self.status = process, f"answers with {process.name}"
        log.info("%s, from %s", self.status, self._model)


class _Process:
    """One process with one model, ready."""

    def __init__(self, model: Path) -> None:
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROGRAM, str(model)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), bufsize=0,
                process_group=0,
            )  # fmt: skip
        except OSError as error:
            raise DataError(
                f"The process that answers cannot be started: {error.strerror}. It is tried again."
            ) from error
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._in, self._out = self._child.stdin.fileno(), self._child.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        try:
            about: dict[str, Any] = json.loads(self._exchanged(b"", _LOAD_S))
            if "error" in about:
                raise DataError(about["error"])
        except DataError:
            self.end()
            raise
        after = "" if about["round"] is None else f" after round {about['round']}"
        self.name = f"model {about['model']!r}{after}"

    @property
    def has_ended(self) -> bool:
        """Whether it is gone: the system ends what takes its last memory."""
        return self._child.poll() is not None

    def ask(self, line: bytes, timeout_s: float) -> bytes:
        """The answer to a line.

        Raises:
            DataError: there is none in time, or the process has ended.
        """
        return self._exchanged(line + b"\n", timeout_s)

    def end(self) -> None:
        """End it, whatever it does."""
        with suppress(ProcessLookupError):
            self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _exchanged(self, line: bytes, timeout_s: float) -> bytes:
        """Write a line and read one, in ``timeout_s`` together."""
        left, found, until = memoryview(line), bytearray(), time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            if left:
                selector.register(self._in, selectors.EVENT_WRITE)
            while not found.endswith(b"\n"):
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready and time.monotonic() >= until:
                    raise DataError(
                        f"The answer took more than {timeout_s:g} s (serve.timeout_s) and was given up."
                    )
                for key, _ in ready:
                    if key.fd == self._in:
                        left = self._written(left)
                        if not left:
                            selector.unregister(self._in)
                    else:
                        found += self._read()
        return bytes(found[:-1])

    def _written(self, left: memoryview) -> memoryview:
        try:
            return left[os.write(self._in, left) :]
        except BlockingIOError:
            return left
        except OSError as error:
            raise DataError("The process that answers has ended. Ask again.") from error

    def _read(self) -> bytes:
        try:
            piece = os.read(self._out, _READ_BYTES)
        except BlockingIOError:
            return b""
        if not piece:
            raise DataError("The process that answers has ended, maybe for want of memory. Ask again.")
        return piece


def _state_of(file: Path) -> tuple[int, ...] | None:
    """What changes when a file is replaced; None without one."""
    try:
        known = file.stat()
    except OSError:
        return None
    return known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns
