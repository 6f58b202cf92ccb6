"""The test vectors of one-time tokens: one round's key, one device's request, its answer and a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vector_fleet import FLEET, OPENER, PLAN, SIGNER, TOPICS, fixed

from coordinator.blind_signing import PrivateKey
from dpagent.protocol.blind_signatures import blind, finalize
from dpagent.protocol.codec import encode
from dpagent.protocol.issuing import Answer, AnswerOpener, Ask, Statement, Verdict, Wish, blinded_digest
from dpagent.protocol.tokens import RoundKey, TokenKeys, key_digest, token_id
from dpagent.protocol.witnesses import Witness

_P = int(
    "e2fd0f8a3da7ee3af862a520a6b9ae4839a9c6c48bd6ddb28474f3545da13b9345a9e67e27ef08984d0c3548b9c193a4"
    "db445961e22e8e3b690c3bdc2d495687a73fce90c4b87593cd2a200f92467803611ecbf9b798d08708611ba61ded0fe5"
    "a1896daa8bd70ee72c873e6c27ead554ea1fe09ee4bd74a403f242b4a0b0191d",
    16,
)
_Q = int(
    "d1156bbbd3b9df3917f161654d0c49f3466e26bf6b6484d92c06c2020886fd84f6aaded2433bdd1eef0afea8a3c3121b"
    "8e64d5a9c3125d71beacf7983b92122992ade210c512217b8f681346caa36770e71ff17c8ab05f436fe6c064355570ea"
    "4ffde663738a9ea9893b74c761e7f73476573bb8d88b1fa63e0fdc4ca60fed11",
    16,
)
_KEY, _ROUND, _TOKENS = PrivateKey(_P, _Q), 2, 3
_DEVICE = fixed("device", 16)
_REPLY_SECRET = fixed("reply", 32)


def _drawn(*names: str) -> Callable[[int], bytes]:
    """Entropy that is the same each time; below the modulus, whose highest bit is set."""
    left = iter(names)

    def draw(size: int) -> bytes:
        name = next(left)
        data = b"".join(fixed(f"{name} {part}", 32) for part in range(8))[:size]
        return data if size < 256 else b"\x7f" + data[1:]

    return draw


def tokens() -> dict[str, Any]:
    """What ``tokens.json`` holds."""
    keys = TokenKeys(
        job=PLAN.job, linkability="fragment", tokens=_TOKENS, sealing_key=OPENER.public_key,
        first_round=_ROUND, moduli=[_KEY.modulus.to_bytes(256, "big")],
    )  # fmt: skip
    key = RoundKey.of(keys, _ROUND, FLEET)
    made = []
    for place in range(_TOKENS):
        nonce = fixed(f"nonce {place}", 32)
        message = key.message(place, nonce)
        blinded = blind(key.public(place), message, entropy=_drawn(f"salt {place}", f"factor {place}"))
        signature = _KEY.blind_sign(place, blinded.message)
        token = nonce + finalize(key.public(place), message, signature, blinded.inverse)
        made.append({
            "block": place, "exponent": key.public(place).exponent, "nonce": nonce.hex(),
            "message": message.hex(), "salt": _drawn(f"salt {place}")(48).hex(),
            "inverse": blinded.inverse.hex(), "blinded": blinded.message.hex(),
            "blind_signature": signature.hex(), "token": token.hex(), "id": token_id(token, place).hex(),
        })  # fmt: skip
    blinded_messages = tuple(bytes.fromhex(each["blinded"]) for each in made)
    statement = Statement(
        _DEVICE, PLAN.job, _ROUND, Wish.TAKES_PART, key_digest(keys, _ROUND, FLEET), 7, fixed("head", 32),
        AnswerOpener(_REPLY_SECRET, FLEET).public_key, blinded_digest(blinded_messages),
    )  # fmt: skip
    answer = Answer(
        Verdict.GRANTED, Answer.NOTHING, tuple(bytes.fromhex(each["blind_signature"]) for each in made)
    )
    envelope = SIGNER.sign(keys, "token-keys")
    return {
        "description": "The key of a round; a device's request for three tokens, its answer, the tokens.",
        "topics": {
            "token-keys": TOPICS.token_keys, "ask": TOPICS.ask(_DEVICE.hex()),
            "answer": TOPICS.answer(_DEVICE.hex()), "witness": TOPICS.witness, "evidence": TOPICS.evidence,
        },
        "keys": {"bytes": encode(keys).hex(), "envelope": envelope.hex()},
        "modulus": keys.moduli[0].hex(),
        "key_digest": statement.keys.hex(),
        "tokens": made,
        "statement": statement.to_bytes().hex(),
        "signed_statement": (b"dpagent v1 device\0" + statement.signed).hex(),
        "reply_secret": _REPLY_SECRET.hex(),
        "ask": encode(Ask(statement, bytes(64), blinded_messages)).hex(),
        "answer": encode(answer).hex(),
        "witness": encode(Witness.of(keys, FLEET)).hex(),
    }  # fmt: skip
