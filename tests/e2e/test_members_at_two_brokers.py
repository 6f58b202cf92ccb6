"""Enrolled boards with tokens at two brokers, and a coordinator's state in PostgreSQL.

Programs are processes, on files that the operator's commands wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from brokers import reserved_port, wait_until
from children import Child
from commands import Result, dpagent
from enrolments import EnrolmentFleet, enrol
from fleets import Program, digits
from postgresql import Postgresql

from agent.audit import verify
from agent.identity import Identity
from coordinator.brokers.mosquitto import find_mosquitto
from coordinator.participation import participation_of
from coordinator.reader import StoreReader
from dpagent.errors import ExitCode
from dpagent.learning.data.formats.npz import save_npz

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUNDS = 2
QUICK = (
    *("--set", "limits.minimum_compute_slot_s=0.001", "--set", "limits.minimum_jitter_window_s=0"),
    *("--set", "limits.minimum_fragments=1", "--set", "limits.messages_per_second=200"),
)


class TwoBrokers:
    """A fleet with a broker of the coordinators and one that has a bridge to it, each by ``broker-config``.

    Args:
        directory: for everything.
        server: of the database.
        held: ends what runs.
    """

    def __init__(self, directory: Path, server: Postgresql, held: ExitStack) -> None:
        self.directory, self._held = directory, held
        ports = [held.enter_context(reserved_port()) for _ in range(3)]
        first, second, endpoint = (each.getsockname()[1] for each in ports)
        self.fleet = EnrolmentFleet(
            directory / "fleet", f"mqtts://127.0.0.1:{first}", linkability="fragment", rounds=ROUNDS,
            store=server.settings(server.new_schema()), broker_dir="broker-1",
        )  # fmt: skip
        held.callback(self.fleet.stop)
        values = yaml.safe_load(self.fleet.file.read_text())
        values["mqtt"] |= {"url": f"mqtts://127.0.0.1:{second}"}
        values["enrolment"] |= {"address": f"127.0.0.1:{endpoint}"}
        values["broker_dir"] = "broker-2"
        self.second = self.fleet.file.with_name("fleet-2.yaml")
        self.second.write_text(yaml.safe_dump(values))
        for name in ("worker", "bridge"):
            assert self.fleet.run("ca", "client", name).returncode == 0
        values["mqtt"] |= {"cert_file": "members/worker.crt", "key_file": "members/worker.key"}
        for name, port in (("1", first), ("2", second)):
            values["mqtt"] |= {"url": f"mqtts://127.0.0.1:{port}"}
            self.fleet.file.with_name(f"worker-{name}.yaml").write_text(yaml.safe_dump(values))
        self._broker("1", self.fleet.file, first, "--bridge")
        self._broker("2", self.second, second, "--bridge-to", f"127.0.0.1:{first}")
        self.fleet.start()
        endpoint_2 = self._program("enrolment", "--config", self.second, log="endpoint-2")
        wait_until(lambda: "enrolment of fleet" in endpoint_2.said(), "the second endpoint")

    def _broker(self, name: str, file: Path, port: int, *options: str) -> None:
        pair = [self.fleet.members / "broker.crt", self.fleet.members / "broker.key"]
        command = [
            sys.executable, "-P", "-m", "cli.main", "coordinator", "broker-config", "mosquitto",
            "--config", file, "--address", "127.0.0.1", "--port", str(port),
            "--certificate", pair[0], "--key", pair[1], "--members", "--worker", *options, "--run",
        ]  # fmt: skip
        self._held.enter_context(Child(command, self.directory / f"broker-{name}.log"))

        def listens() -> bool:
            result = dpagent("doctor", "--config", file)
            return any(line.startswith("ok") and "login" in line for line in result.stdout.splitlines())

        wait_until(listens, f"broker {name}")

    def _program(self, *words: str | Path, log: str) -> Program:
        return self._held.enter_context(
            Program("coordinator", *words, log=self.directory / f"{log}.log")  # type: ignore[arg-type]
        )

    def coordinator(self) -> Program:
        return self._program("run", "--config", self.fleet.file, log="coordinator")

    def worker(self, name: str) -> Program:
        file = self.fleet.file.with_name(f"worker-{name}.yaml")
        return self._program("worker", "--name", name, "--config", file, log=f"worker-{name}")

    def board(self, number: int, file: Path) -> Path:
        """A board that enrols by the endpoint of a ``fleet.yaml``, and so is at its broker."""
        board = self.directory / f"board-{number}"
        board.mkdir()
        save_npz(board / "data.npz", digits(50 * number, 50 * number + 50))
        invited = dpagent("coordinator", "invite", "--config", file)
        assert invited.returncode == 0, invited.stderr
        result: Result = enrol(invited.stdout.strip(), board)
        assert (result.returncode, result.stderr) == (0, "")
        return board

    def run(self, board: Path) -> Program:
        return self._held.enter_context(
            Program("run", "--config", board / "agent.yaml", *QUICK, log=board / "log")
        )


@pytest.fixture
def fleet(tmp_path: Path, postgresql: Postgresql) -> Iterator[TwoBrokers]:
    if find_mosquitto() is None:
        pytest.skip("Mosquitto is not installed")
    with ExitStack() as held:
        yield TwoBrokers(tmp_path, postgresql, held)


def test_boards_at_either_broker_get_tokens_and_count_and_the_registry_has_both(fleet: TwoBrokers) -> None:
    boards = [fleet.board(0, fleet.fleet.file), fleet.board(1, fleet.second)]
    urls = [yaml.safe_load((board / "agent.yaml").read_text())["mqtt"]["url"] for board in boards]
    assert len(set(urls)) == 2
    coordinator = fleet.coordinator()
    wait_until(lambda: "begins" in coordinator.said(), "the job")
    workers = [fleet.worker(name) for name in ("1", "2")]
    agents = [fleet.run(board) for board in boards]
    assert coordinator.wait(240) == ExitCode.OK
    settings = fleet.fleet.settings
    with closing(StoreReader(settings.store_place)) as reader:
        rounds, counters, job = reader.rounds(), reader.counters(), reader.job()
        counting: dict[str, Any] = {each.name: each.fragments for each in reader.workers()}
    assert job is not None
    assert [each.fragments for each in rounds] == [10] * ROUNDS
    assert {name for name in counters if name.startswith("rejected")} == set()
    assert counting == {"1": 5 * ROUNDS, "2": 5 * ROUNDS}, "each board's fragments at its own broker"
    for number in range(1, ROUNDS + 1):
        found = participation_of(settings, job.id, number)
        assert found is not None
        assert found.sentence() == "2 of 2 take part"
    assert [verify(board / "state").charges for board in boards] == [ROUNDS] * 2
    for each in (*agents, *workers):
        assert each.stop() == ExitCode.OK
    # One export has all boards, whichever broker they are at.
    exported = yaml.safe_load(fleet.fleet.run("budgets", "export", "-").stdout)
    ids = {
        Identity.load(*(board / "identity" / f"device.{end}" for end in ("crt", "key"))).device_id
        for board in boards
    }
    assert {each["device"] for each in exported["devices"]} == ids
    assert {each["jobs"][0]["rounds"] for each in exported["devices"]} == {ROUNDS}
