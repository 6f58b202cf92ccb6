"""How a program tells its user of errors: by a sentence, and an exit code for scripts."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from dpagent.errors import DpagentError, ExitCode


class Interrupted(DpagentError):
    """Ctrl-C outside a daemon, which handles it itself."""

    exit_code = ExitCode.INTERRUPTED


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted("Interrupted.")


def _about(error: OSError) -> str:
    """The sentence of an error that nobody expected of the file that it names, or else of the output."""
    from dpagent.storage import disk_errors

    if not isinstance(error.filename, (str, bytes)):
        return f"the output cannot be written ({error.strerror or error})."
    try:
        with disk_errors(Path(os.fsdecode(error.filename))):
            raise error
    except DpagentError as named:
        return str(named)


def reported(program: Callable[[], object]) -> None:
    """Run a program; report every error as a sentence and an exit code."""
    signal.signal(signal.SIGINT, _interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show ε gets a question mark, not an error.
        sys.stdout.reconfigure(errors="replace")
    try:
        program()
    except DpagentError as error:
        print(f"dpagent: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of the output has gone, as with `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.OK)
    except OSError as error:
        print(f"dpagent: {_about(error)}", file=sys.stderr)
        sys.exit(ExitCode.STORAGE)
    except Exception as error:  # noqa: BLE001 - the only place that catches unexpected errors
        with tempfile.NamedTemporaryFile("w", prefix="dpagent-error-", suffix=".log", delete=False) as log:
            traceback.print_exc(file=log)
        print(
            f"dpagent: internal error ({type(error).__name__}: {error}). "
            f"Please report it with the details in {log.name}.",
            file=sys.stderr,
        )
        sys.exit(ExitCode.INTERNAL)
