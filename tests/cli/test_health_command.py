"""``dpagent health``: a daemon that gets on is told from one that is stopped, by a real agent."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from brokers import Broker, wait_until
from children import PATIENCE_S, Child
from commands import Result, dpagent
from fleets import run_agent, run_coordinator, write_agent, write_fleet

from cli.health import require_sign_of_life
from coordinator.keys import load_signer
from dpagent.errors import ChildProcessError, ExitCode, UsageError
from dpagent.protocol.signing import Signer
from dpagent.service_manager import ServiceManager

OFTEN = {"WATCHDOG_USEC": "2000000"}


def as_the_image_runs_it(environment: dict[str, str]) -> Result:
    return subprocess.run(
        [sys.executable, "-P", "-m", "cli.health"], env=dict(os.environ) | environment,
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


@contextmanager
def feeding(environment: dict[str, str]) -> Iterator[None]:
    """A program that gets on."""
    over, manager = threading.Event(), ServiceManager(environment)

    def feed() -> None:
        while not over.wait(0.02):
            manager.alive()

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_an_agent_is_healthy_until_it_is_stopped_and_again_when_it_goes_on(
    tmp_path: Path, mosquitto: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = OFTEN | {"NOTIFY_SOCKET": str(tmp_path / "n")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    key = Signer(bytes(range(32)), "healthy").public_key
    with run_agent(write_agent(tmp_path / "board", mosquitto, key, fleet="healthy")) as agent:
        wait_until(lambda: "waiting for a plan" in agent.said(), "an agent that serves")
        result = as_the_image_runs_it(environment)
        assert (result.returncode, result.stderr) == (0, "")
        assert dpagent("health").returncode == 0
        agent.process.send_signal(signal.SIGSTOP)
        result = as_the_image_runs_it(environment)
        assert result.returncode == ExitCode.CHILD
        assert re.search(r"no sign of life on \S+/n\b", result.stderr)
        agent.process.send_signal(signal.SIGCONT)
        assert as_the_image_runs_it(environment).returncode == 0
    assert not (tmp_path / "n").exists()


def test_a_coordinator_that_stays_after_its_job_is_healthy_and_ends_well(
    tmp_path: Path, mosquitto: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = OFTEN | {"NOTIFY_SOCKET": str(tmp_path / "n")}
    file = write_fleet(tmp_path / "fleet", mosquitto, fleet="staying", devices=1)
    key = load_signer(tmp_path / "fleet" / "keys", "staying").public_key
    with (
        run_coordinator(file) as coordinator,
        run_agent(write_agent(tmp_path / "board", mosquitto, key, fleet="staying")),
    ):
        assert coordinator.wait() == 0
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-P", "-m", "cli.main", "coordinator", "run", "--stay", "--config", file]
    with Child(command, tmp_path / "log") as staying:
        wait_until(lambda: "staying until a stop" in staying.said(), "a coordinator without work")
        assert dpagent("health").returncode == 0
        assert dpagent("coordinator", "status", "--config", file).returncode == 0
        assert staying.stop() == 0


def test_a_socket_that_a_killed_check_left_is_in_nobodys_way(tmp_path: Path) -> None:
    environment = OFTEN | {"NOTIFY_SOCKET": str(tmp_path / "n")}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(environment["NOTIFY_SOCKET"])
    with feeding(environment):
        assert require_sign_of_life(environment) >= 0


def test_checks_at_one_time_take_turns(tmp_path: Path) -> None:
    environment = {"WATCHDOG_USEC": "10000000", "NOTIFY_SOCKET": str(tmp_path / "n")}
    results: list[float] = []
    checks = [
        threading.Thread(target=lambda: results.append(require_sign_of_life(environment))) for _ in range(3)
    ]
    with feeding(environment | {"WATCHDOG_USEC": "100000"}):
        for check in checks:
            check.start()
        for check in checks:
            check.join()
    assert len(results) == 3


def test_a_word_that_is_none_of_getting_on_is_no_sign_of_life(tmp_path: Path) -> None:
    environment = {"WATCHDOG_USEC": "500000", "NOTIFY_SOCKET": str(tmp_path / "n")}
    over = threading.Event()

    def talk() -> None:
        manager = ServiceManager({"NOTIFY_SOCKET": environment["NOTIFY_SOCKET"]})
        while not over.wait(0.02):
            manager.ready()

    talker = threading.Thread(target=talk)
    talker.start()
    try:
        with pytest.raises(ChildProcessError, match=r"0\.5 s"):
            require_sign_of_life(environment)
    finally:
        over.set()
        talker.join()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": "@abstract", "WATCHDOG_USEC": "1000"},
        {"NOTIFY_SOCKET": "/somewhere"},
        {"NOTIFY_SOCKET": "/somewhere", "WATCHDOG_USEC": "soon"},
        {"NOTIFY_SOCKET": "/somewhere", "WATCHDOG_USEC": "0"},
    ],
)
def test_without_an_address_and_a_time_nobody_is_called_healthy(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="dpagent service status"):
        require_sign_of_life(environment)


def test_a_place_where_nobody_can_listen_is_named(tmp_path: Path) -> None:
    address = str(tmp_path / "none" / "n")
    with pytest.raises(ChildProcessError, match=re.escape(address)):
        require_sign_of_life(OFTEN | {"NOTIFY_SOCKET": address})


def test_what_is_no_socket_stays(tmp_path: Path) -> None:
    file = tmp_path / "n"
    file.write_text("mine")
    with pytest.raises(ChildProcessError):
        require_sign_of_life({"NOTIFY_SOCKET": str(file), "WATCHDOG_USEC": "300000"})
    assert file.read_text() == "mine"


def test_the_module_loads_no_package_of_others() -> None:
    shown = "import sys, cli.health; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-P", "-c", shown], capture_output=True, text=True, check=True)
    own = set(result.stdout.split()) - set(sys.stdlib_module_names)
    assert own <= {"cli", "dpagent", "__main__"} | {
        name for name in own if name.startswith(("_", "sitecustomize"))
    }
