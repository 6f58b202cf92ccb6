"""RabbitMQ with its MQTT plugin: ``rabbitmq.conf``, the plugins, and definitions of users and rules.

https://www.rabbitmq.com/docs/mqtt. MQTT topics become routing keys of the exchange ``amq.topic``, with ``.``
for ``/``; rules are regular expressions over them. A refused publication or subscription ends the connection.
Nothing that is retained reaches a subscription with wildcards, which these rules refuse anyway.

TLS is set in Erlang's own terms (``advanced.config``): ``rabbitmq.conf`` has no word for where revocation
lists are (https://www.erlang.org/docs/25/man/ssl: ``crl_check``, ``crl_cache``). They are looked up by a
hash of their issuer's name in a directory, each time that a client shows a certificate, so nothing has to be
read again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import shutil
from pathlib import Path
from signal import Signals
from typing import Any, ClassVar, Final

from cryptography import x509

from coordinator.brokers.deployment import (
    AUTHORITIES,
    BOARDS,
    MESSAGE_BYTES,
    QUEUED_MESSAGES,
    Command,
    Deployment,
    User,
    Written,
    by_name_and_certificate,
    require_no_bridge,
    require_no_workers,
)
from coordinator.brokers.hashed_names import name_hash
from dpagent.protocol.access import Role

_EXCHANGE: Final = "amq.topic"
_OWN_QUEUES: Final = r"^mqtt-subscription-.*$"
_QUEUES: Final = r"^(amq\.topic|mqtt-subscription-.*)$"
_SERVERS: Final = "/usr/lib/rabbitmq/bin"
"""Where Debian has the program itself; that in the PATH becomes another user, and logs elsewhere."""
_REVOKED: Final = "revoked"
"""The directory of revocation lists."""
_DISTRIBUTION: Final = 20_000
"""How far above the port of MQTT the node's own port is, or below, as for RabbitMQ's other ports."""


class RabbitMq:
    """See the module's text."""

    name: ClassVar[str] = "rabbitmq"
    package: ClassVar[str] = "apt-get install rabbitmq-server"
    names_by_certificate: ClassVar[bool] = False
    lists_members: ClassVar[bool] = False
    reload_signal: ClassVar[Signals | None] = None
    looks_itself: ClassVar[bool] = True

    def find(self) -> str | None:
        """The program, where it is installed."""
        return shutil.which("rabbitmq-server", path=_SERVERS) or shutil.which("rabbitmq-server")

    def files(self, deployment: Deployment) -> dict[str, Written]:
        """Configuration, plugins and definitions."""
        require_no_workers(deployment, "RabbitMQ")
        require_no_bridge(deployment, "RabbitMQ")
        guest = secrets.token_urlsafe(32)
        users = list(deployment.users)
        if deployment.wants_certificates:
            users.append(User(BOARDS, Role.BOARD, guest))
        definitions = json.dumps(_definitions(deployment, users), indent=2) + "\n"
        return {
            "rabbitmq.conf": Written(_configuration(deployment, guest), 0o600),
            "enabled_plugins": Written("[rabbitmq_mqtt].\n"),
            "definitions.json": Written(definitions, 0o600),
            "advanced.config": Written(_tls(deployment)),
            **self.member_files(deployment),
        }

    def member_files(self, deployment: Deployment) -> dict[str, Written]:
        """Authorities, and the list of each."""
        if (membership := deployment.membership) is None:
            return {}
        files = {AUTHORITIES: membership.files[AUTHORITIES]}
        for pem in membership.revocations:
            issuer = x509.load_pem_x509_crl(pem).issuer
            files[f"{_REVOKED}/{name_hash(issuer)}.r0"] = Written(pem.decode())
        return files

    def command(self, program: str, deployment: Deployment) -> Command:
        """In the foreground, with a node name, a cookie and a database of its own."""
        place, port = deployment.directory, deployment.port
        node_port = port + (_DISTRIBUTION if port < 65_536 - _DISTRIBUTION else -_DISTRIBUTION)
        return Command(
            (program,),
            {
                "HOME": str(place),
                "RABBITMQ_CONF_ENV_FILE": os.devnull,
                "RABBITMQ_NODENAME": f"dpagent-{port}@localhost",
                "RABBITMQ_CONFIG_FILE": str(place / "rabbitmq.conf"),
                "RABBITMQ_ADVANCED_CONFIG_FILE": str(place / "advanced.config"),
                "RABBITMQ_ENABLED_PLUGINS_FILE": str(place / "enabled_plugins"),
                "RABBITMQ_MNESIA_BASE": str(deployment.store),
                "RABBITMQ_LOG_BASE": str(place / "log"),
                "RABBITMQ_PID_FILE": str(place / "pid"),
                "RABBITMQ_DIST_PORT": str(node_port),
                # The node talks to no other.
                "ERL_EPMD_ADDRESS": "127.0.0.1",
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
                # The script then becomes the server, whose process can be ended by its id.
                "RUNNING_UNDER_SYSTEMD": "true",
            },
        )

    def remarks(self, deployment: Deployment) -> list[str]:
        """What its operator has to know."""
        return [
            "For an installed service, copy rabbitmq.conf, advanced.config and enabled_plugins to "
            "/etc/rabbitmq, "
            "and let them name definitions.json and the files of TLS where the service may read them.",
            "RabbitMQ before 3.13 writes a CONNECT of MQTT 5 into its log, password and all: set "
            "mqtt.protocol "
            "to 3.1.1.",
            *by_name_and_certificate(deployment, "RabbitMQ"),
        ]


def _configuration(deployment: Deployment, guest: str) -> str:
    kind = "tcp" if deployment.tls is None else "ssl"
    lines = [
        "listeners.tcp = none",
        f"mqtt.listeners.{kind}.1 = {deployment.address or '0.0.0.0'}:{deployment.port}",
        f"mqtt.exchange = {_EXCHANGE}",
        "mqtt.vhost = /",
        # On disk; the other store forgets at a restart.
        "mqtt.retained_message_store = rabbit_mqtt_retained_msg_store_dets",
        f"max_message_size = {MESSAGE_BYTES}",
        f"load_definitions = {deployment.directory}/definitions.json",
        "log.console = true",
        "log.console.level = warning",
        "log.file = false",
    ]
    if kind == "ssl":
        lines.append("mqtt.listeners.tcp = none")
    if deployment.wants_certificates:
        lines += [
            "mqtt.allow_anonymous = true",
            f"mqtt.default_user = {BOARDS}",
            f"mqtt.default_pass = {guest}",
        ]
    else:
        lines.append("mqtt.allow_anonymous = false")
    return "\n".join(lines) + "\n"


def _tls(deployment: Deployment) -> str:
    """The text of ``advanced.config``: one Erlang term, with the options of TLS."""
    if (tls := deployment.tls) is None:
        return "[].\n"
    options = [
        f"{{certfile, {_string(tls.certificate)}}}",
        f"{{keyfile, {_string(tls.key)}}}",
        "{versions, ['tlsv1.3', 'tlsv1.2']}",
    ]
    if deployment.wants_certificates:
        options += [
            f"{{cacertfile, {_string(deployment.authorities)}}}",
            "{verify, verify_peer}",
            "{fail_if_no_peer_cert, true}",
            "{crl_check, peer}",
            "{crl_cache, {ssl_crl_hash_dir, {internal, [{dir, "
            f"{_string(deployment.directory / _REVOKED)}}}]}}}}}}",
            # Who resumes a session shows no certificate.
            "{reuse_sessions, false}",
        ]
    else:
        options.append("{verify, verify_none}")
    separator = ",\n    "
    return f"[{{rabbit, [{{ssl_options, [\n    {separator.join(options)}\n]}}]}}].\n"


def _string(path: Path) -> str:
    r"""A string of Erlang's.

    >>> print(_string(Path('a "b" \\ ü')))
    "a \x{22}b\x{22} \x{5c} \x{fc}"
    """
    plain = [
        each if " " <= each <= "~" and each not in '"\\' else f"\\x{{{ord(each):x}}}" for each in str(path)
    ]
    return f'"{"".join(plain)}"'


def _definitions(deployment: Deployment, users: list[User]) -> dict[str, Any]:
    """What ``rabbitmqctl import_definitions`` takes."""
    return {
        "vhosts": [{"name": "/"}],
        "users": [
            {
                "name": user.name,
                "password_hash": hashed(user.password or ""),
                "hashing_algorithm": "rabbit_password_hashing_sha256",
                "tags": "",
            }
            for user in users
        ],
        "permissions": [
            {"user": user.name, "vhost": "/", "configure": _OWN_QUEUES, "write": _QUEUES, "read": _QUEUES}
            for user in users
        ],
        "topic_permissions": [
            {
                "user": user.name,
                "vhost": "/",
                "exchange": _EXCHANGE,
                "read": expression(
                    deployment.filters(user.role, "read"), wildcards=user.role is Role.COORDINATOR
                ),
                "write": expression(deployment.filters(user.role, "write")),
            }
            for user in users
        ],
        "policies": [
            {
                "vhost": "/", "name": "fragments", "pattern": _OWN_QUEUES, "apply-to": "queues",
                "definition": {"max-length": QUEUED_MESSAGES, "overflow": "drop-head"}, "priority": 0,
            }
        ],
    }  # fmt: skip


def expression(filters: list[str], *, wildcards: bool = False) -> str:
    """The regular expression of routing keys that filters allow; without a filter, of none.

    Args:
        filters: of topics.
        wildcards: whether a subscription may have a ``+`` where they have one, as the coordinator's to the
            requests of all boards.

    >>> expression(["dpagent/v1/porch/plan", "dpagent/v1/porch/model/+"])
    '^(dpagent\\\\.v1\\\\.porch\\\\.plan|dpagent\\\\.v1\\\\.porch\\\\.model\\\\.[a-z0-9-]+)$'
    """
    # A literal + of an MQTT filter becomes * in a binding: an expression without it allows no wildcards.
    any_level = r"(\*|[a-z0-9-]+)" if wildcards else "[a-z0-9-]+"
    keys = [
        r"\.".join(any_level if level == "+" else re.escape(level) for level in each.split("/"))
        for each in filters
    ]
    return f"^({'|'.join(keys)})$" if keys else "^$"


def hashed(password: str) -> str:
    """A password as RabbitMQ keeps it: a salt of four bytes, and SHA-256 over salt and password."""
    salt = os.urandom(4)
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()
