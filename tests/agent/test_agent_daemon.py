"""The agent over a real broker, with a hand-made coordinator: in a thread on a clock of the test's, or as a
process of its own where that is what is tested."""

from __future__ import annotations

import fcntl
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker, wait_until
from children import PATIENCE_S
from clocks import MovableClock
from daemons import agent_thread
from fleets import run_agent, write_agent
from ledgers import charge_and_spool, charge_for, open_state
from lone_agents import BLOCKS, DECLINED, OPENER_SECRET, charges, counter, ids, plan_for, rows, state_of
from observers import Announcer

from agent.audit import verify
from agent.charges import Budget, digest_of
from agent.publisher import Publisher
from agent.settings import load_agent_settings
from agent.spool import SpooledFragment
from dpagent.errors import ExitCode
from dpagent.learning.data.formats.npz import open_npz
from dpagent.protocol.codec import decode
from dpagent.protocol.fragments import read_block
from dpagent.protocol.messages import Fragment, Receipts
from dpagent.protocol.receipts import receipt_digest
from dpagent.protocol.sealing import Opener
from dpagent.protocol.signing import Signer, new_signing_secret

pytestmark = pytest.mark.usefixtures("attentive")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times of pending fragments that were drawn last, on the agent's clock."""
    times, draw = list[float](), Publisher._draw

    def draw_and_note(publisher: Publisher, *arguments: Any) -> None:
        draw(publisher, *arguments)
        times[:] = publisher._state.spool.due(math.inf, 1_000).values()

    monkeypatch.setattr(Publisher, "_draw", draw_and_note)
    return times


def test_a_plan_is_answered_by_fragments_until_receipts_come(
    announcer: Announcer, file: Path, fleet: str, drawn: list[float]
) -> None:
    plan = plan_for(fleet)
    with agent_thread(file) as agent:
        announcer.announce(plan)
        wait_until(lambda: charges(file), "the charge")
        agent.clock.advance(23.0)
        wait_until(lambda: len(drawn) == BLOCKS, "the fragments, and their times")
        assert announcer.fragments == [], "nothing leaves before the window opens"
        # The slot begins after the preparation's own time, a few tenths of a second.
        agent.clock.advance(7.0 + 60.0 + 4.0)
        wait_until(lambda: len(ids(announcer, fleet)) == BLOCKS, "all fragments")
        opener = Opener(OPENER_SECRET, fleet)
        opened = [opener.open(message, b"j" * 16) for message in announcer.fragments]
        places = sorted(piece.position for piece in opened if read_block(piece, plan.wire, BLOCKS))
        assert places == list(range(BLOCKS))
        assert len(announcer.fragments) == BLOCKS
        # Without a receipt everything goes again, and nobody else can tell that it is the same.
        agent.clock.advance(10.0)
        wait_until(lambda: len(announcer.fragments) == 2 * BLOCKS, "a resend")
        assert len(set(announcer.fragments)) == 2 * BLOCKS
        assert len({len(message) for message in announcer.fragments}) == 1
        again = {opener.open(message, b"j" * 16).id for message in announcer.fragments[BLOCKS:]}
        assert again == {piece.id for piece in opened}
        digests = b"".join(receipt_digest(piece.id) for piece in opened)
        receipts = Receipts(digests)
        # Receipts of somebody else are no receipts.
        forged = Signer(new_signing_secret(), fleet).sign(receipts, "receipts")
        announcer.publish(announcer.topics.receipts, forged)
        agent.clock.advance_until(lambda: counter(file, "rejected") == 1, "the rejection")
        assert rows(file, "SELECT count(*) FROM fragments WHERE state = 'counted'") == [(0,)]
        announcer.publish(announcer.topics.receipts, announcer.signer.sign(receipts, "receipts"))
        wait_until(
            lambda: rows(file, "SELECT count(*) FROM fragments WHERE state = 'counted'") == [(BLOCKS,)],
            "the receipts' effect",
        )
        sent = len(announcer.fragments)
        agent.clock.advance(100.0)
        agent.stop()
    assert len(announcer.fragments) == sent, "what is counted goes no more"
    assert charges(file) == [(plan.job.hex(), 1)]
    assert verify(state_of(file)).charges == 1
    assert counter(file, "bytes_up") >= sum(map(len, announcer.fragments))


def test_what_leaves_the_board_has_one_length_and_no_name(
    announcer: Announcer, file: Path, fleet: str
) -> None:
    with agent_thread(file) as agent:
        announcer.announce(plan_for(fleet))
        agent.clock.advance_until(lambda: len(ids(announcer, fleet)) == BLOCKS, "all fragments", 10.0)
    sent = [message for message in announcer.seen if message.topic == announcer.topics.fragments]
    assert len({len(message.payload) for message in sent}) == 1
    assert not any(message.retain for message in sent)
    for message in sent:
        assert set(message.properties.json()) <= {"MessageExpiryInterval"}
    # The agent says nothing at all on any other topic.
    own = {announcer.topics.plan, announcer.topics.model_chunk(0)}
    assert {message.topic for message in announcer.seen} - own == {announcer.topics.fragments}


def test_a_budget_that_is_too_small_is_kept_and_the_reason_noted(
    announcer: Announcer, tmp_path: Path, mosquitto: Broker, fleet: str
) -> None:
    file = write_agent(
        tmp_path / "poor", mosquitto, announcer.signer.public_key, fleet=fleet, budget={"epsilon": 0.1}
    )
    with agent_thread(file) as agent:
        announcer.announce(plan_for(fleet))
        wait_until(
            lambda: rows(file, DECLINED),
            "the note",
        )
        ((job, number, reason, declined_at),) = rows(file, DECLINED)
        assert (job, number, declined_at) == ((b"j" * 16).hex(), 1, agent.clock.unix())
        assert "lifetime budget for 'digits' is 0.1" in reason
        assert agent.is_running
        agent.clock.advance(1_000.0)
    assert announcer.fragments == []
    assert charges(file) == []


def test_a_round_that_was_declined_is_decided_again_when_it_is_announced_again(
    announcer: Announcer, file: Path, fleet: str
) -> None:
    """The coordinator gave it more time; what was against it may be over."""
    with agent_thread(file) as agent:
        plan = plan_for(fleet, deadline=agent.clock.unix() + 1.0)
        announcer.announce(plan)
        wait_until(
            lambda: rows(file, DECLINED),
            "the note",
        )
        announcer.announce(plan.with_values({"deadline": plan.deadline + 600}))
        wait_until(lambda: charges(file), "the charge")


def test_a_round_is_charged_once_though_it_is_announced_again_and_again(
    announcer: Announcer, file: Path, fleet: str
) -> None:
    plan = plan_for(fleet)
    with agent_thread(file) as agent:
        announcer.announce(plan)
        agent.clock.advance_until(lambda: len(ids(announcer, fleet)) == BLOCKS, "all fragments", 10.0)
        for seconds in (1.0, 2.0):
            announcer.announce(plan.with_values({"deadline": plan.deadline + seconds}))
        announcer.confirm(ids(announcer, fleet).pop())
        announcer.announce(plan_for(fleet, round=2))
        both = 2 * BLOCKS
        agent.clock.advance_until(lambda: len(ids(announcer, fleet)) == both, "the second round", 10.0)
        for identity in ids(announcer, fleet):
            announcer.confirm(identity)
        # Those of the first round too, which its successor has made expire meanwhile.
        wait_until(lambda: not rows(file, "SELECT * FROM fragments WHERE state != 'counted'"), "the receipts")
    with agent_thread(file):
        announcer.announce(plan_for(fleet, round=3))
        wait_until(lambda: len(charges(file)) == 3, "the third round, after a restart")
    assert charges(file) == [(plan.job.hex(), number) for number in (1, 2, 3)]
    states = dict(rows(file, "SELECT round, group_concat(DISTINCT state) FROM fragments GROUP BY round"))
    assert states[1] == states[2] == "counted"
    assert verify(state_of(file)).charges == 3


def test_a_killed_agent_resends_what_it_had_charged(announcer: Announcer, file: Path, fleet: str) -> None:
    # A window so long that nearly nothing has left when the power fails.
    announcer.announce(plan_for(fleet, compute_slot_s=0.3))
    with run_agent(file) as agent:
        wait_until(lambda: rows(file, "SELECT * FROM fragments"), "the charge, and its fragments")
        agent.kill()
    left_before = len(ids(announcer, fleet))
    spooled = {decode(row[0], Fragment).id for row in rows(file, "SELECT message FROM messages")}
    assert len(spooled) == BLOCKS > left_before
    with agent_thread(file) as again:
        again.clock.advance_until(lambda: len(ids(announcer, fleet)) == BLOCKS, "all fragments", 10.0)
    assert ids(announcer, fleet) == spooled
    assert len(charges(file)) == 1


@pytest.mark.heavy
@pytest.mark.parametrize(
    "room", [4_000, *(pytest.param(room, marks=pytest.mark.slow) for room in (16_000, 24_000))]
)
def test_an_agent_whose_disk_takes_no_more_ends_with_a_sentence_and_goes_on_when_it_does(
    announcer: Announcer, file: Path, fleet: str, room: int
) -> None:
    with run_agent(file) as agent:
        wait_until(lambda: "connected to" in agent.said(), "the connection")
        # Not even into the room that it has taken. A round of this plan writes less than 32 kB.
        resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        announcer.announce(plan_for(fleet, compute_slot_s=0.3, jitter_window_s=0.3))
        assert agent.wait() == ExitCode.STORAGE
        assert "ledger.db" in agent.said().splitlines()[-1]
    assert announcer.fragments == []
    with run_agent(file) as agent:
        wait_until(lambda: len(ids(announcer, fleet)) == BLOCKS, "all fragments")
        assert agent.stop() == ExitCode.OK
    assert len(charges(file)) == 1
    assert verify(state_of(file)).charges == 1


def test_an_agent_whose_log_nobody_reads_goes_on(announcer: Announcer, file: Path, fleet: str) -> None:
    """Before, it stood still for good once a pipe was full: sooner, the more it had said of its records."""
    unread, full = os.pipe()
    fcntl.fcntl(full, fcntl.F_SETPIPE_SZ, 4_096)
    os.write(full, bytes(4_096))
    command = [sys.executable, "-P", "-m", "cli.main", "run", "--config", str(file)]
    with subprocess.Popen(command, stdout=full, stderr=full) as agent:
        try:
            announcer.announce(plan_for(fleet, compute_slot_s=0.3, jitter_window_s=0.3))
            wait_until(lambda: len(ids(announcer, fleet)) == BLOCKS, "all fragments")
            agent.terminate()
            assert agent.wait(PATIENCE_S) == ExitCode.OK
        finally:
            agent.kill()
            os.close(unread)
            os.close(full)


def test_what_waited_for_a_restart_is_spread_over_the_window_again(
    announcer: Announcer, file: Path, fleet: str, drawn: list[float]
) -> None:
    """Overdue fragments that all leave at once would show that they are one device's."""
    plan = plan_for(fleet, jitter_window_s=3_000.0)
    settings, clock = load_agent_settings(file), MovableClock()
    state = open_state(settings.state_dir, Budget(100.0, 1e-2))
    charge = charge_for(plan, open_npz(settings.data.path), state.ledger)
    overdue = [
        SpooledFragment(bytes([index]) * 16, b"overdue", clock.monotonic() - 60) for index in range(40)
    ]
    charge_and_spool(state, charge, overdue, plan=digest_of(plan))
    state.close()
    opens_at = clock.monotonic()
    announcer.announce(plan)
    with agent_thread(file, clock):
        wait_until(lambda: len(drawn) == 40 and min(drawn) >= opens_at, "new times")
    assert announcer.fragments == [], "they left at their old times"
    assert max(drawn) <= opens_at + 3_000
    assert max(drawn) - min(drawn) > 1_500


def test_an_agent_that_hears_nothing_says_what_it_waits_for_and_what_silence_may_mean(
    file: Path, fleet: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = f"dpagent/v1/{fleet}/plan"
    with caplog.at_level("INFO", "agent.daemon"), agent_thread(file) as agent:

        def said(words: str) -> list[str]:
            return [text for each in caplog.records if words in (text := each.getMessage())]

        wait_until(lambda: said(f"waiting for a plan on {topic}"), "a word on what is awaited")
        agent.clock.advance(28.0)
        assert not said("no plan has come")
        agent.clock.advance_until(lambda: said("no plan has come"), "a word on the silence")
        agent.clock.advance_until(lambda: agent.clock.monotonic() > 1_200, "some minutes more", step_s=20)
    (sentence,) = said("no plan has come")
    assert all(part in sentence for part in (topic, fleet, "`fleet` is another's name", "dpagent doctor"))


def test_the_end_of_a_job_ends_the_resending(announcer: Announcer, file: Path, fleet: str) -> None:
    with agent_thread(file) as agent:
        announcer.announce(plan_for(fleet))
        agent.clock.advance_until(lambda: len(ids(announcer, fleet)) == BLOCKS, "all fragments", 10.0)
        announcer.announce(plan_for(fleet, round=3, state="finished"))
        wait_until(
            lambda: rows(file, "SELECT DISTINCT state FROM fragments") == [("expired",)], "the spool's end"
        )
        assert agent.is_running
