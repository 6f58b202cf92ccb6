"""``dpagent profiles list|show|check|detect``: the boards that are known, and whether this one fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli.commands import Commands
from cli.config import flattened, origin_in, shown
from cli.findings import as_json, exit_code_of, lines_of
from cli.output import write_json
from cli.tables import render_table
from dpagent.schema.json_values import json_values

if TYPE_CHECKING:
    from agent.profile import LoadedProfile

app = Commands(help="The boards that are known: list, show, detect, check.", no_args_is_help=True)

JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead.")
]
ProfileArgument = Annotated[
    str, typer.Argument(help="A name of `profiles list`, the path of a .yaml file, or `auto`: this board's.")
]
_DEFAULT: Final = "default"
_NOT_IN_THE_TABLE: Final = ("extends", "description", "board.sources")


@app.command("list")
def list_profiles(json_file: JsonOption = None) -> None:
    """List the profiles of the package; `*` is this board's."""
    from agent.profile import load_profile, profile_names

    here = _detected()
    profiles = {name: load_profile(name) for name in profile_names()}
    if json_file is not None:
        write_json(
            json_file,
            [
                {"name": name, "this_board": name == here, **json_values(each)}
                for name, each in profiles.items()
            ],
        )
        return
    rows = [
        [
            f"{name} *" if name == here else name, each.board.architecture, str(each.board.cores),
            f"{each.board.memory_mib:,}", each.description,
        ]
        for name, each in profiles.items()
    ]  # fmt: skip
    header = ["profile", "processor", "cores", "MiB", "board"]
    typer.echo(render_table(header, rows, words=len(header)), nl=False)


@app.command()
def show(profile: ProfileArgument = "auto", json_file: JsonOption = None) -> None:
    """Show a profile: each value, and the file that it is from."""
    from agent.profile import open_profile

    loaded = open_profile(profile)
    if json_file is not None:
        write_json(json_file, {"name": loaded.name, **json_values(loaded.profile)})
        return
    rows = [
        [key, shown(value), origin] for key, value, origin in _values(loaded) if key not in _NOT_IN_THE_TABLE
    ]
    typer.echo(f"{loaded.name}: {loaded.profile.description}\n")
    typer.echo(render_table(["key", "value", "from"], rows, words=3), nl=False)
    if sources := loaded.profile.board.sources:
        typer.echo("\n".join(["", "The board's facts are from:", *sources]))


@app.command()
def detect(json_file: JsonOption = None) -> None:
    """Say what this board is, and which profile `profile: auto` takes."""
    from agent.board import Board
    from agent.profile import detect_profile, load_profile

    board = Board.this()
    name = detect_profile(board)
    facts = {
        "board": board.model or None,
        "device_tree": list(board.compatible),
        "architecture": board.architecture,
        "cores": board.cores,
        "memory_mib": board.memory_mib,
        "profile": name,
    }
    if json_file is not None:
        write_json(json_file, facts)
        return
    typer.echo(f"board         {board.model or 'not named: no device tree'}")
    if board.compatible:
        typer.echo(f"device tree   {', '.join(board.compatible)}")
    typer.echo(f"architecture  {board.architecture}")
    typer.echo(f"cores         {board.cores}")
    typer.echo(f"memory        {board.memory_mib:,} MiB")
    typer.echo(f"profile       {name} ({load_profile(name).description})")


@app.command()
def check(profile: ProfileArgument = "auto", json_file: JsonOption = None) -> None:
    """Check a profile against this board. Exit code 3 if it does not fit."""
    from agent.board import Board
    from agent.diagnosis import misfits
    from agent.profile import open_profile

    loaded = open_profile(profile)
    findings = list(misfits(loaded, Board.this()))
    if json_file is not None:
        write_json(json_file, {"name": loaded.name, **as_json(findings)})
    else:
        typer.echo(f"{loaded.name}: {loaded.profile.description}\n")
        for finding in findings:
            typer.echo(lines_of(finding))
    raise typer.Exit(exit_code_of(findings))


def _detected() -> str | None:
    from agent.board import Board
    from agent.profile import detect_profile
    from dpagent.errors import ConfigurationError

    try:
        return detect_profile(Board.this())
    except ConfigurationError:
        return None


def _values(loaded: LoadedProfile) -> Iterator[tuple[str, Any, str]]:
    """Every value by its dotted key, and the file that it is from."""
    for key, value in flattened(json_values(loaded.profile)):
        yield key, value, origin_in(loaded, key) or _DEFAULT
