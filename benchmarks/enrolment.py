"""Enrolment of 50 boards by one script: from a code to the first connection over mutual TLS.

One after the other, as an operator's script would: `dpagent coordinator invite --count 50`, and for each code
`dpagent enrol CODE` in a process of its own. That reads 60 records, makes the key, checks the fleet's
authority, gets the certificate over HTTPS, writes `agent.yaml`, begins the ledger, and connects to Mosquitto,
which asks for the certificate. Endpoint and broker are processes beside it.

Limits: one machine, so no network; a start of Python on this machine is most of the time.
"""

from __future__ import annotations

import getpass
import resource
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import yaml

from benchmarks.figures import BenchmarkError, Figure, Skipped
from benchmarks.programs import ROOT, environment, python, run_program, stop
from coordinator.brokers.mosquitto import find_mosquitto
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.formats.npz import save_npz
from simulation.programs.broker import reserved_port

BOARDS: Final = 50
WANTED_S: Final = 120.0
WANTED_BOARD_S: Final = 3.0
_READY_S: Final = 30.0


def run() -> list[Figure]:
    """Enrol the boards.

    Raises:
        BenchmarkError: One does not become a member.
        Skipped: Mosquitto is not installed.
    """
    if (mosquitto := find_mosquitto()) is None:
        raise Skipped("Mosquitto is not installed (apt-get install mosquitto).")
    with (
        tempfile.TemporaryDirectory() as directory,
        reserved_port(0) as broker_port,
        reserved_port(0) as port,
    ):
        place = Path(directory)
        fleet = _fleet(place, broker_port, port)
        with (
            _child([mosquitto, "-c", str(place / "mosquitto.conf")], place / "broker.log"),
            _child(_dpagent("coordinator", "enrolment", "--config", str(fleet)), place / "endpoint.log"),
        ):
            _wait_until_open(port)
            began = time.monotonic()
            invite = _dpagent("coordinator", "invite", "--count", str(BOARDS), "--config", str(fleet))
            codes = run_program(invite, timeout_s=60).split()
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            each_s = [_enrol_s(place / f"board-{number}", code) for number, code in enumerate(codes)]
            whole_s = time.monotonic() - began
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [
        Figure(
            f"{BOARDS} boards, one after the other", whole_s, "s",
            f"wanted: {WANTED_S:g} s", whole_s / WANTED_S,
        ),
        Figure(
            "a board, from code to connected: median", statistics.median(each_s), "s",
            f"wanted: {WANTED_BOARD_S:g} s", statistics.median(each_s) / WANTED_BOARD_S,
        ),
        Figure("a board, from code to connected: the slowest", max(each_s), "s"),
        Figure("a board, from code to connected: processor time", processor_s / BOARDS, "s"),
    ]  # fmt: skip


def _fleet(place: Path, broker_port: int, port: int) -> Path:
    """The operator's files, and the broker's configuration."""
    fleet, members = place / "fleet.yaml", place / "members"
    values = {
        "fleet": "meadow", "devices": BOARDS, "records_per_device": 60, "rounds": 1,
        "privacy": {"epsilon": 2.0, "delta": 1e-5},
        "enrolment": {"address": f"127.0.0.1:{port}", "listen": "127.0.0.1"},
        "mqtt": {"url": f"mqtts://127.0.0.1:{broker_port}", "ca_file": str(members / "ca.crt")},
    }  # fmt: skip
    fleet.write_text(yaml.safe_dump(values))
    for words in (("init",), ("server", "127.0.0.1")):
        run_program(_dpagent("coordinator", "ca", *words, "--config", str(fleet)), timeout_s=60)
    lines = [
        f"listener {broker_port} 127.0.0.1", f"cafile {members}/ca.crt", f"certfile {members}/broker.crt",
        f"keyfile {members}/broker.key", f"crlfile {members}/revoked.crl", "require_certificate true",
        "use_identity_as_username true", f"user {getpass.getuser()}", "log_dest stderr", "log_type error",
    ]  # fmt: skip
    (place / "mosquitto.conf").write_text("\n".join(lines) + "\n")
    records = ArrayDataset(np.zeros((60, 8), np.float32), np.arange(60) % 3, 3)
    save_npz(place / "data.npz", records)
    return fleet


def _enrol_s(board: Path, code: str) -> float:
    """Seconds that the command takes, whose last step is the connection."""
    board.mkdir()
    command = _dpagent(
        "enrol", code, "--config", str(board / "agent.yaml"), "--data", str(board.parent / "data.npz"),
        "--epsilon", "6",
    )  # fmt: skip
    began = time.monotonic()
    said = run_program(command, timeout_s=60)
    took_s = time.monotonic() - began
    if "Connected to" not in said:
        raise BenchmarkError(f"{board.name} did not connect: {said}")
    return took_s


def _dpagent(*words: str) -> list[str]:
    return python("-P", "-m", "cli.main", *words)


@contextmanager
def _child(command: Sequence[str], log: Path) -> Iterator[None]:
    with log.open("wb") as stream:
        child = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=stream, stderr=stream)
        try:
            yield
        finally:
            stop(child)


def _wait_until_open(port: int) -> None:
    until = time.monotonic() + _READY_S
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise BenchmarkError(f"the endpoint does not answer within {_READY_S:g} s")
