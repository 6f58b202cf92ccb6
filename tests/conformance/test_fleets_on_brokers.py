"""The same fleet on every broker: real processes, TLS, and the access rules that `broker-config` writes.

A model of several chunks, which are retained before the boards come; a board that joins late, and one that is
killed and started again; a broker that is killed in the middle of a round; a second job on the same broker.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from brokers import wait_until
from fleets import Program, run_agent, run_coordinator, write_agent, write_fleet
from observed import Observations
from servers import BOARDS, FLEET, Server
from watched_fleets import charges

from coordinator.keys import load_signer
from coordinator.reader import RoundRecord, StoreReader
from coordinator.settings import load_fleet_settings
from dpagent.errors import DpagentError
from dpagent.protocol.chunks import chunked
from dpagent.protocol.weights import weights_to_bytes

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(900)]

ROUNDS, BLOCKS = 3, 4
PATIENCE_S = 250.0
LAYERS = [{"dense": 1_500}, "tanh", {"dense": 10}]


class Job:
    """A job of the fleet, whose boards go on from job to job."""

    def __init__(self, directory: Path, server: Server, boards: Path, *, devices: int) -> None:
        self.devices = devices
        (directory / "coordinator").mkdir(parents=True)
        model = {"name": "mine", "input_shape": [8, 8, 1], "classes": 10, "front_end": [], "layers": LAYERS}
        (directory / "coordinator" / "mine.yaml").write_text(yaml.safe_dump(model))
        # Long enough for boards that start on a busy machine; a round ends when all fragments are in.
        times = {"deadline_s": 300.0, "compute_slot_s": 1.0, "jitter_window_s": 0.5, "device_grid_s": 0.001}
        self.file = write_fleet(
            directory / "coordinator", None, fleet=FLEET, devices=devices, rounds=ROUNDS,
            round=times | {"minimum_devices": devices},
            model={"name": "mine.yaml", "precision": "float32"}, fragments_per_update=BLOCKS,
            keys_dir=str(boards / "keys"), privacy={"epsilon": 2.0}, mqtt=server.values("coordinator"),
        )  # fmt: skip
        self.settings = load_fleet_settings(self.file)
        weights = weights_to_bytes(self.settings.model.spec().initial_weights(0), "float32")
        assert len(chunked(weights)) == 10, "more than a board follows at a time"
        key = load_signer(self.settings.keys_dir, FLEET).public_key
        self.boards = [
            write_agent(
                boards / name, None, key, number, fleet=FLEET, mqtt=server.values(name),
                budget={"epsilon": 20.0, "delta": 1e-3},
            )
            for number, name in enumerate(BOARDS[:devices])
        ]  # fmt: skip

    def rounds(self) -> list[RoundRecord]:
        try:
            reader = StoreReader(self.settings.state_dir)
        except DpagentError:
            return []
        try:
            return reader.rounds()
        except DpagentError:
            return []
        finally:
            reader.close()

    def closed(self) -> int:
        return sum(each.closed_at is not None for each in self.rounds())

    def require_done(self, coordinator: Program) -> None:
        assert coordinator.wait(PATIENCE_S) == 0, coordinator.said()
        assert [each.fragments for each in self.rounds()] == [self.devices * BLOCKS] * ROUNDS


def test_a_fleet_whose_boards_join_late_and_are_killed(
    server: Server, observations: Observations, tmp_path: Path
) -> None:
    """And then a second job on the same broker, with the same boards."""
    boards = tmp_path / "boards"
    job = Job(tmp_path / "one", server, boards, devices=2)
    with run_coordinator(job.file) as coordinator:
        wait_until(job.rounds, "the first round", PATIENCE_S)
        # All that they get of the model was retained before.
        with run_agent(job.boards[0]) as first:
            wait_until(lambda: charges(job.boards[0]) >= 1, "the first charge", PATIENCE_S)
            first.kill()
        with run_agent(job.boards[0]), run_agent(job.boards[1]):
            job.require_done(coordinator)
            assert charges(*job.boards) == 2 * ROUNDS
            second = Job(tmp_path / "two", server, boards, devices=2)
            with run_coordinator(second.file) as coordinator:
                second.require_done(coordinator)
            assert charges(*job.boards) == 4 * ROUNDS
    observations.note("boards that join late or are killed, and a second job", "hold")


def test_a_broker_that_is_killed_in_the_middle_of_a_job(
    server: Server, observations: Observations, tmp_path: Path
) -> None:
    job = Job(tmp_path / "job", server, tmp_path / "boards", devices=2)
    with run_agent(job.boards[0]), run_agent(job.boards[1]), run_coordinator(job.file) as coordinator:
        wait_until(lambda: job.closed() >= 1, "the end of the first round", PATIENCE_S)
        server.kill()
        server.start()
        job.require_done(coordinator)
        assert charges(*job.boards) == 2 * ROUNDS
    observations.note("a broker that is killed in the middle of a round", "holds")
