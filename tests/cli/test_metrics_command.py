"""``dpagent metrics``: what a board tells Prometheus, and what it does not."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
from pathlib import Path

import pytest
from brokers import reserved_port, wait_until
from commands import command_line, dpagent
from fleets import write_agent

from agent.settings import load_agent_settings
from agent.status import Doing, Link, RoundStatus, Status, StatusFile
from coordinator.keys import load_signer
from dpagent.clock import SystemClock

_SENSORS = re.compile(r"temperature|memory|mib|disk|load|energy|slot|records|phase|held", re.IGNORECASE)


@pytest.fixture
def board(tmp_path: Path) -> Path:
    key = load_signer(tmp_path / "keys", "testers").public_key
    return write_agent(tmp_path / "board", None, key, 1)


def note(file: Path) -> None:
    """What an agent in this process would say."""
    announced = RoundStatus("ab" * 16, 3, 9, "dp-sgd", Doing.TRAIN, None, 2e9)
    status = Status(Link.CONNECTED, "mqtt://here", "plans", announced, "the board is hot", 1.7e9)
    StatusFile(load_agent_settings(file).state_dir, SystemClock(), {}).note(status, is_last=True)


def values(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_a_board_that_never_ran_has_its_budget(board: Path) -> None:
    found = values(dpagent("metrics", "--config", board).stdout)
    assert (found["dpagent_agent_up"], found["dpagent_agent_connected"]) == (0, 0)
    assert found['dpagent_agent_epsilon_budget{account="digits"}'] == 4
    assert found['dpagent_agent_epsilon_spent{account="digits"}'] == 0


def test_nothing_is_in_them_that_may_tell_of_a_record(board: Path) -> None:
    note(board)
    text = dpagent("metrics", "--config", board).stdout
    found = values(text)
    assert (found["dpagent_agent_up"], found["dpagent_agent_connected"]) == (1, 1)
    assert (found["dpagent_agent_announced_round"], found["dpagent_agent_announced_rounds"]) == (3, 9)
    assert found["dpagent_agent_last_receipt_timestamp_seconds"] == 1.7e9
    assert [name for name in found if _SENSORS.search(name)] == []
    assert "train" not in text
    assert "hot" not in text


def test_whether_a_model_found_room_beside_the_records_is_not_in_them(board: Path) -> None:
    """The coordinator chooses its size, and how full the disk is follows from the records on it."""
    note(board)
    without = dpagent("metrics", "--config", board).stdout
    file = load_agent_settings(board).model_file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"a model")
    assert dpagent("metrics", "--config", board).stdout == without


def test_with_dummy_traffic_they_hide_which_rounds_it_takes_part_in(board: Path) -> None:
    note(board)
    board.write_text(board.read_text().replace("limits:", "limits:\n  dummy_traffic: true"))
    found = values(dpagent("metrics", "--config", board).stdout)
    assert found["dpagent_agent_up"] == 1
    assert [name for name in found if re.search("reserved|spent|receipt", name)] == []
    assert found['dpagent_agent_epsilon_budget{account="digits"}'] == 4


def test_they_go_into_a_file_for_node_exporter(board: Path, tmp_path: Path) -> None:
    file = tmp_path / "dpagent.prom"
    assert dpagent("metrics", "--config", board, "--out", file).returncode == 0
    assert values(file.read_text())["dpagent_agent_up"] == 0


def test_at_a_loopback_port_they_are_served_under_its_own_name_alone(board: Path) -> None:
    with reserved_port() as reserved:
        port = reserved.getsockname()[1]
        serving = subprocess.Popen(command_line("metrics", "--config", board, "--listen", str(port)))
        try:

            def asked(host: str) -> tuple[int, str]:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                try:
                    connection.request("GET", "/metrics", headers={"Host": host})
                    answer = connection.getresponse()
                    return answer.status, answer.read().decode()
                except OSError:
                    return 0, ""
                finally:
                    connection.close()

            status, text = wait_until(lambda: (found := asked(f"localhost:{port}"))[0] and found, "the port")
            assert status == 200
            assert values(text)["dpagent_agent_up"] == 0
            assert asked("evil.example")[0] == 421
        finally:
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(20) == 0
