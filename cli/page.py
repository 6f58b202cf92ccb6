"""``dpagent coordinator serve|page-token``: the fleet's page and its metrics, and who may see them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from cli.configurations import coordinator_settings, find
from cli.daemons import LogFormat, LogLevel, StopSignals, start_logging
from cli.interpreter import program
from cli.options.daemons import FleetConfig, LogFormatOption, LogLevelOption, SetOptions
from dpagent.errors import ConfigurationError

_REPORT_S: Final = 300.0
_BEHIND_THE_COORDINATOR: Final = 5
"""Nice value: where both want the processor, the coordinator has it."""


class _Role(StrEnum):
    OPERATOR = "operator"
    VIEWER = "viewer"


def serve(
    config: FleetConfig = None,
    options: SetOptions = None,
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Serve the fleet's page, and its metrics at /metrics, until SIGTERM or Ctrl-C.

    It reads beside the coordinator, which goes on without it, and gives orders as `job` does: run it as the
    same user. By default it listens on this machine alone, for that user and root (docs/operating.md).
    """
    start_logging(log_level, log_format, "page")
    stop = StopSignals()
    from dpagent.extras import extra_needed

    with extra_needed("page", "The page"):
        from coordinator.page.server import serve as serve_page

    os.nice(_BEHIND_THE_COORDINATOR)
    settings = coordinator_settings(config, options)
    file = find(config, "coordinator")
    serve_page(settings, file.absolute().parent, stop.serving(), lambda job: _report(file, job))
    raise typer.Exit(stop.exit_code)


def page_token(
    config: FleetConfig = None,
    role: Annotated[
        _Role, typer.Option("--role", help="What its holder may do: look, or give orders too.")
    ] = _Role.OPERATOR,
    renew: Annotated[
        bool, typer.Option("--renew", help="Make another one; the one so far, and its sessions, end.")
    ] = False,
) -> None:
    """Print a token for the fleet's page, made the first time, in a file that only this user may read.

    Give it in the browser, once for twelve hours, or to Prometheus as `credentials_file`.
    """
    from coordinator.page.tokens import Role, make_token

    typer.echo(make_token(coordinator_settings(config).keys_dir, Role[role.name], renew=renew))


def _report(file: Path, job: str) -> bytes:
    """The report of a job, made by a program of its own: pictures take memory, which this one gives back."""
    with tempfile.TemporaryDirectory(prefix="dpagent-report-") as directory:
        command = [
            *program("cli.main"), "coordinator", "report", "--config", str(file), "--job", job,
            "--out", directory,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, timeout=_REPORT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ConfigurationError(f"The report of job {job} took more than {_REPORT_S:g} s.") from error
        if done.returncode:
            text = done.stderr.decode(errors="replace").strip().removeprefix("dpagent: ")
            raise ConfigurationError(text or f"The report of job {job} could not be made.")
        return (Path(directory) / "index.html").read_bytes()
