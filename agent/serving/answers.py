"""Answers of the latest model, one at a time, by a process that may be ended (:mod:`agent.serving.program`).

A process knows one model. When the file changes, another is started beside it, and takes over once it is
ready: no request is dropped, nor waits for that, and a file that cannot be read changes nothing.
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
from agent.serving.lines import GIVES_WAY, READS_FILES, READS_NONE, error_line
from dpagent.errors import DataError

log = logging.getLogger(__name__)

_PROGRAM: Final = "agent.serving.program"
_LOAD_S: Final = 120.0
_LOAD_BEHIND_S: Final = 3_600.0
"""Where that gives way to all other programs: training may want all cores, for so long."""
_READ_BYTES: Final = 1 << 16
_TRY_AGAIN_S: Final = 5.0
_LOOK_S: Final = 1.0


class Answers:
    """What the latest model answers.

    Args:
        model: its file, which may come later, and change.
        timeout_s: that an answer may take.
        stop: nobody waits for a model any more once it is set.
        is_of_records: whether records decide that there is a model at the start, as of that of ``dpagent
            personalise``. Whether, and when, another one comes, they decide in any case: it may find no room
            on the disk. So it is read only where nothing else wants a core.
    """

    def __init__(
        self, model: Path, timeout_s: float, stop: threading.Event, *, is_of_records: bool = False
    ) -> None:
        self._model, self._timeout_s, self._stop, self._is_of_records = model, timeout_s, stop, is_of_records
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._next: _Process | None = None
        """That takes over once it is ready."""
        self._known: tuple[int, ...] | None = None
        """The file that the last process was given which was started, or was to be."""
        self._had = None if is_of_records else _state_of(model)
        """The file that was there at the start, or has been read: that it is read again tells nothing of when
        it came."""
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
                self._await_next()
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

    def begin(self) -> None:
        """Be ready to answer, if there is a model; but wait for none that is read behind all others."""
        if self._is_of_records:
            self.refresh()  # Somebody who has asked already may be waiting for it, and holds the lock.
            return
        with self._lock:
            self._refresh()
            self._await_next()

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
            for process in (self._process, self._next):
                if process is not None:
                    process.end()
            self._process = self._next = None

    def _refresh(self) -> None:
        if self._process is not None and self._process.has_ended:
            log.warning("the process that answers has ended; another is started")
            self._process.end()
            self._process, self._known = None, None
        self._take_next()
        now, state = time.monotonic(), _state_of(self._model)
        is_there = self._process is not None or self._next is not None
        if state == self._known and (is_there or now < self._not_before):
            return
        self._known, self._not_before = state, now + _TRY_AGAIN_S
        if state is None:
            if not is_there:
                self.status = f"{self._model} is not there yet; it comes when a job of the fleet is finished."
            return
        if self._next is not None:
            self._next.end()
            self._next = None
        try:
            self._next = _Process(self._model, state, gives_way=state != self._had)
        except DataError as error:
            self._refuse(error)
        else:
            self.status = self.status if self._process is not None else f"{self._model} is being read."

    def _take_next(self) -> None:
        """Let the next process answer, if it is ready."""
        process = self._next
        try:
            if process is None or not process.is_ready():
                return
        except DataError as error:
            assert process is not None
            process.end()
            self._next = None
            self._refuse(error)
            return
        if self._process is not None:
            self._process.end()
        self._process, self._next, self._had = process, None, process.file
        self.status = f"answers with {process.name}"
        log.info("%s, from %s", self.status, self._model)

    def _refuse(self, error: DataError) -> None:
        """The model before goes on, if there is one."""
        self.status = self.status if self._process is not None else str(error)
        log.error("the model is not taken: %s", error)

    def _await_next(self) -> None:
        """Wait for the next process, but not for long, whoever else has waited for it already."""
        while (
            self._next is not None
            and time.monotonic() < self._next.began_at + _LOAD_S
            and not self._stop.is_set()
        ):
            self._next.wait(_LOOK_S)
            self._take_next()


class _Process:
    """One process with one model."""

    def __init__(self, model: Path, file: tuple[int, ...], *, gives_way: bool) -> None:
        self.file = file
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROGRAM, str(model), *([GIVES_WAY] if gives_way else [])],
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
        self._patience_s = _LOAD_BEHIND_S if gives_way else _LOAD_S
        self.began_at, self._said = time.monotonic(), bytearray()
        self.name = ""
        """Of the model, once it is ready."""

    def is_ready(self) -> bool:
        """Whether it has its model, and may be asked. Waits for nothing.

        Raises:
            DataError: it cannot have it, or not in time.
        """
        while not self._said.endswith(b"\n") and (piece := self._read()):
            self._said += piece
        if not self._said.endswith(b"\n"):
            if time.monotonic() - self.began_at > self._patience_s:
                raise DataError(f"The model took more than {self._patience_s:g} s to be read.")
            return False
        about: dict[str, Any] = json.loads(bytes(self._said))
        if "error" in about:
            raise DataError(about["error"])
        after = "" if about["round"] is None else f" after round {about['round']}"
        self.name = f"model {about['model']!r}{after}"
        return True

    def wait(self, seconds: float) -> None:
        """Wait until it says something, but no longer than so many seconds."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            selector.select(seconds)

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
