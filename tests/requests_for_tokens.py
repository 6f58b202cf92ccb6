"""Requests for tokens as boards make them, and what they read in the answers."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from token_desks import FLEET, JOB, Desk

from agent.identity import Identity
from dpagent.protocol.blind_signatures import PREFIX_BYTES, Blinded, blind, finalize
from dpagent.protocol.issuing import (
    Answer,
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
from dpagent.protocol.signing import Verifier
from dpagent.protocol.tokens import key_digest


@dataclass
class Asked:
    """A request as a board makes it, and what it needs to read the answer."""

    desk: Desk
    ask: Ask
    opener: AnswerOpener
    nonces: list[bytes]
    blinded: list[Blinded]
    forged: bytes | None = None
    """What is sent in place of the request."""

    @property
    def payload(self) -> bytes:
        """The message, sealed anew each time."""
        return self.forged or seal_ask(self.ask, self.desk.opener.public_key, FLEET)

    def read(self, answer: bytes) -> Answer:
        statement = self.ask.statement
        sealed = Verifier(self.desk.signer.public_key, FLEET).open(answer, Sealed, "answer")
        return self.opener.open(sealed, statement.job, statement.round, statement.blinded)

    def tokens(self, desk: Desk, answer: Answer) -> list[bytes]:
        key = desk.round_key(self.ask.statement.round)
        return [
            nonce + finalize(key.public(place), key.message(place, nonce), signature, made.inverse)
            for place, (nonce, made, signature) in enumerate(
                zip(self.nonces, self.blinded, answer.signatures, strict=True)
            )
        ]


def asked(desk: Desk, board: Identity, number: int = 1, **changes: Any) -> Asked:
    """A request. Changes are of the statement; ``signer`` signs it in place of the board."""
    key, secret = desk.round_key(number), new_sealing_secret()
    opener = AnswerOpener(secret, FLEET)
    nonces = [os.urandom(PREFIX_BYTES) for _ in range(key.tokens)]
    made = [blind(key.public(place), key.message(place, nonce)) for place, nonce in enumerate(nonces)]
    signer = changes.pop("signer", board)
    messages = tuple(changes.pop("messages", [each.message for each in made]))
    statement = Statement(
        bytes.fromhex(board.device_id), JOB, number, Wish.TAKES_PART, key_digest(desk.keys, number, FLEET), 7,
        b"h" * 32, opener.public_key, blinded_digest(messages),
    )  # fmt: skip
    statement = replace(statement, **changes)
    ask = Ask(statement, signer.sign(statement.signed), messages)
    return Asked(desk, ask, opener, nonces, made)


def ask_for(desk: Desk, board: Identity, number: int, **changes: Any) -> Verdict:
    """What a board is answered."""
    request = asked(desk, board, number, **changes)
    return request.read(desk.answer(board.device_id, request.payload)).verdict
