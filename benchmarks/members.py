"""Members of a fleet in one process: their certificates, their requests for tokens, and what they read in
answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from agent.identity import Identity
from coordinator.authority import Authority, AuthorityFiles, pem_of
from coordinator.brokers.deployment import TlsFiles
from coordinator.devices import Devices
from dpagent.protocol.blind_signatures import PREFIX_BYTES, Blinded, blind, finalize
from dpagent.protocol.device_signing import new_device_id
from dpagent.protocol.issuing import (
    AnswerOpener,
    Ask,
    Statement,
    Verdict,
    Wish,
    blinded_digest,
    seal_ask,
)
from dpagent.protocol.messages import Sealed
from dpagent.protocol.sealing import new_sealing_secret
from dpagent.protocol.tokens import RoundKey, TokenKeys, key_digest
from dpagent.storage import write_atomically
from simulation.programs.broker import BrokerTls


def enrolled(authority: Authority, members_dir: Path, count: int) -> Iterator[Identity]:
    """New members, without an endpoint."""
    with Devices(members_dir) as devices:
        for _ in range(count):
            key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
            certificate = authority.issue_device(key.public_key(), new_device_id(), days=1, now=now)
            with devices.transaction():
                device = devices.add(certificate, at=now.timestamp())
            yield Identity(device.id, certificate, key)


def server_tls(authority: Authority, directory: Path) -> BrokerTls:
    """A certificate of a broker on loopback, in files."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    certificate = authority.issue_server(key.public_key(), ["127.0.0.1"], days=1, now=now)
    files = TlsFiles(directory / "broker.crt", directory / "broker.key")
    write_atomically(files.certificate, pem_of([certificate]))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomically(files.key, pem, mode=0o600)
    return BrokerTls(files, AuthorityFiles(directory).certificate)


@dataclass(slots=True)
class TokenRequest:
    """A member's request for the tokens of a round.

    Attributes:
        identity: the member's.
        keys: that are announced.
        number: of the round.
        fleet: its name.
    """

    identity: Identity
    keys: TokenKeys
    number: int
    fleet: str
    _key: RoundKey = field(init=False)
    _opener: AnswerOpener = field(init=False)
    _nonces: list[bytes] = field(init=False)
    _blinded: list[Blinded] = field(init=False)

    def __post_init__(self) -> None:
        self._key = RoundKey.of(self.keys, self.number, self.fleet)
        self._opener = AnswerOpener(new_sealing_secret(), self.fleet)
        self._nonces = [os.urandom(PREFIX_BYTES) for _ in range(self.keys.tokens)]
        self._blinded = [
            blind(self._key.public(place), self._key.message(place, nonce))
            for place, nonce in enumerate(self._nonces)
        ]

    def message(self) -> bytes:
        """The request, signed and sealed."""
        blinded = tuple(each.message for each in self._blinded)
        statement = Statement(
            device=bytes.fromhex(self.identity.device_id),
            job=self.keys.job,
            round=self.number,
            wish=Wish.TAKES_PART,
            keys=key_digest(self.keys, self.number, self.fleet),
            entries=self.number,
            head=bytes(32),
            reply_key=self._opener.public_key,
            blinded=blinded_digest(blinded),
        )
        ask = Ask(statement, self.identity.sign(statement.signed), blinded)
        return seal_ask(ask, self.keys.sealing_key, self.fleet)

    def tokens(self, answer: Sealed) -> list[bytes]:
        """The tokens that an answer grants, one for each block.

        Raises:
            MessageError: It answers another request.
            ValueError: It grants none.
        """
        blinded = blinded_digest(tuple(each.message for each in self._blinded))
        opened = self._opener.open(answer, self.keys.job, self.number, blinded)
        if opened.verdict is not Verdict.GRANTED:
            raise ValueError(f"the coordinator grants no tokens: {opened.verdict.name.lower()}")
        return [
            nonce
            + finalize(self._key.public(place), self._key.message(place, nonce), signature, made.inverse)
            for place, (nonce, made, signature) in enumerate(
                zip(self._nonces, self._blinded, opened.signatures, strict=True)
            )
        ]
