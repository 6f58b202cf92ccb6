"""A fleet with members: real broker with mutual TLS, real endpoint, agents and coordinator as processes."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker, BrokerFactory, wait_until
from commands import TIMEOUT_S, command_line, dpagent
from cryptography import x509
from enrolments import DIED, EnrolmentFleet, die_at, die_with_an_identity, enrol, mutual_tls
from fleets import Program, digits
from launching.starts import Popen
from members import certified, new_authority, written

from agent.audit import audit
from agent.charges import BudgetChange, Charge
from agent.identity import Identity, read_certificate
from agent.settings import AgentSettings, load_agent_settings
from coordinator.authority import load_authorities
from coordinator.devices import DeviceState
from dpagent.errors import ExitCode
from dpagent.learning.data.formats.npz import save_npz
from dpagent.transport.events import Connected, Disconnected
from dpagent.transport.session import MqttSession, Pace
from dpagent.transport.settings import MqttSettings

QUICK = (
    *("--set", "limits.minimum_compute_slot_s=0.001", "--set", "limits.minimum_jitter_window_s=0"),
    *("--set", "limits.minimum_fragments=1", "--set", "limits.messages_per_second=200"),
    *("--set", "limits.maximum_update_mib=1", "--set", "limits.maximum_charges=500"),
)


class Scene:
    """A fleet, its endpoint and its broker, both running."""

    def __init__(self, directory: Path, new_broker: BrokerFactory, **changes: Any) -> None:
        # The broker's configuration names files that the fleet makes, and the fleet's the broker's port.
        self.members = directory / "fleet" / "members"
        self.broker = mutual_tls(new_broker, self.members)
        url = f"mqtts://127.0.0.1:{self.broker.port}"
        self.fleet = EnrolmentFleet(directory / "fleet", url, **changes).start()
        self.broker.start()

    def board(self, directory: Path) -> AgentSettings:
        (code,) = self.fleet.invite()
        result = enrol(code, directory)
        assert (result.returncode, result.stderr) == (0, "")
        assert f"Connected to mqtts://127.0.0.1:{self.broker.port}." in result.stdout
        return load_agent_settings(directory / "agent.yaml")


@pytest.fixture
def new_scene(tmp_path: Path, new_broker: BrokerFactory) -> Iterator[Callable[..., Scene]]:
    """Makes the scene of a test, which ends with it; takes changes of ``fleet.yaml``."""
    with ExitStack() as made:

        def make(**changes: Any) -> Scene:
            scene = Scene(tmp_path, new_broker, **changes)
            made.callback(scene.fleet.stop)
            return scene

        yield make


@pytest.fixture
def scene(new_scene: Callable[..., Scene]) -> Scene:
    return new_scene()


def outcome(settings: MqttSettings) -> str | None:
    """How a connection ends that is refused; None for one that the broker accepts."""
    pace = Pace(answer_s=3.0, pause_s=0.1, longest_s=3.0)
    found: list[str | None] = []

    def settled() -> bool:
        match session.next_event(0.1):
            case Connected():
                found.append(None)
            case Disconnected(reason):
                found.append(reason)
        return bool(found)

    with MqttSession(settings, client_id=None, subscriptions=[], persistent=False, pace=pace) as session:
        wait_until(settled, "an answer of the broker")
    return found[0]


def test_boards_enrol_and_run_a_job_with_the_coordinator_over_mutual_tls(
    tmp_path: Path, new_scene: Callable[..., Scene]
) -> None:
    scene = new_scene(rounds=1)
    run = Program("coordinator", "run", "--config", scene.fleet.file, log=tmp_path / "run.log")
    with run as coordinator, ExitStack() as boards:
        for number in range(2):
            board = tmp_path / f"board-{number}"
            board.mkdir()
            save_npz(board / "data.npz", digits(50 * number, 50 * number + 50))
            settings = scene.board(board)
            # No password and no user: the broker knows the board by its certificate.
            assert settings.mqtt.username is None
            boards.enter_context(Program("run", "--config", board / "agent.yaml", *QUICK, log=board / "log"))
        assert coordinator.wait(200) == ExitCode.OK
    for number in range(2):
        entries = audit(tmp_path / f"board-{number}" / "state").entries
        assert any(isinstance(entry.record, Charge) for entry in entries)


def test_the_broker_lets_in_members_and_nobody_else(scene: Scene, tmp_path: Path) -> None:
    settings = scene.board(tmp_path / "board").mqtt
    authority = load_authorities(scene.members, now=datetime.now(UTC)).issuing
    assert outcome(settings) is None

    def with_identity(name: str, identity: Identity) -> MqttSettings:
        cert_file, key_file = written(tmp_path, name, identity.certificate, identity.private_key)
        return settings.with_values({"cert_file": cert_file, "key_file": key_file})

    foreign = certified(new_authority(tmp_path / "foreign"))
    expired = certified(authority, days=0.01, issued_ago=timedelta(minutes=30))
    refused = [
        settings.with_values({"cert_file": None, "key_file": None}),
        with_identity("foreign", foreign),
        with_identity("expired", expired),
    ]
    for each in refused:
        assert outcome(each) is not None


def test_a_stolen_board_is_revoked_and_replaced(scene: Scene, tmp_path: Path) -> None:
    """Revoked at both, and its successor enrols; what the broker has in hand stays until it starts again."""
    stolen = scene.board(tmp_path / "stolen")
    assert stolen.mqtt.cert_file is not None
    lost = read_certificate(stolen.mqtt.cert_file)
    with Program("run", "--config", tmp_path / "stolen/agent.yaml", *QUICK, log=tmp_path / "log") as agent:
        wait_until(lambda: "connected to" in agent.said(), "the thief's connection")
        listed = scene.fleet.run("devices", "list").stdout
        device = Identity.load(stolen.mqtt.cert_file, stolen.mqtt.key_file or Path()).device_id
        assert device in listed
        replaced = scene.fleet.run("devices", "replace", device)
        assert replaced.returncode == 0
        reload_lists(scene.broker)
        wait_until(lambda: outcome(stolen.mqtt) is not None, "a broker that has read the list")
        # A broker looks at the list as a connection begins. To end those that it has, it starts again.
        assert agent.said().count("reconnecting") == 0
        scene.broker.stop()
        scene.broker.start()
        wait_until(lambda: "may refuse mqtt.cert_file" in agent.said(), "the thief's end")
    with scene.fleet.devices() as devices:
        known = devices.holder(lost)
        assert known is not None
        assert known.state is DeviceState.REVOKED
    (code,) = replaced.stdout.split()
    assert enrol(code, tmp_path / "heir").returncode == 0
    shown = scene.fleet.run("devices", "show", "--json", device)
    assert '"state": "replaced"' in shown.stdout
    # Nothing lets the thief in again: neither the code nor the endpoint.
    again = enrol(code, tmp_path / "stolen")
    assert (again.returncode, "has been used" in again.stderr) == (ExitCode.USAGE, True)


def test_a_board_that_is_replaced_by_itself_keeps_its_ledger(scene: Scene, tmp_path: Path) -> None:
    settings = scene.board(tmp_path / "board")
    assert settings.mqtt.cert_file is not None
    before, identity = audit(settings.state_dir).entries, read_certificate(settings.mqtt.cert_file)
    text = (tmp_path / "board/agent.yaml").read_text()
    with scene.fleet.devices() as devices:
        device = devices.holder(identity)
    assert device is not None
    (code,) = scene.fleet.run("devices", "replace", device.id).stdout.split()
    reload_lists(scene.broker)
    result = enrol(code, tmp_path / "board")
    assert (result.returncode, result.stderr) == (0, "")
    assert audit(settings.state_dir).entries == before
    assert (tmp_path / "board/agent.yaml").read_text() == text
    now = read_certificate(settings.mqtt.cert_file)
    assert now.public_key() != identity.public_key()
    assert outcome(settings.mqtt) is None


def reload_lists(broker: Broker) -> None:
    child = broker._child
    assert child is not None
    os.kill(child.process.pid, signal.SIGHUP)


def test_a_certificate_is_renewed_while_the_agent_runs(
    tmp_path: Path, new_scene: Callable[..., Scene]
) -> None:
    """It is due at once, since it begins an hour early. The next connection is made with the new one: the
    broker refuses the one before."""
    scene = new_scene(enrolment={"certificate_days": 0.02})
    settings = scene.board(tmp_path / "board")
    assert settings.mqtt.cert_file is not None
    first = read_certificate(settings.mqtt.cert_file)
    file = tmp_path / "board/agent.yaml"
    with Program("run", "--config", file, *QUICK, log=tmp_path / "log") as agent:
        wait_until(lambda: "connected to" in agent.said(), "a connection")
        wait_until(lambda: "the certificate is renewed" in agent.said(), "a renewal")
        following = read_certificate(settings.mqtt.cert_file)
        assert following.serial_number != first.serial_number
        authority = load_authorities(scene.members, now=datetime.now(UTC)).issuing
        gone = authority.revocation_list([(first.serial_number, 0.0)], now=datetime.now(UTC))
        (scene.members / "revoked.crl").write_bytes(gone)
        scene.broker.stop()
        scene.broker.start()
        wait_until(lambda: agent.said().count("connected to mqtts") == 2, "a connection with the new one")
        assert agent.stop() == ExitCode.OK


def test_a_fleet_changes_its_authority_while_boards_go_on(
    tmp_path: Path, new_scene: Callable[..., Scene]
) -> None:
    """One board renews during the change, one enrols, one sleeps through it."""
    scene = new_scene(enrolment={"certificate_days": 0.02})
    one, asleep = (scene.board(tmp_path / name) for name in ("one", "asleep"))
    assert one.enrolment is not None
    (before,) = trusted_by(one)
    assert scene.fleet.run("ca", "change").returncode == 0
    reload_lists(scene.broker)
    endpoint = scene.fleet.endpoint
    assert endpoint is not None
    wait_until(lambda: "the authority has changed" in endpoint.said(), "the endpoint")
    renew_one(tmp_path / "one", tmp_path / "log")
    assert len(trusted_by(one)) == 2
    two = scene.board(tmp_path / "two")
    assert [issuer_of(each) == before.subject for each in (one, two, asleep)] == [False, False, True]
    assert [outcome(each.mqtt) for each in (one, two, asleep)] == [None, None, None]
    assert "2 of 3 members" in scene.fleet.run("ca", "show").stdout

    refused = scene.fleet.run("ca", "retire")
    asleep_id = Identity.load(*pair_of(asleep)).device_id
    assert (refused.returncode, asleep_id[:8] in refused.stderr) == (ExitCode.USAGE, True)
    refused = scene.fleet.run("ca", "retire", "--lock-out")
    assert (refused.returncode, "coordinator.crt" in refused.stderr) == (ExitCode.USAGE, True)
    make_again(scene, "coordinator", "ca", "client", "coordinator")
    retired = scene.fleet.run("ca", "retire", "--lock-out")
    assert (retired.returncode, f"devices replace {asleep_id[:8]}" in retired.stdout) == (0, True)
    reload_lists(scene.broker)
    wait_until(lambda: outcome(asleep.mqtt) is not None, "a broker that has read its files")
    make_again(scene, "broker", "ca", "server", "127.0.0.1")
    reload_lists(scene.broker)

    def shown() -> x509.Certificate:
        pem = ssl.get_server_certificate(("127.0.0.1", scene.broker.port))
        return x509.load_pem_x509_certificate(pem.encode())

    wait_until(lambda: shown().issuer != before.subject, "the broker's new certificate")
    coordinator = scene.fleet.settings.mqtt
    assert [outcome(each) for each in (one.mqtt, two.mqtt, coordinator)] == [None, None, None]

    wait_until(lambda: endpoint.said().count("the authority has changed") == 2, "the endpoint")
    renew_one(tmp_path / "one", tmp_path / "log-2")
    (after,) = trusted_by(one)
    assert after.subject != before.subject
    (code,) = scene.fleet.run("devices", "replace", asleep_id).stdout.split()
    assert enrol(code, tmp_path / "asleep").returncode == 0


def make_again(scene: Scene, name: str, *words: str) -> None:
    for suffix in ("crt", "key"):
        (scene.members / f"{name}.{suffix}").unlink()
    assert scene.fleet.run(*words).returncode == 0


def renew_one(board: Path, log: Path) -> None:
    with Program("run", "--config", board / "agent.yaml", *QUICK, log=log) as agent:
        wait_until(lambda: "the certificate is renewed" in agent.said(), "a renewal")
        assert agent.stop() == ExitCode.OK


def pair_of(settings: AgentSettings) -> tuple[Path, Path]:
    assert settings.mqtt.cert_file is not None
    assert settings.mqtt.key_file is not None
    return settings.mqtt.cert_file, settings.mqtt.key_file


def issuer_of(settings: AgentSettings) -> x509.Name:
    return read_certificate(pair_of(settings)[0]).issuer


def trusted_by(settings: AgentSettings) -> list[x509.Certificate]:
    assert settings.enrolment is not None
    return x509.load_pem_x509_certificates(settings.enrolment.ca_file.read_bytes())


def test_an_enrolment_that_is_interrupted_goes_on_with_the_same_code(scene: Scene, tmp_path: Path) -> None:
    """Killed after each file that it writes, until it writes no more; one device comes of it."""
    (code,) = scene.fleet.invite()
    board = tmp_path / "board"
    for number in range(1, 30):
        result = interrupted(code, board, partial(die_at, number))
        if result != DIED:
            break
    assert result == ExitCode.OK
    assert number > 4
    settings = load_agent_settings(board / "agent.yaml")
    assert [type(entry.record) for entry in audit(settings.state_dir).entries] == [BudgetChange]
    assert outcome(settings.mqtt) is None
    with scene.fleet.devices() as devices:
        assert len(devices.all()) == 1
    found = dpagent("doctor", "--config", board / "agent.yaml", "--no-broker")
    assert found.returncode == ExitCode.OK


def test_another_code_after_an_interruption_makes_another_device(scene: Scene, tmp_path: Path) -> None:
    (first, second) = scene.fleet.invite("--count", "2")
    board = tmp_path / "board"
    assert interrupted(first, board, die_with_an_identity) == DIED
    assert interrupted(second, board) == ExitCode.OK
    assert sorted(file.name for file in (board / "identity").iterdir()) == [
        "device.crt", "device.key", "fleet-ca.crt",
    ]  # fmt: skip
    assert outcome(load_agent_settings(board / "agent.yaml").mqtt) is None


def interrupted(code: str, board: Path, first: Callable[[], object] | None = None) -> int:
    board.mkdir(exist_ok=True)
    save_npz(board / "data.npz", digits(0, 50))
    words = command_line(
        "enrol", code, "--config", board / "agent.yaml", "--data", board / "data.npz", "--epsilon", "6"
    )
    with Popen(words, first=first, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        return process.wait(TIMEOUT_S)


def test_a_code_file_keeps_the_code_from_the_list_of_processes(scene: Scene, tmp_path: Path) -> None:
    image = tmp_path / "invitation"
    assert scene.fleet.run("invite", "--count", "2", "--image", str(image)).returncode == 0
    for number in range(2):
        board = tmp_path / f"board-{number}"
        board.mkdir()
        save_npz(board / "data.npz", digits(0, 50))
        result = dpagent(
            "enrol", "--code-file", image, "--config", board / "agent.yaml", "--data", board / "data.npz",
            "--epsilon", "6",
        )  # fmt: skip
        assert (result.returncode, result.stderr) == (0, "")


def test_an_enrolled_board_whose_broker_is_away_says_so_and_need_not_enrol_again(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.enrol._PATIENCE_S", 1.0)
    scene.broker.stop()
    (code,) = scene.fleet.invite()
    result = enrol(code, tmp_path / "board")
    assert result.returncode == ExitCode.BROKER
    assert "need not be repeated" in result.stderr
    scene.broker.start()
    assert outcome(load_agent_settings(tmp_path / "board/agent.yaml").mqtt) is None
