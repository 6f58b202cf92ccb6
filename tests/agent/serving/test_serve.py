"""``dpagent serve``: a real process, real sockets, a real broker, and whoever asks wrongly."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from brokers import Broker, wait_for, wait_until
from children import PATIENCE_S
from commands import dpagent
from exported_models import answers, write_model
from fleets import Program, agent_values
from hostile_files import slow_jpeg
from pictures import encoded, noise, write

import agent.other_brokers
from agent.latest_model import personal_of
from agent.serving.answers import Answers, _Process
from agent.serving.lines import GIVES_WAY
from agent.serving.server import serve as run_server
from agent.serving.topic import TopicServer, require_another_broker
from agent.settings import AgentSettings, load_agent_settings
from dpagent.errors import ConfigurationError
from dpagent.protocol.signing import Signer
from dpagent.storage import write_atomically
from dpagent.transport.events import Received, Subscribed

KEY = Signer(bytes(range(32)), "testers").public_key
NAMES = ["cat", "fox", "owl"]
WALKS = {"features": ["ay", "ax"], "offset": {"ay": 9.81}, "scale": 10, "window": 4}
COLUMNS = {"ax": [1.0, 2.0, 3.0, 4.0], "ay": [9.0, 10.0, 11.0, 12.0], "unused": "text"}
SCALED = np.stack([(np.array(COLUMNS["ay"]) - 9.81) / 10, np.array(COLUMNS["ax"]) / 10], axis=1)
SHAPE = (8, 12, 3)


def config(directory: Path, broker: Broker | None = None, **serve: Any) -> Path:
    file = directory / "agent.yaml"
    values = agent_values(broker, KEY, model={"file": "model.onnx"}, serve={"socket": "ask.sock"} | serve)
    file.write_text(yaml.safe_dump(values))
    return file


class Client:
    """A program of the board, on one connection."""

    def __init__(self, directory: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(str(directory / "ask.sock"))
        self._lines = self._socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def next(self) -> Any:
        line = self._lines.readline()
        return json.loads(line) if line else None

    def ask(self, **request: Any) -> Any:
        self.send(json.dumps(request).encode() + b"\n")
        return self.next()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


Serve = Callable[..., Program]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers, ready, that end with the test."""
    running: list[Program] = []

    def start(**settings: Any) -> Program:
        program = Program("serve", "--config", config(tmp_path, **settings), log=tmp_path / "serve.log")
        running.append(program)
        wait_until(lambda: "listening at" in program.said(), "the server")
        return program

    yield start
    for program in running:
        program.kill()


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[Callable[[], Client]]:
    made: list[Client] = []

    def connect() -> Client:
        made.append(Client(tmp_path))
        return made[-1]

    yield connect
    for client in made:
        client.close()


def expected(shares: np.ndarray) -> dict[str, Any]:
    """The answer with these probabilities."""
    order = np.argsort(-shares)
    top = [
        {"class": NAMES[number], "probability": pytest.approx(shares[number], abs=2e-6)} for number in order
    ]
    return {**top[0], "top": top}


def test_columns_and_arrays_are_answered_as_numpy_does(
    tmp_path: Path, serve: Serve, clients: Callable[[], Client]
) -> None:
    write_model(tmp_path / "model.onnx", (4, 2), 3, NAMES, {"csv": WALKS})
    program, client = serve(), Client(tmp_path)
    right = expected(answers((4, 2), 3, SCALED[np.newaxis].astype(np.float32))[0])
    assert client.ask(id=7, inputs=COLUMNS) == {"id": 7} | right
    assert client.ask(id="a", inputs=SCALED.tolist()) == {"id": "a"} | right
    assert client.ask(inputs=COLUMNS, top=1) == right | {"top": right["top"][:1]}
    assert client.ask(inputs=COLUMNS, top=99) == right
    about = client.ask(about=True)
    assert about["inputs"] == {"csv": WALKS}
    assert (about["model"], about["classes"], about["input_shape"]) == ("linear", NAMES, [4, 2])
    # Several connections, and several requests in one piece, the last without an end.
    other = clients()
    line = json.dumps({"inputs": COLUMNS}).encode()
    other.send(line + b"\n\n" + line + b"\n" + line)
    other._socket.shutdown(socket.SHUT_WR)
    assert [other.next() for _ in range(4)] == [right, right, right, None]
    client.close()
    assert program.stop() == 0
    assert not (tmp_path / "ask.sock").exists()


def test_pictures_are_answered_by_path_and_by_bytes(
    tmp_path: Path, serve: Serve, clients: Callable[[], Client]
) -> None:
    write_model(tmp_path / "model.onnx", SHAPE, 3, NAMES)
    pixels = noise(1)
    file = write(tmp_path / "a.png", encoded(pixels))
    serve()
    client = clients()
    right = expected(answers(SHAPE, 3, pixels[np.newaxis])[0])
    assert client.ask(picture=str(file)) == right
    assert client.ask(picture_bytes=base64.b64encode(file.read_bytes()).decode()) == right
    assert "does not say what columns" in client.ask(inputs=COLUMNS)["error"]
    assert "no base64" in client.ask(picture_bytes="!")["error"]
    assert "not a picture" in client.ask(picture_bytes="aaaa")["error"]
    assert "no regular file" in client.ask(picture="/dev/zero")["error"]


BAD: list[tuple[bytes, str]] = [
    (b"hello", "no JSON"),
    (b"[1]", "expected a JSON object"),
    (b"{}", "no input; expected one of"),
    (b"[" * 50_000, "no JSON"),
    (b'{"inputs": ' + b"9" * 5_000 + b"}", "no JSON"),
    (b'{"inputs": {}}', "'ay' is missing"),
    (b'{"inputs": {"ax": [1, 2], "ay": [1, 2, 3, 4]}}', "expected a list of 4 numbers"),
    (b'{"inputs": {"ax": ["1", 2, 3, 4], "ay": [1, 2, 3, 4]}}', "expected a list of 4 numbers"),
    (b'{"inputs": {"ax": [true, false, true, true], "ay": [1, 2, 3, 4]}}', "expected a list of 4 numbers"),
    (b'{"inputs": {"ax": [[1], 2, 3, 4], "ay": [1, 2, 3, 4]}}', "expected a list of 4 numbers"),
    (b'{"inputs": {"ax": [NaN, 2, 3, 4], "ay": [1, 2, 3, 4]}}', "NaN or infinity"),
    (b'{"inputs": {"ax": [1e300, 2, 3, 4], "ay": [1, 2, 3, 4]}}', "NaN or infinity"),
    (b'{"inputs": [[1, 2]]}', "expected numbers of shape (4, 2)"),
    (b'{"inputs": [["x", 2]]}', "something else than numbers"),
    (b'{"inputs": 3}', "`inputs` is 3; expected columns"),
    (b'{"inputs": {}, "about": true}', "inputs and about; expected one of"),
    (b'{"about": false}', "`about` is False; expected true"),
    (b'{"about": true, "delete": 1}', "the key 'delete'"),
    (b'{"about": true, "id": [1]}', "`id` is [1]"),
    (b'{"about": true, "id": "' + b"x" * 200 + b'"}', "at most 128"),
    (b'{"about": true, "top": 0}', "`top` is 0"),
    (b'{"picture": "a.png"}', "expected an absolute path"),
    (b'{"picture": "/etc/passwd"}', "no picture"),
    (b'{"inputs": {"ax": [1, 2, 3, 4], "ay": "\\ud800"}}', "expected a list of 4 numbers"),
    (b"\xff\xfe", "no JSON"),
]


def test_each_bad_request_costs_itself_alone(
    tmp_path: Path, serve: Serve, clients: Callable[[], Client]
) -> None:
    write_model(tmp_path / "model.onnx", (4, 2), 3, NAMES, {"csv": WALKS})
    program = serve()
    client = clients()
    right = client.ask(inputs=COLUMNS)
    for line, said in BAD:
        client.send(line + b"\n")
        answer = client.next()
        assert said in answer["error"], line[:80]
        assert len(answer["error"]) < 1_000
    assert client.ask(inputs=COLUMNS) == right
    assert "given up" not in program.said()


def test_a_new_model_is_taken_and_no_request_is_dropped(
    tmp_path: Path, serve: Serve, clients: Callable[[], Client]
) -> None:
    model = write_model(tmp_path / "model.onnx", (4, 2), 3, NAMES, {"csv": WALKS})
    serve()
    client, done, seen = clients(), threading.Event(), []

    def asks() -> None:
        while not done.is_set():
            seen.append(client.ask(inputs=COLUMNS)["class"])

    asking = threading.Thread(target=asks)
    asking.start()
    try:
        wait_until(lambda: len(seen) > 20, "answers of the first model")
        first = seen[0]
        renamed = write_model(tmp_path / "new", (4, 2), 3, [f"new {name}" for name in NAMES], {"csv": WALKS})
        write_atomically(model, renamed.read_bytes())
        wait_until(lambda: seen[-1] == f"new {first}", "answers of the second")
        # What is no model changes nothing.
        write_atomically(model, b"not a model")
        wait_until(lambda: "the model is not taken" in (tmp_path / "serve.log").read_text(), "a look")
        count = len(seen)
        wait_until(lambda: len(seen) > count + 20, "more answers")
    finally:
        done.set()
        asking.join()
    assert set(seen) == {first, f"new {first}"}
    assert seen == sorted(seen, key=lambda name: name != first)


def test_systemd_is_told_when_it_serves_and_when_it_ends(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(60)
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        program = serve()
        assert manager.recv(1_000) == b"READY=1"
        assert b"is not there yet" in manager.recv(1_000)
        write_model(tmp_path / "model.onnx", (4, 2), 3, NAMES, {"csv": WALKS})
        assert b"is being read" in manager.recv(1_000)
        assert manager.recv(1_000) == b"STATUS=answers with model 'linear' after round 7"
        assert program.stop() == 0
        assert manager.recv(1_000) == b"STOPPING=1"


def test_what_it_says_of_the_boards_own_model_is_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is another follows from the records. Before, the service manager told every user of the
    board, and lines that are collected without those that are private did."""
    options = ("--config", config(tmp_path, model="personal"), "--log-format", "json")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(60)
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with Program("serve", *options, log=tmp_path / "serve.log") as program:
            assert manager.recv(1_000) == b"READY=1"
            for number in (1, 2):  # By the second one, what it tells of the first is said.
                write_model(tmp_path / "model.personal.onnx", (4, 2), 3, NAMES, {"csv": WALKS})
                wait_until(lambda: program.said().count("answers with") == number, "a model")  # noqa: B023
            assert program.stop() == 0
        told = [manager.recv(1_000) for _ in range(2)]
    assert told == [b"STATUS=answers with the board's own model, if there is one", b"STOPPING=1"]
    lines = [json.loads(line) for line in program.said().splitlines()]
    assert any("round 7" in line["message"] for line in lines)
    assert all(line.get("private") for line in lines)


@pytest.mark.usefixtures("executed")
@pytest.mark.parametrize("model", ["latest", "personal"])
def test_a_model_that_comes_after_the_server_is_read_behind_all_other_programs(
    tmp_path: Path, serve: Serve, clients: Callable[[], Client], model: str
) -> None:
    """Whether there is one, records decide: by what they make of it, or by the room that they leave on the
    disk. Before, it was read before training, at a time that the coordinator chose as well: training on one
    core was late for as long as that took."""
    program, client = serve(model=model), clients()
    assert "comes when a job of the fleet is finished" in client.ask(inputs=COLUMNS)["error"]
    name = "model.onnx" if model == "latest" else "model.personal.onnx"
    write_model(tmp_path / name, (4, 2), 3, NAMES, {"csv": WALKS})

    def is_read_behind() -> bool:
        return any(os.SCHED_IDLE in policies_of(child) for child in children_of(program))

    wait_until(is_read_behind, "a model that is read behind all others")
    wait_until(lambda: "error" not in client.ask(inputs=COLUMNS), "an answer")
    (child,) = children_of(program)
    assert os.sched_getscheduler(child) == os.SCHED_OTHER, "it answers as any program does"
    assert os.getpriority(os.PRIO_PROCESS, child) == os.getpriority(os.PRIO_PROCESS, 0)
    wait_until(lambda: policies_of(child) == {os.SCHED_OTHER}, "the end of the thread that read it")
    # That it is read again tells nothing of when it came: whoever asks is not to wait for training.
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: child not in children_of(program), "the end of the process")
    assert "error" not in client.ask(inputs=COLUMNS)
    (other,) = children_of(program)
    assert GIVES_WAY not in Path(f"/proc/{other}/cmdline").read_text()


def with_a_model_that_is_never_ready(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "never_ready.py").write_text("import sys\nsys.stdin.read()\n")
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setattr("agent.serving.answers._PROGRAM", "never_ready")


def test_nobody_waits_for_long_for_a_model_that_is_read_behind_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where training wants all cores. Before, each request waited for two minutes more than the one before,
    and so did the start, which systemd gives up by then, and the end."""
    with_a_model_that_is_never_ready(tmp_path, monkeypatch)
    monkeypatch.setattr("agent.serving.answers._LOAD_S", 0.2)
    monkeypatch.setattr("agent.serving.answers._LOOK_S", 0.1)
    waited: list[float] = []
    original = _Process.wait

    def wait(process: _Process, seconds: float) -> None:
        waited.append(seconds)
        original(process, seconds)

    monkeypatch.setattr(_Process, "wait", wait)
    (tmp_path / "model.onnx").write_bytes(b"a model")
    stop, said = threading.Event(), []
    served = Answers(tmp_path / "model.onnx", 1.0, stop, is_of_records=True)

    def ask() -> None:
        said.append(json.loads(served.answer(b"{}", reads_files=False))["error"])

    try:
        served.begin()
        assert not waited, "the start waits for nothing"
        ask()
        so_far = len(waited)
        ask()
        assert len(waited) == so_far, "the next one does not wait anew"
        monkeypatch.setattr("agent.serving.answers._LOAD_S", 100.0)
        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: len(waited) > so_far, "one that waits")
        stop.set()
        wait_until(lambda: len(said) == 3, "its answer at the end")
        asking.join()
    finally:
        stop.set()
        served.close()
    assert all("is being read" in each for each in said)


def test_a_socket_that_was_left_is_replaced_and_one_in_use_is_not(
    tmp_path: Path, serve: Serve, clients: Callable[[], Client]
) -> None:
    write_model(tmp_path / "model.onnx", (4, 2), 3, NAMES, {"csv": WALKS})
    path = tmp_path / "ask.sock"
    serve().kill()
    assert path.exists()
    (tmp_path / "serve.log").unlink()
    program = serve(mode="0660")
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    second = dpagent("serve", "--config", tmp_path / "agent.yaml")
    assert second.returncode == 7
    assert "Another `dpagent serve` listens at" in second.stderr
    assert "Traceback" not in second.stderr
    assert clients().ask(about=True)["model"] == "linear"
    program.process.send_signal(signal.SIGINT)
    assert program.wait() == 130


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ask.sock").write_text("mine")
    result = dpagent("serve", "--config", config(tmp_path))
    assert result.returncode == 8
    assert "no socket" in result.stderr
    assert (tmp_path / "ask.sock").read_text() == "mine"
    long = dpagent("serve", "--config", config(tmp_path, socket="x" * 200))
    assert long.returncode == 3
    assert "expected at most 107" in long.stderr


def test_a_request_that_takes_too_long_is_given_up_alone(
    tmp_path: Path, serve: Serve, clients: Callable[[], Client]
) -> None:
    write_model(tmp_path / "model.onnx", SHAPE, 3, NAMES)
    program = serve(timeout_s=1)
    client, other = clients(), clients()
    slow = write(tmp_path / "slow.jpg", slow_jpeg())
    fine = write(tmp_path / "fine.png", encoded(noise(1)))
    assert "took more than 1 s (serve.timeout_s)" in client.ask(picture=str(slow))["error"]
    assert client.ask(picture=str(fine))["class"] in NAMES
    assert other.ask(picture=str(fine))["class"] in NAMES
    assert program.is_running()


@pytest.mark.usefixtures("executed")
def test_a_process_that_ends_is_started_again(
    tmp_path: Path, serve: Serve, clients: Callable[[], Client]
) -> None:
    write_model(tmp_path / "model.onnx", (4, 2), 3, NAMES, {"csv": WALKS})
    program, client = serve(), clients()
    right = client.ask(inputs=COLUMNS)
    (child,) = children_of(program)
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: child not in children_of(program), "the end of the process")
    assert client.ask(inputs=COLUMNS) == right
    (other,) = children_of(program)
    # However the server ends, it leaves no process behind.
    program.kill()
    wait_until(lambda: not Path(f"/proc/{other}").exists(), "the end of the process")


def seated(clients: Callable[[], Client]) -> Client:
    """A client with a seat: a connection that has just ended may keep its own for a moment."""

    def found() -> Client | None:
        client = clients()
        with contextlib.suppress(ConnectionError):
            return client if "model" in (client.ask(about=True) or {}) else None
        return None

    seat: Client = wait_until(found, "a seat")
    return seat


def test_requests_and_connections_are_bounded(
    tmp_path: Path, serve: Serve, clients: Callable[[], Client]
) -> None:
    write_model(tmp_path / "model.onnx", (4, 2), 3, NAMES, {"csv": WALKS})
    serve(maximum_request_mib=1)
    long = clients()
    long.send(b" " * ((1 << 20) + 1))
    assert "more than 1,048,576 bytes" in long.next()["error"]
    assert long.next() is None
    seats = [seated(clients) for _ in range(16)]
    assert "There are 16 connections already" in clients().next()["error"]
    seats[0].close()
    seated(clients)
    # A line that does not end in ten seconds ends its connection, and no other.
    seats[1].send(b'{"about"')
    assert seats[1].next() is None
    assert seats[2].ask(about=True)["model"] == "linear"


def policies_of(process: int) -> set[int]:
    """By which its threads get the processor."""
    found = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            found.add(os.sched_getscheduler(int(task.name)))
    return found


def children_of(program: Program) -> list[int]:
    """The processes that it has started, by whichever thread, and that live: in any of their threads, since
    the first of a process that is killed may be gone before the others."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = status.read_text().rpartition(") ")
            threads = len(list((status.parent / "task").iterdir()))
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if (state != "Z" or threads > 1) and parent == str(program.process.pid):
            found.append(int(name.split()[0]))
    return found


# --- over a topic ---


def test_a_topic_of_a_local_broker_is_answered(tmp_path: Path, mosquitto: Broker, serve: Serve) -> None:
    write_model(tmp_path / "model.onnx", (4, 2), 3, NAMES, {"csv": WALKS})
    program = serve(mqtt=mosquitto.values, topic="home/porch")
    right = expected(answers((4, 2), 3, SCALED[np.newaxis].astype(np.float32))[0])
    with mosquitto.session("app", "home/porch/answer") as app:
        wait_for(app, Subscribed)
        wait_until(lambda: "answers at home/porch/answer" in program.said(), "the topic")

        def ask(payload: bytes) -> Any:
            app.publish("home/porch/ask", payload)
            return json.loads(wait_for(app, Received).payload)

        # The server's subscription follows its connection.
        wait_until(lambda: _heard(app, ask_about), "the subscription")
        assert ask(json.dumps({"id": 1, "inputs": COLUMNS}, indent=1).encode()) == {"id": 1} | right
        assert "over MQTT" in ask(b'{"picture": "/etc/passwd"}')["error"]
        assert "no JSON" in ask(b"")["error"]
        assert "no JSON" in ask(b"a\nb")["error"]
    assert program.stop() == 0


ask_about = b'{"about": true}'


def _heard(app: Any, payload: bytes) -> bool:
    app.publish("home/porch/ask", payload)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        if isinstance(app.next_event(0.1), Received):
            return True
    return False


def settings_with(tmp_path: Path, fleet: str, ask: str, **serve: Any) -> AgentSettings:
    values = agent_values(None, KEY, mqtt={"url": fleet}, serve={"mqtt": {"url": ask}} | serve)
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(values))
    return load_agent_settings(tmp_path / "agent.yaml")


@pytest.mark.parametrize(
    ("fleet", "ask"),
    [
        ("mqtt://127.0.0.1:18831", "mqtt://127.0.0.1:18831"),
        ("mqtt://localhost:18831", "mqtt://127.0.0.1:18831"),
        ("mqtts://Broker.invalid", "mqtts://broker.INVALID"),
        ("mqtt://broker.invalid", "mqtt://broker.invalid:1883"),
        ("mqtts://broker.invalid", "mqtt://broker.invalid"),
        ("mqtts://192.0.2.1", "mqtt://192.0.2.1"),
        ("mqtts://192.0.2.1", "mqtts://[::ffff:192.0.2.1]"),
        ("mqtts://broker.invalid", "mqtts://broker.invalid."),
    ],
)
def test_the_broker_of_the_fleet_is_refused_by_any_name(tmp_path: Path, fleet: str, ask: str) -> None:
    with pytest.raises(ConfigurationError, match="the broker of the fleet"):
        require_another_broker(settings_with(tmp_path, fleet, ask))
    require_another_broker(settings_with(tmp_path, fleet, ask, fleet_broker=True))
    with pytest.raises(ConfigurationError, match="reveals its records"):
        require_another_broker(settings_with(tmp_path, fleet, ask, fleet_broker=True, model="personal"))
    require_another_broker(settings_with(tmp_path, fleet, "mqtt://127.0.0.1:18832"))


@pytest.mark.parametrize("model", ["latest", "personal"])
def test_a_name_that_leads_to_the_fleets_broker_by_now_ends_the_answers(
    tmp_path: Path, mosquitto: Broker, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """A board that starts before its network knows no name's addresses. Before, the fleet's operator could
    then ask the board's own model, as often as it liked."""
    fleet = mosquitto.values | {"url": mosquitto.values["url"].replace("127.0.0.1", "localhost")}
    values = agent_values(None, KEY, mqtt=fleet, serve={"mqtt": mosquitto.values, "model": model})
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(values))
    settings = load_agent_settings(tmp_path / "agent.yaml")
    with monkeypatch.context() as without_network:
        without_network.setattr(agent.other_brokers, "_addresses", lambda broker: set())
        require_another_broker(settings)
    with TopicServer(settings, Answers(tmp_path / "none.onnx", 1.0, threading.Event())) as server:
        wait_until(lambda: server.failure, "the end of the answers")
    assert isinstance(server.failure, ConfigurationError)
    assert "broker of the fleet" in str(server.failure) or "reveals its records" in str(server.failure)


def test_a_request_that_waits_for_a_model_holds_up_no_end(
    tmp_path: Path, mosquitto: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that failed ended up to two minutes later: somebody waited for a model that was being read.
    And where they asked before it was ready, it was not ready before that."""
    fleet = mosquitto.values | {"url": mosquitto.values["url"].replace("127.0.0.1", "localhost")}
    asked_at = {"mqtt": mosquitto.values, "model": "personal", "socket": "ask.sock"}
    values = agent_values(None, KEY, mqtt=fleet, model={"file": "model.onnx"}, serve=asked_at)
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(values))
    settings = load_agent_settings(tmp_path / "agent.yaml")
    with_a_model_that_is_never_ready(tmp_path, monkeypatch)
    personal_of(settings.model_file).write_bytes(b"a model")
    asked, addresses = threading.Event(), agent.other_brokers._addresses

    def known_late(broker: Any) -> Any:
        if threading.current_thread().name != "topic":
            return set()
        asked.wait(PATIENCE_S)
        return addresses(broker)

    monkeypatch.setattr(agent.other_brokers, "_addresses", known_late)
    begin = Answers.begin

    def begin_late(self: Answers) -> None:
        client.connect(str(tmp_path / "ask.sock"))
        client.sendall(b'{"about": true}\n')
        time.sleep(0.5)
        begin(self)
        asked.set()

    monkeypatch.setattr(Answers, "begin", begin_late)
    with socket.socket(socket.AF_UNIX) as client, ThreadPoolExecutor() as threads:
        ending = threads.submit(run_server, settings, threading.Event())
        with pytest.raises(ConfigurationError, match="reveals its records"):
            ending.result(PATIENCE_S)


def test_a_request_that_waits_for_a_model_holds_up_no_start_that_fails(
    tmp_path: Path, mosquitto: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked before the topic could not be had held it up by two minutes."""
    asked_at = {"mqtt": mosquitto.values, "socket": "ask.sock", "fleet_broker": True}
    values = agent_values(None, KEY, mqtt=mosquitto.values, model={"file": "model.onnx"}, serve=asked_at)
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump(values))
    settings = load_agent_settings(tmp_path / "agent.yaml")
    with_a_model_that_is_never_ready(tmp_path, monkeypatch)
    settings.model_file.write_bytes(b"a model")

    def none(*_: Any) -> Any:
        client.connect(str(tmp_path / "ask.sock"))
        client.sendall(b'{"about": true}\n')
        time.sleep(0.5)
        raise ConfigurationError("no password")

    monkeypatch.setattr("agent.serving.server.TopicServer", none)
    with socket.socket(socket.AF_UNIX) as client, ThreadPoolExecutor() as threads:
        ending = threads.submit(run_server, settings, threading.Event())
        with pytest.raises(ConfigurationError, match="no password"):
            ending.result(PATIENCE_S)


def test_topics_of_fleets_and_patterns_are_refused(tmp_path: Path) -> None:
    for topic in ("dpagent/v1/testers", "home/+", "#", "/home", "$SYS/x", "a\0b", ""):
        with pytest.raises(ConfigurationError, match=r"serve\.topic|serve"):
            settings_with(tmp_path, "mqtt://127.0.0.1", "mqtt://127.0.0.1:18832", topic=topic)
