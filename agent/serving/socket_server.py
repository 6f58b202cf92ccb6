"""The Unix socket: requests as lines, by as many connections as there are seats, each in a thread.

Who may connect is decided by the file's mode. Whoever does can do no more than wait and ask: requests are of
bounded length, a line that does not end in time ends its connection, and connections beyond the seats are
told so.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from agent.serving.answers import Answers
from agent.serving.lines import error_line
from dpagent.errors import ConfigurationError, StateInUseError, StorageError
from dpagent.storage import disk_errors
from dpagent.wording import counted

log = logging.getLogger(__name__)

_SEATS: Final = 16
_LINE_S: Final = 10.0
_IDLE_S: Final = 600.0
_LOOK_S: Final = 0.2
_READ_BYTES: Final = 1 << 16
_LONGEST_PATH: Final = 107
"""Bytes of the address of a Unix socket (unix(7))."""


class SocketServer:
    """Listens at a path, and answers until it is closed.

    Args:
        path: of the socket. One that a killed server left is replaced.
        mode: of the file.
        answers: of the model.
        longest: bytes of a request.

    Raises:
        StateInUseError: another server listens there.
        StorageError: the socket cannot be made, or another file is there.
        ConfigurationError: the path is too long for a socket.
    """

    def __init__(self, path: Path, mode: int, answers: Answers, longest: int) -> None:
        self._path, self._answers, self._longest = path, answers, longest
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise ConfigurationError(
                f"serve.socket {path} has {counted(len(os.fsencode(path)), 'byte')}; expected at most "
                f"{_LONGEST_PATH}."
            )
        self._stop = threading.Event()
        self._seats = threading.BoundedSemaphore(_SEATS)
        self._threads: set[threading.Thread] = set()
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._listener = self._listening(mode)
        except BaseException:
            os.close(self._lock)
            raise
        self._listener.settimeout(_LOOK_S)
        self._acceptor = threading.Thread(target=self._accept, name="socket", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Take no more requests; those that are being answered are."""
        self._stop.set()
        self._acceptor.join()
        self._listener.close()
        for thread in list(self._threads):
            thread.join()
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._lock)

    def __enter__(self) -> SocketServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _listening(self, mode: int) -> socket.socket:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateInUseError(
                f"Another `dpagent serve` listens at {self._path}. Stop it first, or give this one another "
                "serve.socket."
            ) from None
        with disk_errors(self._path):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(self._path.lstat().st_mode):
                    raise StorageError(
                        f"{self._path} is there, and no socket; expected a free name for serve.socket."
                    )
                self._path.unlink()  # Nobody listens: a server that was killed left it.
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o777 & ~mode)
            try:
                listener.bind(str(self._path))
                self._path.chmod(mode)
                listener.listen(_SEATS)
            except BaseException:
                listener.close()
                raise
            finally:
                os.umask(before)
        return listener

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # no descriptor, or no memory, is left
                log.warning("a connection was not taken: %s", error.strerror)
                self._stop.wait(_LOOK_S)
                continue
            if not self._seats.acquire(blocking=False):
                self._refuse(link)
                continue
            thread = threading.Thread(target=self._serve, args=(link,), name="client", daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError as error:  # of the system's limit on threads
                log.warning("a connection was not taken: %s", error)
                self._threads.discard(thread)
                self._seats.release()
                link.close()

    def _refuse(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            link.settimeout(_LOOK_S)
            link.sendall(
                error_line(f"There are {_SEATS} connections already. Close some, and try again.") + b"\n"
            )

    def _serve(self, link: socket.socket) -> None:
        try:
            with link, contextlib.suppress(OSError):
                left = b""
                while (found := self._line(link, left)) is not None:
                    line, left = found
                    if line.strip():
                        link.settimeout(_LINE_S)
                        link.sendall(self._answers.answer(line, reads_files=True) + b"\n")
        finally:
            self._seats.release()
            self._threads.discard(threading.current_thread())

    def _line(self, link: socket.socket, begun: bytes) -> tuple[bytes, bytes] | None:
        """The next line, and what came after it; None when the client is gone, too slow, or told to go."""
        data, since, seen = bytearray(begun), time.monotonic(), 0
        while True:
            end = data.find(b"\n", seen)
            seen = len(data)
            if (end if end >= 0 else seen) > self._longest:
                self._tell(
                    link,
                    f"The request has more than {counted(self._longest, 'byte')} "
                    "(serve.maximum_request_mib).",
                )
                return None
            if end >= 0:
                return bytes(data[:end]), bytes(data[end + 1 :])
            if self._stop.is_set() or time.monotonic() - since > (_LINE_S if data else _IDLE_S):
                return None
            link.settimeout(_LOOK_S)
            try:
                piece = link.recv(_READ_BYTES)
            except TimeoutError:
                continue
            if not piece:
                return (bytes(data), b"") if data else None
            if not data:
                since = time.monotonic()
            data += piece

    def _tell(self, link: socket.socket, sentence: str) -> None:
        link.settimeout(_LINE_S)
        link.sendall(error_line(sentence) + b"\n")
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_WR)
