"""Options that say where records are and how they are read, for every command that reads some."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

if TYPE_CHECKING:
    from dpagent.learning.data.settings import DatasetSettings


class Kind(StrEnum):
    """What data are."""

    AUTO = "auto"
    NPZ = "npz"
    IDX = "idx"
    CIFAR = "cifar"
    IMAGES = "images"
    CSV = "csv"


class Half(StrEnum):
    """Which part of data that come in two."""

    TRAIN = "train"
    TEST = "test"


class Mode(StrEnum):
    """Channels of a picture."""

    GREY = "grey"
    RGB = "rgb"


class Mixed(StrEnum):
    """What becomes of a window with several labels."""

    MAJORITY = "majority"
    DROP = "drop"


def _whole_number(text: str) -> int:
    """Click would speak of integers; see :func:`cli.data.values.whole_number`."""
    from cli.data.values import whole_number

    return whole_number(text)


KindOption: TypeAlias = Annotated[Kind, typer.Option(help="What the data are; `auto` recognises it.")]
ClassesOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="A,B,C", help="All classes of the fleet, in order.")
]
HalfOption: TypeAlias = Annotated[Half, typer.Option(help="Which half, where data have two.")]
ShapeOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="N,N,N", help="Another shape for each record, with as many values.")
]
SizeOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="WxH", help="Images: scale and cut every picture to this size; one number: a square."
    ),
]
ModeOption: TypeAlias = Annotated[Mode | None, typer.Option(help="Images: one channel or three.")]
LabelOption: TypeAlias = Annotated[
    str | None, typer.Option(help="CSV: the column of the label.", show_default="label")
]
FeaturesOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="A,B,C", help="CSV: the columns of the inputs.", show_default="all others"),
]
OffsetOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="X or A=X,B=Y", help="CSV: inputs are (cell - offset) / scale. Public constants!"),
]
ScaleOption: TypeAlias = Annotated[
    str | None, typer.Option(metavar="X or A=X,B=Y", help="CSV: see --offset; above 0.")
]
WindowOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        parser=_whole_number,
        metavar="ROWS",
        help="CSV: rows in a record, for a time series.",
        show_default="a row each",
    ),
]
StrideOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        parser=_whole_number,
        metavar="ROWS",
        help="CSV: rows from one window to the next.",
        show_default="the window",
    ),
]
GroupOption: TypeAlias = Annotated[
    str | None, typer.Option(help="CSV: a column whose changes no window goes across.")
]
MixedOption: TypeAlias = Annotated[Mixed | None, typer.Option(help="CSV: windows with several labels.")]
DelimiterOption: TypeAlias = Annotated[
    str | None, typer.Option(help="CSV: one character, or `tab`.", show_default=",")
]
NoHeaderOption: TypeAlias = Annotated[
    bool, typer.Option("--no-header", help="CSV: the first row is data; columns are 1, 2, ….")
]


def dataset_settings(
    path: Path,
    *,
    kind: Kind,
    classes: str | None,
    half: Half,
    shape: str | None,
    size: str | None,
    mode: Mode | None,
    label: str | None,
    features: str | None,
    offset: str | None,
    scale: str | None,
    window: int | None,
    stride: int | None,
    group: str | None,
    mixed: Mixed | None,
    delimiter: str | None,
    no_header: bool,
) -> DatasetSettings:
    """The settings that the options stand for; what was not given is left to its default.

    Raises:
        ConfigurationError: A value is out of its range; names the option.
    """
    from cli.data.values import constants, names, numbers, settings_from
    from cli.data.values import size as pixels

    return settings_from(
        {
            "kind": kind.value,
            # Here, "." was not forgotten but meant.
            "path": path if str(path) != "." else path.absolute(),
            "half": half.value,
            "classes": names(classes),
            "shape": numbers("--shape", shape),
            "images": {
                "size": pixels(size),
                "mode": None if mode is None else mode.value,
            },
            "csv": {
                "label": label,
                "features": names(features),
                "offset": constants("--offset", offset),
                "scale": constants("--scale", scale),
                "window": window,
                "stride": stride,
                "group": group,
                "mixed": None if mixed is None else mixed.value,
                "delimiter": delimiter,
                "header": False if no_header else None,
            },
        }
    )
