"""Workers that share a coordinator's state in PostgreSQL: one, two, and what a device costs.

A real coordinator leads, workers are processes of their own, Mosquitto gives each fragment to one of them,
and PostgreSQL is durable (`fsync`). The fragments are those of the 26,010-parameter model, 16 a device, of
noise alone, each sealed by itself. For the rate, 1,000 devices' fragments wait at the broker while the
workers are stopped (SIGSTOP); it is those 16,000 over the time from SIGCONT until the database has them all.
One worker and two take turns. The cost of a device is the processor time of two workers and of their
sessions at the database, for as many devices, in portions of 1,000: other programs on the machine lengthen
it less than they do the time. Of the memory, the most that a worker takes.

Interpretation: two workers are nearly twice one while each has a core, and the database and the broker have
some besides; on two cores, these four share them.

Limits: one machine, loopback, one connection for all devices. The longest run sends 10,000 devices'
fragments; `--long` sends 100,000.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any, Final

import numpy as np
import yaml

from benchmarks.figures import BenchmarkError, Figure, Skipped
from benchmarks.postgresql_server import PostgresqlServer
from coordinator.brokers.mosquitto import find_mosquitto
from coordinator.keys import load_signer
from dpagent.privacy.mechanisms.wire import round_to_wire
from dpagent.protocol.codec import encode
from dpagent.protocol.fragments import cut
from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.sealing import seal
from dpagent.protocol.signing import Verifier
from dpagent.protocol.task import RoundTask
from dpagent.protocol.topics import Topics
from dpagent.transport.events import Acknowledged, Received
from dpagent.transport.session import MqttSession, Subscription
from simulation.programs.broker import BrokerChild, choose_broker, wait_until_ready
from simulation.programs.supervisor import Supervisor, python_module
from simulation.request import BrokerRequest

_FLEET: Final = "many"
_FRAGMENTS: Final = 16
_REPEATS: Final = 3
_RATE_DEVICES: Final = 1_000
_COST_DEVICES: Final = (100, 1_000, 10_000)
_LONG_DEVICES: Final = (100, 100_000)
_PATIENCE_S: Final = 3_600.0
_LOOK_S: Final = 0.02
_UPDATES: Final = 20
"""Different updates; the others have their values, and ids of their own."""


def run(devices: Sequence[int] = _COST_DEVICES) -> list[Figure]:
    """Count fragments.

    Raises:
        Skipped: Mosquitto or PostgreSQL is not installed.
    """
    if find_mosquitto() is None:
        raise Skipped("Mosquitto is not installed: apt-get install mosquitto.")
    rates: dict[int, list[float]] = {1: [], 2: []}
    with PostgresqlServer(durable=True) as server:
        for _ in range(_REPEATS):
            for workers, found in rates.items():
                found.append(_rate(server, workers))
        costs = [_cost(server, each) for each in devices]
    one, two = (statistics.median(rates[workers]) for workers in (1, 2))
    figures = [
        Figure("fragments counted by one worker", one, "a second", "wanted: 6,000 a second", one / 6_000),
        Figure("fragments counted by two workers", two, "a second", "by one", two / one),
    ]
    for number, cost in zip(devices, costs, strict=True):
        name = f"{number:,} devices"
        figures += [
            Figure(
                f"{name}: processor time of workers and database", 1_000 * cost.processor_s / number,
                "ms a device", f"{devices[0]:,} devices",
                cost.processor_s / number / (costs[0].processor_s / devices[0]),
            ),
            Figure(
                f"{name}: most memory of a worker", cost.memory_mib, "MiB", f"{devices[0]:,} devices",
                cost.memory_mib / costs[0].memory_mib,
            ),
        ]  # fmt: skip
    return figures


def run_long() -> list[Figure]:
    """Count the fragments of 100,000 devices."""
    return run(_LONG_DEVICES)


@dataclass(frozen=True, slots=True)
class _Cost:
    processor_s: float
    memory_mib: float


def _rate(server: PostgresqlServer, workers: int) -> float:
    """Fragments a second that so many workers count, of those that wait for them."""
    with _Round(server, _RATE_DEVICES, workers) as opened:
        opened.signal(SIGSTOP)
        opened.send(opened.messages())
        began = time.monotonic()
        opened.signal(SIGCONT)
        opened.wait(_RATE_DEVICES * _FRAGMENTS)
        return _RATE_DEVICES * _FRAGMENTS / (time.monotonic() - began)


def _cost(server: PostgresqlServer, devices: int) -> _Cost:
    """What a round of so many devices costs two workers."""
    with _Round(server, devices, 2) as opened:
        before, messages = opened.processor_s(), opened.messages()
        for start in range(0, devices, _RATE_DEVICES):
            number = min(_RATE_DEVICES, devices - start)
            opened.signal(SIGSTOP)
            opened.send(islice(messages, number * _FRAGMENTS))
            opened.signal(SIGCONT)
            opened.wait((start + number) * _FRAGMENTS)
        return _Cost(opened.processor_s() - before, opened.memory_mib())


class _Round:
    """A round that is open, its coordinator and its workers. A context manager."""

    def __init__(self, server: PostgresqlServer, devices: int, workers: int) -> None:
        self._server, self._devices, self._workers = server, devices, workers
        self._pids: list[int] = []

    def __enter__(self) -> _Round:
        with ExitStack() as stack:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dpagent-bench-")))
            broker = stack.enter_context(choose_broker(BrokerRequest(broker="mosquitto"), root / "broker"))
            supervisor = stack.enter_context(Supervisor(root / "logs"))
            assert isinstance(broker, BrokerChild)
            supervisor.start("broker", broker.command)
            wait_until_ready(broker.address)
            self._mqtt, schema = broker.address.settings, self._server.new_schema()
            self._database = stack.enter_context(self._server.connect())
            self._database.execute(f"SET search_path = {schema}")
            file = root / "fleet.yaml"
            file.write_text(yaml.safe_dump(self._settings(schema)))
            key = load_signer(root / "keys", _FLEET).public_key
            supervisor.start(
                "coordinator", python_module("cli.main", "coordinator", "run", "--config", str(file))
            )
            self._verifier, self._topics = Verifier(key, _FLEET), Topics(_FLEET)
            self._session = stack.enter_context(
                MqttSession(
                    self._mqtt,
                    client_id=None,
                    subscriptions=[Subscription(self._topics.plan)],
                    persistent=False,
                )
            )
            self._plan = self._announced()
            for number in range(self._workers):
                command = ["coordinator", "worker", "--name", str(number), "--config", str(file)]
                self._pids.append(supervisor.start(f"worker-{number}", python_module("cli.main", *command)))
            for number in range(self._workers):
                _wait_for(
                    lambda number=number: b"is counted" in (root / f"logs/worker-{number}.log").read_bytes()
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(SIGCONT)
        self._stack.close()

    def _settings(self, schema: str) -> dict[str, Any]:
        return {
            "fleet": _FLEET, "devices": self._devices, "rounds": 1, "records_per_device": 120,
            "fragments_per_update": _FRAGMENTS, "model": {"name": "mnist-cnn"},
            "privacy": {"method": "dp-sgd", "epsilon": 2.0, "sampling_rate": 0.1},
            "round": {
                "deadline_s": 80_000.0, "compute_slot_s": 40_000.0, "device_grid_s": 0.001,
                "jitter_window_s": 0.0,
            },
            "state_dir": "state", "keys_dir": "keys", "store": self._server.settings(schema),
            "mqtt": {
                # The broker would take a worker that is stopped for gone, and drop what waits for it.
                "keepalive_s": 3_600,
                "url": self._mqtt.url, "username": self._mqtt.username,
                "password_file": str(self._mqtt.password_file),
            },
        }  # fmt: skip

    def _announced(self) -> Plan:
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            event = self._session.next_event(1.0)
            if isinstance(event, Received):
                return self._verifier.open(event.payload, Plan, "plan")
        raise BenchmarkError("The coordinator announced no round.")

    def messages(self) -> Iterator[bytes]:
        """All devices' sealed fragments."""
        release = RoundTask.of(self._plan).release
        assert isinstance(release, NoisySum)
        updates: list[list[Fragment]] = []
        for _ in range(min(_UPDATES, self._devices)):
            noise = np.asarray(release.mechanism.sampler().sample(release.dimension))
            updates.append([*cut(round_to_wire(noise, release.terms.step), self._plan)])
        for number in range(self._devices):
            for each in updates[number % len(updates)]:
                fragment = Fragment(each.round, each.position, os.urandom(16), each.payload)
                yield seal(encode(fragment), self._plan)

    def send(self, messages: Iterator[bytes]) -> None:
        """Send them, until the broker has them all."""
        unanswered, rest = 0, True
        while rest or unanswered:
            while rest and self._session.has_room:
                message = next(messages, None)
                if message is None:
                    rest = False
                else:
                    self._session.publish(self._topics.fragments, message)
                    unanswered += 1
            if isinstance(self._session.next_event(_LOOK_S), Acknowledged):
                unanswered -= 1

    def counted(self) -> int:
        """Fragments that the database has."""
        row = self._database.execute("SELECT coalesce(sum(fragments), 0)::bigint FROM tallies").fetchone()
        return int(row[0])

    def wait(self, fragments: int) -> None:
        """Wait until so many are counted."""
        _wait_for(lambda: self.counted() >= fragments)

    def signal(self, number: int) -> None:
        """Send all workers a signal."""
        for pid in self._pids:
            os.kill(pid, number)

    def processor_s(self) -> float:
        """Processor time so far of the workers and of their sessions at the database, in seconds."""
        rows = self._database.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'dpagent worker%'"
        )
        ticks = 0
        for pid in (*self._pids, *(row[0] for row in rows)):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory_mib(self) -> float:
        """The most that a worker has taken, in MiB."""
        peaks = []
        for pid in self._pids:
            status = Path(f"/proc/{pid}/status").read_text()
            peaks.append(int(status.partition("VmHWM:")[2].split()[0]) / 1_024)
        return max(peaks)


def _wait_for(condition: Any) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise BenchmarkError("The fragments were not counted in time.")
        time.sleep(_LOOK_S)
