"""The coordinator gives one fragment a receipt, and none to any other: whose is it?

Claim: nothing that the coordinator sees of a board by name (its requests for tokens, when they come, how far
    its ledger has come by its own statements) depends on which fragments have receipts, whether or not they
    carried tokens. A board that may ask for tokens goes on by the receipt of its probe alone, and a probe's
    time tells nothing of when its board's fragments leave.
Parameters: four boards with certificates, real requests, issuing, registry, ledgers and spools, on clocks
    that stand still between steps of 50 ms. Keys are announced a round at a time, so that each further round
    has to be asked for.

Power: with the rule that holds without tokens (a receipt of any fragment lets a board go on), the board that
    sent the one fragment is the one that asks, whichever it is.

Outcome: nobody asks. Who gives one probe a receipt learns whose it is: a message of nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from devices import PERIOD_S, SIGNER, Device, open_device
from fleets import make_plan
from token_desks import JOB, Desk

import agent.spooling
from agent.identity import Identity
from agent.spool import SpooledFragment
from agent.state import AgentState
from dpagent.protocol.messages import Fragment, Plan, Receipts
from dpagent.protocol.receipts import receipt_digest
from dpagent.protocol.sealing import Opener, new_sealing_secret
from dpagent.protocol.tokens import without_token

BOARDS, BLOCKS, ROUNDS = 4, 4, 3
OPENER = Opener(new_sealing_secret(), "testers")


def plan(number: int, **changes: Any) -> Plan:
    return make_plan(
        **{
            "round": number, "linkability": "fragment", "wire": {"block": 2_500},
            "sealing_key": OPENER.public_key,
        }
        | changes
    )  # fmt: skip


@dataclass
class Board:
    device: Device
    identity: Identity
    named: list[tuple[int, int]] = field(default_factory=list)
    """What is seen of it by name: the round of each request, and the entries of its ledger by then."""
    fragments: list[Fragment] = field(default_factory=list)
    probes: list[tuple[float, Fragment]] = field(default_factory=list)
    handled: int = 0


class Fleet:
    """Boards, and a coordinator that answers requests and chooses receipts."""

    def __init__(self, directory: Path, held: ExitStack, **limits: Any) -> None:
        self.desk = Desk(directory / "members", SIGNER, tokens=BLOCKS, rounds=ROUNDS)
        held.callback(self.desk.close)
        self.plans: dict[int, Plan] = {}
        self.boards: list[Board] = []
        for number in range(BOARDS):
            identity = self.desk.member()
            device = held.enter_context(
                open_device(directory / str(number), identity=identity, limits=limits)
            )
            device.give()
            self.boards.append(Board(device, identity))

    def announce(self, number: int, **changes: Any) -> None:
        """The key of a round, and no later one, and its plan."""
        self.plans[number] = plan(number, **changes)
        keys = self.desk.keys.with_values({"moduli": self.desk.keys.moduli[:number]})
        for board in self.boards:
            board.device.tokens.watch.take_keys(SIGNER.sign(keys, "token-keys"))
            board.device.take_plan(self.plans[number], confirmed=False)

    def pass_time(self, seconds: float = 16.0) -> None:
        for _ in range(round(seconds / PERIOD_S)):
            for board in self.boards:
                board.device.clock.advance(PERIOD_S)
                board.device.tokens.tend()
                board.device.cycle.advance()
                board.device.cycle._publisher.publish_due()
                self._see(board)

    def _see(self, board: Board) -> None:
        line, start = board.device.line, board.handled
        board.handled = len(line.sent)
        for topic, payload in zip(line.topics[start:], line.sent[start:], strict=True):
            if topic.endswith("/ask"):
                statement = self.desk.opener.open(payload).statement
                board.named.append((statement.round, statement.entries))
                board.device.tokens.take_answer(self.desk.answer(board.identity.device_id, payload))
            elif topic.endswith("/fragments"):
                fragment = OPENER.open(payload, JOB)
                if self.plans[fragment.round].linkability != "none":
                    _, fragment = without_token(fragment)
                if fragment.probe:
                    board.probes.append((board.device.clock.monotonic(), fragment))
                else:
                    board.fragments.append(fragment)

    def give_receipt(self, *fragments: Fragment) -> None:
        """Receipts are broadcast."""
        for board in self.boards:
            board.device.take_receipts(Receipts(b"".join(receipt_digest(each.id) for each in fragments)))

    @property
    def named(self) -> list[list[tuple[int, int]]]:
        return [board.named for board in self.boards]

    @property
    def have_gone_on(self) -> list[int]:
        """Boards that have asked for a second round."""
        return [number for number, board in enumerate(self.boards) if board.named[-1][0] > 1]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as held:
        yield Fleet(tmp_path, held)


def first_round(fleet: Fleet) -> None:
    fleet.announce(1)
    fleet.pass_time()
    assert [board.device.charged() for board in fleet.boards] == [[1]] * BOARDS
    for board in fleet.boards:
        assert {fragment.position for fragment in board.fragments} == set(range(BLOCKS))


@pytest.mark.parametrize("sender", [0, 3])
def test_a_receipt_of_one_fragment_says_nothing_of_its_sender(fleet: Fleet, sender: int) -> None:
    first_round(fleet)
    fleet.give_receipt(fleet.boards[sender].fragments[0])
    before = [list(each) for each in fleet.named]
    fleet.announce(2)
    fleet.pass_time()
    assert fleet.named == before, "nobody asks: not the one whose fragment it is either"
    assert [board.device.charged() for board in fleet.boards] == [[1]] * BOARDS


@pytest.mark.parametrize("sender", [0, 3])
def test_by_the_rule_that_holds_without_tokens_it_says_who(
    fleet: Fleet, sender: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power: the same attack, where any fragment's receipt lets a board go on."""

    class AnyLetsGoOn(SpooledFragment):
        @classmethod
        def of(cls, fragment: Fragment, *, lets_go_on: bool = False) -> SpooledFragment:
            return SpooledFragment.of(fragment, lets_go_on=True)

    monkeypatch.setattr(agent.spooling, "SpooledFragment", AnyLetsGoOn)
    monkeypatch.setattr(
        AgentState, "awaits_receipt", lambda self, job, **_: self.rounds.awaits_receipt(job, by_probe=False)
    )
    first_round(fleet)
    fleet.give_receipt(fleet.boards[sender].fragments[0])
    fleet.announce(2)
    fleet.pass_time()
    assert fleet.have_gone_on == [sender]


def test_a_receipt_of_a_probe_says_whose_that_is_and_nothing_more(fleet: Fleet) -> None:
    first_round(fleet)
    _, probe = fleet.boards[2].probes[0]
    assert probe.payload.rstrip(b"\0") == Fragment.PROBE, "it holds nothing"
    fleet.give_receipt(probe)
    fleet.announce(2)
    fleet.pass_time()
    assert fleet.have_gone_on == [2]


def test_with_receipts_of_all_probes_all_go_on_at_once_though_no_fragment_has_one(fleet: Fleet) -> None:
    first_round(fleet)
    for number in (2, 3):
        fleet.give_receipt(*(probe for board in fleet.boards for _, probe in board.probes))
        fleet.announce(number)
        fleet.pass_time()
        assert [board.device.charged() for board in fleet.boards] == [[*range(1, number + 1)]] * BOARDS


def test_each_board_sends_one_probe_a_round_whether_it_takes_part_or_sits_out(tmp_path: Path) -> None:
    with ExitStack() as held:
        for name, limits in (("a", {}), ("b", {"maximum_job_epsilon": 1e-6})):
            fleet = Fleet(tmp_path / name, held, dummy_traffic=True, **limits)
            for number in (1, 2):
                fleet.announce(number)
                fleet.pass_time()
                for board in fleet.boards:
                    assert len({probe.id for _, probe in board.probes if probe.round == number}) == 1
                    fragments = {each.id for each in board.fragments if each.round == number}
                    assert len(fragments) == BLOCKS
                    assert all(each.dummy for each in board.fragments) == bool(limits)
                    line = board.device.line
                    sent = zip(line.topics, line.sent, strict=True)
                    assert len({len(payload) for topic, payload in sent if topic.endswith("/fragments")}) == 1
                fleet.give_receipt(*(probe for board in fleet.boards for _, probe in board.probes))


@pytest.mark.parametrize("rounds_without", [1, 2])
def test_nor_does_one_of_a_round_without_tokens_when_a_later_round_has_them(
    fleet: Fleet, rounds_without: int
) -> None:
    """Which rounds of a job carry tokens is the plan's word. Before, the one whose fragment had the receipt
    asked alone for the tokens of the round after it; or had charged one more round by then, and said so."""
    for number in range(1, rounds_without + 1):
        fleet.announce(number, linkability="none")
        fleet.pass_time()
        (one, *_) = fleet.boards[2].fragments
        fleet.give_receipt(one)
    fleet.announce(rounds_without + 1)
    fleet.pass_time()
    assert fleet.named == [[]] * BOARDS, "all wait"
    fleet.give_receipt(*(probe for board in fleet.boards for _, probe in board.probes))
    fleet.pass_time()
    (named,) = {tuple(each) for each in fleet.named}
    assert named, "all ask, and with ledgers of one length"
