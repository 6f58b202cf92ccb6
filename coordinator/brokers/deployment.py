"""What any broker of a fleet is told: where it listens, whom it lets in, and who may do what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
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
AUTHORITIES: Final = "authorities.pem"
REVOKED: Final = "revoked.pem"

assert MAX_PACKET_BYTES <= MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files of a listener, in PEM.

    Attributes:
        certificate: the broker's.
        key: its private key.
    """

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Membership:
    """Who is known by a certificate of the fleet's.

    Attributes:
        authorities: whose certificates are let in, in PEM.
        revocations: the list of each, in PEM.
        members: ids of the devices that may take part.
        ended: ids of those that may no longer.
    """

    authorities: bytes
    revocations: tuple[bytes, ...]
    members: tuple[str, ...]
    ended: tuple[str, ...]

    @property
    def files(self) -> dict[str, Written]:
        """The authorities and their lists, as most brokers take them."""
        return {
            AUTHORITIES: Written(self.authorities.decode()),
            REVOKED: Written(b"".join(self.revocations).decode()),
        }


@dataclass(frozen=True, slots=True)
class User:
    """Who has a name at the broker.

    Attributes:
        password: None for one whom the certificate names.
    """

    name: str
    role: Role
    password: str | None = None


@dataclass(frozen=True, slots=True)
class Bridge:
    """A connection to the broker at which the fleet's coordinators are.

    Attributes:
        host: of that broker.
        port: likewise.
        certificate: by which it knows this one, in PEM.
        key: its private key.
        session: the client id there. Brokers let any user take a session over whose id it gives, and a board
            that knew this one could keep all boards of this broker from the coordinator.
    """

    host: str
    port: int
    certificate: Path
    key: Path
    session: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """One broker of one fleet.

    Attributes:
        fleet: its name.
        directory: absolute, of the broker's files.
        address: to listen at.
        port: likewise.
        tls: None: without, on loopback or a network of the fleet's own.
        users: the coordinator, the mixer if there is one, and boards that have a password.
        mixed: whether the fleet has a mixer.
        membership: who is known by a certificate; None where all have passwords.
        bridge: to the broker of the coordinators; None where this is that one.
    """

    fleet: str
    directory: Path
    address: str
    port: int
    tls: TlsFiles | None
    users: tuple[User, ...]
    mixed: bool = False
    membership: Membership | None = None
    bridge: Bridge | None = None

    @property
    def store(self) -> Path:
        """The directory of what the broker keeps."""
        return self.directory / "data"

    @property
    def wants_certificates(self) -> bool:
        """Whether boards are known by certificates of the fleet's authority, and have no password."""
        return self.membership is not None

    @property
    def authorities(self) -> Path:
        """The file of those whose certificates are let in."""
        return self.directory / AUTHORITIES

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


def require_no_workers(deployment: Deployment, software: str) -> None:
    """Refuse workers, for a broker that would give each of them every fragment, or none.

    Raises:
        UsageError: There are some.
    """
    if any(each.role is Role.WORKER for each in deployment.users):
        raise UsageError(
            f"`--worker`: {software} has no shared subscriptions of MQTT 5, and workers need them. Use "
            "mosquitto or emqx, or let the coordinator count alone."
        )


def require_no_bridge(deployment: Deployment, software: str) -> None:
    """Refuse bridges, for a broker whose own were not tried.

    Raises:
        UsageError: One is asked for.
    """
    if deployment.bridge is not None or any(each.role is Role.BRIDGE for each in deployment.users):
        raise UsageError(
            f"`--bridge` and `--bridge-to` are written for mosquitto alone; {software} has a federation or a "
            "cluster of its own, which was not tried."
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
    names_by_certificate: ClassVar[bool]
    """Whether a certificate names coordinator and mixer, who then need no password."""
    lists_members: ClassVar[bool]
    """Whether it lets in whom its files name, so that they change when a board enrols."""
    reload_signal: ClassVar[Signals | None]
    """What makes it read its files again, if anything does."""
    looks_itself: ClassVar[bool]
    """Whether it looks at its files whenever a client connects."""

    def find(self) -> str | None:
        """The program, where it is installed."""

    def files(self, deployment: Deployment) -> dict[str, Written]:
        """The files to write, by their names in the directory; those of members are in them."""

    def member_files(self, deployment: Deployment) -> dict[str, Written]:
        """Those that follow who is a member; none where all have passwords."""

    def command(self, program: str, deployment: Deployment) -> Command:
        """How it is started on these files."""

    def remarks(self, deployment: Deployment) -> list[str]:
        """What its operator has to know, a sentence each."""
