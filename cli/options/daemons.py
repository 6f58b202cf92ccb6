"""Options that the daemons share with the commands that look at them: which configuration, and the log.

Apart from what they stand for (:mod:`cli.configurations`, :mod:`cli.daemons`): an agent does without typer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from cli.configurations import CONFIG_VARIABLE
from cli.daemons import LogFormat, LogLevel

_WHERE: Final = "./{0} if it is there, else /etc/dpagent/{0}"
AgentConfig = Annotated[
    Path | None,
    typer.Option(
        "--config", envvar=CONFIG_VARIABLE, help="The board's agent.yaml.",
        show_default=_WHERE.format("agent.yaml"),
    ),
]  # fmt: skip
FleetConfig = Annotated[
    Path | None,
    typer.Option(
        "--config", envvar=CONFIG_VARIABLE, help="The fleet's fleet.yaml.",
        show_default=_WHERE.format("fleet.yaml"),
    ),
]  # fmt: skip
MixerConfig = Annotated[
    Path | None,
    typer.Option(
        "--config", envvar=CONFIG_VARIABLE, help="The mixer's mixer.yaml.",
        show_default=_WHERE.format("mixer.yaml"),
    ),
]  # fmt: skip
AnyConfig = Annotated[
    Path | None,
    typer.Option(
        "--config", envvar=CONFIG_VARIABLE, help="An agent.yaml, fleet.yaml, mixer.yaml or job file.",
        show_default="the first of them in the working directory, else in /etc/dpagent",
    ),
]  # fmt: skip
SetOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE",
        help="A setting over the file's and over DPAGENT_… variables, such as mqtt.keepalive_s=60; several "
        "times. docs/configuration.md",
    ),
]  # fmt: skip

LogLevelOption = Annotated[LogLevel, typer.Option(help="Log level, on standard error.")]
LogFormatOption = Annotated[
    LogFormat, typer.Option(help="Of the log's lines; the keys of JSON: docs/operating.md.")
]
