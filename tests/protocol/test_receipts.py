"""What a receipt says, and where it goes: two values of an id that tell neither it nor each other."""

from __future__ import annotations

import hashlib
import os

import pytest
from fleets import make_plan

from dpagent.protocol.receipts import receipt_digest, receipt_place
from dpagent.schema.problems import SchemaError

IDS = [os.urandom(16) for _ in range(100)]


def test_neither_gives_the_id_or_the_other_away() -> None:
    places = [bytes.fromhex(receipt_place(identity)) for identity in IDS]
    digests = [receipt_digest(identity) for identity in IDS]
    assert {len(each) for each in (*places, *digests)} == {16}
    assert len({*IDS, *places, *digests}) == 300


def test_they_are_made_for_nothing_else() -> None:
    """Ids of fragments with tokens are digests themselves, of a message that begins otherwise."""
    for identity in IDS:
        plain = hashlib.sha256(identity).digest()
        assert receipt_digest(identity) not in (plain[:16], plain[16:])


def test_no_plan_has_receipts_show_what_passes_through_a_mixer() -> None:
    make_plan(receipts="fragment")
    make_plan(mixer=bytes(32))
    with pytest.raises(SchemaError, match="tell who sent what passes through a mixer"):
        make_plan(receipts="fragment", mixer=bytes(32))
