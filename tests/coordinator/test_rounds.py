"""Whole jobs: coordinator and agents over a real broker, watched and disturbed.

They run in threads, on clocks that the test moves.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from brokers import Broker, wait_until
from clocks import MovableClock
from daemons import agent_thread, attentive_daemons, coordinator_thread
from fleets import DIGITS, digits
from observers import Observer
from watched_fleets import WatchedFleet

from agent.audit import open_ledger, verify
from coordinator.daemon import _BATCH
from coordinator.settings import FIRST_JOB
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.inference.onnx_evaluator import OnnxEvaluator
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.protocol.chunks import chunked
from dpagent.protocol.codec import encode
from dpagent.protocol.fragments import cut
from dpagent.protocol.messages import ModelChunk, Plan, Receipts
from dpagent.protocol.sealing import Opener, new_sealing_secret, seal
from dpagent.protocol.signing import Signer, new_signing_secret


@pytest.fixture(autouse=True)
def _attentive() -> Iterator[None]:
    with attentive_daemons():
        yield


def disturb(observer: Observer, fleet: WatchedFleet, plan: Plan) -> dict[str, int]:
    """Everything a stranger can send; returns what the coordinator should count it as."""
    send = observer.publish
    topic = observer.topics.fragments
    update = np.zeros(DIGITS.parameter_count, np.int64)
    piece = next(cut(update, plan))

    def sealed(**changes: Any) -> bytes:
        return seal(encode(replace(piece, **changes)), plan)

    expected: dict[str, int] = {}
    wrong: list[tuple[str, bytes]] = [
        ("malformed", b""), ("unsupported version", b"garbage"), ("unsupported version", b"\xff" * 3_000),
        ("cannot open", b"\1" + encode(chunked(b"w" * 40)[0])), ("oversized", b"x" * 60_001),
        *(
            ("cannot open", seal(encode(piece), plan.with_values(change)))
            for change in (
                {"sealing_key": Opener(new_sealing_secret(), fleet.name).public_key},
                {"fleet": "another"}, {"job": b"x" * 16},
            )
        ),
        ("wrong round", sealed(round=plan.round + 1)),
        ("bad position", sealed(position=fleet.blocks)),
        ("bad position", sealed(position=2**32 - 1)),
        ("wrong size", sealed(payload=piece.payload + b"\0")), ("wrong size", sealed(payload=b"")),
    ]  # fmt: skip
    for reason, message in wrong:
        send(topic, message)
        expected[f"rejected: {reason}"] = expected.get(f"rejected: {reason}", 0) + 1
    # And at the devices: another's plan, another's receipts, a model nobody asked for.
    other = Signer(new_signing_secret(), fleet.name)
    send(observer.topics.plan, other.sign(plan.with_values({"round": plan.rounds}), "plan"))
    receipts = Receipts(b"r" * 32)
    send(observer.topics.receipts, other.sign(receipts, "receipts"))
    foreign = ModelChunk(digest=b"f" * 32, index=0, data=b"foreign")
    send(observer.topics.model_chunk(7), encode(foreign))
    return expected


def _is_receipted(file: Path) -> bool:
    """Whether a device has no fragment to send."""
    connection, _ = open_ledger(file.parent / "state")
    try:
        return not connection.execute("SELECT 1 FROM fragments JOIN messages USING (number)").fetchall()
    finally:
        connection.close()


def test_a_job_runs_to_its_end_whatever_strangers_send(tmp_path: Path, mosquitto: Broker) -> None:
    save_npz(tmp_path / "test.npz", digits(1_500, 1_700))
    fleet = WatchedFleet(tmp_path, mosquitto, test_data={"path": str(tmp_path / "test.npz")})
    files = [fleet.agent(number) for number in (0, 1)]
    clock = MovableClock()
    with (
        Observer(mosquitto, fleet.name) as observer,
        coordinator_thread(fleet.file, clock) as coordinator,
        agent_thread(files[0], clock) as first,
        agent_thread(files[1], clock) as second,
    ):
        wait_until(lambda: fleet.plans(observer), "the first plan")
        expected = disturb(observer, fleet, fleet.plans(observer)[1])

        def counted() -> set[bytes]:
            return {message for message in observer.fragments if fleet.is_counted(message)}

        clock.advance_until(lambda: len(counted()) >= 3, "some counted fragments", 2.0)
        replayed = 0
        for message in counted():
            observer.publish(observer.topics.fragments, message)
            replayed += 1
        clock.advance_until(lambda: not coordinator.is_running, "the end of the job", 2.0)
        assert coordinator.result is True
        wait_until(lambda: len(observer.plans) and fleet.is_farewell(observer.plans[-1]), "the farewell")
        wait_until(lambda: all(_is_receipted(file) for file in files), "the last receipts")
        first.stop()
        second.stop()

        rounds, counters = fleet.rounds(), fleet.counters()
        reader = fleet.reader()
        assert reader.is_finished()
        reader.close()
        assert [record.fragments for record in rounds] == [2 * fleet.blocks] * 2
        assert all(record.closed_at is not None and record.accuracy is not None for record in rounds)
        assert rounds[-1].epsilon == pytest.approx(4.0, rel=1e-3)
        # What comes again may come after its round, or after the job.
        again = sum(counters.pop(key, 0) for key in ("duplicates", "late", "rejected: no open round"))
        assert counters == expected
        assert again >= replayed

        # Exactly what the broker carried, added up by other code, is the model: bit by bit.
        assert fleet.model().tobytes() == fleet.replayed_model(observer).tobytes()

        genuine = {message for message in observer.fragments if fleet.is_counted(message)}
        assert len({fleet.opener.open(message, fleet.job).id for message in genuine}) == 4 * fleet.blocks
        assert len({len(message) for message in genuine}) == 1  # the noise is the same in both rounds
    for file in files:
        assert verify(file.parent / "state").charges == 2
        connection, _ = open_ledger(file.parent / "state")
        states = connection.execute("SELECT state, count(*) FROM fragments GROUP BY state").fetchall()
        spent = [
            json.loads(row[0]) for row in connection.execute("SELECT body FROM entries WHERE kind = 'charge'")
        ]
        connection.close()
        assert [tuple(row) for row in states] == [("counted", 2 * fleet.blocks)]
        assert spent[-1]["cumulative_epsilon"] <= 4.0 * (1 + 1e-9)
        assert spent[-1]["cumulative_epsilon"] == pytest.approx(rounds[-1].epsilon, rel=1e-3)
    evaluator = OnnxEvaluator((fleet.settings.directory_of(FIRST_JOB) / "model.onnx").read_bytes())
    assert evaluator.accuracy(digits(1_500, 1_700)) == rounds[-1].accuracy
    model = onnxruntime.InferenceSession(
        fleet.settings.directory_of(FIRST_JOB) / "model.onnx", providers=["CPUExecutionProvider"]
    )
    stated = model.get_modelmeta().custom_metadata_map
    assert json.loads(stated["dpagent.privacy_statement"]) == json.loads(
        json.dumps(DiscretisedGaussian.job_statement(4.0, 1e-4).as_dict())
    )
    (spent,) = json.loads(stated["dpagent.spent"])
    assert spent["epsilon"] == rounds[-1].epsilon
    assert spent["unit"] == "record"
    assert stated["dpagent.privacy"].startswith(
        "ε = 4, δ = 0.0001 (record-level, add-or-remove-one adjacency"
    )


def deadline_of(fleet: WatchedFleet) -> float:
    connection = sqlite3.connect(fleet.state / "coordinator.db", timeout=10)
    try:
        return float(connection.execute("SELECT deadline FROM rounds WHERE number = 1").fetchone()[0])
    finally:
        connection.close()


def test_a_round_with_a_missing_device_closes_at_its_deadline(
    tmp_path: Path, mosquitto: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = WatchedFleet(tmp_path, mosquitto, rounds=1, round={"minimum_devices": 1})
    clock = MovableClock()
    with (
        Observer(mosquitto, fleet.name) as observer,
        agent_thread(fleet.agent(0), clock),
        coordinator_thread(fleet.file, clock) as coordinator,
    ):
        clock.advance_until(lambda: len(fleet.counted()) == fleet.blocks, "the device's fragments", 2.0)
        assert coordinator.is_running
        clock.advance_until(lambda: not coordinator.is_running, "the end of the job", 100.0)
        assert coordinator.result is True
        assert f"closes at its deadline with {fleet.blocks} of {2 * fleet.blocks}" in caplog.text
        (record,) = fleet.rounds()
        assert record.fragments == fleet.blocks
        assert record.closed_at is not None
        assert record.closed_at >= deadline_of(fleet)
        assert fleet.model().tobytes() == fleet.replayed_model(observer).tobytes()


def test_a_round_with_too_few_devices_stays_open_for_another_deadline(
    tmp_path: Path, mosquitto: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = WatchedFleet(tmp_path, mosquitto, rounds=1, round={"minimum_devices": 2})
    files = [fleet.agent(0), fleet.agent(1)]
    clock = MovableClock()
    with agent_thread(files[0], clock), coordinator_thread(fleet.file, clock) as coordinator:
        clock.advance_until(lambda: len(fleet.counted()) == fleet.blocks, "the first device's fragments", 2.0)
        first = deadline_of(fleet)
        clock.advance_until(lambda: deadline_of(fleet) > first, "another deadline", 100.0)
        assert "fewer than the 2 needed; it stays open" in caplog.text
        assert coordinator.is_running
        with agent_thread(files[1], clock):
            clock.advance_until(lambda: not coordinator.is_running, "the end of the job", 2.0)
            assert coordinator.result is True
    assert len(fleet.counted()) == 2 * fleet.blocks
    assert [verify(file.parent / "state").charges for file in files] == [1, 1]


def test_a_flood_of_rubbish_is_counted_to_the_last_message(tmp_path: Path, mosquitto: Broker) -> None:
    fleet = WatchedFleet(tmp_path, mosquitto)
    number = 2 * _BATCH + 1
    with coordinator_thread(fleet.file) as coordinator, Observer(mosquitto, fleet.name) as observer:
        wait_until(lambda: observer.plans, "the plan")
        coordinator.stop()
        for _ in range(number):  # the broker keeps them for the coordinator's return
            observer.publish(observer.topics.fragments, b"rubbish")
    with coordinator_thread(fleet.file):
        wait_until(
            lambda: fleet.counters().get("rejected: unsupported version", 0) >= number, "all the rubbish"
        )
    assert fleet.counters() == {"rejected: unsupported version": number}
