"""The test vectors of one-time tokens: by the second client, and by dpagent."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import second_client
from second_client import tokens as plain

from dpagent.protocol.codec import decode
from dpagent.protocol.issuing import Answer, Ask, Statement, Verdict
from dpagent.protocol.signing import Verifier
from dpagent.protocol.tokens import RoundKey, TokenKeys, key_digest, token_id
from dpagent.protocol.witnesses import Witness

FOLDER = Path(__file__).parents[2] / "docs" / "protocol" / "vectors"
FLEET: dict[str, Any] = json.loads((FOLDER / "fleet.json").read_text())
FILE: dict[str, Any] = json.loads((FOLDER / "tokens.json").read_text())
NAME = FLEET["fleet"]
MODULUS = int(FILE["modulus"], 16)


def raw(key: str, of: dict[str, Any] = FILE) -> bytes:
    return bytes.fromhex(of[key])


@pytest.mark.parametrize("vector", FILE["tokens"], ids=str)
def test_the_second_client_makes_each_token(vector: dict[str, Any]) -> None:
    keys = second_client.decode(bytes.fromhex(FILE["keys"]["bytes"]))
    number, block = keys["first_round"], vector["block"]
    assert plain.exponent_of(block) == vector["exponent"]
    message = plain.token_message(raw("nonce", vector), NAME, keys["job"], number, block)
    assert message == raw("message", vector)
    inverse = raw("inverse", vector)
    blinded = plain.blinded_of(message, raw("salt", vector), inverse, MODULUS, vector["exponent"])
    assert blinded == raw("blinded", vector)
    signature = plain.unblinded(raw("blind_signature", vector), inverse, MODULUS)
    plain.verify(message, signature, MODULUS, vector["exponent"])
    token = raw("nonce", vector) + signature
    assert token == raw("token", vector)
    assert plain.token_fragment_id(token, block) == raw("id", vector)


def test_dpagent_takes_what_the_vectors_say() -> None:
    keys = Verifier(FLEET["coordinator_key"], NAME).open(
        bytes.fromhex(FILE["keys"]["envelope"]), TokenKeys, "token-keys"
    )
    assert decode(bytes.fromhex(FILE["keys"]["bytes"]), TokenKeys) == keys
    assert key_digest(keys, keys.first_round, NAME) == raw("key_digest")
    key = RoundKey.of(keys, keys.first_round, NAME)
    for vector in FILE["tokens"]:
        assert key.is_valid(raw("token", vector), vector["block"])
        assert token_id(raw("token", vector), vector["block"]) == raw("id", vector)
    ask, answer = decode(raw("ask"), Ask), decode(raw("answer"), Answer)
    assert ask.statement == decode(raw("statement"), Statement)
    assert [each.hex() for each in ask.blinded] == [vector["blinded"] for vector in FILE["tokens"]]
    assert answer.verdict is Verdict.GRANTED
    assert decode(raw("witness"), Witness).by_round == {keys.first_round: raw("key_digest")}


def test_the_second_client_reads_messages_by_the_page() -> None:
    keys = second_client.decode(bytes.fromhex(FILE["keys"]["bytes"]))
    number = keys["first_round"]
    assert plain.key_digest(keys, number, NAME) == raw("key_digest")
    statement, ask = raw("statement"), raw("ask")
    assert ask[:173] == statement
    assert len(ask) == 173 + 64 + 256 * keys["tokens"]
    assert statement[16:32] == keys["job"]
    assert int.from_bytes(statement[32:36], "big") == number
    assert statement[36] == 0
    assert statement[37:69] == raw("key_digest")
    assert statement[141:] == hashlib.sha256(ask[237:]).digest()
    assert raw("signed_statement") == b"dpagent v1 device\0token statement\0" + statement
    assert len(raw("answer")) == 1 + 173 + 64 + 256 * keys["tokens"]
    assert raw("witness") == keys["job"] + number.to_bytes(4, "big") + raw("key_digest")
    name = statement[:16].hex()
    assert FILE["topics"]["ask"] == f"dpagent/v1/{NAME}/devices/{name}/ask"
