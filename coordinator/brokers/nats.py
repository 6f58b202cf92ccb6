"""NATS with JetStream and MQTT: one configuration file.

https://docs.nats.io/running-a-nats-service/configuration/mqtt. It speaks MQTT 3.1.1 alone. Topics become
subjects, with ``.`` for ``/``; a subscription with wildcards passes where all that it could match is allowed.
A refused publication is acknowledged, and dropped.
"""

from __future__ import annotations

import json
import secrets
import shutil
from typing import ClassVar, Final

from coordinator.brokers.deployment import (
    BOARDS,
    MESSAGE_BYTES,
    Command,
    Deployment,
    User,
    Written,
    by_name_and_certificate,
    require_no_revocations,
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

    def find(self) -> str | None:
        """The program, where it is installed."""
        return shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")

    def files(self, deployment: Deployment) -> dict[str, Written]:
        """The configuration, with passwords."""
        tls = deployment.tls
        require_no_revocations(deployment, "NATS takes no file of revoked certificates: it asks by OCSP")
        users = list(deployment.users)
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
                **({} if tls.authority is None else {"ca_file": str(tls.authority), "verify": True}),
            }
        if deployment.wants_certificates:
            users.append(User(BOARDS, Role.BOARD, secrets.token_urlsafe(32)))
            mqtt["no_auth_user"] = BOARDS
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
        return {"nats.conf": Written(json.dumps(settings, indent=2) + "\n", 0o600)}

    def command(self, program: str, deployment: Deployment) -> Command:
        """In the foreground."""
        return Command((program, "-c", str(deployment.directory / "nats.conf")), {})

    def remarks(self, deployment: Deployment) -> list[str]:
        """What its operator has to know."""
        return [
            "NATS acknowledges what it refuses. `dpagent doctor` tries each topic.",
            "nats.conf holds the passwords as they are: whoever runs the server alone may read it.",
            *by_name_and_certificate(deployment, "NATS"),
        ]


def _user(deployment: Deployment, user: User) -> dict[str, object]:
    reads = [_subject(each) for each in deployment.filters(user.role, "read")]
    writes = [_subject(each) for each in deployment.filters(user.role, "write")]
    permissions = {"publish": {"allow": writes}, "subscribe": {"allow": [*reads, _DELIVERY]}}
    return {"user": user.name, "password": user.password, "permissions": permissions}


def _subject(topics: str) -> str:
    return topics.replace("/", ".").replace("+", "*")
