"""``dpagent data check``: what is there, and whether it fits a model; ``dpagent data decode``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from cli.commands import Commands
from cli.configurations import agent_settings
from cli.options.daemons import AgentConfig
from cli.options.rows import DATA
from cli.options.table import Given, with_options
from cli.output import write_json
from dpagent.errors import DpagentError, ExitCode, UsageError
from dpagent.wording import counted

app = Commands(help="Look at the data of a device.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Look at the data of a device."""


@app.command()
@with_options(data=DATA)
def check(
    path: Annotated[Path, typer.Argument(help="A file or directory with records.", show_default=False)],
    data: Given,
    model: Annotated[
        str | None, typer.Option(help="A built-in model or a model file (.yaml) to check the data against.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw some records of each class into this file, .png or .svg. It is private!"),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write JSON to this file (`-`: standard output) instead of text."),
    ] = None,
) -> None:
    """Read every record on this device once and report what is there.

    Nothing leaves the machine and no budget is spent. The output is private: counts and pictures
    are for the owner of the data. All other programs of the machine come first.
    Exits with 4 if the data cannot be read, or do not fit the model.
    """
    if picture is not None and picture.suffix not in (".svg", ".png"):
        raise UsageError(f"`--picture`: got {str(picture)!r}; expected a name that ends in .svg or .png.")

    from agent.priority import behind_all
    from cli.data.page import as_json, page
    from dpagent.learning.data.checking import Findings, examine
    from dpagent.learning.data.opening import advice_on_shape, fitted, open_inferred
    from dpagent.learning.data.settings import DatasetSettings
    from dpagent.learning.fitting import check_fits
    from dpagent.learning.model_files import find_model
    from dpagent.learning.models.spec import ModelSpec
    from dpagent.storage import write_atomically

    def look() -> tuple[DatasetSettings, ModelSpec | None, str | None, Findings]:
        # Here, "." was not forgotten but meant.
        settings = data.settings(DatasetSettings, path=path.absolute() if path == Path() else path)
        spec = None if model is None else find_model(model)
        if spec is not None:
            settings = fitted(settings, spec.input_shape)
        dataset, declared = open_inferred(settings)
        misfit = None
        try:
            if spec is not None:
                check_fits(dataset, spec, advise=advice_on_shape)
        except DpagentError as error:
            misfit = str(error)
        findings = examine(dataset)
        if picture is not None:
            from cli.data.picture import draw

            write_atomically(picture, draw(dataset, picture.suffix), mode=0o600)
        return declared, spec, misfit, findings

    # On a board that trains, a record that is slow to read would make its round late.
    declared, spec, misfit, findings = behind_all(look)
    if json_file is not None:
        write_json(json_file, as_json(findings, model=model, misfit=misfit))
    else:
        typer.echo(page(findings, declared, model=model, spec=spec, misfit=misfit), nl=False)
        if picture is not None:
            typer.echo(f"\n{picture} shows private records: keep it to yourself.")
    if misfit is not None or findings.unreadable:
        raise typer.Exit(ExitCode.DATA)


@app.command()
def decode(config: AgentConfig = None) -> None:
    """Decode all records that are new, now. Stop the agent first.

    A running agent decodes a few new records after each round, and what it finds counts fifteen minutes
    later; one that is started goes on like that. After many records have come, this takes in all at once.
    The output is private: it counts records. Interrupted, it goes on when it is run again, or at the agent's
    next start.
    """
    from agent.first_rows import decode_at_once, open_records
    from agent.profile import load_profile
    from agent.settings import on_board
    from dpagent.storage import StateDirectory

    settings = agent_settings(config)
    data = on_board(settings, load_profile(settings.profile)).data
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with StateDirectory(settings.state_dir):
        decode_at_once(data, settings.state_dir)
        records = open_records(data, settings.state_dir).dataset
    typer.echo(f"{data.name}: {counted(len(records), 'record')}, all that can be used.")
