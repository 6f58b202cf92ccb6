"""Whole jobs: coordinator and agents over a real broker, watched and disturbed.

They run in threads, on clocks that the test moves. A coordinator that is killed is a process of its own.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from brokers import Broker, wait_until
from clocks import MovableClock
from daemons import agent_thread, attentive_daemons, coordinator_thread
from fleets import DIGITS, digits, fleet_values, run_coordinator, write_agent, write_fleet
from observers import Observer

from agent.ledger import open_ledger, verify
from coordinator import announcer
from coordinator.aggregation import fleet_mean, take_step
from coordinator.daemon import _BATCH, Coordinator
from coordinator.keys import load_opener, load_signer
from coordinator.planning import new_job
from coordinator.settings import FleetSettings, load_fleet_settings
from coordinator.store import RoundRecord, RoundResult, Store, StoreReader
from dpagent.errors import ConfigurationError, DpagentError, PlanError, StateInUseError
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.inference.evaluation import OnnxEvaluator
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.protocol.codec import MessageError, encode
from dpagent.protocol.fragments import (
    block_count,
    chunked,
    content_digest,
    cut,
    read_block,
    receipt_digest,
    weights_to_bytes,
)
from dpagent.protocol.messages import ModelChunk, Plan, Receipts
from dpagent.protocol.sealing import Opener, new_sealing_secret, seal
from dpagent.protocol.signing import Signer, Verifier, new_signing_secret
from dpagent.protocol.task import RoundTask
from dpagent.transport.settings import MqttSettings

SLOW = {"compute_slot_s": 30.0, "jitter_window_s": 60.0, "deadline_s": 600.0}
"""Times of a round that nobody waits for."""

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _attentive() -> Iterator[None]:
    with attentive_daemons():
        yield


class Fleet:
    """The files of a coordinator and its devices."""

    def __init__(self, directory: Path, broker: Broker, **changes: Any) -> None:
        self.name = f"rounds-{next(_numbers)}"
        self.directory, self.broker = directory, broker
        changes["round"] = SLOW | changes.get("round", {})
        self.changes = {"fleet": self.name, **changes}
        self.file = write_fleet(directory / "coordinator", broker, **self.changes)
        self.settings = load_fleet_settings(self.file)
        self.state = self.settings.state_dir
        self.public_key = load_signer(self.settings.keys_dir, self.name).public_key
        self.opener = load_opener(self.settings.keys_dir, self.name)
        self.verifier = Verifier(self.public_key, self.name)

    def agent(self, number: int) -> Path:
        return write_agent(
            self.directory / f"device-{number}", self.broker, self.public_key, number, fleet=self.name
        )

    @property
    def blocks(self) -> int:
        block = -(-DIGITS.parameter_count // self.settings.fragments_per_update)
        return block_count(DIGITS.parameter_count, block)

    def reader(self) -> StoreReader:
        return StoreReader(self.state)

    def counted(self) -> dict[bytes, int]:
        """Rounds of the counted fragments, by id."""
        try:
            reader = self.reader()
        except DpagentError:
            return {}
        try:
            return {identity: number for identity, (number, _) in reader.fragments().items()}
        except DpagentError:
            return {}
        finally:
            reader.close()

    def rounds(self) -> list[RoundRecord]:
        reader = self.reader()
        try:
            return reader.rounds()
        finally:
            reader.close()

    def counters(self) -> dict[str, int]:
        reader = self.reader()
        try:
            return reader.counters()
        finally:
            reader.close()

    def model(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        connection = sqlite3.connect(self.state / "coordinator.db")
        try:
            return np.frombuffer(connection.execute("SELECT weights FROM model").fetchone()[0], np.float32)
        finally:
            connection.close()

    def plans(self, observer: Observer) -> dict[int, Plan]:
        """The plan of each round, as it was announced."""
        plans: dict[int, Plan] = {}
        for message in observer.plans:
            try:
                plan = self.verifier.open(message, Plan, "plan")
            except MessageError:
                continue  # a stranger's
            if plan.state == "open":
                plans[plan.round] = plan
        return plans

    def replayed_model(self, observer: Observer) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The model computed again from what the broker carried, with Python's own integers."""
        pieces: dict[bytes, Any] = {}
        for message in observer.fragments:
            try:
                piece = self.opener.open(message)
            except MessageError:
                continue
            pieces.setdefault(piece.id, piece)
        counted = self.counted()
        weights, state = DIGITS.initial_weights(0), np.zeros((1, DIGITS.parameter_count))
        optimiser, rate = self.settings.optimiser.optimiser(), self.settings.optimiser.learning_rate
        for number, plan in sorted(self.plans(observer).items()):
            sums: dict[int, tuple[int, Any]] = {}
            for identity, piece in pieces.items():
                if counted.get(identity) == number:
                    position, values = read_block(piece, plan.wire, DIGITS.parameter_count)
                    count, total = sums.get(position, (0, 0))
                    sums[position] = (count + 1, total + values)
            task = RoundTask.of(plan)
            gradient = task.clipping.gradient(fleet_mean(task, sums))
            step = take_step(task, gradient, weights, state, optimiser, rate)
            weights, state = step.weights, step.state
        return weights


def disturb(observer: Observer, fleet: Fleet, plan: Plan) -> dict[str, int]:
    """Everything a stranger can send; returns what the coordinator should count it as."""
    send = observer.publish
    topic = observer.topics.fragments
    update = np.zeros(DIGITS.parameter_count, np.int64)
    piece = next(cut(update, plan))

    def sealed(**changes: Any) -> bytes:
        return seal(piece.model_copy(update=changes), fleet.name, plan.sealing_key)

    expected: dict[str, int] = {}
    wrong: list[tuple[str, bytes]] = [
        ("malformed", b""), ("malformed", b"garbage"), ("malformed", b"\xff" * 3_000),
        ("malformed", encode(chunked(b"w" * 40)[0])), ("oversized", b"x" * 60_001),
        ("cannot open", seal(piece, fleet.name, Opener(new_sealing_secret(), fleet.name).public_key)),
        ("cannot open", seal(piece, "another", plan.sealing_key)),
        ("wrong job", sealed(job=b"x" * 16)),
        ("wrong round", sealed(round=plan.round + 1)),
        ("bad position", sealed(position=(fleet.blocks).to_bytes(4, "big"))),
        ("bad position", sealed(position=b"\xff" * 4)),
        ("wrong size", sealed(payload=piece.payload + b"\0")), ("wrong size", sealed(payload=b"")),
    ]  # fmt: skip
    for reason, message in wrong:
        send(topic, message)
        expected[f"rejected: {reason}"] = expected.get(f"rejected: {reason}", 0) + 1
    # And at the devices: another's plan, another's receipts, a model nobody asked for.
    other = Signer(new_signing_secret(), fleet.name)
    send(observer.topics.plan, other.sign(plan.model_copy(update={"round": plan.rounds}), "plan"))
    receipts = Receipts(version=1, kind="receipts", job=plan.job, round=plan.round, digests=b"r" * 32)
    send(observer.topics.receipts, other.sign(receipts, "receipts"))
    foreign = ModelChunk(version=1, kind="model", digest=b"f" * 32, index=0, data=b"foreign")
    send(observer.topics.model_chunk(7), encode(foreign))
    return expected


def charged(*files: Path) -> int:
    """Charges in the ledgers of devices."""
    return sum(verify(file.parent / "state").charges for file in files if _has_ledger(file))


def _has_ledger(file: Path) -> bool:
    return (file.parent / "state" / "ledger.head").exists()


def test_a_job_runs_to_its_end_whatever_strangers_send(tmp_path: Path, mosquitto: Broker) -> None:
    save_npz(tmp_path / "test.npz", digits(1_500, 1_700))
    fleet = Fleet(tmp_path, mosquitto, test_data={"path": str(tmp_path / "test.npz")})
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
        clock.advance_until(lambda: len(fleet.counted()) >= 3, "some counted fragments", 2.0)
        replayed = 0
        for message in {message for message in observer.fragments if _is_counted(fleet, message)}:
            observer.publish(observer.topics.fragments, message)
            replayed += 1
        assert replayed >= 3
        clock.advance_until(lambda: not coordinator.is_running, "the end of the job", 2.0)
        assert coordinator.result is True
        wait_until(lambda: len(observer.plans) and _is_farewell(fleet, observer.plans[-1]), "the farewell")
        first.stop()
        second.stop()

        rounds, counters = fleet.rounds(), fleet.counters()
        reader = fleet.reader()
        assert reader.is_finished()
        reader.close()
        assert [record.fragments for record in rounds] == [2 * fleet.blocks] * 2
        assert all(record.closed_at is not None and record.accuracy is not None for record in rounds)
        assert rounds[-1].epsilon == pytest.approx(4.0, rel=1e-3)
        assert {k: value for k, value in counters.items() if k not in ("duplicates", "late")} == expected
        assert counters["duplicates"] + counters.get("late", 0) >= replayed

        # Exactly what the broker carried, added up by other code, is the model: bit by bit.
        assert fleet.model().tobytes() == fleet.replayed_model(observer).tobytes()

        genuine = {message for message in observer.fragments if _is_counted(fleet, message)}
        assert len(genuine) == 4 * fleet.blocks
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
    evaluator = OnnxEvaluator((fleet.state / "model.onnx").read_bytes())
    assert evaluator.accuracy(digits(1_500, 1_700)) == rounds[-1].accuracy
    model = onnxruntime.InferenceSession(fleet.state / "model.onnx", providers=["CPUExecutionProvider"])
    stated = model.get_modelmeta().custom_metadata_map
    assert json.loads(stated["dpagent.privacy_statement"]) == json.loads(
        json.dumps(DiscretisedGaussian.job_statement(4.0, 1e-4).as_dict())
    )
    assert stated["dpagent.privacy"].startswith(
        "ε = 4, δ = 0.0001 (record-level, add-or-remove-one adjacency"
    )


def _is_counted(fleet: Fleet, message: bytes) -> bool:
    try:
        return fleet.opener.open(message).id in fleet.counted()
    except MessageError:
        return False


def _is_farewell(fleet: Fleet, message: bytes) -> bool:
    try:
        return fleet.verifier.open(message, Plan, "plan").state == "finished"
    except MessageError:
        return False


def test_a_coordinator_killed_in_the_middle_of_a_round_goes_on_with_its_counts(
    tmp_path: Path, mosquitto: Broker
) -> None:
    fleet = Fleet(tmp_path, mosquitto, rounds=1, fragments_per_update=30)
    files = [fleet.agent(number) for number in (0, 1)]
    clock = MovableClock()
    with (
        Observer(mosquitto, fleet.name) as observer,
        agent_thread(files[0], clock),
        agent_thread(files[1], clock),
    ):
        before: dict[bytes, int] = {}
        for _ in range(2):
            with run_coordinator(fleet.file) as coordinator:
                # Announced: what is pending has new times.
                announced = len(observer.plans)
                wait_until(lambda known=announced: len(observer.plans) > known, "the plan")
                wait_until(lambda: charged(*files) == 2, "the charges")
                enough = len(before) + 1
                clock.advance_until(
                    lambda enough=enough: len(fleet.counted()) >= enough, "more counted fragments", 1.0
                )
                coordinator.kill()
            now = fleet.counted()
            assert before.items() <= now.items(), "a restart forgot what it had counted"
            before = now
        assert 0 < len(before) < 2 * fleet.blocks, "the kill came too late to show anything"
        # Whatever was receipted before the kill is counted.
        receipted = set()
        for message in observer.receipts:
            raw = fleet.verifier.open(message, Receipts, "receipts").digests
            receipted |= {raw[start : start + 16] for start in range(0, len(raw), 16)}
        assert receipted <= {receipt_digest(identity) for identity in before}
        with coordinator_thread(fleet.file, clock) as last:
            clock.advance_until(lambda: not last.is_running, "the end of the job", 1.0)
            assert last.result is True
        counted = fleet.counted()
        assert before.items() <= counted.items()
        assert len(counted) == 2 * fleet.blocks
        assert fleet.model().tobytes() == fleet.replayed_model(observer).tobytes()
    assert [verify(file.parent / "state").charges for file in files] == [1, 1]


def deadline_of(fleet: Fleet) -> float:
    connection = sqlite3.connect(fleet.state / "coordinator.db", timeout=10)
    try:
        return float(connection.execute("SELECT deadline FROM rounds WHERE number = 1").fetchone()[0])
    finally:
        connection.close()


def test_a_round_with_a_missing_device_closes_at_its_deadline(
    tmp_path: Path, mosquitto: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(tmp_path, mosquitto, rounds=1, round={"minimum_devices": 1})
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
    fleet = Fleet(tmp_path, mosquitto, rounds=1, round={"minimum_devices": 2})
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


def test_a_broker_that_restarts_in_the_middle_does_not_end_a_job(tmp_path: Path, new_broker: Any) -> None:
    broker = new_broker("mosquitto").start()
    fleet = Fleet(tmp_path, broker, rounds=1, fragments_per_update=20)
    files = [fleet.agent(0), fleet.agent(1)]
    clock = MovableClock()
    with (
        agent_thread(files[0], clock),
        agent_thread(files[1], clock),
        coordinator_thread(fleet.file, clock) as coordinator,
    ):
        clock.advance_until(fleet.counted, "some counted fragments", 1.0)
        broker.kill()
        assert len(fleet.counted()) < 2 * fleet.blocks, "the kill came too late to show anything"
        (broker.directory / "mosquitto.db").unlink(missing_ok=True)  # it forgot everything, as amqtt does
        broker.start()
        # Sessions come back in real time.
        clock.advance_until(lambda: not coordinator.is_running, "the end of the job", 1.0)
        assert coordinator.result is True
    assert len(fleet.counted()) == 2 * fleet.blocks
    assert [verify(file.parent / "state").charges for file in files] == [1, 1]


def test_a_job_whose_last_round_closed_before_a_crash_is_ended_after_it(
    tmp_path: Path, mosquitto: Broker
) -> None:
    fleet = Fleet(tmp_path, mosquitto, rounds=1)
    close_all_rounds(fleet)
    with Observer(mosquitto, fleet.name) as observer, coordinator_thread(fleet.file) as coordinator:
        assert coordinator.wait() is True
        wait_until(lambda: observer.plans, "the farewell")
        assert _is_farewell(fleet, observer.plans[-1])
    assert (fleet.state / "model.onnx").exists()
    # A job that is over is not begun again, and nobody is told twice.
    with Observer(mosquitto, fleet.name) as observer, coordinator_thread(fleet.file) as again:
        assert again.wait() is True
        wait_until(lambda: observer.plans, "the farewell that the broker retains")
        assert len(observer.plans) == 1


def close_all_rounds(fleet: Fleet) -> None:
    fleet.state.mkdir(mode=0o700)
    store = Store(fleet.state)
    weights = DIGITS.initial_weights(0)
    state = np.zeros((1, len(weights)))
    store.begin(new_job(fleet.settings), weights, state, 1.0)
    store.start_round(1, 10.0, 70.0)
    store.close_round(1, weights, state, 1.0, RoundResult(None, 0, 1.0, 1.0, 4.0), closed_at=60.0)
    store.close()


def test_a_fleet_that_could_not_be_told_of_the_end_is_told_after_a_restart(
    tmp_path: Path, new_broker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announcer, "_FAREWELL_S", 0.1)
    broker = new_broker("mosquitto")  # not started
    fleet = Fleet(tmp_path, broker, rounds=1)
    close_all_rounds(fleet)
    with coordinator_thread(fleet.file) as coordinator:
        wait_until(lambda: caplog.text.count("did not accept the announcement") > 1, "two failed farewells")
        assert coordinator.is_running
        assert coordinator.stop() is False
    monkeypatch.undo()
    broker.start()
    with Observer(broker, fleet.name) as observer, coordinator_thread(fleet.file) as coordinator:
        assert coordinator.wait() is True
        wait_until(lambda: observer.plans, "the farewell")


# --- starting -----------------------------------------------------------------------------------


def settings_of(directory: Path, **changes: Any) -> FleetSettings:
    return load_fleet_settings(write_fleet(directory, None, **changes))


def make_and_free(settings: FleetSettings) -> None:
    """Begin or take up a job, and let go of its directory without running it."""
    Coordinator(settings).close()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"privacy": {"epsilon": 5.0}}, "privacy.epsilon was 4.0 and is 5.0"),
        ({"privacy": {"schedule": {"kind": "linear"}}},
         "privacy.schedule.kind was 'uniform' and is 'linear'"),
        ({"rounds": 3}, "rounds was 2 and is 3"),
        ({"fleet": "renamed"}, "fleet was 'testers' and is 'renamed'"),
        ({"model": {"seed": 7}}, "model.seed was 0 and is 7"), ({"cap": {"kind": "none"}}, "cap.kind was"),
        ({"optimiser": {"momentum": 0.5}}, "optimiser.momentum was 0.9 and is 0.5"),
        ({"fragments_per_update": 6}, "fragments_per_update was 5 and is 6"),
        ({"records_per_device": 51}, "records_per_device was 50.0 and is 51.0"),
    ],
)  # fmt: skip
def test_changed_settings_are_refused_with_the_key_named(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    make_and_free(settings_of(tmp_path))
    with pytest.raises(ConfigurationError) as caught:
        Coordinator(settings_of(tmp_path, **changes))
    assert sentence in str(caught.value).replace("`", "")
    make_and_free(settings_of(tmp_path))  # free again, and unchanged


def test_what_does_not_define_the_job_may_change(tmp_path: Path) -> None:
    make_and_free(settings_of(tmp_path))
    make_and_free(
        settings_of(tmp_path, devices=9, round={"deadline_s": 99}, mqtt={"url": "mqtt://elsewhere"})
    )


def test_a_restart_keeps_job_and_keys(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    make_and_free(settings)
    key, sealing = load_signer(settings.keys_dir, "testers"), load_opener(settings.keys_dir, "testers")
    reader = StoreReader(settings.state_dir)
    job = reader.job_id()
    make_and_free(settings)
    assert reader.job_id() == job
    reader.close()
    assert load_signer(settings.keys_dir, "testers").public_key == key.public_key
    assert load_opener(settings.keys_dir, "testers").public_key == sealing.public_key
    assert settings.keys_dir == tmp_path / "keys"
    for name in ("signing.key", "sealing.key"):
        assert (settings.keys_dir / name).stat().st_mode & 0o777 == 0o600


def test_a_new_job_in_another_state_keeps_the_keys(tmp_path: Path) -> None:
    first, second = settings_of(tmp_path), settings_of(tmp_path, state_dir="next", rounds=3)
    make_and_free(first)
    keys = {file.name: file.read_bytes() for file in first.keys_dir.iterdir()}
    with pytest.raises(ConfigurationError, match="in another state_dir"):
        Coordinator(settings_of(tmp_path, rounds=3))
    make_and_free(second)
    assert {file.name: file.read_bytes() for file in second.keys_dir.iterdir()} == keys
    assert not list(second.state_dir.glob("*.key"))


@pytest.mark.parametrize("name", ["signing.key", "sealing.key"])
@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_damaged_key_is_a_sentence(tmp_path: Path, name: str, content: bytes) -> None:
    settings = settings_of(tmp_path)
    make_and_free(settings)
    (settings.keys_dir / name).write_bytes(content)
    with pytest.raises(DpagentError, match=name):
        Coordinator(settings)


def test_two_coordinators_cannot_share_a_state(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    coordinator = Coordinator(settings)
    with pytest.raises(StateInUseError):
        Coordinator(settings)
    coordinator.close()


@pytest.mark.parametrize(
    "changes",
    [{"records_per_device": 1e9, "privacy": {"sampling_rate": 1.0}},
     {"fragments_per_update": 1, "model": {"name": "mnist-cnn"}, "records_per_device": 1e5},
     {"privacy": {"epsilon": 1e-6, "delta": 1e-12}},
     {"privacy": {"epsilon": 100.0, "delta": 1e-5}}],
    ids=["lot", "fragment", "no epsilon", "sampler"],
)  # fmt: skip
def test_a_plan_that_no_device_would_accept_fails_at_the_coordinator(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(PlanError):
        Coordinator(settings_of(tmp_path, **changes))
    make_and_free(settings_of(tmp_path))  # nothing was begun, and nothing is held


def test_a_job_whose_later_rounds_do_not_fit_a_message_is_refused_before_it_begins(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "fragments_per_update": 1, "model": {"name": "mnist-cnn"}, "records_per_device": 300_000,
        "rounds": 50,
        "privacy": {
            "epsilon": 6.8, "delta": 1e-5, "sampling_rate": 0.1, "schedule": {"kind": "incrementing"},
        },
    }  # fmt: skip
    with pytest.raises(PlanError, match="fragments_per_update is 1; expected at least 2"):
        Coordinator(settings_of(tmp_path, **changes))
    assert not (tmp_path / "state" / "coordinator.db").exists() or Store(tmp_path / "state").job() is None
    make_and_free(settings_of(tmp_path, **changes | {"fragments_per_update": 2}))


def test_a_flood_of_rubbish_is_counted_to_the_last_message(tmp_path: Path, mosquitto: Broker) -> None:
    fleet = Fleet(tmp_path, mosquitto)
    number = 2 * _BATCH + 1
    with coordinator_thread(fleet.file) as coordinator, Observer(mosquitto, fleet.name) as observer:
        wait_until(lambda: observer.plans, "the plan")
        coordinator.stop()
        for _ in range(number):  # the broker keeps them for the coordinator's return
            observer.publish(observer.topics.fragments, b"rubbish")
    with coordinator_thread(fleet.file):
        wait_until(lambda: fleet.counters().get("rejected: malformed", 0) >= number, "all the rubbish")
    assert fleet.counters() == {"rejected: malformed": number}


def test_a_missing_password_leaves_the_state_free(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    missing = MqttSettings(username="u", password_file=tmp_path / "none")
    with pytest.raises(ConfigurationError) as caught:
        Coordinator(settings.model_copy(update={"mqtt": missing}))
    assert "password_file" in str(caught.value)
    # The error is still in hand, as it is for a caller who shows it and tries again.
    make_and_free(settings)


def test_a_damaged_database_is_a_sentence(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    make_and_free(settings)
    database = settings.state_dir / "coordinator.db"
    content = bytearray(database.read_bytes())
    content[4_096:] = b"\xaa" * (len(content) - 4_096)
    database.write_bytes(content)
    with pytest.raises(DpagentError, match=r"coordinator\.db"):
        Coordinator(settings)


def test_the_example_of_a_fleet_is_valid() -> None:
    assert FleetSettings.model_validate(fleet_values(None)).rounds == 2


def test_a_stopped_coordinator_ends_well_and_goes_on_with_the_same_job(
    tmp_path: Path, mosquitto: Broker
) -> None:
    fleet = Fleet(tmp_path, mosquitto)
    with Observer(mosquitto, fleet.name) as observer:
        with coordinator_thread(fleet.file) as coordinator:
            wait_until(lambda: observer.plans, "the plan")
            assert coordinator.stop() is False
        plan = fleet.plans(observer)[1]
        assert plan.model.digest == content_digest(weights_to_bytes(DIGITS.initial_weights(0)))
        assert plan.sealing_key == fleet.opener.public_key
        with coordinator_thread(fleet.file, MovableClock(plan.deadline + 1e6)) as again:
            wait_until(lambda: fleet.plans(observer)[1].deadline > plan.deadline, "the plan again")
            again.stop()
        after = fleet.plans(observer)[1]
        assert (after.job, after.round, after.mechanism) == (plan.job, 1, plan.mechanism)
        assert after.deadline == plan.deadline + 1e6 + SLOW["deadline_s"]
