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


ODD = b"\xfe" * 255 + b"\1"


def lists_of_other_jobs(desk: Desk, count: int, modulus: bytes = ODD, rounds: int = 1) -> list[bytes]:
    """As a coordinator can sign without end."""
    keys = desk.keys.with_values({"moduli": [modulus] * rounds})
    jobs = [number.to_bytes(16, "big") for number in range(count)]
    return [SIGNER.sign(keys.with_values({"job": job}), "token-keys") for job in jobs]


@pytest.mark.parametrize("rounds", [1, 16])
@pytest.mark.parametrize("restarts", [False, True])
def test_lists_of_other_jobs_do_not_have_a_board_forget_what_it_asked_by(
    tmp_path: Path, rounds: int, restarts: bool
) -> None:
    """Before, after 64 lists of 16 rounds it took another key for the round whose tokens it had by the first
    one, and nobody ever heard of that."""
    with served(tmp_path) as fleet:
        _, other = two_lists(fleet.desk)
        watch, identity = fleet.device.tokens.watch, fleet.identity
        fleet.device.take_plan(plan())
        fleet.device.cycle.advance()
        for message in lists_of_other_jobs(fleet.desk, 150, rounds=rounds):
            watch.take_keys(message)
        assert watch.keys(JOB) == fleet.desk.keys
        fleet.pass_time(35.0)
        witness = encode(Witness.of(fleet.desk.keys, "testers"))
        assert fleet.device.line.sent.count(witness) == 1
        if not restarts:
            watch.take_keys(other)
            assert fleet.device.state.tokens.conflicting_round(JOB) == 2
    if restarts:
        with open_device(tmp_path / "device", identity=identity) as device:
            device.tokens.watch.take_keys(other)
            assert device.state.tokens.conflicting_round(JOB) == 2


def test_later_lists_of_a_job_do_not_have_a_board_forget_what_it_asked_by(tmp_path: Path) -> None:
    """Before, 64 of them took the place on the disk of the one by which it had asked."""
    with served(tmp_path) as fleet:
        _, other = two_lists(fleet.desk)
        identity = fleet.identity
        fleet.device.take_plan(plan())
        fleet.device.cycle.advance()
        for number in range(50, 120):
            later = fleet.desk.keys.with_values({"first_round": number, "moduli": [ODD]})
            fleet.device.tokens.watch.take_keys(SIGNER.sign(later, "token-keys"))
        assert 64 <= len(fleet.device.state.tokens.lists()) <= 65
    with open_device(tmp_path / "device", identity=identity) as device:
        device.tokens.watch.take_keys(other)
        assert device.state.tokens.conflicting_round(JOB) == 2


def test_false_digests_keep_no_evidence_from_others(tmp_path: Path) -> None:
    """Anybody may write digests. Before, 256 of lists that the coordinator had signed for it kept two that
    disagree from being told for as long as those waited."""
    with served(tmp_path) as fleet:
        watch = fleet.device.tokens.watch
        for number, message in enumerate(lists_of_other_jobs(fleet.desk, 256)):
            watch.take_keys(message)
            watch.take_witness(encode(Witness(number.to_bytes(16, "big"), 1, (bytes(32),))))
        for message in two_lists(fleet.desk):
            watch.take_keys(message)
        fleet.pass_time(15.0)
        assert {*two_lists(fleet.desk)} <= {*fleet.device.line.sent}


def test_a_list_that_comes_again_before_a_board_asks_by_it_is_told(tmp_path: Path) -> None:
    """Before, its digest, which had waited, was dropped for those of other jobs, and the list was known."""
    with served(tmp_path) as fleet:
        for message in [*lists_of_other_jobs(fleet.desk, 100), fleet.desk.signed_keys]:
            fleet.device.tokens.watch.take_keys(message)
        fleet.device.take_plan(plan())
        fleet.device.cycle.advance()
        fleet.pass_time(35.0)
        assert fleet.device.line.sent.count(encode(Witness.of(fleet.desk.keys, "testers"))) == 1


def test_a_digest_that_is_out_leaves_no_second_time_as_the_board_asks(tmp_path: Path) -> None:
    with served(tmp_path) as fleet:
        witness = encode(Witness.of(fleet.desk.keys, "testers"))
        fleet.pass_time(35.0)
        assert fleet.device.line.sent.count(witness) == 1
        fleet.device.take_plan(plan())
        fleet.pass_time(35.0)
        assert len(fleet.asks()) >= 3
        assert fleet.device.line.sent.count(witness) == 1


def test_a_coordinator_that_was_found_out_is_not_believed_again_for_finding_more(tmp_path: Path) -> None:
    """Before, the 65th conflict had a board forget the first one, and take part in its job."""
    with served(tmp_path) as fleet:
        one, other = two_lists(fleet.desk)
        fleet.device.tokens.watch.take_keys(other)
        others = lists_of_other_jobs(fleet.desk, 80, b"\xff" * 256), lists_of_other_jobs(fleet.desk, 80, ODD)
        for pair in zip(*others, strict=True):
            fleet.device.clock.advance(1.0)
            for message in pair:
                fleet.device.tokens.watch.take_keys(message)
        kept = fleet.device.state.tokens.conflicts()
        assert len(kept) == 64
        assert {kept[0].one, kept[0].other} == {one, other}
        fleet.run(plan(), plan(job=b"k" * 16))
        assert fleet.device.charged() == [], "nor in any other job: who signs so many is believed no more"
        identity = fleet.identity
    with open_device(tmp_path / "device", identity=identity) as device:
        assert device.state.tokens.conflicting_round(b"k" * 16) is not None


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
