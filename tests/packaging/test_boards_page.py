"""The commands of docs/boards.md, as they stand there, in a clean root: from the package to an agent that
trains in a job, and then each thing that is broken is named by ``dpagent doctor`` as the page has it.

systemd runs in it, unless the root is emulated. Needs root, mmdebstrap, Mosquitto and a package
(`make test-deb`), and is skipped without. The broker is this machine's.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest
from booted_roots import BootedRoot
from brokers import find_mosquitto, reserved_port, wait_until
from children import Child
from clean_roots import HERE, Root, is_emulated, make_root, package
from commands import dpagent_process
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from fleets import digits, run_coordinator

from agent.audit import verify
from agent.heads import second_head_beside
from coordinator.authority import load_authorities
from dpagent.learning.data.formats.npz import save_npz

PAGE: Final = HERE / "docs" / "boards.md"
PACKAGE: Final = package()
ROUNDS: Final = 2
JOB_S: Final = 1_500.0
DISK_MIB: Final = 480
FLEET: Final = """
fleet: meadow
devices: 1
records_per_device: 200
rounds: {rounds}
privacy: {{epsilon: 2, delta: 1e-6, sampling_rate: 0.2}}
model: {{name: digits}}
round: {{deadline_s: 3600, compute_slot_s: 30, jitter_window_s: 10}}
mqtt:
  url: "mqtts://127.0.0.1:{port}"
  ca_file: members/ca.crt
  username: coordinator
  password_file: broker/users/coordinator
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7_200),
    pytest.mark.skipif(PACKAGE is None, reason="needs root, mmdebstrap, and a package: make test-deb"),
    pytest.mark.skipif(find_mosquitto() is None, reason="needs Mosquitto"),
]


def blocks() -> list[str]:
    """The commands of the page, in its order."""
    found = re.findall(r"^( *)```sh\n(.*?)^ *```$", PAGE.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [re.sub(f"(?m)^{indent}", "", text) for indent, text in found]


def named_faults() -> dict[str, str]:
    """What the page says that doctor says, by what was broken."""
    table = PAGE.read_text("utf-8").split("| broken | what `dpagent doctor` says |", 1)[1].split("\n\n", 1)[0]
    return dict(re.findall(r"(?m)^\| ([^|-]+?) \| `([^|]+)` \|$", table))


class Operator:
    """Fleet and broker on this machine, by the commands of the README."""

    def __init__(self, place: Path, port: int) -> None:
        self.place, self.port = place, port
        self.file, self.certificate = place / "fleet.yaml", place / "broker" / "broker.crt"
        self.file.write_text(FLEET.format(rounds=ROUNDS, port=port))
        self.say("coordinator", "ca", "init")
        self.say("coordinator", "ca", "server", "127.0.0.1", "--out", "broker")
        self.say("coordinator", "broker-config", "mosquitto", *self._broker)
        self.key = self.say("coordinator", "key").strip()

    @property
    def _broker(self) -> tuple[str, ...]:
        return ("--board", "attic", "--address", "127.0.0.1", "--port", str(self.port))

    def say(self, *arguments: str) -> str:
        result = dpagent_process(
            *arguments, "--config", str(self.file), cwd=self.place, env=os.environ | {"PYTHONPATH": str(HERE)}
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def another_authority(self) -> Path:
        """The certificate of another fleet's."""
        elsewhere = self.place / "elsewhere"
        elsewhere.mkdir()
        shutil.copy(self.file, elsewhere)
        dpagent_process(
            "coordinator", "ca", "init", cwd=elsewhere, env=os.environ | {"PYTHONPATH": str(HERE)}
        )
        return elsewhere / "members" / "ca.crt"

    def broker(self) -> Child:
        """It runs, and answers."""
        words = ("coordinator", "broker-config", "mosquitto", *self._broker, "--config", self.file, "--run")
        child = Child([sys.executable, "-P", "-m", "cli.main", *map(str, words)], self.place / "broker.log")
        wait_until(self._answers, "the broker")
        return child

    def expire(self) -> None:
        """Give the broker a certificate of its authority that is over."""
        key = load_pem_private_key(self.certificate.with_suffix(".key").read_bytes(), None)
        assert isinstance(key, EllipticCurvePrivateKey)
        authority = load_authorities(self.place / "members", now=datetime.now(UTC)).issuing
        over = authority.issue_server(
            key.public_key(), ["127.0.0.1"], days=1 / 86_400, now=authority.certificate.not_valid_before_utc
        )
        self.certificate.write_bytes(over.public_bytes(Encoding.PEM))

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    place = tmp_path / "operator"
    place.mkdir()
    with reserved_port() as reserved:
        yield Operator(place, reserved.getsockname()[1])


@pytest.fixture
def board(disk: Path, operator: Operator) -> Iterator[Root]:
    """A clean root with the files that step 2 of the page copies there, and a small disk for the state."""
    assert PACKAGE is not None
    made = (Root if is_emulated() else BootedRoot)(disk / "root")
    make_root(PACKAGE, made.path, has_systemd=not is_emulated())
    files = made.path / "root"
    shutil.copy(PACKAGE, files)
    shutil.copy(operator.place / "members" / "ca.crt", files)
    shutil.copy(operator.place / "broker" / "users" / "attic", files)
    save_npz(files / "records.npz", digits(0, 200))
    small = made.path / "var/lib"  # systemd moves the state within it.
    before = small.rename(small.with_name("lib.before"))
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=755", "board", small], check=True)
    try:
        subprocess.run(["cp", "-a", f"{before}/.", small], check=True)
        made.runs_systemd()
        yield made
    finally:
        made.give_up()
        subprocess.run(["umount", "--lazy", small], check=True)


class Faults:
    """What is broken on a board that works, one thing at a time."""

    def __init__(self, board: Root, operator: Operator, running: Child) -> None:
        self.board, self.operator, self.running = board, operator, running

    def doctor(self, *before: str) -> str:
        """What it says, with each finding's parts a blank apart."""
        said = self.board.ended(*before, "dpagent", "doctor").stdout
        return re.sub(r"(?m) {2,}", " ", said)

    @contextlib.contextmanager
    def broker_down(self) -> Iterator[None]:
        """It is stopped, and then started with what its files say by then."""
        self.running.stop()
        try:
            yield
        finally:
            self.running = self.operator.broker()

    def said(self, broken: str) -> str:
        """What doctor says while something is broken."""
        etc, data = self.board.path / "etc/dpagent", self.board.path / "srv/dpagent/records.npz"
        match broken:
            case "nothing":
                return self.doctor()
            case "the broker is down":
                with self.broker_down():
                    return self.doctor()
            case "the clock shows 1970":
                return self.doctor("faketime", "1970-01-02 00:00:00")
            case "the broker's certificate has expired":
                with changed(self.operator.certificate):
                    with self.broker_down():
                        self.operator.expire()
                    said = self.doctor()
                with self.broker_down():
                    pass
                return said
            case "`ca.crt` is another authority's":
                with changed(etc / "ca.crt"):
                    shutil.copy(self.operator.another_authority(), etc / "ca.crt")
                    return self.doctor()
            case "the password is another's":
                with changed(etc / "attic"):
                    (etc / "attic").write_text("guessed\n")
                    return self.doctor()
            case "the disk is full" | "the disk is full before the agent's first start":
                filler = self.board.path / "var/lib/dpagent/filler"
                with contextlib.suppress(OSError), filler.open("wb") as stream:
                    while True:
                        stream.write(bytes(1 << 16))
                try:
                    return self.doctor()
                finally:
                    filler.unlink()
            case "the records are gone":
                with changed(data):
                    data.unlink()
                    return self.doctor()
        pytest.fail(f"the page has a fault that this test does not make: {broken}")


def assert_named(faults: Faults, broken: str) -> None:
    """Doctor says what the page says that it says."""
    said = faults.said(broken)
    assert named_faults()[broken] in said, f"{broken}: {said}"


def assert_started_again(board: Root, signal_name: str) -> None:
    """By systemd, after a kill at once, and after a stand-still when its watchdog has run out."""
    ended, before = board.pid, board.log.count("connected to")
    assert ended is not None
    board.run("sh", "-c", f"kill -{signal_name} {ended}")
    wait_until(lambda: board.pid not in (None, ended), "another process", JOB_S)
    wait_until(lambda: board.log.count("connected to") > before, "its connection", JOB_S)


def hasten(board: Root) -> None:
    """Have its service wait for seconds, where it would for minutes."""
    own = board.path / "etc/systemd/system/dpagent-agent.service.d/hasty.conf"
    own.parent.mkdir()
    own.write_text("[Service]\nWatchdogSec=10\nTimeoutStopSec=5\nRestartSec=1\n")
    board.run("systemctl", "daemon-reload")
    board.run("systemctl", "restart", "dpagent-agent")


@contextlib.contextmanager
def changed(file: Path) -> Iterator[None]:
    """A file that is as before afterwards."""
    kept = file.with_name(f"{file.name}.kept")
    shutil.copy2(file, kept)
    owners = file.stat()
    os.chown(kept, owners.st_uid, owners.st_gid)  # The agent has to read it still.
    try:
        yield
    finally:
        kept.replace(file)


def test_the_page_leads_from_the_package_to_an_agent_that_trains_and_names_what_is_broken(
    operator: Operator, board: Root
) -> None:
    broker = operator.broker()
    with run_coordinator(operator.file) as coordinator:
        for block in blocks():
            if "--latest" in block:
                assert coordinator.wait(JOB_S) == 0, coordinator.said()[-2_000:] + board.log[-2_000:]
                wait_until((board.path / "var/lib/dpagent/state/model.onnx").exists, "the model", JOB_S)
            faults = Faults(board, operator, broker)
            early = [broken for broken in named_faults() if "before the agent's first start" in broken]
            if "doctor\ndpagent service install" in block:
                for broken in early:
                    assert_named(faults, broken)
            if "service remove" in block:
                if not is_emulated():
                    assert_started_again(board, "KILL")
                    hasten(board)
                    assert_started_again(board, "STOP")
                assert "PROBLEM" not in faults.said("nothing")
                for broken in named_faults():
                    if broken not in early:
                        assert_named(faults, broken)
                broker = faults.running
            script = block.replace("broker.example:8883", f"127.0.0.1:{operator.port}")
            if is_emulated():
                # QEMU tells a process another start of its own than the kernel tells others.
                script = re.sub(r"(?m)^dpagent status$", "", script)
            ended = board.ended("sh", "-euc", f"cd /root\n{script}", COORDINATOR_KEY=operator.key)
            assert ended.returncode == 0, f"{block}: {ended.stdout[-2_000:]}{ended.stderr[-2_000:]}"
    assert not board.log.count("Traceback")
    state = board.path / "var/lib/dpagent/state"
    assert verify(state, second_head_beside(state)).charges == ROUNDS
    assert board.pid is None, "the service was removed"
    broker.stop()
