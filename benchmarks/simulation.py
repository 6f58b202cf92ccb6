"""A virtual fleet on Ray: what it takes above its engine, how that grows with devices, and with nodes.

`mnist-cnn`, 600 made-up records a device, one round. *Engine alone*: the same Ray workers compute the same
records with the same engine, device by device, and nothing else: no lots, noise, fragments or checks. Sides
take turns; a ratio is the median over turns. With a sampling rate of 1 a round computes all records; with 0.1
a tenth of them, and noise, which takes as long for any lot, weighs ten times as much.

*Nodes*: Ray's own cluster utilities start two nodes with one core each on this machine; one side may use the
first alone.

Limits: two cores, on which nothing else may run. `--long` has 10,000 devices too, and each side one turn
there: a quarter of an hour, and 5 GB of shared memory.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import Figure
from benchmarks.programs import python, run_json
from coordinator.store import OpenRound
from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.models.built_ins import built_in
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.weights import weights_to_bytes
from simulation.choices import settle
from simulation.planning import trial_job, trial_planner
from simulation.programs.configurations import fleet_settings
from simulation.settings import DataForm
from simulation.virtual.cluster import ClusterRequest, ray_on, ray_package
from simulation.virtual.crew import RayCrew
from simulation.virtual.devices import DeviceGroup, GroupSums, RoundOrder, engine_for, sums_of_group
from simulation.virtual.settings import VirtualRequest

_RECORDS: Final = 600
_DEVICES: Final = 200
_MANY: Final = 10_000
_TURNS: Final = 5
_TIMEOUT_S: Final = 7200.0


def run() -> list[Figure]:
    """Measure with 200 devices."""
    figures = [_against_engine(_DEVICES, rate, _child("engine", _DEVICES, rate)) for rate in ("1.0", "0.1")]
    figures.append(_by_device(_DEVICES, _child("devices", _DEVICES)))
    found = _child("nodes", _DEVICES)
    figures.append(Figure("two nodes", found["two"], "s", f"one: {found['one']:.1f} s", found["ratio"]))
    return figures


def run_long() -> list[Figure]:
    """Measure with 200 devices, and with 10,000."""
    found = _child("long", _MANY)
    return [*run(), _against_engine(_MANY, "1.0", found), _by_device(_MANY, found)]


def _child(part: str, devices: int, *more: str) -> dict[str, float]:
    command = [*python("-m", "benchmarks.simulation", part, str(devices)), *more]
    found: dict[str, float] = run_json(command, timeout_s=_TIMEOUT_S)
    return found


def _against_engine(devices: int, rate: str, found: dict[str, float]) -> Figure:
    what = f"a round of {devices:,} devices of {_RECORDS} records, sampling rate {rate}"
    return Figure(what, found["round"], "s", f"engine alone: {found['engine']:.1f} s", found["ratio"])


def _by_device(devices: int, found: dict[str, float]) -> Figure:
    compared = f"of a quarter: {1e3 * found['few']:.1f} ms"
    return Figure(
        f"a device of {devices:,}", 1e3 * found["many"], "ms", compared, found["many"] / found["few"]
    )


def engine_alone(order: RoundOrder, group: DeviceGroup) -> GroupSums:
    """The clipped sums of a group, all records of each device, and nothing else."""
    task, engine = engine_for(order)
    release = task.release
    assert isinstance(release, NoisySum)
    weights, norms = task.weights_from(order.weights), release.clipping.norms
    for _, shard in group.shards():
        inputs, labels = shard.batch(np.arange(round(release.sampling.rate * len(shard))))
        engine.clipped_sum(weights, inputs, labels, norms)
    return GroupSums(devices=group.devices)


class _EngineAlone(RayCrew):
    """A crew that computes nothing but clipped sums."""

    def __init__(self, ray: Any, shards: Sequence[Dataset]) -> None:
        super().__init__(ray, shards)
        self._sum = ray.remote(num_cpus=1)(engine_alone)


class _OnOneNode(RayCrew):
    """A crew of the first node alone."""

    def __init__(self, ray: Any, shards: Sequence[Dataset]) -> None:
        super().__init__(ray, shards)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._sum = ray.remote(num_cpus=1, scheduling_strategy=here)(sums_of_group)


def shards_of(devices: int) -> list[Dataset]:
    """Made-up records; all devices have parts of one array."""
    generator = np.random.default_rng(0)
    pool: NDArray[np.uint8] = generator.integers(0, 256, (8 * _RECORDS, 28, 28, 1), np.uint8)
    labels = generator.integers(0, 10, len(pool))
    starts = [(device % 8) * _RECORDS for device in range(devices)]
    return [ArrayDataset(pool[at : at + _RECORDS], labels[at : at + _RECORDS], 10) for at in starts]


def order_of(devices: int, rate: float) -> RoundOrder:
    """The first round of a job."""
    spec = built_in("mnist-cnn")
    request = VirtualRequest(
        model="mnist-cnn", devices=devices, rounds=2, epsilon=2.0, sampling_rate=rate, clip_norm=1.0,
        learning_rate=1.0,
    )  # fmt: skip
    form = DataForm(devices * _RECORDS, 100, (28, 28, 1), 10, dtype="uint8")
    fleet = fleet_settings(settle(request, form, "mnist-cnn", spec)[0])
    sent = weights_to_bytes(spec.initial_weights(0), fleet.model.precision)
    task = trial_planner(fleet, spec, trial_job(fleet, spec)).task(OpenRound(1, 0, 0), sent)
    return RoundOrder(task.plan, sent, fleet)


def in_turns(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float, float]:
    """Medians of two sides that take turns, in seconds, and the median of their ratios."""
    for side in (first, second):
        side()
    turns = [(_seconds(first), _seconds(second)) for _ in range(_TURNS)]
    one, two = (statistics.median(times) for times in zip(*turns, strict=True))
    return one, two, statistics.median(a / b for a, b in turns)


def _seconds(side: Callable[[], object]) -> float:
    began = time.perf_counter()
    side()
    return time.perf_counter() - began


def main(part: str, devices: int, rate: float) -> dict[str, float]:
    """What a child measures."""
    if part == "nodes":
        return _nodes(devices)
    order = order_of(devices, rate)
    with ray_on(ClusterRequest(), devices * _RECORDS * 784) as ray:
        shards = shards_of(devices)
        crew = RayCrew(ray, shards)
        if part == "engine":
            alone = _EngineAlone(ray, shards)
            took, engine, ratio = in_turns(lambda: crew.compute(order), lambda: alone.compute(order))
            return {"round": took, "engine": engine, "ratio": ratio}
        quarter = RayCrew(ray, shards[: devices // 4])
        if part == "long":
            quarter.compute(order)  # The workers start.
            few = _seconds(lambda: quarter.compute(order))
            took = _seconds(lambda: crew.compute(order))
            engine = _seconds(lambda: _EngineAlone(ray, shards).compute(order))
            per_device = {"many": took / devices, "few": 4 * few / devices}
            return {"round": took, "engine": engine, "ratio": took / engine} | per_device
        many, few, _ = in_turns(lambda: crew.compute(order), lambda: quarter.compute(order))
        return {"many": many / devices, "few": 4 * few / devices}


def _nodes(devices: int) -> dict[str, float]:
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
    from ray.cluster_utils import Cluster

    # Wherever the cluster's own directory is, its utilities note its address in Ray's.
    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
    store = max(256 << 20, 2 * devices * _RECORDS * 784)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        head = {
            "num_cpus": 1,
            "object_store_memory": store,
            "include_dashboard": False,
            "temp_dir": directory,
        }
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(num_cpus=1, object_store_memory=store)
            cluster.wait_for_nodes()
            request = ClusterRequest(address=cluster.address)
            ray_package(request)
            with ray_on(request) as ray:
                shards, order = shards_of(devices), order_of(devices, 1.0)
                both, one = RayCrew(ray, shards), _OnOneNode(ray, shards)
                alone, together, ratio = in_turns(lambda: one.compute(order), lambda: both.compute(order))
                return {"one": alone, "two": together, "ratio": ratio}
        finally:
            cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    asked, number, *rest = sys.argv[1:]
    print(json.dumps(main(asked, int(number), float(rest[0]) if rest else 1.0)))
