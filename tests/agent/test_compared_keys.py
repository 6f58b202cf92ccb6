"""Boards compare the keys of tokens that they are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from devices import SIGNER, Device, open_device
from served_boards import BLOCKS, plan, served
from token_desks import JOB, Desk, private_key

from dpagent.protocol.codec import MessageError, decode, encode
from dpagent.protocol.tokens import TokenKeys
from dpagent.protocol.witnesses import Witness


def two_lists(desk: Desk) -> tuple[bytes, bytes]:
    """Signed lists that disagree on round 2."""
    moduli = [desk.keys.moduli[0], private_key(9, BLOCKS).modulus.to_bytes(256, "big")]
    return desk.signed_keys, SIGNER.sign(desk.keys.with_values({"moduli": moduli}), "token-keys")


def test_two_signed_lists_that_disagree_end_the_job_for_the_device(tmp_path: Path) -> None:
    with served(tmp_path, limits={"dummy_traffic": True}) as fleet:
        one, other = two_lists(fleet.desk)
        fleet.device.tokens.watch.take_keys(other)
        assert fleet.device.state.tokens.conflicting_round(JOB) == 2
        row = fleet.device.state.connection.execute("SELECT one, other FROM token_conflicts").fetchone()
        assert {row["one"], row["other"]} == {one, other}
        fleet.run(plan())
        assert fleet.device.charged() == []
        assert fleet.desk.entries() == []
        assert len(fleet.spooled()) == BLOCKS, "dummies, as for any round that is sat out"
        # Both go to the others, once.
        fleet.pass_time(15.0)
        evidence = [
            payload
            for topic, payload in zip(fleet.device.line.topics, fleet.device.line.sent, strict=True)
            if topic.endswith("/witness/evidence")
        ]
        assert sorted(evidence) == sorted([one, other])
        identity = fleet.identity
    with open_device(tmp_path / "device", identity=identity) as device:
        assert device.state.tokens.conflicting_round(JOB) == 2, "for good"


def test_a_key_that_one_board_alone_was_shown_is_noticed_by_all(tmp_path: Path) -> None:
    """A coordinator swaps the retained list for one board. Each hears digests, and then signed lists."""
    desk = Desk(tmp_path / "members", SIGNER, tokens=BLOCKS)
    one, other = two_lists(desk)
    boards: list[Device] = []
    with (
        open_device(tmp_path / "a", identity=desk.member()) as first,
        open_device(tmp_path / "b", identity=desk.member()) as second,
        open_device(tmp_path / "c", identity=desk.member()) as victim,
    ):
        boards += [first, second, victim]
        for board, seen in zip(boards, (one, one, other), strict=True):
            board.tokens.watch.take_keys(seen)
        carried = 0
        for _ in range(1_000):
            for board in boards:
                board.clock.advance(0.05)
                before = len(board.line.sent)
                board.tokens.tend()
                news = zip(board.line.topics[before:], board.line.sent[before:], strict=True)
                for topic, payload in news:
                    carried += 1
                    for hearer in boards:
                        if topic.endswith("/witness"):
                            hearer.tokens.watch.take_witness(payload)
                        elif topic.endswith("/witness/evidence"):
                            hearer.tokens.watch.take_evidence(payload)
        assert [board.state.tokens.conflicting_round(JOB) for board in boards] == [2, 2, 2]
        assert carried <= 3 + 2, "a digest each, and two lists"
    desk.close()


def test_whoever_heard_enough_equal_digests_says_nothing(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        witness = encode(Witness.of(fleet.desk.keys, "testers"))
        for _ in range(3):
            fleet.device.tokens.watch.take_witness(witness)
        fleet.pass_time(35.0)
        assert fleet.device.line.sent == []


def test_false_digests_cost_one_list(tmp_path: Path) -> None:
    """Anybody may write digests."""
    with served(tmp_path) as fleet:
        for number in range(50):
            false = Witness(JOB, 1, (bytes([number]) * 32,) * 3)
            fleet.device.tokens.watch.take_witness(encode(false))
            fleet.pass_time(1.0)
        assert [topic.rsplit("/", 1)[-1] for topic in fleet.device.line.topics] in (
            ["evidence", "witness"], ["witness", "evidence"],
        )  # fmt: skip
        assert fleet.device.state.tokens.conflicting_round(JOB) is None
        for rubbish in (b"", bytes(20), bytes(53), bytes(20 + 32 * 17)):
            with pytest.raises(MessageError):
                fleet.device.tokens.watch.take_witness(rubbish)


def test_a_list_that_the_coordinator_did_not_sign_says_nothing(tmp_path: Path) -> None:
    from dpagent.protocol.signing import Signer, new_signing_secret

    stranger = Signer(new_signing_secret(), "testers")
    with served(tmp_path) as fleet:
        for message in (
            stranger.sign(fleet.desk.keys, "token-keys"),
            SIGNER.sign(fleet.desk.keys, "plan"),
        ):
            with pytest.raises(MessageError, match="bad signature"):
                fleet.device.tokens.watch.take_keys(message)
        assert fleet.device.tokens.watch.keys(JOB) == fleet.desk.keys


@pytest.mark.parametrize(
    "changes",
    [
        {"moduli": []}, {"moduli": [bytes(256)]}, {"moduli": [b"\xff" * 255 + b"\xfe"]},
        {"moduli": [b"\x7f" + b"\xff" * 255]}, {"moduli": [b"\xff" * 255]}, {"moduli": [b"\xff" * 256] * 17},
        {"tokens": 0}, {"tokens": 225}, {"linkability": "none"}, {"linkability": "round"},
        {"first_round": 0}, {"job": bytes(15)}, {"sealing_key": bytes(31)},
    ],
)  # fmt: skip
def test_a_list_of_keys_has_its_ranges(changes: dict[str, Any]) -> None:
    import cbor2

    values = {
        "job": JOB, "linkability": "fragment", "tokens": 4, "sealing_key": bytes(32), "first_round": 1,
        "moduli": [b"\xff" * 256],
    }  # fmt: skip
    assert decode(cbor2.dumps(values), TokenKeys).rounds == range(1, 2)
    with pytest.raises(MessageError):
        decode(cbor2.dumps(values | changes), TokenKeys)
