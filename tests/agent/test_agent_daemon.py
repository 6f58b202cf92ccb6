"""The agent as a process of its own, with a hand-made coordinator over a real broker."""

from __future__ import annotations

import itertools
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import Broker, wait_until
from fleets import DIGITS, agent_values, make_plan, run_agent, write_agent
from ledgers import charge_for, open_state
from observers import Announcer, in_an_hour

from agent.charges import Budget
from agent.daemon import Agent
from agent.ledger import verify
from agent.settings import load_agent_settings
from agent.spool import SpooledFragment
from dpagent.errors import ConfigurationError, DataError, ExitCode
from dpagent.learning.data.formats.npz import open_npz
from dpagent.protocol.codec import encode
from dpagent.protocol.fragments import (
    block_count,
    chunked,
    content_digest,
    read_block,
    receipt_digest,
    weights_to_bytes,
)
from dpagent.protocol.messages import Plan, Receipts
from dpagent.protocol.sealing import Opener, new_sealing_secret
from dpagent.protocol.signing import Signer, new_signing_secret

WEIGHTS = weights_to_bytes(DIGITS.initial_weights(0))
OPENER_SECRET = new_sealing_secret()
_numbers = itertools.count()


@pytest.fixture
def fleet() -> str:
    return f"agents-{next(_numbers)}"


@pytest.fixture
def announcer(mosquitto: Broker, fleet: str) -> Iterator[Announcer]:
    with Announcer(mosquitto, fleet) as announcer:
        announcer.announce_model(WEIGHTS)
        yield announcer


@pytest.fixture
def file(tmp_path: Path, mosquitto: Broker, announcer: Announcer, fleet: str) -> Path:
    """An ``agent.yaml`` with a budget for many jobs."""
    return write_agent(
        tmp_path / "device", mosquitto, announcer.signer.public_key, fleet=fleet,
        budget={"epsilon": 100.0, "delta": 1e-2},
    )  # fmt: skip


def plan_for(fleet: str, **changes: Any) -> Plan:
    opener = Opener(OPENER_SECRET, fleet)
    values: dict[str, Any] = {
        "fleet": fleet, "sealing_key": opener.public_key, "deadline": in_an_hour(),
        "compute_slot_s": 0.3, "jitter_window_s": 0.3,
    }  # fmt: skip
    return make_plan(**(values | changes))


BLOCKS = block_count(DIGITS.parameter_count, 1_000)


def state_of(file: Path) -> Path:
    return file.parent / "state"


def rows(file: Path, query: str) -> list[tuple[Any, ...]]:
    database = state_of(file) / "ledger.db"
    if not database.exists():
        return []
    connection = sqlite3.connect(database, timeout=10)
    try:
        return connection.execute(query).fetchall()
    except sqlite3.OperationalError:
        return []  # not yet created
    finally:
        connection.close()


def charges(file: Path) -> list[tuple[str, int]]:
    found = rows(file, "SELECT body FROM entries WHERE kind = 'charge' ORDER BY number")
    return [(body["job"], body["round"]) for (text,) in found for body in [json.loads(text)]]


def counter(file: Path, name: str) -> int:
    found = rows(file, f"SELECT value FROM counters WHERE name = '{name}'")
    return found[0][0] if found else 0


def test_a_plan_is_answered_by_fragments_until_receipts_come(
    announcer: Announcer, file: Path, fleet: str
) -> None:
    plan = plan_for(fleet)
    with run_agent(file) as agent:
        announcer.announce(plan)
        wait_until(lambda: len(set(announcer.fragments)) == BLOCKS, "all fragments")
        opener = Opener(OPENER_SECRET, fleet)
        opened = [opener.open(message) for message in set(announcer.fragments)]
        places = sorted(read_block(piece, plan.wire, plan.model.parameters)[0] for piece in opened)
        assert places == list(range(BLOCKS))
        # Without a receipt everything goes again, the very same bytes.
        before = len(announcer.fragments)
        wait_until(lambda: len(announcer.fragments) > before, "a resend")
        assert len(set(announcer.fragments)) == BLOCKS
        digests = b"".join(receipt_digest(piece.id) for piece in opened)
        receipts = Receipts(version=1, kind="receipts", job=plan.job, round=1, digests=digests)
        # Receipts of somebody else are no receipts.
        forged = Signer(new_signing_secret(), fleet).sign(receipts, "receipts")
        announcer.publish(announcer.topics.receipts, forged)
        wait_until(lambda: counter(file, "rejected") == 1, "the rejection")
        assert rows(file, "SELECT count(*) FROM fragments WHERE state = 'counted'") == [(0,)]
        announcer.publish(announcer.topics.receipts, announcer.signer.sign(receipts, "receipts"))
        wait_until(
            lambda: rows(file, "SELECT count(*) FROM fragments WHERE state = 'counted'") == [(BLOCKS,)],
            "the receipts' effect",
        )
        assert agent.stop() == ExitCode.OK
    assert charges(file) == [(plan.job.hex(), 1)]
    assert verify(state_of(file)).charges == 1
    assert counter(file, "bytes_up") >= sum(map(len, announcer.fragments))


def test_what_leaves_the_board_has_one_length_and_no_name(
    announcer: Announcer, file: Path, fleet: str
) -> None:
    with run_agent(file):
        announcer.announce(plan_for(fleet))
        wait_until(lambda: len(set(announcer.fragments)) == BLOCKS, "all fragments")
    sent = [message for message in announcer.seen if message.topic == announcer.topics.fragments]
    assert len({len(message.payload) for message in sent}) == 1
    assert not any(message.retain for message in sent)
    for message in sent:
        assert set(message.properties.json()) <= {"MessageExpiryInterval"}
    # The agent says nothing at all on any other topic.
    own = {announcer.topics.plan, announcer.topics.model_chunk(0)}
    assert {message.topic for message in announcer.seen} - own == {announcer.topics.fragments}


def test_plans_that_are_not_the_coordinators_are_ignored(
    announcer: Announcer, file: Path, fleet: str
) -> None:
    other = Signer(new_signing_secret(), fleet)
    with run_agent(file) as agent:
        announcer.announce(plan_for(fleet), other)
        wait_until(lambda: counter(file, "rejected") == 1, "the first rejection")
        wrong = [
            b"", b"garbage", other.sign(plan_for(fleet), "plan"),
            announcer.signer.sign(plan_for(fleet), "receipts"),
            announcer.signer.sign(plan_for("another"), "plan"),
        ]  # fmt: skip
        for message in wrong:
            announcer.publish(announcer.topics.plan, message)
        announcer.publish(announcer.topics.model_chunk(0), b"garbage")
        announcer.publish(announcer.topics.receipts, b"garbage")
        # An empty payload with the retain flag only clears the topic, and arrives as well.
        wait_until(lambda: counter(file, "rejected") == 8, "all rejections")
        assert charges(file) == []
        assert announcer.fragments == []
        announcer.announce(plan_for(fleet))
        wait_until(lambda: charges(file), "the charge for the true plan")
        assert agent.is_running()


def test_a_budget_that_is_too_small_is_kept_and_the_reason_noted(
    announcer: Announcer, tmp_path: Path, mosquitto: Broker, fleet: str
) -> None:
    file = write_agent(
        tmp_path / "poor", mosquitto, announcer.signer.public_key, fleet=fleet, budget={"epsilon": 0.1}
    )
    with run_agent(file) as agent:
        announcer.announce(plan_for(fleet))
        wait_until(lambda: rows(file, "SELECT * FROM declined"), "the note")
        ((job, number, reason),) = rows(file, "SELECT job, round, reason FROM declined")
        assert (job, number) == ((b"j" * 16).hex(), 1)
        assert "lifetime budget for 'digits' is 0.1" in reason
        assert agent.is_running()
    assert announcer.fragments == []
    assert charges(file) == []


@pytest.mark.parametrize(
    "changes",
    [{"mechanism": {"noise_multipliers": [10_000.0] * 3}}, {"model": {"description": b"resnet"}},
     {"deadline": 1_000.0}, {"sealing_key": bytes(32)}],
    ids=lambda changes: next(iter(changes)) + str(next(iter(changes.values()))),
)  # fmt: skip
def test_no_plan_that_is_signed_can_end_the_agent(
    announcer: Announcer, file: Path, fleet: str, changes: dict[str, Any]
) -> None:
    plan = plan_for(fleet, **changes)
    with run_agent(file) as agent:
        announcer.announce(plan)
        wait_until(lambda: not agent.is_running() or rows(file, "SELECT * FROM declined"), "a decision")
        assert agent.is_running(), agent.said()[-500:]
        assert charges(file) == []


def test_undefined_weights_do_not_end_the_agent(announcer: Announcer, file: Path, fleet: str) -> None:
    weights = weights_to_bytes(np.full(DIGITS.parameter_count, np.nan, np.float32))
    plan = plan_for(
        fleet, model={"digest": content_digest(weights)}, cap={"kind": "clamp", "where": "device"}
    )
    with run_agent(file) as agent:
        announcer.announce_model(weights)
        announcer.announce(plan)
        wait_until(
            lambda: not agent.is_running() or charges(file) or rows(file, "SELECT * FROM declined"),
            "a decision",
        )
        assert agent.is_running(), agent.said()[-500:]


def test_a_lying_chunk_does_not_keep_the_agent_out_of_the_round(
    announcer: Announcer, file: Path, fleet: str
) -> None:
    """Anyone in the fleet may publish; the retained chunks are the truth and can be had again."""
    with run_agent(file) as agent:
        wait_until(lambda: counter(file, "bytes_down") or "connected" in agent.said(), "the connection")
        (chunk,) = chunked(WEIGHTS)
        announcer.announce(plan_for(fleet, round=2, deadline=1_000.0))
        wait_until(lambda: rows(file, "SELECT * FROM declined"), "the agent to have the model")
        lie = chunk.model_copy(update={"data": bytes(len(chunk.data))})
        announcer.publish(announcer.topics.model_chunk(0), encode(lie))
        announcer.announce(plan_for(fleet, round=2))
        wait_until(lambda: charges(file), "the charge", 12)


def test_a_round_is_charged_once_though_it_is_announced_again_and_again(
    announcer: Announcer, file: Path, fleet: str
) -> None:
    plan = plan_for(fleet)
    with run_agent(file):
        announcer.announce(plan)
        wait_until(lambda: len(set(announcer.fragments)) == BLOCKS, "all fragments")
        for seconds in (1.0, 2.0):
            announcer.announce(plan.model_copy(update={"deadline": plan.deadline + seconds}))
        announcer.announce(plan_for(fleet, round=2))
        wait_until(lambda: len(charges(file)) == 2, "the second round")
    with run_agent(file):
        announcer.announce(plan_for(fleet, round=3))
        wait_until(lambda: len(charges(file)) == 3, "the third round, after a restart")
    assert charges(file) == [(plan.job.hex(), number) for number in (1, 2, 3)]
    states = dict(rows(file, "SELECT round, group_concat(DISTINCT state) FROM fragments GROUP BY round"))
    assert states[1] == states[2] == "expired"
    assert verify(state_of(file)).charges == 3


def test_an_older_round_is_a_replay(announcer: Announcer, file: Path, fleet: str) -> None:
    with run_agent(file):
        announcer.announce(plan_for(fleet, round=2))
        wait_until(lambda: charges(file), "the second round")
        announcer.announce(plan_for(fleet, round=1))
        wait_until(lambda: counter(file, "rejected") == 1, "the rejection")
    assert charges(file) == [((b"j" * 16).hex(), 2)]


def test_a_killed_agent_resends_what_it_had_charged(announcer: Announcer, file: Path, fleet: str) -> None:
    # A window so long that nearly nothing has left when the power fails.
    announcer.announce(plan_for(fleet, jitter_window_s=60.0))
    with run_agent(file) as agent:
        wait_until(lambda: charges(file), "the charge", 12)
        agent.kill()
    left_before = len(set(announcer.fragments))
    spooled = {row[0] for row in rows(file, "SELECT message FROM fragments")}
    assert len(spooled) == BLOCKS > left_before
    with run_agent(file):
        announcer.announce(plan_for(fleet))  # now with a short window
        wait_until(lambda: len(set(announcer.fragments)) == BLOCKS, "all fragments")
    assert set(announcer.fragments) == spooled
    assert len(charges(file)) == 1


def test_what_waited_for_a_restart_is_spread_over_the_window_again(
    announcer: Announcer, file: Path, fleet: str
) -> None:
    """Overdue fragments that all leave at once would show that they are one device's."""
    plan = plan_for(fleet, jitter_window_s=3_000.0)
    settings = load_agent_settings(file)
    state = open_state(settings.state_dir, Budget(100.0, 1e-2))
    charge = charge_for(plan, open_npz(settings.data.path), state.ledger)
    overdue = [SpooledFragment(bytes([index]) * 16, b"overdue", time.monotonic() - 60) for index in range(40)]
    state.charge_and_spool(charge, overdue)
    state.close()
    announcer.announce(plan)
    with run_agent(file) as agent:
        wait_until(
            lambda: (
                rows(file, f"SELECT count(*) FROM fragments WHERE due_at > {time.monotonic() + 15}")[0][0]
                > 30
            ),
            "new times",
        )
        assert agent.is_running()
        assert len(announcer.fragments) <= 2, "they left at their old times"


def test_the_end_of_a_job_ends_the_resending(announcer: Announcer, file: Path, fleet: str) -> None:
    with run_agent(file) as agent:
        announcer.announce(plan_for(fleet))
        wait_until(lambda: len(set(announcer.fragments)) == BLOCKS, "all fragments")
        announcer.announce(plan_for(fleet, round=3, state="finished"))
        wait_until(
            lambda: rows(file, "SELECT DISTINCT state FROM fragments") == [("expired",)], "the spool's end"
        )
        assert agent.is_running()


# --- starting -----------------------------------------------------------------------------------


def exit_of(file: Path) -> tuple[int, str]:
    with run_agent(file) as agent:
        return agent.wait(), agent.said()


def test_a_second_agent_on_the_same_state_is_refused(announcer: Announcer, file: Path) -> None:
    with run_agent(file) as agent:
        wait_until(lambda: "connected" in agent.said(), "the first agent")
        code, said = exit_of(file)
        assert code == ExitCode.STATE_IN_USE
        assert f"in use by process {agent.process.pid}" in said


def test_a_wrong_password_ends_the_agent_with_a_sentence(
    announcer: Announcer, tmp_path: Path, mosquitto: Broker
) -> None:
    (tmp_path / "password").write_text("wrong\n")
    file = write_agent(
        tmp_path / "device", mosquitto, announcer.signer.public_key,
        mqtt={"password_file": str(tmp_path / "password")},
    )  # fmt: skip
    code, said = exit_of(file)
    assert code == ExitCode.BROKER
    assert "refuses the connection" in said


def test_a_damaged_ledger_ends_the_agent_before_it_connects(announcer: Announcer, file: Path) -> None:
    state_of(file).mkdir()
    (state_of(file) / "ledger.db").write_bytes(b"not a database" * 1_000)
    code, said = exit_of(file)
    assert code in (ExitCode.STORAGE, ExitCode.LEDGER)
    assert "not a readable database" in said
    assert "connected to" not in said


def test_missing_data_and_a_missing_password_leave_the_state_free(
    tmp_path: Path, announcer: Announcer
) -> None:
    file = write_agent(tmp_path, None, announcer.signer.public_key, profile="calm.yaml")
    # This process is the tests': it must not be made nicer.
    (tmp_path / "calm.yaml").write_text("description: x\nmemory_mib: 64\nmicrobatch: 8\nniceness: 0\n")
    settings = load_agent_settings(file).model_copy(update={"profile": str(tmp_path / "calm.yaml")})
    wrong = settings.model_copy(
        update={"data": settings.data.model_copy(update={"path": tmp_path / "no.npz"})}
    )
    with pytest.raises(DataError):
        Agent(wrong)
    missing = settings.mqtt.model_copy(update={"username": "u", "password_file": tmp_path / "none"})
    with pytest.raises(ConfigurationError) as caught:
        Agent(settings.model_copy(update={"mqtt": missing}))
    assert "password_file" in str(caught.value)
    # The error is still in hand, as it is for a caller who shows it and tries again.
    open_state(settings.state_dir, Budget(4.0, 1e-4)).close()


def test_values_of_the_files_are_those_the_agent_takes() -> None:
    assert agent_values(None, "key")["budget"] == {"epsilon": 4.0, "delta": 1e-4}
