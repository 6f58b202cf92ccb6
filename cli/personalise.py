"""``dpagent personalise``: the board's model, trained on with its own records for its own use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from cli.configurations import agent_settings
from cli.notation import percent
from cli.options.daemons import AgentConfig
from cli.output import write_json
from dpagent.wording import counted


def personalise(
    config: AgentConfig = None,
    layers: Annotated[
        Literal["last", "all"], typer.Option(help="What is trained: the last layer, or all.")
    ] = "last",
    epochs: Annotated[
        float, typer.Option(min=0.01, max=1000, help="How often each record is used, on average.")
    ] = 5.0,
    batch: Annotated[int, typer.Option(min=1, max=65_536, help="Records of a step.")] = 16,
    learning_rate: Annotated[
        float, typer.Option(min=1e-6, max=10, help="Learning rate of every step.")
    ] = 0.05,
    held_out: Annotated[
        float,
        typer.Option(min=0.05, max=0.9, help="Share of the records that accuracy is measured on."),
    ] = 0.2,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead.")
    ] = None,
) -> None:
    """Train a copy of this board's latest model on its own records, for its own use.

    The copy never leaves the board, so it is made without noise and costs no budget. It holds private data,
    and its file, beside the model's, is readable by its owner alone. It is kept if it is no less accurate on
    records that were held out. `dpagent predict` takes it by its path, `dpagent serve` with
    `serve.model: personal`.
    """
    from dpagent.extras import require_onnx_runtime

    require_onnx_runtime("`dpagent personalise`")
    from agent.personal_model import personalise_board
    from dpagent.learning.inference.personal import Recipe

    recipe = Recipe(layers, epochs, batch, learning_rate, held_out)
    found, file = personalise_board(agent_settings(config), recipe)
    if json_file is not None:
        write_json(
            json_file,
            {
                "before": found.before,
                "after": found.after,
                "trained": found.trained,
                "held_out": found.held_out,
                "left_out": found.left_out,
                "file": None if file is None else str(file),
            },
        )
        return
    left_out = f", {counted(found.left_out, 'record')} left out" if found.left_out else ""
    typer.echo(
        f"Accuracy on {counted(found.held_out, 'record')} held out: {percent(found.before, 1)} before, "
        f"{percent(found.after, 1)} after training on {counted(found.trained, 'record')}{left_out}."
    )
    if file is None:
        typer.echo(
            "It is less accurate, and not kept. Try --layers last, fewer --epochs, a lower --learning-rate."
        )
    else:
        typer.echo(f"{file} holds private data of this board, and must not leave it.")
