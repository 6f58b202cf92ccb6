"""A virtual fleet on a real Ray: the same bits on any workers, whoever is killed, and nothing left behind."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpagent.errors import ConfigurationError, UsageError
from simulation.fleet import Fleet
from simulation.request import Request
from simulation.virtual.checkpoint import Checkpoint
from simulation.virtual.crew import RayCrew, group_size
from simulation.virtual.devices import RoundOrder
from simulation.virtual.fleet import Listener, VirtualFleet
from simulation.virtual.settings import VirtualRequest

pytestmark = pytest.mark.heavy


def request(**changes: Any) -> VirtualRequest:
    return VirtualRequest.checked(
        {"devices": 9, "rounds": 3, "model": "digits", "insecure_noise_seed": 5} | changes
    )


def weights_of(fleet: VirtualFleet) -> bytes:
    assert fleet.checkpoint is not None
    return fleet.checkpoint.model.weights.tobytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> VirtualFleet:
    """A run in this process."""
    fleet = VirtualFleet(request(), tmp_path_factory.mktemp("alone") / "run")
    fleet.run_here()
    return fleet


def test_workers_compute_what_one_process_computes(tmp_path: Path, ray: Any, alone: VirtualFleet) -> None:
    fleet = VirtualFleet(request(), tmp_path / "run")
    record = fleet.run_on(ray)
    assert weights_of(fleet) == weights_of(alone)
    assert record.fragments == alone.record().fragments
    assert record.fragments.counted == 9 * 3 * fleet.settings.fragments_per_update
    assert record.accuracy_history == alone.record().accuracy_history
    (budget,) = record.budgets
    assert (budget.charges, budget.verified) == (3, True)
    assert budget.epsilon_spent == pytest.approx(record.epsilon_spent[-1], rel=1e-3)


def test_a_clip_norm_at_its_bound_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rounds of a real fleet tell of it, too."""

    class Stopped(Exception):
        """After a round."""

    class Stops(Listener):
        def closed(self, fleet: VirtualFleet, checkpoint: Checkpoint) -> None:
            raise Stopped

    # All gradients are shorter, so that the norm falls.
    asked = request(clipping="quantile", clip_norm=1e4)
    fleet = VirtualFleet(asked, tmp_path / "run")
    with pytest.raises(Stopped):
        fleet.run_here(Stops())
    assert fleet.checkpoint is not None
    least, _ = fleet._fleet_settings().privacy.clip_norms
    model = replace(fleet.checkpoint.model, clip_norm=1.01 * least)
    replace(fleet.checkpoint, model=model).save(tmp_path / "run")
    assert "the clip norm" not in caplog.text
    fleet = VirtualFleet(asked, tmp_path / "run")
    fleet.run_here()
    assert fleet.checkpoint is not None
    assert [each.clip_norm for each in fleet.checkpoint.rounds] == [1e4, 1.01 * least, least]
    assert caplog.text.count(f"the clip norm has come to {least:g}, the least") == 1


def test_killed_workers_cost_time_and_change_no_bit(tmp_path: Path, ray: Any, alone: VirtualFleet) -> None:
    killed: list[int] = []

    @ray.remote(num_cpus=1)
    def identity() -> int:
        time.sleep(0.5)  # So that each worker has one.
        return os.getpid()

    class Killer(Listener):
        def starts(self, fleet: VirtualFleet, cores: int, nodes: int) -> None:
            self.workers = set(ray.get([identity.remote() for _ in range(cores)]))

        def computed(self, round_number: int, devices: int) -> None:
            if round_number == 2 and not killed and devices < 9:
                for worker in self.workers:
                    os.kill(worker, signal.SIGKILL)
                    killed.append(worker)

    fleet = VirtualFleet(request(), tmp_path / "run")
    fleet.run_on(ray, Killer())
    assert killed
    assert weights_of(fleet) == weights_of(alone)


class Stopped(Exception):
    pass


class Stopping(Listener):
    """Ends the program after a round, when its checkpoint is written or just before."""

    def __init__(self, after: int) -> None:
        self._after = after

    def closed(self, fleet: VirtualFleet, checkpoint: Checkpoint) -> None:
        if len(checkpoint.rounds) == self._after:
            raise Stopped


def test_a_stopped_run_goes_on_after_its_last_round(tmp_path: Path, alone: VirtualFleet) -> None:
    for after in (1, 2):
        with pytest.raises(Stopped):
            VirtualFleet(request(), tmp_path / "run").run_here(Stopping(after))
    # What is charged and not checkpointed is run again under the charge it has.
    file = tmp_path / "run" / "checkpoint.cbor"
    kept = file.read_bytes()
    with pytest.raises(Stopped):
        VirtualFleet(request(), tmp_path / "run").run_here(Stopping(3))
    file.write_bytes(kept)
    fleet = VirtualFleet(request(), tmp_path / "run")
    record = fleet.run_here()
    assert weights_of(fleet) == weights_of(alone)
    assert record.budgets[0].charges == 3
    assert VirtualFleet(request(), tmp_path / "run").run_here().accuracy == record.accuracy
    with pytest.raises(ConfigurationError, match="other settings"):
        VirtualFleet(request(insecure_noise_seed=6), tmp_path / "run")


def test_a_run_without_a_seed_repeats_nothing(tmp_path: Path) -> None:
    one, other = (VirtualFleet(request(insecure_noise_seed=None, rounds=1), tmp_path / name) for name in "ab")
    first, second = one.run_here(), other.run_here()
    assert weights_of(one) != weights_of(other)
    assert first.is_private
    assert first.settings.insecure == second.settings.insecure == ""


def test_every_output_says_that_noise_was_seeded(alone: VirtualFleet) -> None:
    import onnx

    from simulation.report.page import render_report
    from simulation.report.results import as_json

    record, said = alone.record(), "--insecure-noise-seed 5"
    assert not record.is_private
    assert said in as_json(record)["insecure"]
    assert as_json(record)["privacy"]["statement"]["guarantee"] == "none"
    assert said in render_report(record, alone.layout.root / "report")
    model = onnx.load(str(alone.layout.trained_model))
    metadata = {each.key: each.value for each in model.metadata_props}
    assert said in metadata["dpagent.insecure"]
    assert metadata["dpagent.privacy"].startswith("no guarantee")
    assert "dpagent.epsilon_spent" not in metadata


def test_without_noise_the_mean_is_that_of_the_training_loop(tmp_path: Path, ray: Any) -> None:
    fleet = VirtualFleet(request(rounds=2, baseline=True, sampling_rate=1.0), tmp_path / "run")
    record = fleet.run_on(ray)
    from simulation.programs.configurations import fleet_settings
    from simulation.training_loop import TrainingLoop

    loop = TrainingLoop(
        fleet_settings(fleet.settings), fleet.spec, fleet._shards, fleet._source.test, noise=False
    )
    for number, accuracy in enumerate(record.baseline_history, start=1):
        loop.round(number)
        assert loop.accuracy() == pytest.approx(accuracy, abs=0.006)


def test_a_front_end_with_a_projection_takes_its_first_round(tmp_path: Path, ray: Any) -> None:
    model = tmp_path / "projected.yaml"
    model.write_text(
        "name: projected\ninput_shape: [8, 8, 1]\nclasses: 10\n"
        "front_end:\n  - projection: {components: 8}\nlayers:\n  - dense: {units: 10}\n"
    )
    fleets = [VirtualFleet(request(model=str(model), rounds=3), tmp_path / name) for name in "ab"]
    here, there = fleets[0].run_here(), fleets[1].run_on(ray)
    assert weights_of(fleets[0]) == weights_of(fleets[1])
    assert here.accuracy == there.accuracy
    assert math.isnan(here.accuracy_history[0])
    assert len(here.accuracy_history) == 3


def test_ray_listens_on_the_loopback_interface_alone_and_keeps_no_token(ray: Any) -> None:
    token = os.environ["RAY_AUTH_TOKEN"].encode()
    sockets = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if token in (process / "environ").read_bytes() or int(process.name) == os.getpid():
                    sockets |= {str(each.readlink()) for each in (process / "fd").iterdir()}
            except OSError:
                continue
    listening = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                listening.append(fields[1].partition(":")[0])
    assert len(listening) >= 4
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert {*listening} <= loopback


def test_what_virtual_devices_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="published"):
        VirtualFleet(
            request(method="incrementing", noise="laplace", cap="published", allow_unproven=True),
            tmp_path / "run",
        )
    with pytest.raises(UsageError, match="dpagent simulate"):
        Fleet(Request(devices=201), tmp_path / "demo")
    assert not any(tmp_path.iterdir())


def test_groups_are_computed_once_each(ray: Any, alone: VirtualFleet) -> None:
    assert [group_size(devices, 2) for devices in (1, 7, 8, 80, 10_000)] == [1, 1, 1, 10, 64]
    crew = RayCrew(ray, alone._shards)
    seen: list[int] = []
    found = crew.compute(_order(alone), seen.append)
    assert found.devices == seen[-1] == 9
    assert {count for count, _ in found.sums.values()} == {9}


def _order(fleet: VirtualFleet) -> RoundOrder:
    from coordinator.store import OpenRound
    from dpagent.protocol.weights import weights_to_bytes
    from simulation.planning import trial_job, trial_planner
    from simulation.programs.configurations import fleet_settings

    settings = fleet_settings(fleet.settings)
    sent = weights_to_bytes(fleet.spec.initial_weights(0), settings.model.precision)
    planner = trial_planner(settings, fleet.spec, trial_job(settings, fleet.spec))
    return RoundOrder(planner.task(OpenRound(1, 0, 0), sent).plan, sent, settings, insecure_noise_seed=1)
