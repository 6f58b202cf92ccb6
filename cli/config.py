"""``dpagent config show|check|schema``: what a configuration says, where a value is from, what it may say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli.commands import Commands
from cli.configurations import Configuration, configuration, schema_of, stated
from cli.options.daemons import AnyConfig, SetOptions
from cli.output import write_json
from cli.tables import render_table
from dpagent.schema.json_values import json_values

if TYPE_CHECKING:
    from agent.profile import LoadedProfile

app = Commands(
    help="Configuration files: what they say, where a value is from, what they may say.", no_args_is_help=True
)

_DEFAULT: Final = "default"


class FileKind(StrEnum):
    """Files with a schema."""

    AGENT = "agent"
    FLEET = "fleet"
    JOB = "job"
    MIXER = "mixer"
    PROFILE = "profile"


@app.command()
def show(
    config: AnyConfig = None,
    options: SetOptions = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead.")
    ] = None,
) -> None:
    """Show every setting as the program takes it, and where it is from: an option, a variable, a line of the
    file, a profile, a default."""
    values = settings_of(configuration(config, options))
    if json_file is not None:
        write_json(json_file, {key: {"value": value, "from": origin} for key, value, origin in values})
        return
    rows = [[key, shown(value), origin] for key, value, origin in values]
    typer.echo(render_table(["key", "value", "from"], rows, words=3), nl=False)


@app.command()
def check(config: AnyConfig = None, options: SetOptions = None) -> None:
    """Check a file, with the variables and options over it, as its program would, without starting it. Exit
    code 3 with all that is wrong, by line.

    `dpagent doctor` looks at what it names: disk, data, broker.
    """
    found = configuration(config, options)
    found.load()
    typer.echo(
        f"{stated(found.file, found.overrides)}: nothing is wrong with this configuration of "
        f"{_of(found.kind)}."
    )


@app.command()
def schema(
    kind: Annotated[FileKind, typer.Argument(help="Which file.")],
) -> None:
    """Print the JSON schema of a file, with which editors complete and check it."""
    import json

    from dpagent.schema.json_schema import json_schema

    name: Any = "coordinator" if kind is FileKind.FLEET else kind.value
    made = json_schema(schema_of(name))
    if kind is FileKind.FLEET:
        from coordinator.settings import CoordinatorSettings

        # It holds a job, or its jobs are in files of their own.
        made["required"] = json_schema(CoordinatorSettings)["required"]
    typer.echo(
        json.dumps(
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}, indent=2, ensure_ascii=False
        )
    )


def settings_of(found: Configuration) -> list[tuple[str, Any, str]]:
    """Every setting as the program takes it: its dotted key, its value as JSON has it, where that is from.

    Raises:
        ConfigurationError: something in them is wrong.
    """
    from dpagent.overrides import overridden
    from dpagent.schema.problems import dotted
    from dpagent.yaml_file import read_document

    settings, profile = found.load(), None
    if found.kind == "agent":
        from agent.profile import open_profile
        from agent.settings import AgentSettings, on_board

        assert isinstance(settings, AgentSettings)
        profile = open_profile(settings.profile)
        settings = on_board(settings, profile.profile)
    lines = read_document(found.file, example="fleet: meadow").lines
    origins = {dotted(location): f"{found.file.name}:{line}" for location, line in lines.items() if location}
    sources = overridden(schema_of(found.kind), {}, found.overrides).sources
    over = {dotted(location): source for location, source in sources.items()}
    return [
        (key, value, _origin(key, value, over, origins, profile))
        for key, value in flattened(json_values(settings))
    ]


def flattened(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Values by their dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, (*path, str(key)))
        else:
            yield ".".join((*path, str(key))), value


def shown(value: Any) -> str:
    """A value as it is written, in words where there is none."""
    match value:
        case None:
            return "not set"
        case bool():
            return "true" if value else "false"
        case list() | dict():
            return ", ".join(map(str, value)) or "none"
        case _:
            return str(value)


def origin_in(profile: LoadedProfile, key: str) -> str | None:
    """The file of a profile's chain that a value is from."""
    for name, values in profile.chain:
        found: Any = values
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is not None:
            return name
    return None


def _origin(
    key: str,
    value: Any,
    over: Mapping[str, str],
    lines: Mapping[str, str],
    profile: LoadedProfile | None,
) -> str:
    for known in (over, lines):
        if key in known:
            return known[key]
        # Lists and maps have a line for each of their parts.
        above = key
        while above:
            if above in known and not any(other.startswith(f"{above}.") for other in known):
                return known[above]
            above = above.rpartition(".")[0]
    if profile is not None and value is not None:
        of_profile = "max_records" if key == "data.max_records" else key
        if (key.startswith(("limits.", "governor.")) or of_profile in ("engine", "max_records")) and (
            name := origin_in(profile, of_profile)
        ):
            return f"profile {name}"
    return _DEFAULT


def _of(kind: str) -> str:
    return {"agent": "a board", "coordinator": "a coordinator", "mixer": "a mixer", "job": "a job"}[kind]
