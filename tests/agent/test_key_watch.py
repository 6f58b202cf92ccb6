"""The watch over the keys of tokens: what it keeps has bounds, and a start takes up what is good still."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from devices import SIGNER, Device, open_device
from token_desks import JOB, Desk

from agent.identity import Identity
from dpagent.protocol.signing import Signer, new_signing_secret


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "members", SIGNER)
    yield made
    made.close()


@pytest.fixture
def identity(desk: Desk) -> Identity:
    return desk.member()


@pytest.fixture
def device(tmp_path: Path, desk: Desk, identity: Identity) -> Iterator[Device]:
    with open_device(tmp_path / "device", identity=identity) as opened:
        opened.tokens.watch.take_keys(desk.signed_keys)
        yield opened


def test_lists_without_end_take_no_room_without_end(device: Device, desk: Desk) -> None:
    """A coordinator may sign any number of lists, of any number of jobs, that disagree or not."""
    watch = device.tokens.watch
    for number in range(300):
        job = number.to_bytes(16, "big")
        one, two = (
            SIGNER.sign(desk.keys.with_values({"job": job, "moduli": [modulus]}), "token-keys")
            for modulus in (b"\xff" * 256, b"\xfe" * 255 + b"\1")
        )
        watch.take_keys(one)
        watch.take_keys(two)
        watch.take_evidence(two)
    kept = (watch._current, watch._witness_at, watch._evidence_at, watch._told, watch._disputed)
    assert max(len(each) for each in kept) <= 256
    for table in ("token_lists", "token_conflicts"):
        (count,) = device.state.connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        assert count <= 64


def test_lists_of_old_jobs_from_another_device_do_not_hide_the_keys(device: Device, desk: Desk) -> None:
    """Any member may show again what the coordinator once signed."""
    for number in range(100):
        old = desk.keys.with_values({"job": number.to_bytes(16, "big")})
        device.tokens.watch.take_evidence(SIGNER.sign(old, "token-keys"))
    assert device.tokens.watch.keys(JOB) == desk.keys


def test_of_lists_that_disagree_two_are_told(device: Device, desk: Desk) -> None:
    for number in range(20):
        other = desk.keys.with_values({"moduli": [b"\xff" * 255 + bytes([2 * number + 1])]})
        device.tokens.watch.take_keys(SIGNER.sign(other, "token-keys"))
    for _ in range(15):
        device.clock.advance(1.0)
        device.tokens.tend()
    assert sum(topic.endswith("/evidence") for topic in device.line.topics) == 2


def test_a_start_takes_the_newest_keys_and_no_list_of_another_coordinator(
    tmp_path: Path, desk: Desk, identity: Identity
) -> None:
    newer = desk.keys.with_values({"first_round": 2, "moduli": desk.keys.moduli[1:]})
    older = desk.keys.with_values({"moduli": desk.keys.moduli[:2]})
    former = Signer(new_signing_secret(), "testers")
    with open_device(tmp_path / "device", identity=identity) as device:
        for each in (newer, older):
            device.tokens.watch.take_keys(SIGNER.sign(each, "token-keys"))
        device.state.keep_token_list(JOB, former.sign(older, "token-keys"))
    with open_device(tmp_path / "device", identity=identity) as device:
        assert device.tokens.watch.keys(JOB) == newer


def test_conflicts_of_another_coordinator_make_room_where_there_are_very_many(
    tmp_path: Path, desk: Desk, identity: Identity
) -> None:
    """A board takes no tokens of who has signed so many, and may have moved to another fleet since."""
    former = Signer(new_signing_secret(), "testers")
    with open_device(tmp_path / "device", identity=identity) as device:
        for number, signer in enumerate([former] * 63 + [SIGNER]):
            job = number.to_bytes(16, "big")
            one, two = (
                signer.sign(desk.keys.with_values({"job": job, "moduli": [modulus]}), "token-keys")
                for modulus in desk.keys.moduli[:2]
            )
            assert device.state.tokens.conflicting_round(JOB) is None
            device.state.keep_token_conflict(job, 1, one, two, float(number))
        assert device.state.tokens.conflicting_round(JOB) == 1
        device.state.keep_token_conflict(JOB, 2, one, two, 99.0)
        assert len(device.state.tokens.conflicts()) == 64
    with open_device(tmp_path / "device", identity=identity) as device:
        assert device.state.tokens.conflicting_round(JOB) is None
        assert [each.job for each in device.state.tokens.conflicts()] == [job]
