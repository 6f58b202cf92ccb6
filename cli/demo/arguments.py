"""The demo's options as the command line takes them; those that say how data are read are of ``cli.data``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from cli.plan.command import ScheduleKind


class Split(StrEnum):
    """How records come to devices."""

    IID = "iid"
    DIRICHLET = "dirichlet"
    CLASS = "class"
    FILE = "file"


class ClippingKind(StrEnum):
    """What each record's gradient is clipped to."""

    WHOLE = "whole"
    LAYERS = "layers"
    QUANTILE = "quantile"


class EngineChoice(StrEnum):
    """What computes gradients."""

    AUTO = "auto"
    NUMPY = "numpy"
    ONNX = "onnx"


_TRAINING: Final = "Training (what is not given follows docs/first-model.md)"
_FLEET: Final = "Fleet and output"

DataDirOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Your own data: a folder of pictures by class or a zip of one, CSV, NPZ, IDX, CIFAR. "
        "With --dataset mnist, its IDX files.",
    ),
]
TestDataOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Data to test on.", show_default="the test half, if the data have one"),
]
TestShareOption: TypeAlias = Annotated[
    float | None,
    typer.Option(help="Share of the records held out to test on.", show_default="0.2, without a test half"),
]
SplitOption: TypeAlias = Annotated[Split, typer.Option(help="How the records are dealt to the devices.")]
AlphaOption: TypeAlias = Annotated[float, typer.Option(help="dirichlet: small for skewed devices.")]
ClassesPerDeviceOption: TypeAlias = Annotated[
    int, typer.Option(help="class: shards of the sorted records that a device gets.")
]
ModelOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="A built-in model or a model file (.yaml).",
        show_default="one that fits the data",
    ),
]
ScheduleOption: TypeAlias = Annotated[
    ScheduleKind, typer.Option(help="How the budget is spread.", rich_help_panel=_TRAINING)
]
StepOption: TypeAlias = Annotated[
    float,
    typer.Option(help="incrementing: step as a fraction of its maximum.", rich_help_panel=_TRAINING),
]
ClipNormOption: TypeAlias = Annotated[
    float | None, typer.Option(help="L2 norm of one record's gradient.", rich_help_panel=_TRAINING)
]
LearningRateOption: TypeAlias = Annotated[
    float | None, typer.Option(help="Of the coordinator's step.", rich_help_panel=_TRAINING)
]
SamplingRateOption: TypeAlias = Annotated[
    float | None, typer.Option(help="Chance of a record to be in a round's lot.", rich_help_panel=_TRAINING)
]
ClippingOption: TypeAlias = Annotated[
    ClippingKind,
    typer.Option(
        help="The whole gradient, layer by layer, or at a private quantile.", rich_help_panel=_TRAINING
    ),
]
CapOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Noise cap: clamp or none.", rich_help_panel=_TRAINING)
]
CapAtOption: TypeAlias = Annotated[
    str, typer.Option(help="Where the cap acts: coordinator or device.", rich_help_panel=_TRAINING)
]
EngineOption: TypeAlias = Annotated[
    EngineChoice,
    typer.Option(help="What computes the agents' gradients; `auto` tries.", rich_help_panel=_TRAINING),
]
BaselineOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--baseline/--no-baseline", help="Run the same training without noise too.", rich_help_panel=_TRAINING
    ),
]
SeedOption: TypeAlias = Annotated[
    int, typer.Option(help="Seed of splits and initial weights; never of noise.", rich_help_panel=_TRAINING)
]
BrokerOption: TypeAlias = Annotated[
    str,
    typer.Option(
        help="auto, embedded, mosquitto, or mqtt://host:port of one that runs.", rich_help_panel=_FLEET
    ),
]
BrokerPortOption: TypeAlias = Annotated[
    int, typer.Option(help="Port of the broker started; 0 takes a free one.", rich_help_panel=_FLEET)
]
MqttUsernameOption: TypeAlias = Annotated[
    str | None, typer.Option(help="User name for --broker mqtt://….", rich_help_panel=_FLEET)
]
MqttPasswordFileOption: TypeAlias = Annotated[
    Path | None, typer.Option(help="Password file for --broker mqtt://….", rich_help_panel=_FLEET)
]
JitterWindowOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="Seconds over which fragments are spread.",
        show_default="by data set",
        rich_help_panel=_FLEET,
    ),
]
StateDirOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Where everything is kept; a stopped run goes on.",
        show_default="dpagent-demo/DATE-TIME-PID",
        rich_help_panel=_FLEET,
    ),
]
JsonOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--json", help="Write the results as JSON (`-`: standard output).", rich_help_panel=_FLEET),
]
ReportOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Directory of the HTML report.",
        show_default="report in the state directory",
        rich_help_panel=_FLEET,
    ),
]
