"""``dpagent coordinator report``: the HTML report of a fleet's job, as the demo writes one of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.configurations import coordinator_settings
from cli.options.daemons import FleetConfig


def report(
    config: FleetConfig = None,
    job: Annotated[
        str | None, typer.Option("--job", metavar="NAME", help="The job that is reported.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The directory that it is written to.")] = Path("report"),
) -> None:
    """Write the HTML report of a job, also during it: accuracy, budget, noise and guarantee, in pictures.

    By default that of the job that goes on, or else of the one that ended last. It has what the coordinator
    knows: nothing of a single board.
    """
    from dpagent.extras import extra_needed

    settings = coordinator_settings(config)
    with extra_needed("report", "The report"):
        from simulation.fleet_job import collect_job
        from simulation.report.page import write_report

    typer.echo(f"Report: {write_report(collect_job(settings, job), out)}")
