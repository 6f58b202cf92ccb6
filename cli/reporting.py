"""How a program tells its user of errors: by a sentence, and an exit code for scripts."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TextIO

from dpagent.errors import DpagentError, ExitCode

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Interrupted(BaseException):
    """Ctrl-C outside a daemon, which handles it itself. Nothing takes it for an error of what it is at."""


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted


class _OutputError(OSError):
    """Standard output cannot be written."""


class _Output(io.FileIO):
    """Standard output, whose errors are told from others that name no file.

    After one it leads nowhere, so that the end of the program has none to report.
    """

    def write(self, data: ReadableBuffer, /) -> int | None:  # type: ignore[override]
        """As of :class:`io.FileIO`; ends the program where its reader has gone, as with ``| head``."""
        if not memoryview(data).nbytes:
            return 0  # Typer tries whether it may write bytes, and drops the error.
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if isinstance(error, BrokenPipeError):
                raise SystemExit(ExitCode.OK) from None
            raise _OutputError(*error.args) from error


class _Errors(io.FileIO):
    """Standard error. Where it cannot be written, nobody reads it, and the exit code stands all the same."""

    def write(self, data: ReadableBuffer, /) -> int | None:  # type: ignore[override]
        """As of :class:`io.FileIO`; raises nothing."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _ready_streams() -> None:
    """Have all standard streams, and know of their errors which they are.

    What was closed before this program began (``2>&-``) leads nowhere: the next file that is opened would get
    its number, and what libraries and other programs print.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:  # The least number that is free is the next one to be had.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: PTH123, SIM115
            setattr(sys, f"__{name}__", stream)
            setattr(sys, name, stream)
    # A terminal that cannot show ε gets a question mark, not an error.
    sys.stdout = _through(_Output, sys.stdout, "replace")
    sys.stderr = _through(_Errors, sys.stderr, sys.stderr.errors)


def _through(raw: type[io.FileIO], stream: TextIO, errors: str | None) -> TextIO:
    """A standard stream as the interpreter has opened it, but for what reaches the system."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        ours = raw(stream.fileno(), "wb", closefd=False)
    except io.UnsupportedOperation:
        return stream  # In memory: a program has called this one, and reads what it says.
    is_unbuffered = isinstance(stream.buffer, io.RawIOBase)
    return io.TextIOWrapper(
        ours if is_unbuffered else io.BufferedWriter(ours),
        stream.encoding,
        errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _about(error: OSError) -> str:
    """The sentence of an error that nobody expected: of the output, of a file that it names, or of others."""
    from dpagent.storage import disk_errors

    if isinstance(error, _OutputError):
        return f"the output cannot be written ({error.strerror or error})."
    if not isinstance(error.filename, (str, bytes)):
        if isinstance(error, FileNotFoundError) and not _is_somewhere():
            return "the directory that this command runs in is gone. Run it in another one."
        return f"the system refuses something ({error.strerror or error}).{_details()}"
    try:
        with disk_errors(Path(os.fsdecode(error.filename))):
            raise error
    except DpagentError as named:
        return str(named)


def _is_somewhere() -> bool:
    """Whether the working directory is there, below which most paths are looked for."""
    try:
        Path.cwd()
    except OSError:
        return False
    return True


def _details() -> str:
    """Where the details are of the error that is being handled; empty where they could not be kept."""
    import tempfile  # with all that packs and unpacks

    try:
        with tempfile.NamedTemporaryFile("w", prefix="dpagent-error-", suffix=".log", delete=False) as log:
            traceback.print_exc(file=log)
    except OSError:
        return ""
    return f" The details are in {log.name}."


def _say(sentence: str) -> None:
    print(f"dpagent: {sentence}", file=sys.stderr)


def reported(program: Callable[[], object]) -> None:
    """Run a program; report every error as a sentence and an exit code."""
    signal.signal(signal.SIGINT, _interrupt)
    _ready_streams()
    try:
        try:
            program()
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except Interrupted:
        _say("Interrupted.")
        sys.exit(ExitCode.INTERRUPTED)
    except DpagentError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        _say(_about(error))
        sys.exit(ExitCode.STORAGE)
    except Exception as error:  # noqa: BLE001 - the only place that catches unexpected errors
        _say(f"internal error ({type(error).__name__}: {error}). Please report it.{_details()}")
        sys.exit(ExitCode.INTERNAL)
