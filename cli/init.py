"""``dpagent init``: a board's agent.yaml from a few answers, and its ledger."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cli.configurations import agent_settings, over
from dpagent.errors import UsageError

_UNDER_ETC: Final = Path("/etc")
_SERVICE_STATE: Final = Path("/var/lib/dpagent/state")
_QUESTIONS: Final = {
    "fleet": "Name of the fleet (the operator knows it)",
    "key": "Public key of its coordinator (`dpagent coordinator key` prints it there)",
    "broker": "Address of the broker, such as mqtts://broker.example",
    "data": "The records: a folder of pictures, or CSV, NPZ or CIFAR files",
    "epsilon": "Lifetime ε of these records, over all jobs (6 is moderate, 1 is strict)",
}


def init(
    config: Annotated[Path, typer.Option(help="File to write.", envvar="DPAGENT_CONFIG")] = Path(
        "agent.yaml"
    ),
    fleet: Annotated[str | None, typer.Option(help="The fleet's name.")] = None,
    key: Annotated[str | None, typer.Option(help="The coordinator's public key.")] = None,
    broker: Annotated[str | None, typer.Option(help="mqtt://host[:port], or mqtts://host[:port].")] = None,
    username: Annotated[str | None, typer.Option(help="User name at the broker.")] = None,
    password_file: Annotated[
        Path | None, typer.Option(help="File whose first line is the password.")
    ] = None,
    ca_file: Annotated[Path | None, typer.Option(help="Certificate authority of the broker (PEM).")] = None,
    data: Annotated[Path | None, typer.Option(help="The records.")] = None,
    name: Annotated[
        str, typer.Option(help="The ledger's name for these records; the lifetime budget belongs to it.")
    ] = "my-records",
    epsilon: Annotated[float | None, typer.Option(min=1e-9, max=1000, help="Lifetime ε of a record.")] = None,
    delta: Annotated[
        float | None, typer.Option(min=1e-30, max=0.5, help="Lifetime δ.", show_default="1/(100 max_records)")
    ] = None,
    profile: Annotated[str, typer.Option(help="The board, as `dpagent profiles list` has it.")] = "auto",
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory of ledger and spool.",
            show_default="/var/lib/dpagent/state if the file is below /etc, else state",
        ),
    ] = None,
    ledger: Annotated[
        bool, typer.Option("--ledger/--no-ledger", help="Whether to begin the ledger of these records.")
    ] = True,
) -> None:  # fmt: skip
    """Write a board's agent.yaml from a few answers, and begin the ledger of its records.

    What is not given is asked for. The records are looked at, on this machine alone, to declare what they
    are: read that section before you go on, since a board infers nothing. An existing file or ledger is never
    touched.
    """
    from agent.custody import begin_ledger
    from dpagent.learning.data.opening import open_inferred
    from dpagent.learning.data.settings import DatasetSettings
    from dpagent.storage import write_atomically

    if config.exists():
        raise UsageError(f"{config} exists. Change it with an editor, or give another --config.")
    answers = _answered({"fleet": fleet, "key": key, "broker": broker, "data": data, "epsilon": epsilon})
    path = Path(str(answers["data"])).expanduser().absolute()
    dataset, declared = open_inferred(DatasetSettings(path=path))
    section = _declared(declared, name, len(dataset))
    if delta is None:
        delta = _small_delta(section["max_records"])
    values = {
        "fleet": answers["fleet"],
        "coordinator_key": answers["key"],
        "state_dir": str(state_dir or _default_state(config)),
        "data": section,
        "budget": {"epsilon": answers["epsilon"], "delta": delta},
        "profile": profile,
        "mqtt": {
            "url": answers["broker"],
            **({} if ca_file is None else {"ca_file": str(ca_file.absolute())}),
            **({} if username is None else {"username": username}),
            **({} if password_file is None else {"password_file": str(password_file.absolute())}),
        },
    }
    _require_valid(values)
    write_atomically(config, _text(values).encode(), mode=0o644)
    settings = agent_settings(config)
    typer.echo(f"Wrote {config}. It declares what your records are: read its section `data`.")
    if ledger:
        begin_ledger(settings.ledger_files, settings.lifetime_budgets)
        budget = settings.budget
        typer.echo(
            f"Began the ledger of {settings.data.name!r} in {settings.state_dir}: ε = {budget.epsilon:g}, "
            f"δ = {budget.delta:g} for its whole life. Leave its second head, "
            f"{settings.ledger_files.second_head}, out of backups."
        )
    else:
        typer.echo(f"Before the first start: dpagent budget init --config {config}")
    typer.echo(f"Next: dpagent doctor --config {config}, then dpagent run --config {config}")


def _answered(given: dict[str, Any]) -> dict[str, Any]:
    """What was given, and the answers to questions about the rest.

    Raises:
        UsageError: Something is missing, and nobody can be asked.
    """
    missing = [name for name, value in given.items() if value is None]
    if missing and not sys.stdin.isatty():
        options = ", ".join(f"--{name}" for name in missing)
        raise UsageError(f"Missing: {options}. On a terminal, they would be asked for.")
    for name in missing:
        given[name] = typer.prompt(_QUESTIONS[name], type=float if name == "epsilon" else str)
    return given


def _declared(declared: Any, name: str, records: int) -> dict[str, Any]:
    """The section ``data``: as the records were found, with room for as many again."""
    from cli.data.page import declaration

    values: dict[str, Any] = declaration(declared, records, None)
    return values | {"name": name}


def _small_delta(max_records: int) -> float:
    """A hundredth of one over the records that there may be, as a power of ten."""
    import math

    return float(f"1e{-math.ceil(math.log10(100 * max_records))}")


def _default_state(config: Path) -> Path:
    under_etc = config.absolute().is_relative_to(_UNDER_ETC)
    return _SERVICE_STATE if under_etc else Path("state")


def _require_valid(values: dict[str, Any]) -> None:
    """Refuse answers that make no configuration, before anything is written.

    Raises:
        UsageError: One cannot be used; names it.
    """
    from pydantic import ValidationError

    from agent.profile import load_profile
    from agent.settings import AgentSettings
    from dpagent.configuration import complaint
    from dpagent.overrides import overridden

    # The ledger is begun for what the agent will read.
    made = overridden(AgentSettings, values, over())
    if made.problems:
        raise UsageError("\n".join(made.problems))
    try:
        AgentSettings.model_validate(made.values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise UsageError(f"{key}: {complaint(problem)}.") from error
    load_profile(made.values["profile"])


def _text(values: dict[str, Any]) -> str:
    """The file, with what a person should know beside each part."""
    import yaml

    def part(*keys: str) -> str:
        texts = []
        for key in keys:
            flow = None if isinstance(values[key], dict) else False
            texts.append(
                yaml.safe_dump(
                    {key: values[key]},
                    sort_keys=False,
                    allow_unicode=True,
                    default_flow_style=flow,
                    width=100,
                )
            )
        return "".join(texts)

    return "\n".join(
        [
            "# Written by `dpagent init`. All keys: docs/configuration.md, or dpagent config show.",
            "# What is not set here is from the board's profile. DPAGENT_MQTT__URL in the environment stands",
            "# over mqtt.url, and `dpagent run --set mqtt.url=…` over both. Paths are relative to this file.",
            "# The fleet, and the key by which this board knows its coordinator.",
            part("fleet", "coordinator_key"),
            "# Ledger and spool. The ledger is the record of what these data have spent: never delete it.",
            part("state_dir"),
            "# What the records are. A board infers nothing: a record that does not fit is left out.",
            "# max_records is public; with more, the agent does not start.",
            part("data"),
            "# The lifetime budget of a record, over all jobs. Once it is spent, the records train no more.",
            part("budget"),
            "# The board (dpagent profiles list). auto: the one that `dpagent profiles detect` finds.",
            part("profile"),
            "# The broker.",
            part("mqtt"),
        ]
    )
