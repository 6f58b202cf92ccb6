"""What a device states of its ledger when it asks for tokens: how far it has come, and nothing in it."""

from __future__ import annotations

from pathlib import Path

from devices import PERIOD_S, SIGNER, open_device
from fleets import make_plan
from token_desks import Desk

from dpagent.protocol.issuing import Statement, Wish


def test_a_statement_holds_no_hash_by_which_an_entry_can_be_guessed(tmp_path: Path) -> None:
    """The entries name the owner's budget, and when a round was charged: few guesses, each easily tried."""
    desk = Desk(tmp_path / "members", SIGNER)
    identity, statements = desk.member(), []
    for _ in range(2):
        with open_device(tmp_path / "device", identity=identity) as device:
            device.tokens.watch.take_keys(desk.signed_keys)
            device.give()
            device.take_plan(make_plan(linkability="fragment", wire={"block": 2_500}))
            for _ in range(20):
                device.clock.advance(PERIOD_S)
                device.tokens.tend()
                device.cycle.advance()
            asks = [
                payload
                for topic, payload in zip(device.line.topics, device.line.sent, strict=True)
                if topic.endswith("/ask")
            ]
            statements.append([desk.opener.open(ask).statement for ask in asks])
            digests = list(device.state.ledger.digests)
    desk.close()
    stated: set[Statement] = {each for some in statements for each in some}
    assert all(statements)
    assert {each.entries for each in stated} == {len(digests)}
    assert len({each.head for each in stated}) == 1, "the same after a restart, or it would have gone back"
    assert not {each.head for each in stated} & set(digests)


def test_requests_of_jobs_without_end_take_no_room_without_end(tmp_path: Path) -> None:
    """Every one without an answer is tried when an answer comes, on the thread that publishes."""
    desk = Desk(tmp_path / "members", SIGNER)
    with open_device(tmp_path / "device", identity=desk.member()) as device:
        for number in range(50):
            job = number.to_bytes(16, "big")
            keys = desk.keys.with_values({"job": job})
            device.tokens.watch.take_keys(SIGNER.sign(keys, "token-keys"))
            plan = make_plan(job=job, linkability="fragment", wire={"block": 2_500})
            device.tokens.ask(plan, Wish.TAKES_PART, None, device.clock.monotonic())
        assert len(device.state.tokens.unanswered("testers")) == 64
    desk.close()
