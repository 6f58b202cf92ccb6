"""``dpagent model list|show|graph``: the commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from cli.commands import Commands
from cli.output import write_json
from cli.tables import render_table
from dpagent.wording import counted

app = Commands(help="Look at models before they are trained.", no_args_is_help=True)

NameArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="NAME_OR_FILE", help="A built-in model, or a model file (.yaml).", show_default=False
    ),
]


@app.command("list")
def list_models(
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead of a table."),
    ] = None,
) -> None:
    """List the built-in models."""
    from cli.model.page import as_json, dimensions
    from dpagent.learning.models.built_ins import BUILT_IN

    models = [spec for _, spec in sorted(BUILT_IN.items())]
    rows = [
        [spec.name, dimensions(spec.input_shape), f"{spec.classes:,}", f"{spec.parameter_count:,}"]
        for spec in models
    ]
    if json_file is not None:
        write_json(json_file, as_json(models))
    else:
        typer.echo(render_table(["model", "input", "classes", "parameters"], rows, words=2), nl=False)


@app.command()
def show(
    name: NameArgument,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print a model file instead, to start a model of your own from.")
    ] = False,
    microbatch: Annotated[
        int, typer.Option(min=1, max=64, help="Records computed together, for the estimate of memory.")
    ] = 32,
) -> None:
    """Show a model layer by layer: shapes, parameters, operations, and what it takes to train."""
    from cli.model.page import model_file, model_page
    from dpagent.learning.model_files import find_model

    spec = find_model(name)
    typer.echo(model_file(spec) if as_yaml else model_page(spec, microbatch), nl=False)


@app.command()
def graph(
    name: NameArgument,
    views: Annotated[
        int, typer.Option(min=1, max=64, help="Augmented copies of each record, as in fleet.yaml.")
    ] = 1,
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="A clip norm for each layer with parameters.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the graph, an ONNX file, here.")] = None,
) -> None:
    """Build a model's training graph and print its SHA-256, for `trusted_graphs` in agent.yaml.

    A graph decides what is clipped, so a device runs only graphs it knows. Those of the built-in
    models with one view it knows already; of any other, its owner builds the graph with this command
    and trusts what it prints.
    """
    from dpagent.extras import extra_needed
    from dpagent.learning.model_files import find_model
    from dpagent.learning.training.onnx_graph.signature import graph_digest, known_digests
    from dpagent.storage import write_atomically

    spec = find_model(name)
    with extra_needed("coordinator", "Building a training graph"):
        from dpagent.learning.training.onnx_graph.build import build_training_graph

    built = build_training_graph(spec, views=views, per_layer=per_layer)
    digest = graph_digest(built)
    if output is not None:
        write_atomically(output, built)
    typer.echo(digest)
    if (spec.head.digest().hex(), digest) in known_digests():
        note = "Devices with this version know it: nothing needs to be set."
    else:
        note = f"In agent.yaml of every device that shall run it:\n  trusted_graphs: [{digest}]"
    typer.echo(f"{spec.name}: a graph of {counted(len(built), 'byte')}. {note}", err=True)
