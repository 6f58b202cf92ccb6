"""``dpagent config show|check|schema``: what a configuration says, where a value is from, what it may say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli.commands import Commands
from cli.output import write_json
from cli.tables import reader_may_leave, render_table

if TYPE_CHECKING:
    from agent.profile import LoadedProfile

app = Commands(
    help="Configuration files: what they say, where a value is from, what they may say.", no_args_is_help=True
)

ConfigOption = Annotated[Path, typer.Option(help="An agent.yaml, fleet.yaml or mixer.yaml.")]
_DEFAULT: Final = "default"


class FileKind(StrEnum):
    """Files with a schema."""

    AGENT = "agent"
    FLEET = "fleet"
    MIXER = "mixer"
    PROFILE = "profile"


@app.command()
def show(
    config: ConfigOption,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead.")
    ] = None,
) -> None:
    """Show every setting as the program takes it, and where it is from: a line of the file, a profile, a
    default."""
    from cli.configurations import kind_of, load
    from dpagent.configuration import lines_of

    settings, profile = load(config), None
    if kind_of(config) == "agent":
        from agent.profile import open_profile
        from agent.settings import AgentSettings, on_board

        assert isinstance(settings, AgentSettings)
        profile = open_profile(settings.profile)
        settings = on_board(settings, profile.profile)
    lines = lines_of(config)
    found = [
        (key, value, _origin(key, value, config, lines, profile))
        for key, value in flattened(settings.model_dump(mode="json"))
    ]
    with reader_may_leave():
        if json_file is not None:
            write_json(json_file, {key: {"value": value, "from": origin} for key, value, origin in found})
            return
        rows = [[key, shown(value), origin] for key, value, origin in found]
        typer.echo(render_table(["key", "value", "from"], rows, words=3), nl=False)


@app.command()
def check(config: ConfigOption) -> None:
    """Check a file as its program would, without starting it. Exit code 3 with all that is wrong, by line.

    `dpagent doctor` looks at what it names: disk, data, broker.
    """
    from cli.configurations import kind_of, load

    load(config)
    typer.echo(f"{config}: nothing is wrong with this configuration of {_of(kind_of(config))}.")


@app.command()
def schema(
    kind: Annotated[FileKind, typer.Argument(help="Which file.")],
) -> None:
    """Print the JSON schema of a file, with which editors complete and check it."""
    import json

    from cli.configurations import schema_of

    name: Any = "coordinator" if kind is FileKind.FLEET else kind.value
    made = schema_of(name).model_json_schema()
    typer.echo(
        json.dumps(
            {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}, indent=2, ensure_ascii=False
        )
    )


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
    key: str, value: Any, config: Path, lines: Mapping[str, int], profile: LoadedProfile | None
) -> str:
    if key in lines:
        return f"{config.name}:{lines[key]}"
    # Lists and maps have a line for each of their parts.
    above = key
    while above:
        if above in lines and not any(other.startswith(f"{above}.") for other in lines):
            return f"{config.name}:{lines[above]}"
        above = above.rpartition(".")[0]
    if profile is not None and value is not None:
        of_profile = "max_records" if key == "data.max_records" else key
        if (key.startswith("limits.") or of_profile in ("engine", "max_records")) and (
            name := origin_in(profile, of_profile)
        ):
            return f"profile {name}"
    return _DEFAULT


def _of(kind: str) -> str:
    return {"agent": "a board", "coordinator": "a coordinator", "mixer": "a mixer"}[kind]
