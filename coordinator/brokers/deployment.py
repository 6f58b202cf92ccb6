"""What any broker of a fleet is told: where it listens, whom it lets in, and who may do what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Protocol

from dpagent.errors import UsageError
from dpagent.protocol.access import OWN, Right, Role, rights_of
from dpagent.protocol.topics import Topics
from dpagent.transport.bounds import MAX_PACKET_BYTES

MESSAGE_BYTES: Final = 65_536
"""Longest message that a broker takes. Clients take no more than ``MAX_PACKET_BYTES``, which is less."""
QUEUED_MESSAGES: Final = 100_000
"""Messages that wait for one subscriber: fragments while the coordinator is away or busy."""
QUEUED_BYTES: Final = 256 << 20
BOARDS: Final = "board"
"""The user that boards are which show a certificate and give no name, where a broker wants one."""

assert MAX_PACKET_BYTES <= MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files of a listener, in PEM.

    Attributes:
        certificate: the broker's.
        key: its private key.
        authority: whose certificates clients have to show; None if they need none.
        revoked: the list of those that the authority has revoked.
    """

    certificate: Path
    key: Path
    authority: Path | None = None
    revoked: Path | None = None


@dataclass(frozen=True, slots=True)
class User:
    """Who logs in with a name and a password."""

    name: str
    role: Role
    password: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """One broker of one fleet.

    Attributes:
        fleet: its name.
        directory: absolute, of the broker's files.
        address: to listen at.
        port: likewise.
        tls: None: without, on loopback or a network of the fleet's own.
        users: who has a password.
        mixed: whether the fleet has a mixer.
    """

    fleet: str
    directory: Path
    address: str
    port: int
    tls: TlsFiles | None
    users: tuple[User, ...]
    mixed: bool = False

    @property
    def store(self) -> Path:
        """The directory of what the broker keeps."""
        return self.directory / "data"

    @property
    def wants_certificates(self) -> bool:
        """Whether boards are known by certificates of the fleet's authority, and have no password."""
        return self.tls is not None and self.tls.authority is not None

    def filters(self, role: Role, may: str, own: str = "+") -> list[str]:
        """Filters of the topics that a role may read, or write.

        Args:
            role: whose.
            may: ``"read"`` or ``"write"``.
            own: what stands for the common name of the client's certificate in the broker's rules.
        """
        rights = [each.topics for each in self.rights if (each.role, each.may) == (role, may)]
        return [each.replace(OWN, own) for each in rights]

    @property
    def rights(self) -> list[Right]:
        """Of all roles."""
        return rights_of(Topics(self.fleet), mixed=self.mixed, enrolled=self.wants_certificates)


def require_no_revocations(deployment: Deployment, why: str) -> None:
    """Refuse a list of revoked certificates, for a broker that takes none.

    Raises:
        UsageError: There is one.
    """
    if deployment.tls is not None and deployment.tls.revoked is not None:
        raise UsageError(
            f"{why}. Leave --revoked out, and end a board's access by a new --authority; or use mosquitto."
        )


def by_name_and_certificate(deployment: Deployment, software: str) -> list[str]:
    """The remark on a broker that knows boards by having a certificate, and others by a password besides."""
    if not deployment.wants_certificates:
        return []
    return [
        "A board shows its certificate and gives no user name. Coordinator and mixer show theirs, and give "
        f"their names and passwords too: by those, {software} tells them from boards."
    ]


@dataclass(frozen=True, slots=True)
class Written:
    """A file of a broker's configuration.

    Attributes:
        text: what is in it.
        mode: for the file system; passwords and hashes are the owner's alone.
    """

    text: str
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Command:
    """How a broker is started, in the foreground: the process ends with it."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


class BrokerSoftware(Protocol):
    """A kind of broker that can be configured."""

    name: ClassVar[str]
    package: ClassVar[str]
    """What to install, or where it is had."""

    def find(self) -> str | None:
        """The program, where it is installed."""

    def files(self, deployment: Deployment) -> dict[str, Written]:
        """The files to write, by their names in the directory.

        Raises:
            UsageError: This broker cannot do what is asked.
        """

    def command(self, program: str, deployment: Deployment) -> Command:
        """How it is started on these files."""

    def remarks(self, deployment: Deployment) -> list[str]:
        """What its operator has to know, a sentence each."""
