"""Entry point of the ``dpagent`` command: the tree of commands, and how errors reach a person."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import traceback
from types import FrameType
from typing import Annotated, NoReturn

# Until the command takes over, Ctrl-C ends the start-up without a traceback.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))

# One BLAS thread: boards have other work, and the engine shares its cores itself. Read
# when numpy is first imported, so before everything else.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import typer

from cli import budget, coordinator, run
from cli.bench import command as bench_command
from cli.data import command as data_command
from cli.demo import command as demo_command
from cli.model import command as model_command
from cli.plan import command as plan_command
from cli.predict import command as predict_command
from dpagent import __version__
from dpagent.errors import DpagentError, ExitCode

app = typer.Typer(
    name="dpagent",
    help=(
        "Privacy-preserving federated learning for fleets of small boards, over MQTT.\n\n"
        "Start with `dpagent demo`: a whole fleet on this machine, in about a minute. "
        "Exit codes are listed in docs/exit-codes.md."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="demo")(demo_command.demo)
app.command(name="run")(run.run)
app.command(name="plan")(plan_command.plan)
app.add_typer(coordinator.app, name="coordinator")
app.add_typer(budget.app, name="budget")
app.add_typer(data_command.app, name="data")
app.add_typer(model_command.app, name="model")
app.command(name="predict")(predict_command.predict)
app.command(name="bench")(bench_command.bench)


class Interrupted(DpagentError):
    """Ctrl-C, outside the daemons' own handling of it."""

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
    """Hold the options of the command itself."""


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted("Interrupted.")


def main() -> None:
    """Run the command; turn every error into a sentence and an exit code."""
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
        # The reader of our output has gone, as `| head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.OK)
    except OSError as error:
        # Everything that names a file has a sentence of its own: what is left is the output.
        print(f"dpagent: the output cannot be written ({error.strerror or error}).", file=sys.stderr)
        sys.exit(ExitCode.STORAGE)
    except Exception as error:  # noqa: BLE001 - the one place where unexpected errors end
        with tempfile.NamedTemporaryFile("w", prefix="dpagent-error-", suffix=".log", delete=False) as log:
            traceback.print_exc(file=log)
        print(
            f"dpagent: internal error ({type(error).__name__}: {error}). "
            f"The details are in {log.name}; please report them.",
            file=sys.stderr,
        )
        sys.exit(ExitCode.INTERNAL)


if __name__ == "__main__":
    main()
