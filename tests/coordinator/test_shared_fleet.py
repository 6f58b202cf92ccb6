"""A coordinator whose state is in PostgreSQL: who runs rounds, who counts, what each says at its start."""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from brokers import Broker, wait_until
from commands import dpagent
from fleets import write_fleet, write_shared
from observers import Observer
from postgresql import Postgresql, postgresql_server
from shared_fleets import SOON, SharedFleet, digest, fragments_of, send

from coordinator.daemon import Coordinator
from coordinator.diagnosis import examine
from coordinator.keys import load_opener
from coordinator.leadership import lead
from coordinator.settings import load_coordinator_settings, load_fleet_settings
from coordinator.worker import Worker
from dpagent import __version__
from dpagent.diagnosis import Finding
from dpagent.errors import BrokerError, ConfigurationError, ExitCode, StateInUseError
from dpagent.protocol.codec import decode
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.receipts import receipt_digest, receipt_place
from dpagent.protocol.signing import Verifier
from dpagent.storage import StateDirectory

DEVICES = 12

pytestmark = pytest.mark.heavy


@pytest.fixture
def fleet(
    tmp_path: Path, mosquitto: Broker, postgresql: Postgresql, request: pytest.FixtureRequest
) -> SharedFleet:
    name = request.node.name.removeprefix("test_")[:60]
    return SharedFleet(tmp_path, mosquitto, postgresql, name, devices=DEVICES, rounds=1)


@pytest.fixture
def programs() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_the_sum_is_exact_whoever_counts_and_whoever_is_killed(
    fleet: SharedFleet, programs: ExitStack, mosquitto: Broker
) -> None:
    """Of two workers one is killed and another one comes; fragments are sent twice, as devices do."""
    observer = programs.enter_context(Observer(mosquitto, fleet.name))
    coordinator = programs.enter_context(fleet.coordinator())
    first, second = (programs.enter_context(fleet.worker("--name", name)) for name in ("one", "two"))
    for each in (first, second):
        wait_until(lambda each=each: "round 1 is counted" in each.said(), "the workers")
    plan = fleet.plan(observer)
    fragments = fragments_of(plan, DEVICES)
    half = fragments[: len(fragments) // 2]
    send(observer, plan, [*half, *half])
    wait_until(lambda: all(each.fragments for each in fleet.workers()), "a share of the work for each")
    first.kill()
    programs.enter_context(fleet.worker("--name", "three"))

    def is_over() -> bool:
        if coordinator.process.poll() is not None:
            return True
        receipted = fleet.receipted(observer)
        send(observer, plan, [each for each in fragments if digest(each) not in receipted])
        return False

    wait_until(is_over, "the end of the job", 60.0)
    assert coordinator.wait() == 0
    (closed,) = fleet.rounds()
    assert closed.fragments == len(fragments)
    assert fleet.counters()["duplicates"] >= len(half) // 2
    assert fleet.weights() == fleet.stepped(plan, fragments)
    with fleet.database() as database:
        assert database.execute("SELECT count(*) FROM partial_sums").fetchone()[0] == 0
    status = dpagent("coordinator", "status", "--config", fleet.file)
    assert "Job first" in status.stdout
    assert "finished" in status.stdout


def test_another_coordinator_stands_by_and_takes_the_place_of_one_that_is_killed(
    fleet: SharedFleet, programs: ExitStack, mosquitto: Broker
) -> None:
    """Also on the same machine, with the same files."""
    observer = programs.enter_context(Observer(mosquitto, fleet.name))
    first = programs.enter_context(fleet.coordinator())
    wait_until(lambda: observer.plans, "the plan")
    second = programs.enter_context(fleet.coordinator())
    wait_until(lambda: "Standing by" in second.said(), "the second one")
    who = f"run by another coordinator ({socket.gethostname()}, process {first.process.pid}, since"
    assert who in second.said()
    alone = "no worker counts fragments: start `dpagent coordinator worker`"
    wait_until(lambda: alone in first.said(), "a word on workers")
    plans = len(observer.plans)
    first.kill()
    wait_until(lambda: len(observer.plans) > plans, "the plan, by the second one")
    assert fleet.plan(observer).round == 1
    second.process.send_signal(signal.SIGTERM)
    assert second.wait() == ExitCode.OK


def test_an_order_to_give_up_is_carried_out_by_the_coordinator_that_stands_by(
    fleet: SharedFleet, programs: ExitStack, mosquitto: Broker
) -> None:
    """The leader is killed before it hears of it; workers go on to count until then. It is the last round."""
    observer = programs.enter_context(Observer(mosquitto, fleet.name))
    first = programs.enter_context(fleet.coordinator())
    worker = programs.enter_context(fleet.worker("--name", "one"))
    wait_until(lambda: "round 1 is counted" in worker.said(), "the worker")
    plan = fleet.plan(observer)
    second = programs.enter_context(fleet.coordinator())
    wait_until(lambda: "Standing by" in second.said(), "the second one")
    first.process.send_signal(signal.SIGSTOP)
    said = dpagent("coordinator", "job", "pause", "first", "--give-up", "--config", fleet.file)
    assert "round 1 is given up as soon as the boards are told" in said.stdout, said.stderr
    half = fragments_of(plan, 3)
    send(observer, plan, half)
    wait_until(lambda: sum(each.fragments for each in fleet.workers()) == len(half), "the fragments")
    first.kill()
    wait_until(lambda: fleet.rounds()[0].given_up_at is not None, "the end of the round")
    assert fleet.rounds()[0].fragments == len(half)
    assert second.wait() == ExitCode.OK
    plans = [Verifier(fleet.key, fleet.name).open(each, Plan, "plan") for each in observer.plans]
    opened_at = plan.deadline - fleet.settings.round.deadline_s
    assert [(each.state, each.deadline <= opened_at) for each in plans[-2:]] == [
        ("open", True), ("finished", False),
    ]  # fmt: skip
    with fleet.database() as database:
        assert database.execute("SELECT count(*) FROM partial_sums").fetchone()[0] == 0


def test_workers_publish_receipts_on_topics_of_their_own_while_nobody_leads(
    tmp_path: Path, mosquitto: Broker, postgresql: Postgresql, programs: ExitStack
) -> None:
    """The leader signs what goes to all; these need no signature. Before, nobody had a receipt until another
    one led."""
    fleet = SharedFleet(tmp_path, mosquitto, postgresql, "own", devices=2, rounds=1, receipts="fragment")
    observer = programs.enter_context(Observer(mosquitto, fleet.name))
    coordinator, worker = programs.enter_context(fleet.coordinator()), programs.enter_context(fleet.worker())
    wait_until(lambda: "round 1 is counted" in worker.said(), "the worker")
    plan = fleet.plan(observer)
    coordinator.kill()
    fragments = fragments_of(plan, 2)
    send(observer, plan, fragments)
    ids = [decode(each, Fragment).id for each in fragments]
    wanted = {(observer.topics.receipt(receipt_place(each)), receipt_digest(each)) for each in ids}

    def own() -> set[tuple[str, bytes]]:
        return {
            (message.topic, bytes(message.payload))
            for message in observer.seen
            if message.topic.startswith(observer.topics.receipt(""))
        }

    wait_until(lambda: own() == wanted, "receipts of all")
    assert observer.receipts == []
    with fleet.database() as database:
        assert database.execute("SELECT count(*) FROM receipts").fetchone()[0] == 0


def test_a_coordinator_that_stands_by_is_stopped_at_once(fleet: SharedFleet, programs: ExitStack) -> None:
    with fleet.database() as database:
        assert database.lead()
        waiting = programs.enter_context(fleet.coordinator())
        wait_until(lambda: "Standing by" in waiting.said(), "the one that stands by")
        waiting.process.send_signal(signal.SIGINT)
        assert waiting.wait() == ExitCode.INTERRUPTED


def test_a_database_that_goes_away_ends_nothing(
    tmp_path: Path, mosquitto: Broker, programs: ExitStack
) -> None:
    server = programs.enter_context(postgresql_server())
    fleet = SharedFleet(tmp_path, mosquitto, server, "away", devices=2, rounds=1)
    observer = programs.enter_context(Observer(mosquitto, fleet.name))
    coordinator, worker = programs.enter_context(fleet.coordinator()), programs.enter_context(fleet.worker())
    wait_until(lambda: "round 1 is counted" in worker.said(), "the worker")
    plan = fleet.plan(observer)
    fragments = fragments_of(plan, 2)
    send(observer, plan, fragments[:4])
    wait_until(lambda: len(fleet.receipted(observer)) == 4, "four receipts")
    server.kill()
    for each in (coordinator, worker):
        wait_until(lambda each=each: "is away" in each.said(), "a word on that")
        wait_until(lambda each=each: "Trying again" in each.said(), "more tries")
    server.start()
    wait_until(lambda: worker.said().count("round 1 is counted") == 2, "the worker, again")
    send(observer, plan, fragments)
    wait_until(lambda: coordinator.process.poll() is not None, "the end of the job", 60.0)
    assert coordinator.wait() == 0
    assert fleet.weights() == fleet.stepped(plan, fragments)


# --- sentences at the start ------------------------------------------------------------------------


def worker_of(file: Path) -> Worker:
    return Worker(load_coordinator_settings(file), name="tried")


def started(fleet: SharedFleet, version: str = __version__) -> None:
    """What a coordinator leaves in the database."""
    with lead(fleet.settings, fleet.key) as database:
        database.execute("UPDATE fleet SET version = ?", (version,))


def test_another_fleets_database_is_refused(fleet: SharedFleet, mosquitto: Broker, tmp_path: Path) -> None:
    started(fleet)
    other = write_fleet(tmp_path / "other", mosquitto, fleet=fleet.name, store=fleet.store, round=SOON)
    words = re.escape(f"is the store of fleet '{fleet.name}' with coordinator key {fleet.key}; this is fleet")
    with pytest.raises(ConfigurationError, match=f"{words}.*Two coordinators cannot share it"):
        Coordinator(load_fleet_settings(other))
    started(fleet)  # The one that was refused leads no more.
    with pytest.raises(ConfigurationError, match="this is a worker of 'b'"):
        worker_of(write_shared(tmp_path / "third", mosquitto, fleet="b", store=fleet.store))


def test_a_worker_of_another_version_is_refused(fleet: SharedFleet) -> None:
    started(fleet, "0.0.1")
    with pytest.raises(
        ConfigurationError, match=r"the coordinator 0\.0\.1\. Install the version of the coord"
    ):
        worker_of(fleet.file)


def test_a_worker_ends_when_the_coordinator_is_of_another_version_now(
    fleet: SharedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.worker._SEEN_S", 0.0)
    started(fleet)
    worker = worker_of(fleet.file)
    with fleet.database() as database:
        database.execute("UPDATE fleet SET version = '9.9'")
    with pytest.raises(ConfigurationError, match=r"the coordinator 9\.9"):
        worker.run(threading.Event())


def test_a_worker_waits_for_the_first_coordinator(fleet: SharedFleet, programs: ExitStack) -> None:
    worker = programs.enter_context(fleet.worker())
    wait_until(lambda: "has no tables yet: start `dpagent coordinator run`" in worker.said(), "a word")
    started(fleet)
    wait_until(lambda: "connected" in worker.said(), "the worker")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == ExitCode.OK
    assert fleet.workers() == [], "it has taken its leave"


def test_a_worker_without_the_key_is_told_where_to_get_it_and_may_have_it_from_the_database(
    fleet: SharedFleet, tmp_path: Path, mosquitto: Broker
) -> None:
    started(fleet)
    alone = write_shared(tmp_path / "alone", mosquitto, fleet=fleet.name, store=fleet.store)
    with pytest.raises(ConfigurationError, match=r"sealing\.key is missing.*store\.shares_sealing_key: true"):
        worker_of(alone)
    shared = fleet.settings.store.with_values({"shares_sealing_key": True})
    fleet.settings = fleet.settings.with_values({"store": shared})
    started(fleet)
    worker_of(alone).close()
    assert not (tmp_path / "alone" / "keys").exists(), "it is on no disk of the worker"


def test_a_worker_with_another_key_is_told_so(
    fleet: SharedFleet, tmp_path: Path, mosquitto: Broker, programs: ExitStack
) -> None:
    observer = programs.enter_context(Observer(mosquitto, fleet.name))
    programs.enter_context(fleet.coordinator())
    wait_until(lambda: observer.plans, "the plan")
    other = write_shared(tmp_path / "other", mosquitto, fleet=fleet.name, store=fleet.store)
    load_opener(tmp_path / "other" / "keys", fleet.name)
    with pytest.raises(ConfigurationError, match="sealed to another key than this worker has"):
        worker_of(other).run(threading.Event())


def test_the_doctor_says_who_leads_and_who_counts(fleet: SharedFleet, tmp_path: Path) -> None:
    def found() -> Finding:
        return next(each for each in examine(fleet.settings, asks_broker=False) if each.check == "store")

    assert "no coordinator has used it yet" in found().text
    started(fleet)
    assert f"nobody leads; last {socket.gethostname()}, process" in found().text
    with fleet.database() as database:
        assert database.lead()
        assert f"led by {socket.gethostname()}, process" in found().text
    assert "0 workers" in found().text
    assert "start `dpagent coordinator worker`" in str(found())
    worker = worker_of(fleet.file)
    assert found().text.endswith("; 1 worker")
    worker.close()
    away = fleet.settings.store.with_values({"url": "postgresql://tester@127.0.0.1:1/postgres"})
    fleet.settings = fleet.settings.with_values({"store": away})
    assert "No PostgreSQL answers at" in found().text


def test_a_worker_beside_sqlite_is_refused(tmp_path: Path, mosquitto: Broker) -> None:
    with pytest.raises(ConfigurationError, match=r"store\.url is not set"):
        worker_of(write_fleet(tmp_path / "file", mosquitto, fleet="in-a-file"))


@pytest.mark.parametrize("software", ["amqtt", "mosquitto"])
def test_a_broker_without_shared_subscriptions_is_refused(
    tmp_path: Path, request: pytest.FixtureRequest, postgresql: Postgresql, software: str
) -> None:
    """One that knows MQTT 3.1.1 alone, and one that is asked for it."""
    broker: Broker = request.getfixturevalue(software)
    own = broker.values | ({"protocol": "3.1.1"} if software == "mosquitto" else {})
    fleet = SharedFleet(tmp_path, broker, postgresql, "unshared", mqtt=own)
    started(fleet)
    worker = worker_of(fleet.file)
    with pytest.raises(BrokerError, match=r"speaks MQTT 3\.1\.1 here, and workers need shared subscriptions"):
        worker.run(threading.Event())


def test_a_broker_that_says_it_shares_nothing_is_refused(fleet: SharedFleet) -> None:
    started(fleet)
    worker = worker_of(fleet.file)
    with pytest.raises(BrokerError, match="has no shared subscriptions, and workers need them"):
        worker._require_sharing("5", shares=False)
    worker.close()


def test_a_wrong_password_is_a_sentence_without_the_password(
    fleet: SharedFleet, tmp_path: Path, postgresql: Postgresql
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("battery staple\n")
    result = dpagent("coordinator", "worker", "--config", fleet.file, "--set", f"store.password_file={wrong}")
    said = " ".join(result.stderr.split())
    assert result.returncode == ExitCode.CONFIGURATION
    assert "refuses the connection" in said
    assert "Check store.url and store.password_file" in said
    assert "battery" not in said


def test_the_directory_is_held_by_the_one_that_leads(fleet: SharedFleet) -> None:
    with StateDirectory(fleet.settings.state_dir), pytest.raises(StateInUseError):
        Coordinator(fleet.settings)
