"""``dpagent coordinator serve``, ``page-token``, ``report``, ``status --watch``, as an operator runs them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
from brokers import wait_until
from commands import command_line, dpagent, dpagent_process
from fleets import write_fleet
from stores import BLANK_MODEL, begin_job

from coordinator.measurements import Traffic
from coordinator.queue import Queue
from coordinator.settings import load_fleet_settings
from coordinator.store import RoundResult, Store
from dpagent.errors import ExitCode
from dpagent.learning.inference.evaluation import Evaluation


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_fleet(tmp_path / "fleet", None, fleet="meadow")


@pytest.fixture
def store(file: Path) -> Store:
    store = begin_job(load_fleet_settings(file), BLANK_MODEL)
    store.start_round(1, 10.0, 70.0)
    return store


def close(store: Store) -> None:
    evaluation = Evaluation(np.array([[30, 10], [0, 20]]), 0.5)
    result = RoundResult(evaluation, 0, 1.0, 2.5, 1.25, traffic=Traffic(700, 900))
    store.close_round(1, BLANK_MODEL, result, closed_at=40.0)


def test_a_token_is_made_once_and_renewed_on_demand(file: Path) -> None:
    first = dpagent("coordinator", "page-token", "--config", file).stdout
    assert dpagent("coordinator", "page-token", "--config", file).stdout == first
    viewer = dpagent("coordinator", "page-token", "--config", file, "--role", "viewer").stdout
    renewed = dpagent("coordinator", "page-token", "--config", file, "--renew").stdout
    assert len({first, viewer, renewed}) == 3
    assert all(re.fullmatch(r"[\w-]{43}\n", each) for each in (first, viewer, renewed))


def test_serving_where_others_reach_it_needs_to_know_who_they_are(file: Path) -> None:
    refused = dpagent_process("coordinator", "serve", "--config", file, "--set", "page.listen=0.0.0.0")
    assert refused.returncode == ExitCode.CONFIGURATION
    assert "page-token" in refused.stderr


def test_a_port_that_is_taken_is_named(file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = dpagent_process("coordinator", "serve", "--config", file, "--set", f"page.port={port}")
    assert refused.returncode == ExitCode.CONFIGURATION
    assert f"port {port}" in refused.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory away")
def test_the_page_runs_as_the_coordinators_user(file: Path, store: Store) -> None:
    os.chown(load_fleet_settings(file).state_dir, 65_534, 65_534)
    refused = dpagent_process("coordinator", "serve", "--config", file)
    assert refused.returncode == ExitCode.CONFIGURATION
    assert "sudo -u nobody" in refused.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_page_ends_as_it_is_told(file: Path, tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log"
    with log.open("wb") as stream:
        serving = subprocess.Popen(
            command_line("coordinator", "serve", "--config", file, "--set", "page.port=0"), stderr=stream
        )
    wait_until(lambda: "is at http://127.0.0.1:" in log.read_text(), "the page")
    port = int(log.read_text().rstrip().rstrip("/").rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as viewer:
        viewer.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert viewer.recv(4_096).startswith(b"HTTP/1.1 200")
        serving.send_signal(number)
        assert serving.wait(20) == (ExitCode.OK if number is signal.SIGTERM else ExitCode.INTERRUPTED)
    assert "Traceback" not in log.read_text()


def test_the_report_of_a_job_is_that_of_the_demo(file: Path, store: Store, tmp_path: Path) -> None:
    early = dpagent("coordinator", "report", "--config", file, "--out", tmp_path / "report")
    assert early.returncode == ExitCode.CONFIGURATION
    assert "No round of job 'first' has closed yet" in early.stderr
    close(store)
    assert dpagent("coordinator", "report", "--config", file, "--out", tmp_path / "report").returncode == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Job first of fleet meadow, running: 1 of 2 rounds" in re.sub(r"\s+", " ", page)
    assert "83.3" in page
    assert "ε = 1.250" in page
    assert "dpagent demo" not in page
    for unknown in ("Fragments</h3>", "without noise</th>", "Signal to noise", "Agent’s peak memory"):
        assert unknown not in page
    wrong = dpagent("coordinator", "report", "--config", file, "--job", "nothing")
    assert wrong.returncode == ExitCode.CONFIGURATION


def test_a_pipe_gets_a_line_for_each_change(file: Path, store: Store) -> None:
    command = command_line("coordinator", "status", "--watch", "--config", file)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        first = watching.stdout.readline()
        assert "No coordinator runs here" in first
        assert "first: running, 0 of 2 rounds closed" in first
        assert "1 of 2 is open: 0 of 10 fragments" in first
        Queue(store.database).pause("first")
        assert "running, to pause after its open round" in watching.stdout.readline()
        close(store)
        assert "running, paused, 1 of 2 rounds closed, accuracy 83.3 %" in watching.stdout.readline()
        watching.terminate()
        assert watching.wait(20) == 0
