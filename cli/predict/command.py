"""``dpagent predict MODEL INPUT…``: the command and its options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.data.options import (
    ClassesOption,
    DelimiterOption,
    FeaturesOption,
    GroupOption,
    Half,
    HalfOption,
    Kind,
    KindOption,
    LabelOption,
    MixedOption,
    ModeOption,
    NoHeaderOption,
    OffsetOption,
    ScaleOption,
    ShapeOption,
    SizeOption,
    StrideOption,
    WindowOption,
    dataset_settings,
)
from cli.tables import reader_may_leave
from dpagent.errors import DataError, ExitCode

if TYPE_CHECKING:
    from dpagent.learning.data.inputs import Input
    from dpagent.learning.inference.prediction.reader import InputReader


def predict(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A model that the coordinator exported (.onnx).", show_default=False
        ),
    ],
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT", help="Pictures, or files and directories with records.", show_default=False
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="Show so many classes, the most probable first.")] = 1,
    batch: Annotated[int, typer.Option(min=1, max=65_536, help="Inputs in memory at a time.")] = 64,
    summary: Annotated[
        bool, typer.Option("--summary", help="Print accuracy and confusions alone, no line an input.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead of text."),
    ] = None,
    kind: KindOption = Kind.AUTO,
    half: HalfOption = Half.TEST,
    classes: ClassesOption = None,
    shape: ShapeOption = None,
    size: SizeOption = None,
    mode: ModeOption = None,
    label: LabelOption = None,
    features: FeaturesOption = None,
    offset: OffsetOption = None,
    scale: ScaleOption = None,
    window: WindowOption = None,
    stride: StrideOption = None,
    group: GroupOption = None,
    mixed: MixedOption = None,
    delimiter: DelimiterOption = None,
    no_header: NoHeaderOption = False,
) -> None:
    """Run a finished model on inputs, on this machine, and print what it says of each.

    Pictures are made to fit the model; everything else is read as `dpagent data check` does with the
    same options. Where classes are known (folders, a label column), accuracy and confusions follow.
    Predictions go to standard output, everything else to standard error. Exits with 4 if an input
    cannot be read; the others are predicted all the same.
    """
    from cli.data.wording import told_as_options
    from cli.predict.json_output import JsonOutput
    from cli.predict.page import TextOutput, about, accuracy_page, closing
    from dpagent.learning.inference.prediction.exported_model import ExportedModel
    from dpagent.learning.inference.prediction.outcome import Tally
    from dpagent.learning.inference.prediction.outcome import predict as predictions
    from dpagent.learning.inference.prediction.reader import InputReader

    settings = dataset_settings(
        inputs[0], kind=kind, classes=classes, half=half, shape=shape, size=size, mode=mode, label=label,
        features=features, offset=offset, scale=scale, window=window, stride=stride, group=group, mixed=mixed,
        delimiter=delimiter, no_header=no_header,
    )  # fmt: skip
    exported = ExportedModel(model)
    with told_as_options():
        reader = InputReader(exported, settings, say)
    say(about(exported))
    tally = Tally()
    output = (
        JsonOutput(json_file, exported, reader.class_names, top)
        if json_file is not None
        else TextOutput(reader.class_names, exported.classes, top, silent=summary)
    )
    with told_as_options(), reader_may_leave(), output:
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


def say(sentence: str) -> None:
    """Tell a person, aside from the results."""
    from cli.data.wording import as_options

    sentence = as_options(sentence)
    typer.echo("".join(c if c.isprintable() or c == "\n" else "�" for c in sentence), err=True)


def _all_inputs(reader: InputReader, paths: list[Path]) -> Iterator[Input]:
    """The records at all paths; a path that cannot be read is one input without an answer."""
    from cli.data.wording import as_options
    from dpagent.learning.data.inputs import Input

    for path in paths:
        try:
            for one in reader.read(path):
                yield replace(one, problem=as_options(one.problem))
        except DataError as error:
            yield Input(str(path), problem=as_options(str(error)))
