"""A virtual fleet against a real one over Mosquitto, with the same seed, to the bit."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeded_training
from brokers import Broker
from clocks import CreepingClock, MovableClock
from daemons import Running, attentive_daemons, coordinator_thread

import agent.cycle
import agent.worker
import coordinator.intake
import simulation.virtual.devices
from agent.daemon import Agent
from agent.settings import load_agent_settings
from coordinator.fragment_values import FragmentReader
from coordinator.stepping import Stepper
from dpagent.learning.data.formats.npz import records_in
from dpagent.protocol.messages import Fragment
from simulation.data.shards import prepare_data
from simulation.layout import Layout
from simulation.programs.broker import BrokerAddress
from simulation.programs.configurations import write_configurations
from simulation.programs.ledgers import begin_ledgers
from simulation.virtual.crew import RayCrew
from simulation.virtual.devices import DeviceGroup, RoundOrder, sums_of_group
from simulation.virtual.fleet import VirtualFleet
from simulation.virtual.insecure import insecure_entropy
from simulation.virtual.settings import VirtualRequest

pytestmark = pytest.mark.heavy

SEED, DEVICES, ROUNDS = 20261126, 2, 2
_PROFILE = "extends: generic-x86-64\nboard: {memory_mib: 64}\nmicrobatch: 32\nprocesses: 1\nniceness: 0\n"


@dataclass
class Seen:
    """What a fleet was seen to do, by round."""

    fragments: dict[int, Counter[tuple[int, bytes]]] = field(default_factory=dict)
    sums: list[Any] = field(default_factory=list)
    models: list[bytes] = field(default_factory=list)

    def see_fragment(self, fragment: Fragment, values: np.ndarray) -> None:
        of_round = self.fragments.setdefault(fragment.round, Counter())
        of_round[fragment.position, values.astype(np.int64).tobytes()] += 1

    def see_step(self, groups: Any, model: Any) -> None:
        (sums,) = groups
        self.sums.append({place: (count, total.tolist()) for place, (count, total) in sorted(sums.items())})
        self.models.append(b"".join(map(str.encode, map(str, model.stored()))))


def watched(seen: Seen, patch: pytest.MonkeyPatch, module: Any) -> None:
    """Have a module's check of fragments, and every step of a model, tell what they see."""
    step = Stepper.step

    class WatchedReader(FragmentReader):
        def values(self, fragment: Fragment) -> np.ndarray:
            values = super().values(fragment)
            seen.see_fragment(fragment, values)
            return values

    def stepped(self: Stepper, release: Any, model: Any, groups: Any, **more: Any) -> Any:
        result = step(self, release, model, groups, **more)
        seen.see_step(groups, result.model)
        return result

    patch.setattr(module, "FragmentReader", WatchedReader)
    patch.setattr(Stepper, "step", stepped)


def agent_of(file: Path, clock: MovableClock) -> Running:
    profile = file.with_name("calm.yaml")
    profile.write_text(_PROFILE)
    settings = load_agent_settings(file).with_values({"profile": str(profile)})

    return Running(lambda clock: Agent(settings, clock=CreepingClock(clock)), clock)


def run_really(fleet: VirtualFleet, root: Path, broker: Broker, patch: pytest.MonkeyPatch) -> Seen:
    """The same run by real programs: a coordinator, agents with their training processes, and Mosquitto."""
    seen, layout = Seen(), Layout(root)
    watched(seen, patch, coordinator.intake)
    prepare_data(fleet.settings, layout)
    settings = fleet.settings.with_values({"engine": "numpy"})
    address = BrokerAddress(broker.url, broker.values["username"], broker.password_file, "auto", "mosquitto")
    write_configurations(settings, layout, address)
    begin_ledgers(layout, DEVICES)
    patch.setenv(seeded_training.SEED, str(SEED))
    patch.setattr(agent.worker, "_PROGRAM", "seeded_training")
    step = Stepper.step

    def seeded_step(self: Stepper, release: Any, model: Any, groups: Any, **_: Any) -> Any:
        draw = insecure_entropy(SEED, release.plan.round, 0, "noise")
        return step(self, release, model, groups, entropy=draw)

    patch.setattr(Stepper, "step", seeded_step)
    clock = MovableClock()
    with ExitStack() as running:
        running.enter_context(attentive_daemons())
        center = running.enter_context(coordinator_thread(layout.fleet_file, clock))
        for number in range(1, DEVICES + 1):
            running.enter_context(agent_of(layout.agent_file(number), clock))
        clock.advance_until(lambda: not center.is_running, "the end of the job", step_s=0.1)
    return seen


def run_virtually(fleet: VirtualFleet, ray: Any, patch: pytest.MonkeyPatch) -> Seen:
    """The run on Ray; and each device's fragments, computed once more in this process."""
    seen, orders, compute = Seen(), [], RayCrew.compute

    def computed(self: RayCrew, order: RoundOrder, *more: Any) -> Any:
        orders.append(order)
        return compute(self, order, *more)

    watched(seen, patch, simulation.virtual.devices)
    patch.setattr(RayCrew, "compute", computed)
    fleet.run_on(ray)
    for order in orders:
        for number, shard in enumerate(fleet._shards, start=1):
            sums_of_group(order, DeviceGroup.of(number, [shard], max(map(len, fleet._shards))))
    return seen


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"data": {"split": "dirichlet", "alpha": 1.0}}, id="dp-sgd"),
        pytest.param({"cap_at": "device"}, id="cap on the device", marks=pytest.mark.slow),
        pytest.param({"clipping": "quantile"}, id="quantile", marks=pytest.mark.slow),
        pytest.param({"method": "incrementing", "noise": "laplace"}, id="laplace", marks=pytest.mark.slow),
        pytest.param({"method": "central", "device_noise": 20.0}, id="central", marks=pytest.mark.slow),
        pytest.param({"method": "ldp-fl"}, id="ldp-fl", marks=pytest.mark.slow),
    ],
)
def test_fragments_sums_and_models_are_those_of_a_real_run(
    tmp_path: Path, mosquitto: Broker, ray: Any, changes: dict[str, Any]
) -> None:
    request = VirtualRequest(
        devices=DEVICES, rounds=ROUNDS, insecure_noise_seed=SEED, jitter_window_s=0.1,
        **{"model": "digits", **changes},
    )  # fmt: skip
    fleet = VirtualFleet(request, tmp_path / "virtual")
    sizes = {len(shard) for shard in fleet._shards}
    with pytest.MonkeyPatch.context() as patch:
        really = run_really(fleet, tmp_path / "real", mosquitto, patch)
    with pytest.MonkeyPatch.context() as patch:
        virtually = run_virtually(fleet, ray, patch)
    assert really.fragments.keys() == virtually.fragments.keys() == set(range(1, ROUNDS + 1))
    for number in range(1, ROUNDS + 1):
        assert really.fragments[number].total() == DEVICES * fleet.settings.fragments_per_update
        assert really.fragments[number] == virtually.fragments[number]
    assert really.sums == virtually.sums
    assert really.models == virtually.models
    if "data" in changes:  # Boards draw lots among as many records as the largest has room for.
        assert len(sizes) > 1
    assert records_in(Layout(tmp_path / "real").shard_file(1)) == len(fleet._shards[0])
