"""100,000 tokens of one round: issued, finished and checked, in memory that does not grow with their number.

6,250 boards with 16 fragments each. The requests are real but for their blinding, of which the coordinator
sees nothing: what a board saves there would double the time of this test.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from token_desks import FLEET, JOB, Desk

from agent.identity import Identity
from dpagent.protocol.blind_signatures import PREFIX_BYTES, blind
from dpagent.protocol.issuing import AnswerOpener, Ask, Statement, Verdict, Wish, blinded_digest, seal_ask
from dpagent.protocol.messages import Sealed
from dpagent.protocol.sealing import new_sealing_secret
from dpagent.protocol.signing import Signer, Verifier, new_signing_secret
from dpagent.protocol.tokens import key_digest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_600)]

BOARDS, FRAGMENTS = 6_250, 16
LATER = BOARDS * 3 // 4
"""From here on, all that is bounded has come to its bounds."""
MOST_GROWTH = 8 << 20
SIGNER = Signer(new_signing_secret(), FLEET)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "members", SIGNER, tokens=FRAGMENTS, rounds=1)
    yield desk
    desk.close()


def nonce_of(board: int, place: int) -> bytes:
    return (board * FRAGMENTS + place).to_bytes(PREFIX_BYTES, "big")


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def tokens_of(desk: Desk, board: int, identity: Identity, opener: AnswerOpener) -> list[bytes]:
    """A board's request, its answer, and what comes of it."""
    key = desk.round_key(1)
    blinded = tuple(_unblinded(desk, board, place) for place in range(FRAGMENTS))
    statement = Statement(
        bytes.fromhex(identity.device_id), JOB, 1, Wish.TAKES_PART, key_digest(desk.keys, 1, FLEET), 7,
        b"h" * 32, opener.public_key, blinded_digest(blinded),
    )  # fmt: skip
    ask = Ask(statement, identity.sign(statement.signed), blinded)
    payload = seal_ask(ask, desk.opener.public_key, FLEET)
    sealed = Verifier(SIGNER.public_key, FLEET).open(
        desk.answer(identity.device_id, payload), Sealed, "answer"
    )
    answer = opener.open(sealed, JOB, 1, statement.blinded)
    assert answer.verdict is Verdict.GRANTED
    assert len(answer.signatures) == key.tokens
    return [nonce_of(board, place) + signature for place, signature in enumerate(answer.signatures)]


def _unblinded(desk: Desk, board: int, place: int) -> bytes:
    """A message blinded by 1."""
    key = desk.round_key(1)
    drawn = iter([bytes(48), (1).to_bytes(256, "big")])
    message = key.message(place, nonce_of(board, place))
    return blind(key.public(place), message, entropy=lambda _: next(drawn)).message


def test_a_round_of_100_000_tokens_takes_no_more_memory_than_one_of_few(desk: Desk) -> None:
    opener = AnswerOpener(new_sealing_secret(), FLEET)
    key, valid, then = desk.round_key(1), 0, 0
    for number in range(BOARDS):
        if number == LATER:
            then = resident_bytes()
        tokens = tokens_of(desk, number, desk.member(), opener)
        valid += sum(key.is_valid(token, place) for place, token in enumerate(tokens))
    growth = resident_bytes() - then
    print(f"{valid:,} tokens; memory grew by {growth / 2**20:.1f} MiB over the last quarter")
    assert valid == BOARDS * FRAGMENTS == 100_000
    assert growth < MOST_GROWTH
    (rows,) = desk.registry.connection.execute("SELECT count(*) FROM grants WHERE verdict = 0").fetchone()
    assert rows == BOARDS
    assert desk.registry.file.stat().st_size < 1_000 * BOARDS
