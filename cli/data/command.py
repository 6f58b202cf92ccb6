"""``dpagent data check``: what is read, and whether it fits the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

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
from cli.output import write_json
from cli.tables import reader_may_leave
from dpagent.errors import DpagentError, ExitCode

app = typer.Typer(help="Look at the data of a device.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Look at the data of a device."""


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="A file or directory with records.", show_default=False)],
    kind: KindOption = Kind.AUTO,
    model: Annotated[
        str | None, typer.Option(help="A built-in model or a model file (.yaml) that they shall fit.")
    ] = None,
    classes: ClassesOption = None,
    half: HalfOption = Half.TRAIN,
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
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw some records of each class into this file, .png or .svg. It is private!"),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead of text."),
    ] = None,
) -> None:
    """Read every record on this device once and say what there is.

    Nothing leaves the machine and no budget is spent, but what is shown is private: counts and
    pictures are for the owner of the data. Exits with 4 if the data cannot be read, or do not fit
    the model.
    """
    if picture is not None and picture.suffix not in (".svg", ".png"):
        raise typer.BadParameter(f"{picture}: the name has to end in .svg or .png.", param_hint="--picture")

    from cli.data.page import as_json, page
    from cli.data.wording import as_options, told_as_options
    from dpagent.learning.data.checking import examine
    from dpagent.learning.data.opening import fitted, open_dataset
    from dpagent.learning.models.description import find_model
    from dpagent.learning.models.fitting import check_fits
    from dpagent.storage import write_atomically

    settings = dataset_settings(
        path, kind=kind, classes=classes, half=half, shape=shape, size=size, mode=mode, label=label,
        features=features, offset=offset, scale=scale, window=window, stride=stride, group=group, mixed=mixed,
        delimiter=delimiter, no_header=no_header,
    )  # fmt: skip
    spec = None if model is None else find_model(model)
    with told_as_options():
        if spec is not None:
            settings = fitted(settings, spec.input_shape)
        dataset = open_dataset(settings)
    misfit = None
    try:
        if spec is not None:
            check_fits(dataset, spec)
    except DpagentError as error:
        misfit = as_options(str(error))
    findings = examine(dataset)
    findings = replace(findings, warnings=tuple(map(as_options, findings.warnings)))
    if picture is not None:
        from cli.data.picture import draw

        write_atomically(picture, draw(dataset, picture.suffix), mode=0o600)
    with reader_may_leave():
        if json_file is not None:
            write_json(json_file, as_json(findings, model=model, misfit=misfit))
        else:
            typer.echo(page(findings, settings, model=model, misfit=misfit), nl=False)
            if picture is not None:
                typer.echo(f"\n{picture} shows private records: give it to nobody whom they are not for.")
    if misfit is not None or findings.unreadable:
        raise typer.Exit(ExitCode.DATA)
