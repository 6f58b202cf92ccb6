"""NATS with JetStream and MQTT: one configuration file.

https://docs.nats.io/running-a-nats-service/configuration/mqtt. It speaks MQTT 3.1.1 alone. Topics become
subjects, with ``.`` for ``/``; a subscription with wildcards passes where all that it could match is allowed.
A refused publication is acknowledged, and dropped.

It takes no revocation list. Where boards are known by certificates, each is a user of the name in its
certificate (``verify_and_map``): the configuration lists the members, and a user who is struck from it is
disconnected when it is read again.
"""

from __future__ import annotations

import json
import shutil
from signal import Signals
from typing import ClassVar, Final

from coordinator.brokers.deployment import (
    AUTHORITIES,
    MESSAGE_BYTES,
    Command,
    Deployment,
    User,
    Written,
    require_no_bridge,
    require_no_workers,
)
from dpagent.protocol.access import Role

_DELIVERY: Final = "$MQTT.sub.>"
"""What a session at QoS 1 reads its messages from. No client can subscribe to it."""
_ROOM: Final = 1_024
"""Of a packet, besides the message."""


class Nats:
    """See the module's text."""

    name: ClassVar[str] = "nats"
    package: ClassVar[str] = "apt-get install nats-server"
    names_by_certificate: ClassVar[bool] = True
    lists_members: ClassVar[bool] = True
    reload_signal: ClassVar[Signals | None] = Signals.SIGHUP
    looks_itself: ClassVar[bool] = False

    def find(self) -> str | None:
        """The program, where it is installed."""
        return shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")

    def files(self, deployment: Deployment) -> dict[str, Written]:
        """The configuration, with passwords."""
        require_no_workers(deployment, "NATS")
        require_no_bridge(deployment, "NATS")
        tls, membership = deployment.tls, deployment.membership
        mqtt: dict[str, object] = {
            "listen": f"{deployment.address or '0.0.0.0'}:{deployment.port}",
            # A coordinator acknowledges what it has counted.
            "ack_wait": "60s",
            "max_ack_pending": 1_024,
        }
        if tls is not None:
            mqtt["tls"] = {
                "cert_file": str(tls.certificate),
                "key_file": str(tls.key),
                "timeout": 10,
                **(
                    {}
                    if membership is None
                    else {"ca_file": str(deployment.authorities), "verify_and_map": True}
                ),
            }
        members = () if membership is None else membership.members
        users = [*deployment.users, *(User(device, Role.BOARD) for device in members)]
        settings = {
            "server_name": f"dpagent-{deployment.fleet}",
            # NATS's own clients, of which there are none.
            "listen": "127.0.0.1:-1",
            "max_payload": MESSAGE_BYTES + _ROOM,
            "jetstream": {"store_dir": str(deployment.store)},
            "mqtt": mqtt,
            "authorization": {"users": [_user(deployment, user) for user in users]},
        }
        # The configuration language takes JSON.
        files = {"nats.conf": Written(json.dumps(settings, indent=2) + "\n", 0o600)}
        return files if membership is None else {AUTHORITIES: membership.files[AUTHORITIES], **files}

    def member_files(self, deployment: Deployment) -> dict[str, Written]:
        """All of them: the configuration lists the members."""
        return {} if deployment.membership is None else self.files(deployment)

    def command(self, program: str, deployment: Deployment) -> Command:
        """In the foreground."""
        return Command((program, "-c", str(deployment.directory / "nats.conf")), {})

    def remarks(self, deployment: Deployment) -> list[str]:
        """What its operator has to know."""
        return [
            "NATS acknowledges what it refuses. `dpagent doctor` tries each topic.",
            (
                "nats.conf lists the members. It is written anew when a board enrols or is revoked: "
                "whoever runs "
                "NATS otherwise than by --run has it read by enrolment.on_members_change."
                if deployment.wants_certificates
                else "nats.conf holds the passwords as they are: whoever runs the server alone may read it."
            ),
        ]


def _user(deployment: Deployment, user: User) -> dict[str, object]:
    own = user.name if user.role is Role.BOARD else "+"
    reads = [_subject(each) for each in deployment.filters(user.role, "read", own)]
    writes = [_subject(each) for each in deployment.filters(user.role, "write", own)]
    permissions = {"publish": {"allow": writes}, "subscribe": {"allow": [*reads, _DELIVERY]}}
    if user.password is None:
        return {"user": f"CN={user.name}", "permissions": permissions}
    return {"user": user.name, "password": user.password, "permissions": permissions}


def _subject(topics: str) -> str:
    return topics.replace("/", ".").replace("+", "*")
