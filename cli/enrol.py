"""``dpagent enrol``: from an invitation to a board that its fleet knows, in one command."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

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
from cli.configurations import agent_settings
from dpagent.errors import BrokerError, ConfigurationError, UsageError

if TYPE_CHECKING:
    from agent.enrolling import Enrolled
    from agent.settings import AgentSettings
    from dpagent.protocol.enrolment import Invitation
    from dpagent.transport.settings import MqttSettings

_PATIENCE_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class IdentityFiles:
    """Where a board keeps what it is known by: beside its state, where its service may write."""

    directory: Path

    @property
    def certificate(self) -> Path:
        """The board's certificate."""
        return self.directory / "device.crt"

    @property
    def key(self) -> Path:
        """Its private key."""
        return self.directory / "device.key"

    @property
    def authority(self) -> Path:
        """The fleet's authority."""
        return self.directory / "fleet-ca.crt"

    @property
    def broker_authority(self) -> Path:
        """The authority of the broker, where it is another one."""
        return self.directory / "broker-ca.crt"

    @property
    def ledger_is_due(self) -> Path:
        """There while a first enrolment has written agent.yaml, perhaps, and not begun the ledger yet."""
        return self.directory / "ledger-is-due"


def enrol(
    code: Annotated[
        str | None, typer.Argument(help="The code, as `dpagent coordinator invite` printed it.")
    ] = None,
    code_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the code (`-`: standard input); other users of the board do not see it."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URI",
            help="File of a key that is there already, or that names one in hardware; or the pkcs11: URI of "
            "one (docs/deploy.md). Else a new one is made.",
        ),
    ] = None,
    config: NewConfig = Path("agent.yaml"),
    data: DataOption = None,
    name: NameOption = "my-records",
    epsilon: EpsilonOption = None,
    delta: DeltaOption = None,
    profile: ProfileOption = "auto",
    state_dir: StateOption = None,
    ledger: LedgerOption = True,
    connect: Annotated[
        bool, typer.Option("--connect/--no-connect", help="Whether to try the connection to the broker.")
    ] = True,
) -> None:
    """Join a fleet with an invitation: key, certificate, agent.yaml, ledger, and a first connection.

    The key is made here, unless --key gives one, and never leaves. Records are looked at on this machine
    alone, as with `dpagent init`. If the network fails, run the same command again: the code is not used up.
    With an agent.yaml that an enrolment wrote, only key and certificate are replaced, and its ledger stays.
    """
    invitation = _invitation(code, code_file)
    if config.exists():
        settings = _again(invitation, config, key=key, ledger=ledger)
    else:
        settings = _anew(
            invitation, config, key=key, name=name, delta=delta, profile=profile, state_dir=state_dir,
            ledger=ledger, given={"data": data, "epsilon": epsilon},
        )  # fmt: skip
    if connect:
        _connect(settings.mqtt)
    typer.echo(f"Next: dpagent run --config {config}")


def _invitation(code: str | None, code_file: Path | None) -> Invitation:
    from dpagent.protocol.enrolment import Invitation
    from dpagent.storage import disk_errors

    if (code is None) == (code_file is None):
        raise UsageError("Give a code, or --code-file with a file that it is in.")
    if code_file is not None:
        with disk_errors(code_file):
            data = sys.stdin.buffer.read() if str(code_file) == "-" else code_file.read_bytes()
        lines = [line for line in data.decode("ascii", "replace").splitlines() if not line.startswith("#")]
        code = "".join(lines)
    try:
        return Invitation.read(code or "")
    except ValueError as error:
        raise UsageError(f"The code cannot be read: {error}.") from error


def _anew(
    invitation: Invitation,
    config: Path,
    *,
    given: dict[str, Any],
    key: str | None,
    name: str,
    delta: float | None,
    profile: str,
    state_dir: Path | None,
    ledger: bool,
) -> AgentSettings:
    """Enrol a board that has no configuration yet."""
    from agent.enrolling import enrol
    from agent.identity import durable_key
    from dpagent.storage import disk_errors, write_atomically

    answers = answered(given)
    choices = BoardChoices(Path(str(answers["data"])), name, answers["epsilon"], delta, profile, state_dir)
    values = own_values(choices, config)
    state = Path(values["state_dir"])
    beside = IdentityFiles(state.parent / "identity")
    files = IdentityFiles(config.parent / beside.directory)
    pending = _pending(files.key, invitation)
    # What the owner chose is refused before a code is used up by it.
    require_valid({"fleet": "unknown", "coordinator_key": _NO_KEY, **values, "mqtt": {}})
    with disk_errors(config):
        config.parent.mkdir(parents=True, exist_ok=True)
    enrolled = enrol(invitation, durable_key(pending, key))
    values = {
        "fleet": enrolled.answer.fleet,
        "coordinator_key": enrolled.answer.coordinator_key,
        **values,
        "mqtt": _mqtt(enrolled, beside),
        "enrolment": {"url": invitation.url, "ca_file": str(beside.authority)},
    }
    require_valid(values)
    _keep(enrolled, files)
    if ledger:
        write_atomically(files.ledger_is_due, b"")
    settings = write_board(config, values, written_by="dpagent enrol", ledger=ledger)
    _finish(pending, files)
    typer.echo(f"This board is device {enrolled.identity.device_id} of fleet {enrolled.answer.fleet}.")
    return settings


def _again(invitation: Invitation, config: Path, *, key: str | None, ledger: bool) -> AgentSettings:
    """Enrol a board that has the configuration of an enrolment, as another device; or go on where the first
    one was interrupted.

    Raises:
        UsageError: It has another one.
    """
    from agent.custody import begin_ledger
    from agent.database import no_ledger
    from agent.enrolling import enrol
    from agent.heads import read_second_head
    from agent.identity import durable_key

    settings = agent_settings(config)
    cert_file, key_file = settings.mqtt.cert_file, settings.mqtt.key_file
    if settings.enrolment is None or cert_file is None or key_file is None:
        raise UsageError(
            f"{config} exists, and no enrolment wrote it: enrolment, mqtt.cert_file and mqtt.key_file are "
            "not all set. Move it away, enrol with --no-ledger and its state_dir, and copy its sections data "
            "and budget: its ledger stays in use."
        )
    pending, files = _pending(key_file, invitation), IdentityFiles(cert_file.parent)
    # No other sign of an interruption will do: the key of an attempt that an endpoint refused is none, and a
    # board whose state was lost would get its whole budget again.
    is_first = files.ledger_is_due.exists() and not key_file.exists()
    enrolled = enrol(invitation, durable_key(pending, key))
    known, told = (settings.fleet, settings.coordinator_key), enrolled.answer
    if known != (told.fleet, told.coordinator_key):
        raise ConfigurationError(
            f"{config} is of fleet {known[0]} with the coordinator {known[1]}, and the code of fleet "
            f"{told.fleet} with the coordinator {told.coordinator_key}. Give another --config for another "
            "fleet."
        )
    _keep(enrolled, files, certificate=cert_file, authority=settings.enrolment.ca_file)
    kept, second = settings.ledger_files, read_second_head(settings.ledger_files.second_head)
    if is_first and ledger and second is None:
        begin_ledger(kept, settings.lifetime_budgets)
    _finish(pending, files, key_file=key_file)
    typer.echo(f"This board is device {enrolled.identity.device_id} of fleet {told.fleet} now.")
    if not kept.database.exists():
        typer.echo(str(no_ledger(kept, second)))
    return settings


_NO_KEY: Final = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="


def _mqtt(enrolled: Enrolled, files: IdentityFiles) -> dict[str, Any]:
    """The section ``mqtt``: what differs from its defaults."""
    told = enrolled.answer.broker
    values: dict[str, Any] = {"url": told.url}
    if told.authority == "fleet":
        values["ca_file"] = str(files.authority)
    elif told.authority != "system":
        values["ca_file"] = str(files.broker_authority)
    if told.url.partition(":")[0].lower() in ("mqtts", "wss"):
        values |= {"cert_file": str(files.certificate), "key_file": str(files.key)}
    if told.protocol != "auto":
        values["protocol"] = told.protocol
    if told.keepalive_s != 30:
        values["keepalive_s"] = told.keepalive_s
    if told.topic_prefix:
        values["topic_prefix"] = told.topic_prefix
    if told.client_id is not None:
        values["client_id"] = told.client_id
    return values


def _keep(
    enrolled: Enrolled,
    files: IdentityFiles,
    *,
    certificate: Path | None = None,
    authority: Path | None = None,
) -> None:
    from agent.enrolling import pem_of
    from dpagent.storage import write_atomically

    told = enrolled.answer.broker.authority
    if told not in ("fleet", "system"):
        write_atomically(files.broker_authority, told.encode())
    write_atomically(authority or files.authority, pem_of(enrolled.authorities).encode())
    write_atomically(certificate or files.certificate, pem_of(enrolled.chain).encode())


def _pending(key_file: Path, invitation: Invitation) -> Path:
    """Where the key of an enrolment waits for its end. Another code is another device, with another key."""
    return key_file.with_suffix(f".{invitation.name}.new")


def _finish(pending: Path, files: IdentityFiles, *, key_file: Path | None = None) -> None:
    """Let the new key take its place, last: until then, the same command gets the same certificate again."""
    from dpagent.storage import disk_errors, replace_durably

    key_file = key_file or files.key
    with disk_errors(key_file):
        files.ledger_is_due.unlink(missing_ok=True)
        replace_durably(key_file, pending)
        for given_up in key_file.parent.glob(f"{key_file.stem}.*.new"):
            given_up.unlink(missing_ok=True)


def _connect(mqtt: MqttSettings) -> None:
    """Connect once, as the agent will.

    Raises:
        BrokerError: The board is enrolled, and the broker does not let it in.
    """
    from dpagent.transport.events import Connected, Disconnected
    from dpagent.transport.session import MqttSession, Pace

    until, reason = time.monotonic() + _PATIENCE_S, "no answer"
    with MqttSession(
        mqtt, client_id=None, subscriptions=[], persistent=False, pace=Pace(pause_s=0.2, longest_s=3.0)
    ) as session:
        while (left_s := until - time.monotonic()) > 0:
            match session.next_event(left_s):
                case Connected():
                    typer.echo(f"Connected to {mqtt.url}.")
                    return
                case Disconnected() as event:
                    reason = event.reason
                case _:
                    pass
    raise BrokerError(
        f"The board is enrolled, and the broker at {mqtt.url} does not let it in: {reason}. `dpagent doctor` "
        "tries each step; the enrolment need not be repeated."
    )
