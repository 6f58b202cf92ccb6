"""Fleets of boards that have enrolled, whose fragments carry tokens, at a broker that wants certificates."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from brokers import Broker
from cryptography.hazmat.primitives.asymmetric import ec
from fleets import write_agent
from members import enrolled, new_authority, written
from observers import Observer
from watched_fleets import WatchedFleet

from agent.identity import Identity
from coordinator.authority import AuthorityFiles
from coordinator.devices import Devices
from coordinator.registry import Entry, RegistryReader


class TokenFleet(WatchedFleet):
    """A fleet with an authority of its own.

    Args:
        directory: for its files.
        broker: not started yet; it gets a second listener, for certificates.
        changes: of its ``fleet.yaml``.
    """

    def __init__(self, directory: Path, broker: Broker, **changes: Any) -> None:
        changes = {"linkability": "fragment", **changes}
        super().__init__(directory, broker, **changes)
        self.members_dir = self.settings.members_dir
        self.authority = new_authority(self.members_dir, self.name)
        self.identities: dict[int, Identity] = {}
        self.tls_port = broker.another_port()
        key = ec.generate_private_key(ec.SECP256R1())
        server = self.authority.issue_server(key.public_key(), ["127.0.0.1"], days=1, now=datetime.now(UTC))
        cert_file, key_file = written(broker.directory, "server", server, key)
        ca_file = AuthorityFiles(self.members_dir).certificate
        with (broker.directory / "mosquitto.conf").open("a") as configuration:
            configuration.write(
                f"listener {self.tls_port} 127.0.0.1\ncafile {ca_file}\ncertfile {cert_file}\n"
                f"keyfile {key_file}\nrequire_certificate true\n"
            )

    def member(self, number: int) -> Identity:
        """A board that has enrolled."""
        if number not in self.identities:
            with Devices(self.members_dir) as devices:
                self.identities[number], _ = enrolled(self.authority, devices)
        return self.identities[number]

    def agent(self, number: int, **changes: Any) -> Path:
        identity = self.member(number)
        directory = self.directory / f"device-{number}"
        directory.mkdir(parents=True, exist_ok=True)
        cert_file, key_file = written(directory, "board", identity.certificate, identity.private_key)
        tls = {
            "url": f"mqtts://127.0.0.1:{self.tls_port}",
            "ca_file": str(AuthorityFiles(self.members_dir).certificate),
            "cert_file": str(cert_file),
            "key_file": str(key_file),
        }
        return write_agent(
            directory, self.broker, self.public_key, number, fleet=self.name,
            mqtt=tls | changes.pop("mqtt", {}), **changes,
        )  # fmt: skip

    def entries(self) -> list[Entry]:
        """The registry."""
        reader = RegistryReader(self.members_dir)
        try:
            return reader.entries()
        finally:
            reader.close()

    def of_topic(self, observer: Observer, end: str) -> list[bytes]:
        """What came on topics that end so."""
        return [bytes(message.payload) for message in observer.seen if message.topic.endswith(end)]
