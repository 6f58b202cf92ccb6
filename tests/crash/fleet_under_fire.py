"""One job of a small fleet whose programs and broker are killed and started again until it is done."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

from brokers import Broker, wait_until
from children import PATIENCE_S
from crash.checker import Checker, Places
from cryptography.hazmat.primitives.asymmetric import ec
from fleets import DIGITS, write_agent, write_fleet, write_shared
from launching.starts import Popen
from members import certified, new_authority, written
from mixers import key_of, write_mixer
from observers import Observer
from postgresql import Postgresql
from wiretaps import Wiretap

from coordinator.authority import AuthorityFiles
from coordinator.keys import load_opener, load_signer
from coordinator.settings import load_fleet_settings
from dpagent.faults import FaultPoint

COORDINATOR: Final = "coordinator"
DEVICES: Final = ("device-0", "device-1")
BYSTANDER: Final = "device-2"
"""Its job never fits its limits: it declines, and sends dummies."""
PROGRAMS: Final = (COORDINATOR, *DEVICES, BYSTANDER)
STANDBY: Final = "standby"
"""Another coordinator with the same files, in a fleet whose state is in PostgreSQL."""
WORKERS: Final = ("worker-0", "worker-1")
SHARED_PROGRAMS: Final = (*PROGRAMS, STANDBY, *WORKERS)
POSTGRESQL: Final = "postgresql"
MIXER: Final = "mixer"
"""Beside them, in a fleet with one."""
ROUNDS: Final = 3
NAME: Final = "under-fire"
BROKER: Final = "broker"
_ROUND: Final = {"compute_slot_s": 0.1, "jitter_window_s": 0.2, "device_grid_s": 0.001}
PATIENT_S: Final = 600.0
_LEARNING_RATE: Final = 0.5
METHODS: Final[dict[str, dict[str, Any]]] = {
    "dp-sgd": {"cap": {"kind": "none"}},
    "incrementing": {
        "privacy": {"method": "incrementing", "noise": "laplace", "epsilon": 40.0, "clip_norm": 5.0},
        "cap": {"kind": "none"},
    },
    "bounded": {
        "privacy": {"method": "incrementing", "noise": "laplace", "epsilon": 60.0, "clip_norm": 5.0},
        "cap": {"kind": "bounded", "floor": 15.0},
    },
    "published": {
        "privacy": {
            "method": "incrementing",
            "noise": "laplace",
            "epsilon": 40.0,
            "clip_norm": 5.0,
            "schedule": {"kind": "incrementing"},
        },
        "cap": {"kind": "published", "allow_unproven": True, "regularisation": 1e-6},
    },
    "ldp-fl": {
        "privacy": {
            "method": "ldp-fl",
            "epsilon": 60.0,
            "local_training": {"steps": 4, "batch": 8},
            "two_point": {"coordinates": 12},
        },
        "cap": {"kind": "none"},
    },
    "central": {
        "privacy": {
            "method": "central",
            "epsilon": 8.0,
            "clip_norm": 0.5,
            "clipping": {"kind": "quantile"},
            "local_training": {"steps": 4, "batch": 8},
        },
        "cap": {"kind": "none"},
    },
    "noise of devices": {
        "privacy": {
            "method": "central",
            "epsilon": 8.0,
            "clip_norm": 0.5,
            "device_noise": {"epsilon": 30.0},
            "local_training": {"steps": 4, "batch": 8},
        },
        "cap": {"kind": "none"},
    },
}
"""Sections of ``fleet.yaml`` by method, and the cap that gives each round a price of its own."""
METHODS_OF_PLANS: Final = ("dp-sgd", "incrementing", "ldp-fl", "central")
_STUCK_S: Final = 45.0
"""Without a kill, a job takes some seconds."""


class Fault(NamedTuple):
    """Where a program is to kill itself, at which time, and how long its other threads go on."""

    point: FaultPoint
    times: int = 1
    delay_s: float = 0.0


class Launcher:
    """Starts programs that kill themselves, as forks (:mod:`launching`)."""

    def __init__(self) -> None:
        self._running: dict[str, Popen] = {}
        self._ended: list[tuple[str, int]] = []

    @property
    def pids(self) -> dict[str, int]:
        """Processes of the programs that run."""
        self._take_ends()
        return {name: process.pid for name, process in self._running.items()}

    def start(self, name: str, arguments: list[str], log: Path, fault: Fault | None) -> None:
        with log.open("ab") as stream:
            self._running[name] = Popen(
                [sys.executable, "-P", "-m", "cli.main", *arguments], stdin=subprocess.DEVNULL, stdout=stream,
                stderr=stream, start_new_session=True, is_under_fire=True,
                fault=None if fault is None else fault._asdict(),
            )  # fmt: skip

    def runs(self, name: str) -> bool:
        self._take_ends()
        return name in self._running

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a program, which may have ended in this moment."""
        self._running[name].send_signal(number)

    def ended(self) -> list[tuple[str, int]]:
        """Names and exit codes of programs that have ended; each once. Negative codes are signals."""
        self._take_ends()
        ended, self._ended = self._ended, []
        return ended

    def _take_ends(self) -> None:
        for name, process in [*self._running.items()]:
            if (code := process.poll()) is not None:
                del self._running[name]
                self._ended.append((name, code))

    def close(self) -> None:
        """End all that still run."""
        for process in self._running.values():
            process.kill()
            process.wait(PATIENCE_S)
        self._running.clear()


@contextlib.contextmanager
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    try:
        yield made
    finally:
        made.close()


@dataclass
class Outcome:
    """What became of a job."""

    kills: Counter[str] = field(default_factory=Counter)
    """By the point of the kill, or the victim of one at random."""
    replayed: int = 0
    """Messages that the broker delivered to the mixer again."""
    broken: list[str] = field(default_factory=list)
    """Promises, each after the kill that showed it."""
    seconds: float = 0.0


def places(
    directory: Path, *, is_patient: bool = True, is_mixed: bool = False, postgresql: str | None = None
) -> Places:
    """Where the checker finds a fleet under fire."""
    return Places(
        fleet=NAME,
        devices={name: directory / name / "state" for name in DEVICES},
        coordinator=directory / COORDINATOR / "state",
        keys=directory / COORDINATOR / "keys",
        capture=directory / "capture",
        learning_rate=_LEARNING_RATE,
        rounds=ROUNDS,
        tensor_sizes=tuple(tensor.size for tensor in DIGITS.parameter_shapes),
        bystanders={BYSTANDER: directory / BYSTANDER / "state"},
        mixer=directory / MIXER / "keys" if is_mixed else None,
        postgresql=postgresql,
        is_patient=is_patient,
    )


class FleetUnderFire:
    """A coordinator, two devices and one that sits out, their broker and the wiretap between them.

    Args:
        directory: for all of it.
        start: of programs.
        deadline_s: of a round; a short one closes rounds before all fragments are in.
        method: one of :data:`METHODS`.
        is_mixed: whether fragments pass through a mixer, to which the broker delivers all that it has seen
            again after each kill.
        postgresql: keeps the coordinator's state, which another one and two workers share then.
        own_receipts: whether devices have certificates, and each receipt has a topic of its own.
    """

    def __init__(
        self,
        directory: Path,
        start: Launcher,
        *,
        method: str = "dp-sgd",
        deadline_s: float = PATIENT_S,
        is_mixed: bool = False,
        postgresql: Postgresql | None = None,
        own_receipts: bool = False,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._launcher = start
        self._postgresql = postgresql
        self.programs = PROGRAMS if postgresql is None else SHARED_PROGRAMS
        if is_mixed:
            self.programs = (*self.programs, MIXER)
        shared: dict[str, Any] = {}
        schema = ""
        if postgresql is not None:
            schema = postgresql.new_schema()
            shared = {"store": postgresql.settings(schema)}
        self.broker = Broker("mosquitto", directory, protocol="5").start()
        boards = (*DEVICES, BYSTANDER)
        authority = new_authority(directory / COORDINATOR / "members", NAME) if own_receipts else None
        if authority is None:
            self._wiretap = Wiretap(directory, self.broker, self.programs)
        else:
            server = ec.generate_private_key(ec.SECP256R1())
            certificate = authority.issue_server(
                server.public_key(), ["127.0.0.1"], days=1, now=datetime.now(UTC)
            )
            pair = written(directory, "wiretap", certificate, server)
            self._wiretap = Wiretap(directory, self.broker, self.programs, over_tls=boards, pair=pair)

        def mqtt(name: str) -> dict[str, Any]:
            values = self.broker.values | {"url": self._wiretap.url(name)}
            if authority is None or name not in boards:
                return values
            identity = certified(authority)
            own = written(directory, name, identity.certificate, identity.private_key)
            ca_file = AuthorityFiles(directory / COORDINATOR / "members").certificate
            return (
                values
                | dict(zip(("cert_file", "key_file"), map(str, own), strict=True))
                | {"ca_file": str(ca_file)}
            )

        self._files: dict[str, Path] = {}
        mixer_key = None
        if is_mixed:
            key = load_signer(directory / COORDINATOR / "keys", NAME).public_key
            self._files[MIXER] = write_mixer(
                directory / MIXER, None, NAME, key, keys_dir="keys", batch=6, least=2, longest_s=0.1,
                mqtt=mqtt(MIXER),
            )  # fmt: skip
            mixer_key = key_of(self._files[MIXER])
        file = write_fleet(
            directory / COORDINATOR, None, fleet=NAME, rounds=ROUNDS, model={"precision": "float32"},
            mixer_key=mixer_key,
            round=_ROUND | {"deadline_s": deadline_s},
            mqtt=mqtt(COORDINATOR), optimiser={"learning_rate": _LEARNING_RATE, "momentum": 0.0},
            receipts="fragment" if own_receipts else "fleet", **METHODS[method], **shared,
        )  # fmt: skip
        settings = load_fleet_settings(file)
        key = load_signer(settings.keys_dir, NAME).public_key
        load_opener(settings.keys_dir, NAME)
        self._files[COORDINATOR] = file
        for number, name in enumerate(boards):
            limits = {"dummy_traffic": True, "allow_unproven": name != BYSTANDER}
            limits |= {"maximum_job_epsilon": 1e-6} if name == BYSTANDER else {}
            self._files[name] = write_agent(
                directory / name, None, key, number, fleet=NAME, mqtt=mqtt(name), engine="numpy",
                budget={"epsilon": 1_000.0, "coordinator": {"epsilon": 20.0, "delta": 1e-3}},
                limits=limits | {"methods": [*METHODS_OF_PLANS], "trust": ["none", "coordinator"]},
            )  # fmt: skip
        address = None
        if postgresql is not None:
            self._files[STANDBY] = file
            for name in WORKERS:
                self._files[name] = write_shared(
                    directory / name,
                    None,
                    fleet=NAME,
                    mqtt=mqtt(name),
                    **shared,
                    keys_dir="../coordinator/keys",
                )
            address = postgresql.address(schema)
        self.checker = Checker(
            places(directory, is_patient=deadline_s == PATIENT_S, is_mixed=is_mixed, postgresql=address)
        )

    def run(
        self, next_fault: Callable[[str], Fault | None], next_strike: Callable[[], str | None] = lambda: None
    ) -> Outcome:
        """Run the job to its end, with a check after each kill.

        Args:
            next_fault: for a program that starts, or None.
            next_strike: asked all the time; what is to be killed now, or None.
        """
        outcome, began = Outcome(), time.monotonic()
        armed: dict[str, str] = {}
        quiet_since = began

        def start(name: str) -> None:
            fault = next_fault(name)
            armed[name] = f"{name} at random" if fault is None else fault.point
            self._start(name, fault)

        for name in self.programs:
            start(name)
        is_over = False
        while not is_over:
            for name, code in self._launcher.ended():
                if code == -signal.SIGKILL:
                    outcome.kills[armed[name]] += 1
                    self._check(outcome, f"after the kill of {name}: {armed[name]}")
                    connections = self._connections_of_mixer()
                    start(name)
                    if name == MIXER:
                        outcome.replayed += self._replay(connections)
                    quiet_since = time.monotonic()
                elif name in (COORDINATOR, STANDBY) and code == 0:
                    is_over = True
                else:
                    outcome.broken.append(f"{name} ended with exit code {code}")
                    start(name)
            strike = next_strike()
            if strike in self._launcher.pids:
                armed[strike] = f"{strike} at random"
                self._launcher.send(strike, signal.SIGKILL)
            elif strike is not None and strike.startswith(BROKER):
                outcome.kills[strike] += 1
                self.restart_broker(keep_store="without" not in strike)
                self._check(outcome, f"after the kill of the {strike}")
                quiet_since = time.monotonic()
            elif strike == POSTGRESQL:
                assert self._postgresql is not None
                outcome.kills[strike] += 1
                self._postgresql.kill()
                self._postgresql.start()
                self._check(outcome, f"after the kill of {strike}")
                quiet_since = time.monotonic()
            if time.monotonic() > quiet_since + _STUCK_S:
                outcome.broken.append("the job does not end; the stacks are in the logs")
                self._dump_stacks()
                break
            time.sleep(0.005)
        self._stop_devices(outcome)
        self._check(outcome, "at the end", at_the_end=is_over)
        outcome.seconds = time.monotonic() - began
        return outcome

    def restart_broker(self, *, keep_store: bool) -> None:
        self.broker.kill()
        if not keep_store:
            (self.broker.directory / "mosquitto.db").unlink(missing_ok=True)
        self.broker.start()

    def _connections_of_mixer(self) -> int:
        if MIXER not in self._files:
            return 0
        log = self._log(MIXER)
        return log.read_text().count("connected to mqtt") if log.exists() else 0

    def _replay(self, connections: int) -> int:
        """Deliver all to the mixer again that was sent to it, as a broker may; how many they are.

        Args:
            connections: that it had before its start.
        """
        while self._connections_of_mixer() == connections:
            if not self._launcher.runs(MIXER):
                return 0  # It was killed before.
            time.sleep(0.005)
        messages = self.checker.capture.to_mixer
        with Observer(self.broker, NAME) as client:
            for message in messages:
                client.publish(client.topics.mixer, message)
        return len(messages)

    def _start(self, name: str, fault: Fault | None) -> None:
        file = self._files[name]
        coordinator, worker = ["coordinator", "run"], ["coordinator", "worker", "--name", name]
        command = {
            COORDINATOR: coordinator, STANDBY: coordinator, MIXER: ["mixer", "run"],
            **dict.fromkeys(WORKERS, worker),
        }.get(name, ["run"])  # fmt: skip
        arguments = [*command, "--config", str(file), "--log-level", "debug"]
        self._launcher.start(name, arguments, self._log(name), fault)

    def _log(self, name: str) -> Path:
        if name == STANDBY:
            return self._files[name].with_suffix(".standby.log")
        return self._files[name].with_suffix(".log")

    def _check(self, outcome: Outcome, when: str, *, at_the_end: bool = False) -> None:
        outcome.broken += [f"{when}: {broken}" for broken in self.checker.look(at_the_end=at_the_end)]

    def _stop_devices(self, outcome: Outcome) -> None:
        """Leave no program running; those that run end well."""
        for name in [*self._launcher.pids]:
            self._launcher.send(name, signal.SIGTERM)

        until = time.monotonic() + PATIENCE_S
        while self._launcher.pids and time.monotonic() < until:
            for name, code in self._launcher.ended():
                # One that has just been started does not handle the signal yet.
                if code not in (0, -signal.SIGKILL, -signal.SIGTERM):
                    outcome.broken.append(f"{name} ended with exit code {code} when it was stopped")
            time.sleep(0.005)
        for name in self._launcher.pids:
            outcome.broken.append(f"{name} does not end when it is stopped; its stacks are in its log")
            self._dump_stacks()

    def _dump_stacks(self) -> None:
        for name in [*self._launcher.pids]:
            self._launcher.send(name, signal.SIGUSR1)
        time.sleep(1.0)

    def __enter__(self) -> FleetUnderFire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name in [*self._launcher.pids]:
            self._launcher.send(name, signal.SIGKILL)
        wait_until(
            lambda: self._launcher.ended() is None or not self._launcher.pids, "the end of all programs"
        )
        self._wiretap.stop()
        self.broker.give_up()


class RandomKills:
    """Kills at random: programs at fault points or at any time, the broker with its store and without.

    Args:
        seed: of all choices; the programs' own speed is not repeated.
        most: kills of one job.
        programs: to be killed.
    """

    def __init__(self, seed: int, most: int, programs: Sequence[str] = PROGRAMS) -> None:
        self._random, self._programs = random.Random(seed), programs
        self._left = most
        self._next_at = time.monotonic() + self._random.expovariate(1.0)

    def fault(self, name: str) -> Fault | None:
        """For a program that starts: mostly a point of its own."""
        if self._left <= 0 or self._random.random() < 0.3:
            return None
        self._left -= 1
        of_coordinator = name in (COORDINATOR, STANDBY, *WORKERS)
        kind = COORDINATOR if of_coordinator else MIXER if name == MIXER else "agent"
        points = [point for point in FaultPoint if point.startswith((kind, "a file"))]
        delay_s = self._random.choice([0.0, self._random.uniform(0.0, 0.05)])
        return Fault(self._random.choice(points), self._random.choice([1, 1, 1, 2, 3]), delay_s)

    def strike(self) -> str | None:
        """The victim, whenever the time for a kill has come."""
        if self._left <= 0 or time.monotonic() < self._next_at:
            return None
        self._left -= 1
        self._next_at = time.monotonic() + self._random.expovariate(2.0)
        servers = [f"{BROKER} with its store", f"{BROKER} without its store"]
        if STANDBY in self._programs:
            servers.append(POSTGRESQL)
        return self._random.choice([*self._programs] * 4 + servers)
