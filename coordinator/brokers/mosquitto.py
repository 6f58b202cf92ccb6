"""Mosquitto 2: one configuration file, a file of password hashes, and one of access rules.

https://mosquitto.org/man/mosquitto-conf-5.html. A refused publication is acknowledged all the same over MQTT
3.1.1, and answered with a reason over MQTT 5. Subscriptions are not checked, only what they deliver.
"""

from __future__ import annotations

import base64
import getpass
import hashlib
import os
import shutil
from collections.abc import Iterable, Sequence
from signal import Signals
from typing import ClassVar, Final

from coordinator.brokers.deployment import (
    MESSAGE_BYTES,
    QUEUED_BYTES,
    QUEUED_MESSAGES,
    REVOKED,
    Command,
    Deployment,
    User,
    Written,
)
from dpagent.protocol.access import Role

ITERATIONS: Final = 101
"""Of Mosquitto's password hashes, as it has them. The passwords are 32 random bytes: nobody guesses one."""
PLACES: Final = "/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin"
"""Where a user's PATH may not look."""


class Mosquitto:
    """See the module's text."""

    name: ClassVar[str] = "mosquitto"
    package: ClassVar[str] = "apt-get install mosquitto"
    names_by_certificate: ClassVar[bool] = True
    lists_members: ClassVar[bool] = False
    reload_signal: ClassVar[Signals | None] = Signals.SIGHUP
    looks_itself: ClassVar[bool] = False

    def find(self) -> str | None:
        """The program, where it is installed."""
        return find_mosquitto()

    def files(self, deployment: Deployment) -> dict[str, Written]:
        """Configuration, hashes and rules."""
        directory = str(deployment.directory)
        options = []
        if has_passwords := any(user.password is not None for user in deployment.users):
            options.append(f"password_file {directory}/passwords")
        options.append(f"acl_file {directory}/access")
        lines = configuration(deployment, str(deployment.store), options, user=getpass.getuser())
        return {
            "mosquitto.conf": Written(lines, 0o644 if deployment.bridge is None else 0o600),
            **({"passwords": Written(hashes(deployment.users), 0o600)} if has_passwords else {}),
            "access": Written(access(deployment), 0o600),
            **self.member_files(deployment),
        }

    def member_files(self, deployment: Deployment) -> dict[str, Written]:
        """Authorities, lists, and rules: by these, a connection that is open is of no more use."""
        if deployment.membership is None:
            return {}
        return {"access": Written(access(deployment), 0o600), **deployment.membership.files}

    def command(self, program: str, deployment: Deployment) -> Command:
        """In the foreground, as any child."""
        return Command((program, "-c", str(deployment.directory / "mosquitto.conf")), {})

    def remarks(self, deployment: Deployment) -> list[str]:
        """What its operator has to know."""
        return [
            "Over MQTT 3.1.1, Mosquitto acknowledges what it refuses. `dpagent doctor` tries each topic.",
            "Mosquitto reads certificates, revocations, passwords and rules again at SIGHUP.",
        ]


def find_mosquitto() -> str | None:
    """Where Mosquitto is installed."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path=PLACES)


def configuration(
    deployment: Deployment, store: str, options: Iterable[str], *, user: str | None, autosave_s: int = 30
) -> str:
    """The text of ``mosquitto.conf``.

    Args:
        deployment: what it is for.
        store: the directory of its database.
        options: further lines: of passwords and access rules.
        user: it becomes this one if root starts it; None leaves that to Mosquitto.
        autosave_s: how often it writes what it keeps.
    """
    listener = [f"listener {deployment.port}"]
    if deployment.address:
        listener = [f"listener {deployment.port} {deployment.address}"]
    if (tls := deployment.tls) is not None:
        listener += [f"certfile {tls.certificate}", f"keyfile {tls.key}"]
        # TLS 1.3 hides the certificates of clients.
        listener.append(f"tls_version {'tlsv1.3' if deployment.wants_certificates else 'tlsv1.2'}")
        if deployment.wants_certificates:
            listener += [
                f"cafile {deployment.authorities}",
                f"crlfile {deployment.directory / REVOKED}",
                "require_certificate true",
                "use_identity_as_username true",
            ]
    lines = [
        *listener,
        "allow_anonymous false",
        *options,
        *([] if user is None else [f"user {user}"]),
        "persistence true",
        f"persistence_location {store}/",
        f"autosave_interval {autosave_s}",
        # The defaults drop messages of a subscriber that is away beyond a thousand.
        f"max_queued_messages {QUEUED_MESSAGES}",
        f"max_queued_bytes {QUEUED_BYTES}",
        f"message_size_limit {MESSAGE_BYTES}",
        # No persistent_client_expiration: with it, each session whose client is away is in the list of those
        # that end, by which Mosquitto 2.0.11 crashes after a SIGHUP (see dpagent.transport.connection).
        "log_dest stdout",
        "log_type error",
        "log_type warning",
        *_bridge(deployment),
    ]
    return "\n".join(lines) + "\n"


def _bridge(deployment: Deployment) -> list[str]:
    """The lines of a bridge to a broker that knows this one by its certificate.

    What it carries is what its role may do there. Neither broker sends back what came from the other one.
    """
    if (bridge := deployment.bridge) is None:
        return []
    read, write = (deployment.filters(Role.BRIDGE, may) for may in ("read", "write"))
    ways = dict.fromkeys(read, "in") | dict.fromkeys(write, "out")
    ways |= {topics: "both" for topics in read if topics in write}
    return [
        f"connection {deployment.fleet}-{deployment.port}",
        f"address {bridge.host}:{bridge.port}",
        # At this broker it has the same id, after `local.`.
        f"remote_clientid {bridge.session}",
        f"bridge_cafile {deployment.authorities}",
        f"bridge_certfile {bridge.certificate}",
        f"bridge_keyfile {bridge.key}",
        "bridge_tls_version tlsv1.3",
        "notifications false",
        "restart_timeout 1 10",
        *(f"topic {topics} {way} 1" for topics, way in ways.items()),
    ]


def access(deployment: Deployment) -> str:
    """The text of the access rules. Whoever shows a certificate of the fleet has those of boards, unless it
    is a device that is no member any more."""
    ended = deployment.membership.ended if deployment.membership is not None else ()
    lines = [line for device in ended for line in (f"user {device}", "topic deny #")]
    for user in deployment.users:
        if user.role is not Role.BOARD or not deployment.wants_certificates:
            lines += [f"user {user.name}", *_lines("topic", deployment, user)]
    if deployment.wants_certificates:
        lines += _lines("pattern", deployment, User("", Role.BOARD))
    return "\n".join(lines) + "\n"


def _lines(kind: str, deployment: Deployment, user: User) -> Sequence[str]:
    return [
        f"{kind} {may} {topics}"
        for may in ("read", "write")
        for topics in deployment.filters(user.role, may, own="%u")
    ]


def hashes(users: Iterable[User]) -> str:
    """The text of the file of passwords."""
    return "".join(f"{each.name}:{hashed(each.password)}\n" for each in users if each.password is not None)


def hashed(password: str) -> str:
    """A password as ``mosquitto_passwd`` writes it: PBKDF2 with SHA-512."""
    salt = os.urandom(12)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, ITERATIONS)
    return f"$7${ITERATIONS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"
