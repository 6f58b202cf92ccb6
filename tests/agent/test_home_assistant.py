"""A board in Home Assistant: what a real broker gets, and what it never does."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from brokers import Broker, BrokerFactory, wait_until
from commands import dpagent
from fleets import write_agent

from agent import home_assistant
from agent.disclosed import Disclosed, DisclosedAccount
from agent.home_assistant import HomeAssistant, board_id, entities_of, next_due
from agent.overview import overview_of
from agent.profile import open_profile
from agent.sensors import Sensors
from agent.settings import AgentSettings, load_agent_settings, on_board
from agent.status import Doing, Link, RoundStatus, Status, StatusFile
from coordinator.keys import load_signer
from dpagent.clock import SystemClock
from dpagent.errors import ConfigurationError, ExitCode
from dpagent.transport.events import Connected, Received
from dpagent.transport.session import MqttSession

_TELLS_TOO_MUCH = re.compile(
    r"temperature|memory|mib|disk|load|energy|slot|records|phase|held|train|model_at", re.IGNORECASE
)
FLEET_BROKER = {"url": "mqtts://broker.example:8883"}


def board_file(tmp_path: Path, broker: Broker, **changes: Any) -> Path:
    key = load_signer(tmp_path / "keys", "testers").public_key
    own = {"mqtt": broker.values, "name": "attic", "every_s": 5.0}
    values = {"mqtt": FLEET_BROKER, "home_assistant": own} | changes
    return write_agent(tmp_path / "board", None, key, 1, **values)


def settings_of(file: Path) -> AgentSettings:
    loaded = load_agent_settings(file)
    return on_board(loaded, open_profile(loaded.profile).profile)


def note(settings: AgentSettings) -> None:
    """What an agent in this process would say."""
    announced = RoundStatus("ab" * 16, 3, 9, "dp-sgd", Doing.TRAIN, None, 2e9)
    status = Status(Link.CONNECTED, "mqtt://here", "plans", announced, "the board is hot", 1.7e9)
    StatusFile(settings.state_dir, SystemClock(), {}).note(status, is_last=True)


@contextmanager
def told(settings: AgentSettings) -> Iterator[None]:
    stop, failures = threading.Event(), []

    def run() -> None:
        try:
            HomeAssistant(settings, lambda: overview_of(settings, Sensors())).run(stop)
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
    assert failures == []


def heard(session: MqttSession, found: dict[str, bytes]) -> dict[str, bytes]:
    """What the broker has sent by now, by topic."""
    while (event := session.next_event(0.05)) is not None:
        if isinstance(event, Received):
            found[event.topic] = event.payload
    return found


@pytest.fixture
def broker(new_broker: BrokerFactory) -> Broker:
    return new_broker("mosquitto").start()


def test_home_assistant_finds_the_board_and_reads_its_values(tmp_path: Path, broker: Broker) -> None:
    settings = settings_of(board_file(tmp_path, broker))
    note(settings)
    board = board_id(settings)
    with broker.session("home", "homeassistant/#", f"dpagent/{board}/status") as home:
        found: dict[str, bytes] = {}
        with told(settings):
            wait_until(lambda: f"dpagent/{board}/status" in heard(home, found), "the values")
    values = json.loads(found.pop(f"dpagent/{board}/status"))
    shown = {}
    for topic, message in found.items():
        if not message:
            continue
        prefix, component, node, key, last = topic.split("/")
        assert (prefix, node, last) == ("homeassistant", board, "config")
        config = json.loads(message)
        assert config["state_topic"] == f"dpagent/{board}/status"
        assert (config["device"]["name"], config["expire_after"]) == ("attic", 15)
        (name,) = re.findall(r"^\{\{ value_json\.(\w+) \}\}$", config["value_template"])
        assert name == key
        shown[key] = (component, values[name])
    assert set(values) == set(shown)
    assert shown["running"] == ("binary_sensor", "ON")
    assert shown["connected"] == ("binary_sensor", "ON")
    assert shown["round"] == ("sensor", 3)
    assert shown["account_0_spent"] == ("sensor", 0.0)
    assert shown["receipt"] == ("sensor", "2023-11-14T22:13:20Z")
    everything = b"".join(found.values()).decode() + json.dumps(values)
    assert _TELLS_TOO_MUCH.findall(everything) == []
    for secret in ("testers", "hot", "abab", "broker.example", str(tmp_path)):
        assert secret not in everything, "nothing of the fleet, its job or the board's places"


def test_how_long_the_board_took_to_be_looked_at_moves_no_message() -> None:
    """Before, each came so much later than the one before it, in milliseconds: by how busy the board is, as a
    look at a new record makes it."""
    times = {
        took_s: [due := next_due(due, 60.0, due + took_s) for _ in range(3)]
        for took_s in (0.0, 0.03, 59.9)
        if (due := 7.0)
    }
    assert set(map(tuple, times.values())) == {(67.0, 127.0, 187.0)}
    assert next_due(7.0, 60.0, 7.0 + 61.0) == 127.0


class _Line:
    """A connection that is there at once, on a clock of its own: each wait takes a little too long."""

    connected = True

    def __init__(self) -> None:
        self.now, self._events = 1_000.0, [Connected()]

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *of_an_error: object) -> None:
        pass

    def next_event(self, seconds: float) -> Connected | None:
        self.now += seconds + 0.1
        return self._events.pop() if self._events else None


def teller_on(line: _Line, settings: AgentSettings, monkeypatch: pytest.MonkeyPatch) -> Any:
    teller = HomeAssistant(settings, lambda: overview_of(settings, Sensors()))
    monkeypatch.setattr(home_assistant, "time", SimpleNamespace(monotonic=lambda: line.now))
    monkeypatch.setattr(teller, "_session", line)
    return teller


def test_messages_go_out_at_fixed_intervals(
    tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, one that took longer to be read than it is read ahead went out late, by as long."""
    settings, line, stop, times = settings_of(board_file(tmp_path, broker)), _Line(), threading.Event(), []
    teller, take_s = teller_on(line, settings, monkeypatch), iter([0.0, 0.3, 3.1, 0.0])

    def told() -> dict[str, bytes]:
        line.now += next(take_s)
        return {}

    def publish(told: object) -> None:
        times.append(line.now)
        line.now += 0.7
        if len(times) == 4:
            stop.set()

    monkeypatch.setattr(teller, "_told", told)
    monkeypatch.setattr(teller, "_publish", publish)
    teller.run(stop)
    assert [each - times[0] for each in times] == pytest.approx([0.0, 5.0, 15.0, 20.0], abs=0.15)


def test_a_name_that_leads_to_the_fleets_broker_by_now_ends_the_program(
    tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(board_file(tmp_path, broker))
    teller, remover = (teller_on(_Line(), settings, monkeypatch) for _ in range(2))
    monkeypatch.setattr(home_assistant, "are_one", lambda own, fleet: True)
    monkeypatch.setattr(teller, "_publish", lambda told: pytest.fail("the fleet's broker is told"))
    with pytest.raises(ConfigurationError, match="the broker of the fleet"):
        teller.run(threading.Event())
    with pytest.raises(ConfigurationError, match="the broker of the fleet"):
        remover.remove()


def test_a_board_is_looked_at_before_it_is_told_of(tmp_path: Path, broker: Broker) -> None:
    settings = settings_of(board_file(tmp_path, broker))
    teller = HomeAssistant(settings, lambda: overview_of(settings, Sensors()))
    told = teller._told()
    teller._look = lambda: pytest.fail("it is looked at when a message is due")
    teller._publish(told)
    assert list(told)[-1] == f"dpagent/{board_id(settings)}/status"


def test_with_dummy_traffic_they_hide_which_rounds_it_takes_part_in(tmp_path: Path, broker: Broker) -> None:
    """What was announced before the owner switched it on is taken back."""
    file = board_file(tmp_path, broker)
    settings = settings_of(file)
    note(settings)
    board = board_id(settings)
    with told(settings), broker.session("before", f"homeassistant/sensor/{board}/receipt/config") as home:
        wait_until(lambda: any(heard(home, {}).values()), "the entity")
    file.write_text(file.read_text().replace("limits:", "limits:\n  dummy_traffic: true"))
    hiding = settings_of(file)
    assert hiding.limits.dummy_traffic
    with broker.session("home", "homeassistant/#", f"dpagent/{board}/status") as home:
        found: dict[str, bytes] = {}
        with told(hiding):
            wait_until(lambda: f"dpagent/{board}/status" in heard(home, found), "the values")
            wait_until(
                lambda: heard(home, found)[f"homeassistant/sensor/{board}/receipt/config"] == b"", "no entity"
            )
    values = json.loads(found[f"dpagent/{board}/status"])
    assert [key for key in values if re.search("spent|reserved|receipt", key)] == []


def test_a_board_is_forgotten_on_request(tmp_path: Path, broker: Broker) -> None:
    file = board_file(tmp_path, broker)
    settings = settings_of(file)
    board = board_id(settings)
    with told(settings), broker.session("home", f"dpagent/{board}/status") as home:
        wait_until(lambda: heard(home, {}), "the values")
    result = dpagent("home-assistant", "--config", file, "--remove")
    assert (result.returncode, "forgets this board" in result.stdout) == (0, True), result.stderr
    with broker.session("later", "homeassistant/#", "end") as home:
        wait_until(lambda: isinstance(home.next_event(0.1), Connected), "a connection")
        wait_until(lambda: home.publish("end", b"end") is not None, "room")
        found: dict[str, bytes] = {}
        wait_until(lambda: "end" in heard(home, found), "the end")
    assert set(found) == {"end"}


def test_the_fleets_broker_is_refused_by_whatever_name(tmp_path: Path, broker: Broker) -> None:
    port = broker.values["url"].rpartition(":")[2]
    for fleet in (broker.values["url"], f"mqtt://localhost:{port}", f"mqtt://127.0.0.2:{port}"):
        file = board_file(tmp_path, broker, mqtt={**broker.values, "url": fleet})
        result = dpagent("home-assistant", "--config", file)
        assert result.returncode == ExitCode.CONFIGURATION
        assert "the broker of the fleet" in result.stderr
    elsewhere = {"mqtt": {"url": "mqtt://broker.example:1883"}}
    settings = settings_of(board_file(tmp_path, broker, home_assistant=elsewhere))
    with pytest.raises(ConfigurationError, match="or one on its host"):
        HomeAssistant(settings, lambda: overview_of(settings, Sensors()))


def test_without_a_broker_it_says_what_is_missing(tmp_path: Path, broker: Broker) -> None:
    result = dpagent("home-assistant", "--config", board_file(tmp_path, broker, home_assistant=None))
    assert (result.returncode, "home_assistant.mqtt.url" in result.stderr) == (ExitCode.CONFIGURATION, True)
    file = board_file(tmp_path, broker)
    file.write_text(file.read_text().replace("name: attic", "discovery_prefix: dpagent/v1/testers"))
    result = dpagent("home-assistant", "--config", file)
    assert (result.returncode, "discovery_prefix" in result.stderr) == (ExitCode.CONFIGURATION, True)


def test_the_boards_id_there_is_its_own_and_stays(tmp_path: Path, broker: Broker) -> None:
    file = board_file(tmp_path, broker)
    first, again = board_id(settings_of(file)), board_id(settings_of(file))
    assert first == again
    other = settings_of(file).with_values({"fleet": "another"})
    assert board_id(other) != first


@pytest.mark.parametrize("epsilon", [1.9999190963726172, 1e-9, 2.0])
def test_an_epsilon_is_told_rounded_up(epsilon: float) -> None:
    account = DisclosedAccount("digits", budget=4.0, reserved=epsilon, spent=math.inf)
    board = Disclosed(True, True, True, None, None, None, (account,), None, None)
    told = {each.key: each.value for each in entities_of(board)}
    assert epsilon <= told["account_0_reserved"] <= epsilon + 1e-6
    assert (told["account_0_budget"], told["account_0_spent"]) == (4.0, "no bound")
