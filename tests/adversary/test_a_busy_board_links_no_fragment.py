"""A coordinator keeps boards busy, to see which fragments leave together when they have time again.

Claim: a fragment leaves at the time that was drawn for it, and its receipt is heard until the time that was,
    whatever the board is at meanwhile.
Parameters: three boards, each an agent of its own at a real Mosquitto, with 40 fragments in a window of 15 s.
    Once they are spooled, the coordinator sends receipts to all, of 2,048 fragments of nobody's each, and
    signed: 260 at once, every five seconds. It takes two fragments for one board's that arrive within 20 ms.

Power: agents whose one thread reads and sends, as before, read 256 messages before they look what is due, and
    ask the database for each receipt: 10 ms a message. More than three of five guesses are right.

Outcome: before, 55 of 60 and 47 of 55 guesses were right. Now 22 of 33, 17 of 21 and 9 of 22, and 5 of 22 of
    boards that nobody keeps busy: on a machine with fifteen programs for each core, whose agents get one late
    while they read. So much is open; what the test shows is that a board's thread holds nothing back.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from brokers import USER, Broker, wait_until
from children import Child
from fleets import DIGITS, write_agent
from floods import PATIENCE_S
from lone_agents import OPENER_SECRET, WEIGHTS, plan_for, rows, state_of
from observers import Announcer
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from scipy import stats

from dpagent.protocol.messages import RECEIPT_DIGEST_BYTES, RECEIPTS_PER_MESSAGE, Receipts
from dpagent.protocol.receipts import receipt_digest
from dpagent.protocol.sealing import Opener

BOARDS, FRAGMENTS, WINDOW_S, APART_S, ALPHA = 3, 40, 15.0, 0.02, 1e-6
FLOODS, MESSAGES, EVERY_S = 3, 260, 5.0
AS_BEFORE = """
import time
from contextlib import nullcontext
from agent.publisher import Publisher
from agent.spool import Spool
Publisher.running = lambda self: nullcontext()
Spool.known = lambda self, digests: time.sleep(0.01) or []
from cli.main import main; main()
"""
"""With the time that the database took, however busy the machine is; no receipt is a board's here."""


class Arrivals:
    """When fragments arrive at the coordinator."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self.seen: list[tuple[float, bytes]] = []
        self._client = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
        self._client.username_pw_set(USER, broker.password_file.read_text().strip())
        self._client.on_connect = lambda client, *_: client.subscribe(topic, 1)
        self._client.on_message = lambda _client, _data, message: self.seen.append(
            (time.monotonic(), bytes(message.payload))
        )
        self._client.connect("127.0.0.1", broker.port)
        self._client.loop_start()

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def flood(broker: Broker, topic: str, message: bytes, times: int) -> None:
    """One message many times at once, again and again."""
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
    client.username_pw_set(USER, broker.password_file.read_text().strip())
    client.connect("127.0.0.1", broker.port)
    client.loop_start()
    try:
        for _ in range(times):
            time.sleep(EVERY_S)
            for _ in range(MESSAGES):
                client.publish(topic, message, qos=0).wait_for_publish(PATIENCE_S)
    finally:
        client.disconnect()
        client.loop_stop()


def owners_of(files: list[Path]) -> dict[bytes, int]:
    """Which board each fragment is of, as only their disks say."""
    owners: dict[bytes, int] = {}
    for number, file in enumerate(files):
        with closing(sqlite3.connect(state_of(file) / "ledger.db", timeout=10)) as connection:
            owners |= {row[0]: number for row in connection.execute("SELECT digest FROM fragments")}
    return owners


def guessed(
    directory: Path, broker: Broker, program: str | None = None, floods: int = FLOODS
) -> tuple[int, int]:
    """How many pairs the coordinator takes for one board's, and how many of them are.

    Args:
        directory: of the boards.
        broker: theirs.
        program: that they run; None: the agent as it is.
        floods: times that the coordinator keeps them busy.
    """
    how = ["-m", "cli.main"] if program is None else ["-c", program]
    fleet = f"busy-{os.urandom(4).hex()}"
    with ExitStack() as held:
        announcer = held.enter_context(Announcer(broker, fleet))
        arrivals = held.enter_context(Arrivals(broker, announcer.topics.fragments))
        announcer.announce_model(WEIGHTS)
        files = [
            write_agent(directory / str(number), broker, announcer.signer.public_key, number, fleet=fleet)
            for number in range(BOARDS)
        ]
        for file in files:
            command = [sys.executable, "-P", *how, "run", "--config", file]
            held.enter_context(Child(command, file.with_suffix(".log")))
        plan = plan_for(
            fleet,
            compute_slot_s=4.0,
            jitter_window_s=WINDOW_S,
            wire={"block": -(-DIGITS.parameter_count // FRAGMENTS)},
        )
        announcer.announce(plan)
        spooled = "SELECT 1 FROM rounds WHERE state IN ('spooled', 'published')"
        wait_until(lambda: all(rows(file, spooled) for file in files), "the updates of all boards")
        owners = owners_of(files)
        digests = Receipts(os.urandom(RECEIPT_DIGEST_BYTES * RECEIPTS_PER_MESSAGE))
        opener = Opener(OPENER_SECRET, fleet)
        first: dict[bytes, float] = {}

        def have_come() -> bool:
            while arrivals.seen:
                at, message = arrivals.seen.pop(0)
                first.setdefault(receipt_digest(opener.open(message, plan.job).id), at)
            return first.keys() >= owners.keys()

        flood(broker, announcer.topics.receipts, announcer.signer.sign(digests, "receipts"), floods)
        wait_until(have_come, "all fragments", PATIENCE_S)
    marks = sorted((at, owners[digest]) for digest, at in first.items())
    taken = [one == other for (at, one), (after, other) in itertools.pairwise(marks) if after - at < APART_S]
    assert len(owners) == BOARDS * FRAGMENTS
    print(f"{sum(taken)} of {len(taken)} right")
    assert len(taken) > 3, "it has something to go by"
    return len(taken), sum(taken)


@pytest.mark.heavy
def test_fragments_of_a_busy_board_leave_apart(tmp_path: Path, mosquitto: Broker) -> None:
    """As far as those of a board do that nobody keeps busy, on this machine, which others may."""
    (taken, right), (taken_calm, right_calm) = (
        guessed(tmp_path / str(floods), mosquitto, floods=floods) for floods in (FLOODS, 0)
    )
    table = [[right, taken - right], [right_calm, taken_calm - right_calm]]
    assert stats.fisher_exact(table, alternative="greater").pvalue > ALPHA


@pytest.mark.heavy
@pytest.mark.slow
def test_power_where_one_thread_reads_and_sends_they_leave_together(
    tmp_path: Path, mosquitto: Broker
) -> None:
    taken, right = guessed(tmp_path, mosquitto, AS_BEFORE)
    chance = (FRAGMENTS - 1) / (BOARDS * FRAGMENTS - 1)
    assert stats.binomtest(right, taken, chance, alternative="greater").pvalue < ALPHA
    assert right > 0.6 * taken
