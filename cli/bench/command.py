"""``dpagent bench``: the command and its options."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.output import write_json


class EngineChoice(StrEnum):
    """The engines to measure."""

    AUTO = "auto"
    NUMPY = "numpy"
    ONNX = "onnx"


def bench(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Built-in models, or model files (.yaml).",
            show_default="all built in",
        ),
    ] = None,
    engine: Annotated[
        EngineChoice, typer.Option(help="One engine; `auto`: both, and the one that an agent chooses.")
    ] = EngineChoice.AUTO,
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="Cores that training uses, each by a process of its own.")
    ] = 1,
    microbatch: Annotated[
        int, typer.Option(min=1, max=64, help="Records computed together, as in the board's profile.")
    ] = 32,
    lot: Annotated[int, typer.Option(min=1, max=65_536, help="Records per lot.")] = 256,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead of a table."),
    ] = None,
) -> None:
    """Measure the training speed and memory of each model on this board.

    The command uses synthetic records and initial weights: it reads no data and spends no budget. Every
    engine trains in its own process; stop other work on the board first.
    """
    from cli.bench.machine import machine
    from cli.bench.measuring import Terms, measure, require_any
    from cli.bench.page import as_json, page
    from dpagent.learning.model_files import find_model
    from dpagent.learning.models.built_ins import BUILT_IN

    specs = [find_model(name) for name in models or sorted(BUILT_IN)]
    engines = {EngineChoice.NUMPY: ("numpy",), EngineChoice.ONNX: ("onnx",)}.get(engine, ("numpy", "onnx"))
    terms = Terms(engines, lot, microbatch, processes)  # type: ignore[arg-type]  # of literals
    results = [measure(spec, terms, lambda text: typer.echo(text, err=True)) for spec in specs]
    require_any(results)
    about = machine()
    if json_file is not None:
        write_json(json_file, as_json(results, terms, about))
    else:
        typer.echo(page(results, terms, about), nl=False)
