"""``dpagent init``: a board's agent.yaml from a few answers, and its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.board_file import (
    BoardChoices,
    DataOption,
    DeltaOption,
    EpsilonOption,
    LedgerOption,
    NameOption,
    NewConfig,
    ProfileOption,
    StateOption,
    answered,
    own_values,
    require_valid,
    write_board,
)
from dpagent.errors import UsageError


def init(
    config: NewConfig = Path("agent.yaml"),
    fleet: Annotated[str | None, typer.Option(help="The fleet's name.")] = None,
    key: Annotated[str | None, typer.Option(help="The coordinator's public key.")] = None,
    broker: Annotated[str | None, typer.Option(help="mqtt://host[:port], or mqtts://host[:port].")] = None,
    username: Annotated[str | None, typer.Option(help="User name at the broker.")] = None,
    password_file: Annotated[Path | None, typer.Option(help="File whose first line is the password.")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="Certificate authority of the broker (PEM).")] = None,
    data: DataOption = None,
    name: NameOption = "my-records",
    epsilon: EpsilonOption = None,
    delta: DeltaOption = None,
    profile: ProfileOption = "auto",
    state_dir: StateOption = None,
    ledger: LedgerOption = True,
) -> None:
    """Write a board's agent.yaml from a few answers, and begin the ledger of its records.

    What is not given is asked for. The records are looked at, on this machine alone, to declare what they
    are: read that section before you go on, since a board infers nothing. An existing file or ledger is never
    touched. With an invitation from the fleet's operator, `dpagent enrol` does this and gets a certificate.
    """
    if config.exists():
        raise UsageError(f"{config} exists. Change it with an editor, or give another --config.")
    answers = answered({"fleet": fleet, "key": key, "broker": broker, "data": data, "epsilon": epsilon})
    choices = BoardChoices(Path(str(answers["data"])), name, answers["epsilon"], delta, profile, state_dir)
    values = {
        "fleet": answers["fleet"],
        "coordinator_key": answers["key"],
        **own_values(choices, config),
        "mqtt": {
            "url": answers["broker"],
            **({} if ca_file is None else {"ca_file": str(ca_file.absolute())}),
            **({} if username is None else {"username": username}),
            **({} if password_file is None else {"password_file": str(password_file.absolute())}),
        },
    }
    require_valid(values)
    write_board(config, values, written_by="dpagent init", ledger=ledger)
    typer.echo(f"Next: dpagent doctor --config {config}, then dpagent run --config {config}")
