"""``dpagent plan``: the noise that a privacy target needs, before any training."""

from __future__ import annotations

import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.output import write_json
from cli.tables import reader_may_leave


class ScheduleKind(StrEnum):
    """Rules that distribute a budget over the rounds."""

    INCREMENTING = "incrementing"
    UNIFORM = "uniform"
    LINEAR = "linear"


def plan(
    epsilon: Annotated[
        float | None, typer.Option(help="Target ε of the whole job, for each record.", show_default="2")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Target δ of the whole job.", show_default="1e-5")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of the job, up to 5000.", show_default="100")
    ] = None,
    sampling_rate: Annotated[
        float | None, typer.Option(help="Probability that a record is in a round's lot.", show_default="0.1")
    ] = None,
    schedule: Annotated[
        ScheduleKind | None,
        typer.Option(help="How the rounds share the budget.", show_default="incrementing"),
    ] = None,
    step: Annotated[
        float | None,
        typer.Option(
            help="incrementing: the step, as a fraction (0 to 0.99) of its allowed maximum.",
            show_default="0.3",
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(help="linear: the last round's budget over the first round's.", show_default="3"),
    ] = None,
    custom: Annotated[
        str | None,
        typer.Option(
            metavar="WEIGHTS",
            help="Your own schedule: the rounds' shares of the budget as 1,2,3 or a file of numbers. "
            "It is the requested schedule, unless --schedule names another.",
        ),
    ] = None,
    local_steps: Annotated[
        int | None, typer.Option(help="Noisy steps a device takes in a round.", show_default="1")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="Devices that take part in a round.", show_default="100")
    ] = None,
    records_per_device: Annotated[
        float | None, typer.Option(help="Records on a device, a public estimate.", show_default="1000")
    ] = None,
    parameters: Annotated[
        int | None, typer.Option(help="Parameters of the model.", show_default="26010, of mnist-cnn")
    ] = None,
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
        raise typer.BadParameter(f"{picture}: the name must end in .svg or .png.", param_hint="--picture")

    from cli.plan.comparison import compare
    from cli.plan.target import target_from

    target = target_from(
        {
            "epsilon": epsilon,
            "delta": delta,
            "rounds": rounds,
            "sampling_rate": sampling_rate,
            "local_steps": local_steps,
            "schedule": None if schedule is None else schedule.value,
            "step": step,
            "ratio": ratio,
            "devices": devices,
            "records_per_device": records_per_device,
            "parameters": parameters,
        },
        config=config,
        custom=custom,
    )
    comparison = compare(target)
    if picture is not None:
        from cli.plan.picture import draw
        from dpagent.storage import write_atomically

        write_atomically(picture, draw(comparison, picture.suffix))
    with reader_may_leave():
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
