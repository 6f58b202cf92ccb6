"""Receipts to all boards, and each to its own: what a board hears and says in a round, and the broker's work.

A real coordinator, Mosquitto, and boards with a connection, a ledger, a spool and a publisher each, in one
process. Each has 16 fragments of the 26,010-parameter model, of noise alone, and a probe, which leave at
random times in a window of a second for each board, so that as many arrive a second in every fleet. Bytes are
those of TCP connections (the kernel's count, from when the plan was there until all receipts are), so with
all of MQTT and without TLS, the model, or headers of TCP and IP. The broker's processor time is that of the
same window.

Interpretation: receipts to all grow with the fleet, and most of the broker's work is to send them; those of
one's own cost a board as much in every fleet.

Limits: one machine, loopback. Boards check no signature of receipts. `--long` has 300 boards; one process has
no room for more connections.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import yaml

from agent.charges import Budget
from agent.custody import begin_ledger
from agent.heads import LedgerFiles
from agent.probes import probe_for
from agent.publisher import Publisher
from agent.replay import replay
from agent.spool import SpooledFragment
from agent.state import AgentState
from benchmarks.figures import BenchmarkError, Figure, Skipped
from coordinator.brokers.mosquitto import find_mosquitto
from coordinator.keys import load_signer
from dpagent.clock import SystemClock
from dpagent.database_file import transaction
from dpagent.privacy.mechanisms.wire import round_to_wire
from dpagent.protocol.fragments import cut
from dpagent.protocol.messages import RECEIPT_DIGEST_BYTES, Plan
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.signing import Verifier
from dpagent.protocol.task import RoundTask
from dpagent.protocol.topics import Topics
from dpagent.transport.events import Received
from dpagent.transport.session import MqttSession, Subscription
from dpagent.transport.settings import MqttSettings
from simulation.programs.broker import BrokerChild, choose_broker, wait_until_ready
from simulation.programs.supervisor import Supervisor, python_module
from simulation.request import BrokerRequest

_FLEET: Final = "receipts"
_FRAGMENTS: Final = 16
_DEVICES: Final = (20, 100)
_LONG_DEVICES: Final = (300,)
_PATIENCE_S: Final = 3_600.0
_LOOK_S: Final = 0.005
_ACCOUNT: Final = "noise"
_TCP_BYTES: Final = slice(120, 136)
"""Of the kernel's ``struct tcp_info``: ``tcpi_bytes_acked`` and ``tcpi_bytes_received``, 8 bytes each."""


class _Cost(NamedTuple):
    down: float
    """Bytes a board."""
    up: float
    """Likewise."""
    broker_ms: float
    """Of processor time, a board."""


def run(devices: Sequence[int] = _DEVICES) -> list[Figure]:
    """Measure both kinds of receipts in fleets of several sizes.

    Raises:
        Skipped: Mosquitto is not installed.
    """
    if find_mosquitto() is None:
        raise Skipped("Mosquitto is not installed: apt-get install mosquitto.")
    return [figure for number in devices for figure in _figures(number)]


def run_long() -> list[Figure]:
    """The same with as many boards as fit into a process."""
    return run(_LONG_DEVICES)


def _figures(devices: int) -> Iterator[Figure]:
    to_all, own = _measured(devices, "fleet"), _measured(devices, "fragment")
    for name, unit, before, after in (
        ("down to a board", "bytes", to_all.down, own.down),
        ("up from a board", "bytes", to_all.up, own.up),
        ("processor time of the broker", "ms a board", to_all.broker_ms, own.broker_ms),
    ):
        title = f"{devices} boards, a round: {name}"
        yield Figure(f"{title}, receipts to all", before, unit)
        yield Figure(f"{title}, receipts of its own", after, unit, "to all", after / before)


@dataclass
class _Board:
    """Between charge and receipts."""

    state: AgentState
    session: MqttSession
    publisher: Publisher
    digests: set[bytes]

    def turn(self, topics: Topics) -> None:
        """Take what has arrived, and publish what is due."""
        while (event := self.session.next_event(0.0)) is not None:
            if isinstance(event, Received) and event.topic != topics.plan:
                self._take(event.payload[65:] if event.topic == topics.receipts else event.payload)
        self.publisher.publish_due()

    def _take(self, raw: bytes) -> None:
        size = RECEIPT_DIGEST_BYTES
        ours = self.digests & {raw[start : start + size] for start in range(0, len(raw), size)}
        if ours:
            self.digests -= ours
            self.state.mark_counted([*ours], time.time())


def _measured(devices: int, receipts: str) -> _Cost:
    """What a round costs."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dpagent-bench-")))
        broker = stack.enter_context(choose_broker(BrokerRequest(broker="mosquitto"), root / "broker"))
        supervisor = stack.enter_context(Supervisor(root / "logs"))
        assert isinstance(broker, BrokerChild)
        pid = supervisor.start("broker", broker.command)
        wait_until_ready(broker.address)
        mqtt, topics = broker.address.settings, Topics(_FLEET)
        file = root / "fleet.yaml"
        file.write_text(yaml.safe_dump(_settings(devices, receipts, mqtt)))
        key = load_signer(root / "keys", _FLEET).public_key
        supervisor.start(
            "coordinator", python_module("cli.main", "coordinator", "run", "--config", str(file))
        )
        plan = _announced(mqtt, key, topics)
        updates = [*_updates(plan, min(devices, 20))]
        # First, while descriptors are below 1,024: the library waits by select().
        sessions = [_connected(mqtt, topics, stack) for _ in range(devices)]
        boards = [
            _opened(root / str(number), updates[number % len(updates)], plan, session, topics, stack)
            for number, session in enumerate(sessions)
        ]
        _wait(boards, topics, lambda: all(board.session.connected for board in boards), 3.0)
        before, worked_s = _tcp_bytes(mqtt.port), _processor_s(pid)
        for board in boards:
            board.publisher.open_window(plan, time.monotonic())
            board.publisher.draw_times()
        _wait(boards, topics, lambda: not any(board.digests for board in boards), 0.0)
        # Until the last subscription has ended, too.
        _wait(boards, topics, lambda: True, 11.0)
        after = _tcp_bytes(mqtt.port)
        up, down = ((after[place] - before[place]) / devices for place in (0, 1))
        return _Cost(down, up, 1_000 * (_processor_s(pid) - worked_s) / devices)


def _settings(devices: int, receipts: str, mqtt: MqttSettings) -> dict[str, Any]:
    return {
        # One more than there are, so that the round does not end meanwhile.
        "fleet": _FLEET, "devices": devices + 1, "rounds": 1, "records_per_device": 120,
        "fragments_per_update": _FRAGMENTS, "model": {"name": "mnist-cnn"}, "receipts": receipts,
        "privacy": {"method": "dp-sgd", "epsilon": 2.0, "sampling_rate": 0.1},
        "round": {
            "deadline_s": 80_000.0, "compute_slot_s": 1.0, "device_grid_s": 0.001,
            "jitter_window_s": float(devices),
        },
        "state_dir": "state", "keys_dir": "keys",
        "mqtt": {"url": mqtt.url, "username": mqtt.username, "password_file": str(mqtt.password_file)},
    }  # fmt: skip


def _announced(mqtt: MqttSettings, key: str, topics: Topics) -> Plan:
    verifier, until = Verifier(key, _FLEET), time.monotonic() + _PATIENCE_S
    with MqttSession(
        mqtt, client_id=None, subscriptions=[Subscription(topics.plan)], persistent=False
    ) as session:
        while time.monotonic() < until:
            event = session.next_event(1.0)
            if isinstance(event, Received):
                return verifier.open(event.payload, Plan, "plan")
    raise BenchmarkError("The coordinator announced no round.")


def _updates(plan: Plan, number: int) -> Iterator[Any]:
    """Updates of noise alone, (dimension,)."""
    release = RoundTask.of(plan).release
    assert isinstance(release, NoisySum)
    for _ in range(number):
        noise = np.asarray(release.mechanism.sampler().sample(release.dimension))
        yield round_to_wire(noise, release.terms.step)


def _connected(mqtt: MqttSettings, topics: Topics, stack: ExitStack) -> MqttSession:
    """A board's connection, once it is there."""
    session = stack.enter_context(
        MqttSession(
            mqtt,
            client_id=None,
            subscriptions=[Subscription(topics.plan), Subscription(topics.receipts)],
            persistent=False,
        )
    )
    until = time.monotonic() + _PATIENCE_S
    while not session.connected:
        session.next_event(0.1)
        if time.monotonic() > until:
            raise BenchmarkError("The broker lets no more boards in.")
    return session


def _opened(
    directory: Path, update: Any, plan: Plan, session: MqttSession, topics: Topics, stack: ExitStack
) -> _Board:
    """A board that has spooled its update."""
    files, budgets = LedgerFiles(directory, directory.with_suffix(".head")), {_ACCOUNT: Budget(1.0, 1e-6)}
    begin_ledger(files, budgets)
    state = AgentState(files, budgets, check=replay)
    stack.callback(state.close)
    pieces = [SpooledFragment.of(each) for each in cut(update, plan)] + [probe_for(plan)]
    with transaction(state.connection):
        state.spool.put(plan.job.hex(), plan.round, pieces)
    publisher = Publisher(state, session, topics, messages_per_second=10.0, period_s=5.0, clock=SystemClock())
    return _Board(state, session, publisher, {each.digest for each in pieces})


def _wait(boards: Sequence[_Board], topics: Topics, condition: Any, longer_s: float) -> None:
    """Give boards their turns until a condition holds, and for so many seconds more."""
    until, since = time.monotonic() + _PATIENCE_S, None
    while since is None or time.monotonic() < since + longer_s:
        for board in boards:
            board.turn(topics)
        if since is None and condition():
            since = time.monotonic()
        if time.monotonic() > until:
            raise BenchmarkError("The round took too long.")
        time.sleep(_LOOK_S)


def _tcp_bytes(port: int) -> tuple[int, int]:
    """Bytes that this process's connections to a port have sent, and received."""
    sent = received = 0
    for entry in [*Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(entry.stat().st_mode):
                continue
        try:
            with socket.socket(fileno=os.dup(int(entry.name))) as each:
                if each.getpeername()[1] != port:
                    continue
                counts = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)[_TCP_BYTES]
        except (OSError, IndexError, TypeError):
            continue  # No connected socket of that kind.
        sent += int.from_bytes(counts[:8], "little")
        received += int.from_bytes(counts[8:], "little")
    return sent, received


def _processor_s(pid: int) -> float:
    """Processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
