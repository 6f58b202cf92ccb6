"""Entry point of the ``dpagent`` command: the command tree and error reporting."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
import traceback
from types import FrameType
from typing import Annotated, NoReturn

# Until the command starts, Ctrl-C ends the program without a traceback.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))

# One BLAS thread: boards have other work, and the engine manages its own threads. numpy reads this
# at its first import, so set it first.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import typer

from cli import budget, config, coordinator, doctor, init, methods, mixer, profiles, run
from cli.bench import command as bench_command
from cli.commands import Commands
from cli.data import command as data_command
from cli.demo import command as demo_command
from cli.model import command as model_command
from cli.plan import command as plan_command
from cli.predict import command as predict_command
from cli.service import command as service_command
from dpagent import __version__
from dpagent.errors import DpagentError, ExitCode

app = Commands(
    name="dpagent",
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
app.command(name="demo")(demo_command.demo)
app.command(name="init")(init.init)
app.command(name="run")(run.run)
app.command(name="doctor")(doctor.doctor)
app.command(name="plan")(plan_command.plan)
app.add_typer(coordinator.app, name="coordinator")
app.add_typer(mixer.app, name="mixer")
app.add_typer(budget.app, name="budget")
app.add_typer(data_command.app, name="data")
app.add_typer(model_command.app, name="model")
app.add_typer(methods.app, name="methods")
app.add_typer(profiles.app, name="profiles")
app.add_typer(config.app, name="config")
app.add_typer(service_command.app, name="service")
app.command(name="predict")(predict_command.predict)
app.command(name="bench")(bench_command.bench)


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
        # Errors about named files have their own sentence: this one is about the output.
        print(f"dpagent: the output cannot be written ({error.strerror or error}).", file=sys.stderr)
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
