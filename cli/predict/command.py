"""``dpagent predict MODEL INPUT…`` or ``--latest INPUT…``: the command and its options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.configurations import agent_settings
from cli.options.daemons import AgentConfig
from cli.options.rows import DATA
from cli.options.table import Given, with_options
from dpagent.errors import DataError, ExitCode, UsageError

if TYPE_CHECKING:
    from dpagent.learning.data.inputs import Input
    from dpagent.learning.inference.prediction.reader import InputReader


@with_options(data=DATA.with_default("half", "test"))
def predict(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[MODEL] INPUT...",
            help="A model that the coordinator exported (.onnx), unless --latest is given; then pictures, or "
            "files and directories with records.",
            show_default=False,
        ),
    ],
    data: Given,
    latest: Annotated[
        bool, typer.Option("--latest", help="Take the model of the last finished job on this board.")
    ] = False,
    config: AgentConfig = None,
    top: Annotated[int, typer.Option(min=1, help="Number of classes to show, the most probable first.")] = 1,
    batch: Annotated[int, typer.Option(min=1, max=65_536, help="Inputs held in memory at a time.")] = 64,
    summary: Annotated[
        bool, typer.Option("--summary", help="Print accuracy and confusion table only, no line per input.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead of text."),
    ] = None,
) -> None:
    """Run a trained model on inputs, on this machine, and print its answer for each.

    Pictures are scaled to fit the model; everything else is read as by `dpagent data check` with the
    same options. Where labels are known (folders, a label column), accuracy and a confusion table
    follow. Predictions go to standard output, everything else to standard error. Exits with 4 if an
    input cannot be read; the others are answered all the same.
    """
    from dpagent.extras import require_onnx_runtime

    require_onnx_runtime("`dpagent predict`")
    from cli.predict.json_output import JsonOutput
    from cli.predict.page import TextOutput, about, accuracy_page, closing
    from dpagent.learning.data.settings import DatasetSettings
    from dpagent.learning.inference.prediction.exported_model import ExportedModel
    from dpagent.learning.inference.prediction.outcome import Tally
    from dpagent.learning.inference.prediction.outcome import predict as predictions
    from dpagent.learning.inference.prediction.reader import InputReader

    model, inputs = (latest_model(config), paths) if latest else (paths[0], paths[1:])
    if not inputs:
        raise UsageError("Missing argument 'INPUT'. Give what the model is asked about after MODEL.")
    path = inputs[0].absolute() if inputs[0] == Path() else inputs[0]
    settings = data.settings(DatasetSettings, path=path, half=data.values["half"] or "test")
    exported = ExportedModel(model)
    reader = InputReader(exported, settings, say)
    say(about(exported))
    tally = Tally()
    output = (
        JsonOutput(json_file, exported, reader.class_names, top)
        if json_file is not None
        else TextOutput(reader.class_names, exported.classes, top, silent=summary)
    )
    with output:
        for outcome in predictions(exported, _all_inputs(reader, inputs), batch=batch):
            tally.add(outcome)
            if outcome.problem:
                name, problem = outcome.input.name, outcome.problem
                say(problem if name in problem else f"{name}: {problem}")
            output.write(outcome)
        output.close(tally)
    if tally.pairs and json_file is None:
        # It is the result where nothing else is.
        text = accuracy_page(tally, reader.class_names)
        typer.echo(text if summary else f"\n{text}", nl=not summary, err=not summary)
    say(closing(tally, exported))
    if tally.unanswered:
        raise typer.Exit(ExitCode.DATA)


def latest_model(config: Path | None) -> Path:
    """The file of the last finished job on the board of a configuration, by default of this one.

    Raises:
        DataError: There is none yet.
        ConfigurationError: The configuration cannot be read.
    """
    file = agent_settings(config).model_file
    if not file.exists():
        raise DataError(
            f"This board has no model yet: {file} comes when a job of its fleet is finished. Is the agent "
            "running?"
        )
    return file


def say(sentence: str) -> None:
    """Tell a person, aside from the results."""
    typer.echo("".join(c if c.isprintable() or c == "\n" else "�" for c in sentence), err=True)


def _all_inputs(reader: InputReader, paths: list[Path]) -> Iterator[Input]:
    """The records at all paths; a path that cannot be read is one input without an answer."""
    from dpagent.learning.data.inputs import Input

    for path in paths:
        try:
            yield from reader.read(path)
        except DataError as error:
            yield Input(str(path), problem=str(error), is_whole_path=True)
