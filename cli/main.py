"""Entry point of the ``dpagent`` command: the command tree and error reporting."""

from __future__ import annotations

import os
import signal
from typing import Annotated, ClassVar

# Until the command starts, Ctrl-C ends the program without a traceback.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
if os.getpid() == 1:
    # The first process of a container does not hear a signal that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))

# One BLAS thread: boards have other work, and the engine manages its own threads. numpy reads this
# at its first import, so set it first.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import typer

from cli.commands import CommandsByName
from cli.reporting import reported
from dpagent import __version__


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


def main() -> None:
    """Run the command; report every error as a sentence and an exit code."""
    reported(app)


if __name__ == "__main__":
    main()
