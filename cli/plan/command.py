"""``dpagent plan``: the noise that a privacy target needs, before any training."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.options.rows import PLAN
from cli.options.table import Given, with_options
from cli.output import write_json
from dpagent.errors import UsageError


@with_options(target=PLAN)
def plan(
    target: Given,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Take these values from a coordinator's fleet.yaml; the options above override it."
        ),
    ] = None,
    all_rounds: Annotated[
        bool, typer.Option("--all-rounds", help="Show every round instead of about a dozen.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Explain the guarantee in plain words.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the schedules to this file, .svg or .png.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead of text."),
    ] = None,
) -> None:
    """Show the cost of a privacy target: noise and running ε for each schedule.

    The command trains nothing and reads no data. Figures are bounds for the mechanism as implemented;
    the first line states their unit, adjacency and trusted parties.
    """
    if picture is not None and picture.suffix not in (".svg", ".png"):
        raise UsageError(f"`--picture`: got {str(picture)!r}; expected a name that ends in .svg or .png.")

    from cli.plan.comparison import compare
    from cli.plan.target import PlanOptions, target_from

    comparison = compare(target_from(target.settings(PlanOptions), config=config))
    if picture is not None:
        from cli.plan.picture import draw
        from dpagent.storage import write_atomically

        write_atomically(picture, draw(comparison, picture.suffix))
    if json_file is not None:
        from cli.plan.script import as_json

        write_json(json_file, as_json(comparison, explained=explain))
        return
    width, encoding = shutil.get_terminal_size().columns, sys.stdout.encoding or "ascii"
    if explain:
        from cli.plan.explain import explanation

        text = explanation(comparison, width=width)
    else:
        from cli.plan.page import page

        text = page(comparison, every_round=all_rounds, width=width, encoding=encoding)
    typer.echo(text, nl=False)
    if picture is not None:
        typer.echo(f"The picture is in {picture}.")
