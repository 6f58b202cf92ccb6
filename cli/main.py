"""Entry point of the ``dpagent`` command: the command tree and error reporting."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from types import FrameType
from typing import Annotated, ClassVar, NoReturn

# Until the command starts, Ctrl-C ends the program without a traceback.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))

# One BLAS thread: boards have other work, and the engine manages its own threads. numpy reads this
# at its first import, so set it first.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import typer

from cli.commands import CommandsByName
from dpagent import __version__
from dpagent.errors import DpagentError, ExitCode


class _Root(CommandsByName):
    """The commands of ``dpagent``. Each is imported when it is asked for: a daemon keeps what it imports."""

    places: ClassVar = {
        "demo": "cli.demo.command:demo",
        "simulate": "cli.simulate.command:simulate",
        "sweep": "cli.sweep.command:app",
        "init": "cli.init:init",
        "enrol": "cli.enrol:enrol",
        "run": "cli.run:run",
        "status": "cli.status:status",
        "metrics": "cli.metrics:metrics",
        "home-assistant": "cli.home_assistant:home_assistant",
        "doctor": "cli.doctor:doctor",
        "diag": "cli.diag.command:diag",
        "health": "cli.health:health",
        "plan": "cli.plan.command:plan",
        "coordinator": "cli.coordinator:app",
        "mixer": "cli.mixer:app",
        "budget": "cli.budget:app",
        "data": "cli.data.command:app",
        "model": "cli.model.command:app",
        "methods": "cli.methods:app",
        "profiles": "cli.profiles:app",
        "config": "cli.config:app",
        "service": "cli.service.command:app",
        "predict": "cli.predict.command:predict",
        "serve": "cli.serve:serve",
        "personalise": "cli.personalise:personalise",
        "bench": "cli.bench.command:bench",
    }


app = typer.Typer(
    name="dpagent",
    cls=_Root,
    help=(
        "Privacy-preserving federated learning for fleets of small boards, over MQTT.\n\n"
        "Start with `dpagent demo`: a whole fleet on this machine, in about a minute. "
        "docs/exit-codes.md lists the exit codes."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Interrupted(DpagentError):
    """Ctrl-C outside a daemon, which handles it itself."""

    exit_code = ExitCode.INTERRUPTED


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dpagent {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Define the options of the command itself."""


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


def main() -> None:
    """Run the command; report every error as a sentence and an exit code."""
    signal.signal(signal.SIGINT, _interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show ε gets a question mark, not an error.
        sys.stdout.reconfigure(errors="replace")
    try:
        app()
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


if __name__ == "__main__":
    main()
