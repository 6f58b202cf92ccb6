"""A board's first agent.yaml, and its ledger: what `dpagent init` and `dpagent enrol` have in common."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli.configurations import agent_settings, over
from dpagent.errors import UsageError
from dpagent.notation import plain_bounds

if TYPE_CHECKING:
    from agent.settings import AgentSettings

UNDER_ETC: Final = Path("/etc")
_SERVICE_STATE: Final = Path("/var/lib/dpagent/state")

NewConfig = Annotated[Path, typer.Option("--config", help="File to write.", envvar="DPAGENT_CONFIG")]
DataOption = Annotated[Path | None, typer.Option("--data", help="The records.")]
NameOption = Annotated[
    str,
    typer.Option("--name", help="The ledger's name for these records; the lifetime budget belongs to it."),
]
EpsilonOption = Annotated[
    float | None, typer.Option("--epsilon", min=1e-9, max=1000, help="Lifetime ε of a record.")
]
DeltaOption = Annotated[
    float | None,
    typer.Option("--delta", min=1e-30, max=0.5, help="Lifetime δ.", show_default="1/(100 max_records)"),
]
ProfileOption = Annotated[
    str, typer.Option("--profile", help="The board, as `dpagent profiles list` has it.")
]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state-dir", help="Directory of ledger and spool.",
        show_default="/var/lib/dpagent/state if the file is below /etc, else state",
    ),
]  # fmt: skip
LedgerOption = Annotated[
    bool, typer.Option("--ledger/--no-ledger", help="Whether to begin the ledger of these records.")
]

QUESTIONS: Final = {
    "fleet": "Name of the fleet (the operator knows it)",
    "key": "Public key of its coordinator (`dpagent coordinator key` prints it there)",
    "broker": "Address of the broker, such as mqtts://broker.example",
    "data": "The records: a folder of pictures, or CSV, NPZ or CIFAR files",
    "epsilon": "Lifetime ε of these records, over all jobs (6 is moderate, 1 is strict)",
}


@dataclass(frozen=True, slots=True)
class BoardChoices:
    """What the owner of a board decides, whatever fleet it joins."""

    data: Path
    name: str
    epsilon: float
    delta: float | None
    profile: str
    state_dir: Path | None


def answered(given: dict[str, Any]) -> dict[str, Any]:
    """What was given, and the answers to questions about the rest.

    Raises:
        UsageError: Something is missing, and nobody can be asked.
    """
    missing = [name for name, value in given.items() if value is None]
    if missing and not sys.stdin.isatty():
        options = ", ".join(f"--{name}" for name in missing)
        raise UsageError(f"Missing: {options}. On a terminal, they would be asked for.")
    for name in missing:
        given[name] = typer.prompt(QUESTIONS[name], type=float if name == "epsilon" else str)
    return given


def own_values(choices: BoardChoices, config: Path) -> dict[str, Any]:
    """The sections of ``agent.yaml`` that have nothing to do with a fleet: the records as they are found,
    with room for as many again, and their budget.

    Raises:
        DataError: The records cannot be opened.
    """
    from dpagent.learning.data.opening import open_inferred
    from dpagent.learning.data.settings import DatasetSettings

    path = choices.data.expanduser().absolute()
    dataset, declared = open_inferred(DatasetSettings(path=path))
    section = _declared(declared, choices.name, len(dataset))
    delta = _small_delta(section["max_records"]) if choices.delta is None else choices.delta
    return {
        "state_dir": str(choices.state_dir or default_state(config)),
        "data": section,
        "budget": {"epsilon": choices.epsilon, "delta": delta},
        "profile": choices.profile,
    }


def default_state(config: Path) -> Path:
    """Where the state of a board is whose configuration is there."""
    under_etc = config.absolute().is_relative_to(UNDER_ETC)
    return _SERVICE_STATE if under_etc else Path("state")


def require_valid(values: Mapping[str, Any]) -> None:
    """Refuse answers that make no configuration, before anything is written.

    Raises:
        UsageError: One cannot be used; names it.
    """
    from agent.profile import load_profile
    from agent.settings import AgentSettings
    from dpagent.overrides import overridden
    from dpagent.schema.problems import SchemaError

    # The ledger is begun for what the agent will read.
    made = overridden(AgentSettings, dict(values), over())
    if made.problems:
        raise UsageError("\n".join(made.problems))
    try:
        AgentSettings.checked(made.values)
    except SchemaError as error:
        raise UsageError(f"{error.first.sentence()}.") from error
    load_profile(made.values["profile"])


def write_board(config: Path, values: Mapping[str, Any], *, written_by: str, ledger: bool) -> AgentSettings:
    """Write ``agent.yaml``, begin the ledger, and say so.

    Raises:
        LedgerError, StateInUseError, StorageError: Something cannot be written.
    """
    from agent.custody import begin_ledger
    from dpagent.storage import write_atomically

    write_atomically(config, _text(values, written_by).encode(), mode=0o644)
    settings = agent_settings(config)
    typer.echo(f"Wrote {config}. It declares what your records are: read its section `data`.")
    if ledger:
        begin_ledger(settings.ledger_files, settings.lifetime_budgets)
        budget = settings.budget
        typer.echo(
            f"Began the ledger of {settings.data.name!r} in {settings.state_dir}: "
            f"{plain_bounds(budget.epsilon, budget.delta)} for its whole life. Leave its second head, "
            f"{settings.ledger_files.second_head}, out of backups."
        )
    else:
        typer.echo(f"Before the first start: dpagent budget init --config {config}")
    return settings


def _declared(declared: Any, name: str, records: int) -> dict[str, Any]:
    from cli.data.page import declaration

    values: dict[str, Any] = declaration(declared, records, None)
    return values | {"name": name}


def _small_delta(max_records: int) -> float:
    """A hundredth of one over the records that there may be, as a power of ten."""
    import math

    return float(f"1e{-math.ceil(math.log10(100 * max_records))}")


def _text(values: Mapping[str, Any], written_by: str) -> str:
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

    lines = [
        f"# Written by `{written_by}`. All keys: docs/configuration.md, or dpagent config show.",
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
    if "enrolment" in values:
        lines += ["# Where this board's certificate is renewed, in time and by itself.", part("enrolment")]
    return "\n".join(lines)
