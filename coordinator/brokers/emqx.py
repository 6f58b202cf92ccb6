"""EMQX 5: ``emqx.conf``, users for its built-in database, and access rules.

https://docs.emqx.com/en/emqx/latest/configuration/configuration.html, …/access-control/authn/mnesia.html and
…/access-control/authz/file.html. Written from these pages: no package registry that the test suite reaches
has EMQX, so no line of it was ever run (docs/brokers.md).

It fetches a revocation list from an address in each certificate, which ours have none of: a device that is no
member any more is denied everything by a rule.
"""

from __future__ import annotations

import json
import secrets
import shutil
from signal import Signals
from typing import ClassVar

from coordinator.brokers.deployment import (
    AUTHORITIES,
    MESSAGE_BYTES,
    QUEUED_MESSAGES,
    Command,
    Deployment,
    User,
    Written,
    require_no_bridge,
)
from dpagent.protocol.access import Role


class Emqx:
    """See the module's text."""

    name: ClassVar[str] = "emqx"
    names_by_certificate: ClassVar[bool] = True
    lists_members: ClassVar[bool] = False
    reload_signal: ClassVar[Signals | None] = None
    looks_itself: ClassVar[bool] = False
    package: ClassVar[str] = "https://docs.emqx.com/en/emqx/latest/deploy/install.html"

    def find(self) -> str | None:
        """The program, where it is installed."""
        return shutil.which("emqx")

    def files(self, deployment: Deployment) -> dict[str, Written]:
        """Configuration, users and rules."""
        require_no_bridge(deployment, "EMQX")
        directory = deployment.directory
        kind = "tcp" if deployment.tls is None else "ssl"
        listener: dict[str, object] = {"bind": f"{deployment.address or '0.0.0.0'}:{deployment.port}"}
        if (tls := deployment.tls) is not None:
            listener["ssl_options"] = {
                "certfile": str(tls.certificate),
                "keyfile": str(tls.key),
                "versions": ["tlsv1.3", "tlsv1.2"],
                **(
                    {}
                    if not deployment.wants_certificates
                    else {
                        "cacertfile": str(deployment.authorities),
                        "verify": "verify_peer",
                        "fail_if_no_peer_cert": True,
                    }
                ),
            }
        if deployment.wants_certificates:
            # The authority has let them in, and their name is in the certificate.
            listener["enable_authn"] = False
        settings = {
            "node": {
                "name": "emqx@127.0.0.1",
                "cookie": secrets.token_urlsafe(32),
                "data_dir": str(deployment.store),
            },
            "listeners": {
                each: {"default": {**listener, "enable": True} if each == kind else {"enable": False}}
                for each in ("tcp", "ssl", "ws", "wss")
            },
            "mqtt": {
                "max_packet_size": f"{MESSAGE_BYTES // 1_024}KB",
                "max_mqueue_len": QUEUED_MESSAGES,
                "session_expiry_interval": "168h",
                # A coordinator follows the requests for tokens of all boards; the rules refuse others.
                "wildcard_subscription": deployment.wants_certificates,
                # Workers share what comes.
                "shared_subscription": any(user.role is Role.WORKER for user in deployment.users),
                **({"peer_cert_as_username": "cn"} if deployment.wants_certificates else {}),
            },
            "retainer": {
                "enable": True,
                "max_payload_size": f"{MESSAGE_BYTES // 1_024}KB",
                "backend": {"type": "built_in_database", "storage_type": "disc"},
            },
            "authentication": [
                {
                    "mechanism": "password_based",
                    "backend": "built_in_database",
                    "user_id_type": "username",
                    "bootstrap_file": str(directory / "users.csv"),
                    "bootstrap_type": "plain",
                }
            ],
            "authorization": {
                "no_match": "deny",
                "deny_action": "disconnect",
                "sources": [{"type": "file", "enable": True, "path": str(directory / "acl.conf")}],
            },
            "dashboard": {"listeners": {"http": {"bind": 0}}},
        }
        users = "".join(
            f"{user.name},{user.password},false\n" for user in deployment.users if user.password is not None
        )
        return {
            # HOCON takes JSON.
            "emqx.conf": Written(json.dumps(settings, indent=2) + "\n", 0o600),
            "users.csv": Written(f"user_id,password,is_superuser\n{users}", 0o600),
            "acl.conf": Written(_rules(deployment), 0o600),
            **self.member_files(deployment),
        }

    def member_files(self, deployment: Deployment) -> dict[str, Written]:
        """Authorities, and the rules, which deny everything to who is no member any more."""
        if (membership := deployment.membership) is None:
            return {}
        rules = Written(_rules(deployment), 0o600)
        return {AUTHORITIES: membership.files[AUTHORITIES], "acl.conf": rules}

    def command(self, program: str, deployment: Deployment) -> Command:
        """In the foreground, with the configuration of this directory."""
        return Command((program, "foreground"), {"EMQX_ETC_DIR": str(deployment.directory)})

    def remarks(self, deployment: Deployment) -> list[str]:
        """What its operator has to know."""
        return [
            "This configuration was written from EMQX's documentation and never run: try each right with "
            "`dpagent doctor` before a fleet depends on it.",
            "For an installed service, copy the files to /etc/emqx.",
            *(
                [
                    "A device that is revoked still connects, and is denied everything, once EMQX has read "
                    "acl.conf again: restart it (enrolment.on_members_change), or load the file in its "
                    "Dashboard."
                ]
                if deployment.wants_certificates
                else []
            ),
        ]


def _rules(deployment: Deployment) -> str:
    """Erlang terms, of which the first that fits decides."""
    ended = deployment.membership.ended if deployment.membership is not None else ()
    lines = [f'{{deny, {{username, "{device}"}}, all, ["#"]}}.' for device in ended]
    for user in deployment.users:
        if user.role is not Role.BOARD or not deployment.wants_certificates:
            lines += _allowed(f'{{username, "{user.name}"}}', deployment, user)
    if deployment.wants_certificates:
        lines += _allowed("all", deployment, User("", Role.BOARD))
    return "\n".join([*lines, "{deny, all}."]) + "\n"


def _allowed(who: str, deployment: Deployment, user: User) -> list[str]:
    lines = []
    for may, action in (("write", "publish"), ("read", "subscribe")):
        topics = ", ".join(f'"{each}"' for each in deployment.filters(user.role, may, own="${username}"))
        lines.append(f"{{allow, {who}, {action}, [{topics}]}}.")
    return lines
