"""Many devices in one process, over a real Mosquitto and with the real coordinator.

An agent is a process of its own with another for training, which no machine has room for five hundred times.
A swarm does in one process what so many of them do between charge and publication, with their functions:
derive the round from the signed plan, train, add noise, cut, encode and seal. It has one connection for all,
no ledger and no spool, and waits for no slot and no jitter, so that it shows a fleet's accuracy and the
coordinator's work, and no device's privacy. The coordinator is stopped (SIGSTOP) while the swarm sends to the
broker, so that each has the machine to itself. With members, it asks for the tokens of a round before that.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from agent.identity import Identity
from agent.noisy_sums import noisy_gradients
from benchmarks.figures import BenchmarkError, Skipped
from benchmarks.members import TokenRequest, enrolled, server_tls
from coordinator.authority import create_authority
from coordinator.brokers.mosquitto import find_mosquitto
from coordinator.keys import load_signer
from coordinator.reader import RoundRecord, StoreReader
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.protocol.chunks import Assembler
from dpagent.protocol.codec import encode
from dpagent.protocol.fragments import cut
from dpagent.protocol.messages import ModelChunk, Plan, Sealed
from dpagent.protocol.mixing import seal_for
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.reports import Reports
from dpagent.protocol.signing import Verifier
from dpagent.protocol.task import RoundTask
from dpagent.protocol.tokens import TokenKeys, with_token
from dpagent.protocol.topics import Topics
from dpagent.protocol.updates import Updates
from dpagent.transport.events import Acknowledged, Received
from dpagent.transport.session import MqttSession, Subscription
from dpagent.transport.settings import MqttSettings
from simulation.programs.broker import BrokerChild, choose_broker, wait_until_ready
from simulation.programs.supervisor import Supervisor, python_module
from simulation.request import BrokerRequest

_FLEET: Final = "swarm"
_LOOK_S: Final = 0.5
_SILENCE_S: Final = 300.0
_NO_WAITING: Final = {
    "deadline_s": 3600.0,
    "compute_slot_s": 0.001,
    "device_grid_s": 0.001,
    "jitter_window_s": 0.0,
}


@dataclass(frozen=True, slots=True)
class Played:
    """When what happened in a round, in Unix time.

    Attributes:
        asked_at: the first request for tokens left; the round came up, without tokens.
        granted_at: the last of them were there.
        went_on_at: the broker had all fragments, and the coordinator went on.
    """

    asked_at: float
    granted_at: float
    went_on_at: float


class Swarm:
    """Devices, and where their coordinator is.

    Args:
        shards: each device's records; one without any sends noise alone, and trains nothing.
        mqtt: the broker.
        key: the coordinator's public key.
        send_signal: to the coordinator.
        members: what each device is known by, where fragments carry tokens.
        announced: called when the first plan has come.
    """

    def __init__(
        self,
        shards: Sequence[Dataset],
        mqtt: MqttSettings,
        key: str,
        send_signal: Callable[[signal.Signals], None],
        members: Sequence[Identity] = (),
        announced: Callable[[], object] = lambda: None,
    ) -> None:
        self._shards, self._mqtt, self._send_signal = shards, mqtt, send_signal
        self._announced = announced
        self._members = {each.device_id: each for each in members}
        self._verifier, self._topics, self._assembler = Verifier(key, _FLEET), Topics(_FLEET), Assembler()
        self._plan: Plan | None = None
        self._keys: TokenKeys | None = None
        self._requests: dict[str, TokenRequest] = {}
        self._tokens: dict[str, list[bytes]] = {}
        self._waiting: Iterator[tuple[str, bytes]] = iter(())
        self._unanswered = 0
        self.played: dict[int, Played] = {}
        """By round."""

    def play(self) -> dict[int, Played]:
        """Take part in every round, to the end of the job.

        Raises:
            BenchmarkError: The coordinator is silent.
        """
        topics, quiet_s = self._topics, 0.0
        followed = [topics.plan]
        if self._members:
            followed += [topics.token_keys, topics.answer("+")]
        with MqttSession(
            self._mqtt, client_id=None, persistent=False,
            subscriptions=[Subscription(each) for each in followed],
        ) as session:  # fmt: skip
            phases = self._phases()
            next(phases)
            while quiet_s < _SILENCE_S:
                while session.has_room and (message := next(self._waiting, None)) is not None:
                    session.publish(*message)
                    self._unanswered += 1
                event = session.next_event(_LOOK_S)
                quiet_s = quiet_s + _LOOK_S if event is None else 0.0
                if isinstance(event, Acknowledged):
                    self._unanswered -= 1
                elif isinstance(event, Received):
                    self._take(event, session)
                if self._plan is not None and self._plan.state == "finished":
                    return self.played
                next(phases)
        raise BenchmarkError(
            f"The coordinator was silent for {_SILENCE_S:g} s in round {len(self.played) + 1}."
        )

    def _phases(self) -> Iterator[None]:
        """The steps of each round; every one waits for what it needs."""
        while True:
            number = len(self.played) + 1
            while (weights := self._weights(number)) is None:
                yield
            asked_at = time.time()
            while not self._has_tokens(number):
                yield
            granted_at = time.time()
            assert self._plan is not None
            messages = [*self._messages(self._plan, weights)]
            self._send_signal(signal.SIGSTOP)
            self._unanswered = 0
            self._waiting = ((self._topics.fragments, message) for message in messages)
            yield
            while self._unanswered:
                yield
            self._send_signal(signal.SIGCONT)
            self.played[number] = Played(asked_at, granted_at, time.time())

    def _take(self, event: Received, session: MqttSession) -> None:
        """Take a message in."""
        open_, topics = self._verifier.open, self._topics
        if event.topic == topics.plan:
            if self._plan is None:
                self._announced()
            self._plan = open_(event.payload, Plan, "plan")
            if self._plan.state != "finished":
                self._assembler.keep_for(self._plan)
                model = self._plan.model
                chunks = self._assembler.missing(model.digest, model.size)
                session.follow([topics.model_chunk(index) for index in chunks])
        elif event.topic == topics.token_keys:
            self._keys = open_(event.payload, TokenKeys, "token-keys")
        elif event.topic.endswith("/answer"):
            device = event.topic.split("/")[-2]
            # The coordinator answers each request once; one that comes again is of a round before.
            if (request := self._requests.pop(device, None)) is not None:
                self._tokens[device] = request.tokens(open_(event.payload, Sealed, "answer"))
        else:
            self._assembler.add(open_(event.payload, ModelChunk, "model"))

    def _weights(self, number: int) -> bytes | None:
        """The model of a round, once its plan has come."""
        if self._plan is None or self._plan.round != number:
            return None
        return self._assembler.get(self._plan.model.digest, self._plan.model.size)

    def _has_tokens(self, number: int) -> bool:
        """Whether all members have those of a round; they ask for them first."""
        if not self._members:
            return True
        if not self._requests and not self._tokens:
            if self._keys is None or number not in self._keys.rounds:
                return False
            self._requests = {
                device: TokenRequest(identity, self._keys, number, _FLEET)
                for device, identity in self._members.items()
            }
            asked = [(self._topics.ask(device), each.message()) for device, each in self._requests.items()]
            self._waiting = iter(asked)
        return len(self._tokens) == len(self._members)

    def _messages(self, plan: Plan, weights: bytes) -> Iterator[bytes]:
        """All devices' sealed fragments of a round, which spend their tokens."""
        task = RoundTask.of(plan)
        release, received, engine = task.release, task.weights_from(weights), NumpyEngine(task.spec.head)
        tokens = [*self._tokens.values()]
        self._tokens = {}
        for number, shard in enumerate(self._shards):
            match release:
                case NoisySum():
                    update = noisy_gradients(release, received, shard, engine)
                case Reports() | Updates():
                    trained = release.training.train(engine, received, shard) if len(shard) else received
                    update = release.update_of(trained, received)
            for fragment in cut(update, plan):
                if tokens:
                    fragment = with_token(fragment, tokens[number][fragment.position])
                yield seal_for(encode(fragment), plan)


def run_swarm(
    settings: Mapping[str, Any],
    shards: Sequence[Dataset],
    test: Dataset | None = None,
    *,
    has_members: bool = False,
    watch: Callable[[int], AbstractContextManager[object]] = nullcontext,
    announced: Callable[[], object] = lambda: None,
) -> tuple[list[RoundRecord], list[float], list[Played]]:
    """Run a job from start to end.

    Args:
        settings: of ``fleet.yaml``, without the fleet's name, number of devices, round and addresses.
        shards: the devices' records.
        test: the coordinator's, if it is to evaluate the model.
        has_members: whether devices have enrolled, fragments carry tokens, and the broker has TLS.
        watch: what runs beside the coordinator, whose process it is given.
        announced: called when the first plan has come.

    Returns:
        The rounds, as the coordinator keeps them; for how many seconds it worked on each one's fragments; and
        when what happened in each.

    Raises:
        Skipped: Mosquitto is not installed.
    """
    if find_mosquitto() is None:
        raise Skipped("Mosquitto is not installed: apt-get install mosquitto.")
    with tempfile.TemporaryDirectory(prefix="dpagent-bench-") as name:
        root = Path(name)
        test_data, tls, members = None, None, []
        if test is not None:
            save_npz(root / "test.npz", test)
            test_data = {"kind": "npz", "path": "test.npz"}
        if has_members:
            authority = create_authority(root / "members", _FLEET, now=datetime.now(UTC))
            members = [*enrolled(authority, root / "members", len(shards))]
            tls = server_tls(authority, root / "members")
        with (
            choose_broker(BrokerRequest(broker="mosquitto"), root / "broker", tls) as broker,
            Supervisor(root / "logs") as supervisor,
        ):
            assert isinstance(broker, BrokerChild)
            supervisor.start("broker", broker.command)
            wait_until_ready(broker.address)
            mqtt = broker.address.settings
            fleet = dict(settings) | {
                "fleet": _FLEET, "devices": len(shards), "round": _NO_WAITING,
                "state_dir": "state", "keys_dir": "keys", "test_data": test_data,
                "linkability": "fragment" if has_members else "none",
                "mqtt": {
                    "url": mqtt.url, "username": mqtt.username, "password_file": str(mqtt.password_file)
                } | ({} if mqtt.ca_file is None else {"ca_file": str(mqtt.ca_file)}),
            }  # fmt: skip
            file = root / "fleet.yaml"
            file.write_text(yaml.safe_dump(fleet))
            key = load_signer(root / "keys", _FLEET).public_key
            program = python_module("cli.main", "coordinator", "run", "--config", str(file))
            with watch(supervisor.start("coordinator", program, may_end=True)):
                send_signal = partial(supervisor.send_signal, "coordinator")
                played = Swarm(shards, mqtt, key, send_signal, members, announced).play()
        with closing(StoreReader(root / "state")) as reader:
            rounds = reader.rounds()
        worked_s = [
            each.closed_at - played[each.number].went_on_at for each in rounds if each.closed_at is not None
        ]
        return rounds, worked_s, [*played.values()]
