"""What a pack for support has, file by file: what helps, no secret, and nothing that depends on a record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from cli.config import settings_of
from cli.diag.journal import Log
from dpagent.errors import ConfigurationError, DpagentError
from dpagent.schema.json_values import json_values
from dpagent.wording import counted

if TYPE_CHECKING:
    from pathlib import Path

    from agent.settings import AgentSettings
    from cli.configurations import Configuration

LEFT_OUT: Final = "(left out)"
_PACKAGES: Final = ("cbor2", "cryptography", "paho-mqtt", "pillow", "pyyaml", "typer")
"""Besides those that compute."""
_ACCOUNTS: Final = frozenset(
    f"{section}.{key}"
    for section in ("mqtt", "serve.mqtt", "home_assistant.mqtt")
    for key in ("username", "client_id")
)
"""By which a broker knows the board."""
_COMMANDS: Final = frozenset({"governor.command", "model.command"})
"""Of which the arguments may be secrets."""

README: Final = """\
A pack of `dpagent diag`, made on a board for whoever helps its owner.

versions.json       this machine and its packages
configuration.json  every setting, and where it is from
doctor.json         what `dpagent doctor` found
status.json         what the agent does, its last round, and the budget
ledger.json         what was spent, and which rounds were declined and why
agent.log           the log

Left out, whatever there was of it:
- passwords, user names, arguments of commands, keys; files that settings name are not in here;
- records, how many there are, and what doctor and the log say of them;
- how much room there is on the disk, and whether a model found any; how much memory there is;
- what sensors read now (status and log say why training was held back);
- the energy of rounds, and which of them hold noise alone;
- when the agent was started.

Nothing in here depends on a record of the board, beyond what the ledger has charged for. It names the fleet,
its broker, paths on the board, and what `data` declares of the records.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A file of a pack.

    Attributes:
        name: its name.
        content: its text.
        summary: what it holds, for the owner.
    """

    name: str
    content: str
    summary: str


def parts_of(found: Configuration, log: Log, *, asks_broker: bool) -> Iterator[Part]:
    """The files of a pack. What cannot be read is said in its place.

    Args:
        found: the board's configuration.
        log: its log.
        asks_broker: whether `dpagent doctor` connects.

    Raises:
        StorageError: the state directory is another user's.
    """
    yield Part("README.txt", README, "what is in here, and what is not")
    yield _json("versions.json", _versions(), "this machine and its packages")
    try:
        settings, flat = _board(found), settings_of(found)
    except ConfigurationError:
        # What it quotes may be a secret in the wrong place.
        wrong = "It cannot be used. `dpagent config check` says why, and may quote what is in it."
        yield _json("configuration.json", {"problem": wrong}, wrong)
    else:
        yield _configuration(flat)
        yield _doctor(settings, asks_broker=asks_broker)
        yield _status(settings)
        yield _ledger(settings.state_dir)
    yield Part("agent.log", "".join(f"{line}\n" for line in log.lines), log.in_words)


def _board(found: Configuration) -> AgentSettings:
    from agent.profile import open_profile
    from agent.settings import AgentSettings, on_board

    settings = found.load()
    assert isinstance(settings, AgentSettings)
    return on_board(settings, open_profile(settings.profile).profile)


def _versions() -> dict[str, Any]:
    from cli.bench.machine import machine, version_of

    return machine() | {package: version_of(package) for package in _PACKAGES}


def _configuration(flat: list[tuple[str, Any, str]]) -> Part:
    kept = {key: {"value": without_secrets(key, value), "from": origin} for key, value, origin in flat}
    gone = sum(shown["value"] != value for shown, (_, value, _) in zip(kept.values(), flat, strict=True))
    removed = f", {counted(gone, 'value')} left out" if gone else ""
    return _json("configuration.json", kept, f"{counted(len(kept), 'setting')}{removed}")


def without_secrets(key: str, value: Any) -> Any:
    """The value of a setting, as far as others may see it.

    >>> without_secrets("mqtt.username", "board-7"), without_secrets("governor.command", ["curl", "-u", "me"])
    ('(left out)', ['curl', '(left out)'])
    """
    if key in _ACCOUNTS and value is not None:
        return LEFT_OUT
    if key in _COMMANDS and len(value) > 1:
        return [value[0], LEFT_OUT]
    return value


def _doctor(settings: AgentSettings, *, asks_broker: bool) -> Part:
    from agent.diagnosis import examine
    from cli.findings import as_json, summary_of

    found = [each for each in examine(settings, asks_broker=asks_broker) if not each.is_private]
    return _json("doctor.json", as_json(found), f"{counted(len(found), 'finding')}: {summary_of(found)}")


def _status(settings: AgentSettings) -> Part:
    from agent.overview import overview_of
    from agent.sensors import Sensors
    from cli.status import line_of, values_of

    overview = overview_of(settings, Sensors())
    values = values_of(overview)
    for private in ("readings", "model_at"):  # Whether a model found room tells of the records beside it.
        del values[private]
    if values["status"] is not None:
        for private in ("program", "written_at"):  # When the agent was started.
            del values["status"][private]
    return _json("status.json", values, line_of(overview))


def _ledger(state_dir: Path) -> Part:
    from contextlib import closing

    from agent.audit import audit, open_ledger
    from agent.rounds import declined_rounds
    from cli.budget import summary_of
    from dpagent.database_file import database_errors

    try:
        ledger = audit(state_dir)
        with closing(open_ledger(state_dir)[0]) as connection, database_errors(state_dir):
            declined = [asdict(each) for each in declined_rounds(connection)]
    except DpagentError as error:
        return _json("ledger.json", {"problem": str(error)}, str(error))
    values = {"accounts": summary_of(ledger), "declined": declined}
    return _json("ledger.json", values, f"{counted(len(ledger.charges), 'charge')}, verified")


def _json(name: str, values: Any, summary: str) -> Part:
    text = json.dumps(json_values(values), indent=2, ensure_ascii=False, allow_nan=False)
    return Part(name, f"{text}\n", summary)
