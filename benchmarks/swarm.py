"""Many devices in one process, over a real Mosquitto and with the real coordinator.

An agent is a process of its own with another for training, which no machine has room for five hundred times.
A swarm does in one process what so many of them do between charge and publication, with their functions:
derive the round from the signed plan, train, add noise, cut, encode and seal. It has one connection for all,
no ledger and no spool, and waits for no slot and no jitter, so that it shows a fleet's accuracy and the
coordinator's work, and no device's privacy. The coordinator is stopped (SIGSTOP) while the swarm sends to the
broker, so that each has the machine to itself.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from agent.noisy_sums import noisy_gradients
from benchmarks.figures import BenchmarkError, Skipped
from coordinator.brokers.mosquitto import find_mosquitto
from coordinator.keys import load_signer
from coordinator.reader import RoundRecord, StoreReader
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.protocol.codec import encode
from dpagent.protocol.fragments import Assembler, cut
from dpagent.protocol.messages import ModelChunk, Plan
from dpagent.protocol.mixing import seal_for
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.reports import Reports
from dpagent.protocol.signing import Verifier
from dpagent.protocol.task import RoundTask
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
class Swarm:
    """Devices, and where their coordinator is.

    Attributes:
        shards: each device's records; one without any sends noise alone, and trains nothing.
        mqtt: the broker.
        key: the coordinator's public key.
        send_signal: to the coordinator.
    """

    shards: Sequence[Dataset]
    mqtt: MqttSettings
    key: str
    send_signal: Callable[[signal.Signals], None]

    def play(self) -> dict[int, float]:
        """Take part in every round, to the end of the job.

        Returns:
            When the broker had all fragments and the coordinator went on, in Unix time, by round.

        Raises:
            BenchmarkError: The coordinator is silent.
        """
        verifier, topics, assembler = Verifier(self.key, _FLEET), Topics(_FLEET), Assembler()
        plan: Plan | None = None
        played, unanswered, quiet_s = 0, 0, 0.0
        went_on_at: dict[int, float] = {}
        subscriptions = [Subscription(topics.plan)]
        with MqttSession(self.mqtt, client_id=None, subscriptions=subscriptions, persistent=False) as session:
            waiting: Iterator[bytes] = iter(())
            while quiet_s < _SILENCE_S:
                while session.has_room and (message := next(waiting, None)) is not None:
                    session.publish(topics.fragments, message)
                    unanswered += 1
                if played > len(went_on_at) and not unanswered:
                    went_on_at[played] = time.time()
                    self.send_signal(signal.SIGCONT)
                event = session.next_event(_LOOK_S)
                quiet_s = quiet_s + _LOOK_S if event is None else 0.0
                if isinstance(event, Acknowledged):
                    unanswered -= 1
                elif isinstance(event, Received) and event.topic == topics.plan:
                    plan = verifier.open(event.payload, Plan, "plan")
                    if plan.state == "finished":
                        return went_on_at
                    assembler.keep_for(plan)
                    chunks = assembler.missing(plan.model.digest, plan.model.size)
                    session.follow([topics.model_chunk(index) for index in chunks])
                elif isinstance(event, Received):
                    assembler.add(verifier.open(event.payload, ModelChunk, "model"))
                if plan is not None and plan.round > played:
                    weights = assembler.get(plan.model.digest, plan.model.size)
                    if weights is not None:
                        waiting, played = iter([*self._messages(plan, weights)]), plan.round
                        self.send_signal(signal.SIGSTOP)
        raise BenchmarkError(f"The coordinator was silent for {_SILENCE_S:g} s in round {played}.")

    def _messages(self, plan: Plan, weights: bytes) -> Iterator[bytes]:
        """All devices' sealed fragments of a round."""
        task = RoundTask.of(plan)
        release, received, engine = task.release, task.weights_from(weights), NumpyEngine(task.spec.head)
        for shard in self.shards:
            match release:
                case NoisySum():
                    update = noisy_gradients(release, received, shard, engine)
                case Reports() | Updates():
                    trained = release.training.train(engine, received, shard) if len(shard) else received
                    update = release.update_of(trained, received)
            for fragment in cut(update, plan):
                yield seal_for(encode(fragment), plan)


def run_swarm(
    settings: Mapping[str, Any],
    shards: Sequence[Dataset],
    test: Dataset | None = None,
    *,
    watch: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> tuple[list[RoundRecord], list[float]]:
    """Run a job from start to end.

    Args:
        settings: of ``fleet.yaml``, without the fleet's name, number of devices, round and addresses.
        shards: the devices' records.
        test: the coordinator's, if it is to evaluate the model.
        watch: what runs beside the coordinator, whose process it is given.

    Returns:
        The rounds, as the coordinator keeps them, and for how many seconds it worked on each one's fragments.

    Raises:
        Skipped: Mosquitto is not installed.
    """
    if find_mosquitto() is None:
        raise Skipped("Mosquitto is not installed: apt-get install mosquitto.")
    with tempfile.TemporaryDirectory(prefix="dpagent-bench-") as name:
        root = Path(name)
        test_data = None
        if test is not None:
            save_npz(root / "test.npz", test)
            test_data = {"kind": "npz", "path": "test.npz"}
        with (
            choose_broker(BrokerRequest(broker="mosquitto"), root / "broker") as broker,
            Supervisor(root / "logs") as supervisor,
        ):
            assert isinstance(broker, BrokerChild)
            supervisor.start("broker", broker.command)
            wait_until_ready(broker.address)
            mqtt = broker.address.settings
            fleet = dict(settings) | {
                "fleet": _FLEET, "devices": len(shards), "round": _NO_WAITING,
                "state_dir": "state", "keys_dir": "keys", "test_data": test_data,
                "mqtt": {
                    "url": mqtt.url, "username": mqtt.username, "password_file": str(mqtt.password_file)
                },
            }  # fmt: skip
            file = root / "fleet.yaml"
            file.write_text(yaml.safe_dump(fleet))
            key = load_signer(root / "keys", _FLEET).public_key
            program = python_module("cli.main", "coordinator", "run", "--config", str(file))
            with watch(supervisor.start("coordinator", program, may_end=True)):
                went_on_at = Swarm(shards, mqtt, key, partial(supervisor.send_signal, "coordinator")).play()
        with closing(StoreReader(root / "state")) as reader:
            rounds = reader.rounds()
        return rounds, [
            each.closed_at - went_on_at[each.number] for each in rounds if each.closed_at is not None
        ]
