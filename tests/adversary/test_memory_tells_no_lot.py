"""A coordinator asks for work that fits the memory of a board with a small lot and not with a larger one, or
takes memory of the board once the work has been tried.

Claim: whether training has the memory that it takes is settled before the charge, with as much as any lot
    takes. From then on the training process takes none from the system, whatever the lot.
Parameters: 64 views of 60 or 100 records, all in the lot, of which there may be 110; a limit on memory
    within which the views of 64 records fit, which the trial of before computed, but not those of 100. And
    none, half, or all of the records in nine kinds of rounds, in a real training process to which the kernel
    gives no memory any more once the round is prepared, neither a page of its heap nor the stack of a thread.

Before, the device with 60 records answered with their sum, and that with 100 with noise alone, under one
charge: of two numbers of records next to each other, one gave the clipped gradients of all and the other
nothing, where the budget pays for those of one. Records of 1 MiB were read 32 at a time, in pieces as
large as there were records: some lots found none in one piece. Where memory was taken after the trial (256
MiB of chunks that no plan names, in the agent), 705 to 782 MiB were enough for the sum, by how many records
there were. And pieces of a lot for second moments were as large as 4 MiB of records, of which the trial
computed 256.

Power: no randomness; the limit is the kernel's, on a process of its own. On the code of before, training
    fails with every lot once the limit is set, and above it with some.
Outcome: both decline, before any charge; and all lots give their sum.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import PATIENCE_S
from devices import KEY, started_trainer, worker_of
from fleets import (
    make_task,
    merged,
    model_section,
    report_plan,
    terms,
    update_plan,
    write_agent,
)

from agent import board_engine
from agent.board_engine import BoardEngine
from agent.bounded_decoding import address_space
from agent.profile import load_profile
from agent.settings import AgentSettings, load_agent_settings
from agent.training_messages import Order
from agent.worker import Worker, training_settings
from dpagent.learning.models.description import from_description
from dpagent.learning.training.engine_choice import Trial
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask
from dpagent.protocol.weights import weights_to_bytes

pytestmark = pytest.mark.usefixtures("executed")

SHAPE, VIEWS, MOST = (96, 96, 3), 64, 110
MODEL = {
    "name": "few", "input_shape": list(SHAPE), "classes": 2,
    "layers": [{"max_pool2d": {"kernel": 2, "stride": 32}}, {"dense": 2}],
}  # fmt: skip
ROOM_BYTES = 850 << 20
"""64 views of 64 records take 432 MiB, of 100 records 675 MiB, besides what is held anyway."""


def plan_with(views: int) -> Plan:
    return make_task(
        model=model_section(from_description(MODEL)), **terms(rate=1.0), wire={"block": 10},
        augmentation={"views": views, "shift": 1, "flip": False},
    ).plan  # fmt: skip


def answer_of(directory: Path, records: int) -> str:
    """What a device does with the plan, whose memory is limited."""
    made = np.random.default_rng(0).random((records, *SHAPE), np.float32)
    data = {"shape": list(SHAPE), "classes": 2, "max_records": MOST}
    file = write_agent(directory, None, KEY, engine="numpy", data=data)
    np.savez(directory / "data.npz", inputs=made, labels=np.arange(records) % 2)
    trainer = started_trainer(load_agent_settings(file))
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + ROOM_BYTES,) * 2)
    try:
        weights = from_description(MODEL).initial_weights(0)
        work = trainer.prepare(RoundTask.of(plan_with(VIEWS)), {}, weights)
    except MemoryError:
        return "declines"
    return "noise alone" if trainer.noisy_update(work).failure else "the sum"


def _tell(directory: Path, records: int, told: Connection) -> None:
    told.send(answer_of(directory, records))


@pytest.mark.parametrize("records", [pytest.param(60, marks=pytest.mark.slow), 100])
def test_the_memory_is_tried_with_as_many_records_as_any_lot_has(tmp_path: Path, records: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_tell, args=(tmp_path, records, theirs))
    child.start()
    theirs.close()
    assert ours.recv() == "declines"
    child.join()


@dataclass(frozen=True)
class Case:
    """A round, and a device for it.

    Attributes:
        plan: the round's.
        most: records that the device may have.
        changes: of its settings.
        processes: that train.
        is_table: whether its records are rows of a table, which are decoded, and no array.
        is_stored: whether they are read from the file, and not unpacked into memory.
    """

    plan: Plan
    most: int = 1_000
    changes: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    is_table: bool = False
    is_stored: bool = False


PIXELS = {"name": "few", "input_shape": [16, 16, 2], "classes": 2}
FRONT_END = PIXELS | {"front_end": [{"random": {"layers": ["tanh"]}}], "layers": [{"dense": 2}]}
DIRECTIONS = PIXELS | {"front_end": [{"projection": 2}], "layers": [{"dense": 2}]}
LINE = {"name": "line", "input_shape": [8], "classes": 2, "layers": [{"dense": 2}]}
COLUMNS = [f"c{number}" for number in range(8)]
TABLE = {
    "kind": "csv", "path": "rows.csv", "classes": ["0", "1"], "csv": {"features": COLUMNS}, "shape": None,
    "dtype": None,
}  # fmt: skip


def plan_for(model: Mapping[str, Any], **changes: Any) -> Plan:
    return make_task(model=model_section(from_description(model)), **terms(rate=1.0), **changes).plan


CASES = {
    "views, three processes": Case(plan_with(2), MOST, processes=3),
    "gradients": Case(make_task(**terms(rate=0.5, local_steps=2)).plan),
    "features": Case(plan_for(FRONT_END, wire={"block": 1_100}), changes={"data": {"features_mib": 4}}),
    "second moments": Case(
        plan_for(DIRECTIONS, wire={"block": 20_000, "bytes": 20_000},
                 projection={"values": 512, "record_norm": 4.0}),
        changes={"data": {"features_mib": 4}},
    ),
    "rows of a table": Case(plan_for(LINE, wire={"block": 18}), changes={"data": TABLE}, is_table=True),
    "records of a MiB": Case(
        plan_for(MODEL | {"input_shape": [512, 512, 1]}, wire={"block": 600}), 48, is_stored=True
    ),
    "kept records": Case(
        plan_for(MODEL | {"input_shape": [64, 64, 1], "layers": [{"dense": 2}]}, wire={"block": 9_000}), 1_900
    ),
    "reports": Case(report_plan()),
    "updates": Case(update_plan()),
}  # fmt: skip


@contextmanager
def worker_for(directory: Path, case: Case, records: int, *, has_odd_label: bool = False) -> Iterator[Worker]:
    """The training process of a device that has started, of whose records one may have a label that is no
    class."""
    spec = RoundTask.of(case.plan).spec
    changes = merged(case.changes, {"data": {"max_records": case.most, "classes": spec.classes}})
    shape = spec.input_shape
    if case.is_table:
        changes["data"]["classes"] = TABLE["classes"]
        lines = [",".join(["0.5"] * len(COLUMNS) + [str(row % 2)]) for row in range(records)]
        (directory / "rows.csv").write_text("\n".join([",".join([*COLUMNS, "label"]), *lines, ""]))
    else:
        changes["data"]["shape"] = list(shape)
    settings = load_agent_settings(write_agent(directory, None, KEY, **changes))
    made = np.random.default_rng(0).random((records, *shape), np.float32)
    labels = np.arange(records) % spec.classes
    labels[: 1 if has_odd_label else 0] = spec.classes
    save = np.savez if case.is_stored else np.savez_compressed
    save(directory / "data.npz", inputs=made, labels=labels)
    started_trainer(settings)
    if case.processes > 1:
        keep_choice(settings, case)
    worker = worker_of(settings, processes=case.processes)
    try:
        yield worker
    finally:
        worker.end()


def keep_choice(settings: AgentSettings, case: Case) -> None:
    """Have a device compute in several processes, whatever a trial would find on a busy machine."""
    profile = load_profile("generic-x86-64").with_values({"processes": case.processes})
    found = Trial("numpy", examples_per_s=1.0, processes=case.processes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board_engine, "choose_engine", lambda bench, _: (bench.make("numpy"), (found,)))
        BoardEngine(training_settings(settings, profile)).of(RoundTask.of(case.plan), None)


def address_space_of(pid: int) -> int:
    """Bytes that a process has mapped."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


def forks_of(pid: int) -> list[int]:
    """The processes that a process has started, and that are there."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


QUICK = {"views, three processes": (0.0, 1.0), "rows of a table": (0.0, 1.0), "second moments": (1.0,)}
ROUNDS = [
    pytest.param(kind, share, marks=[] if share in QUICK.get(kind, ()) else pytest.mark.slow)
    for kind in CASES
    for share in (0.0, 0.5, 1.0)
]


@pytest.mark.parametrize(("kind", "share"), ROUNDS)
def test_training_takes_no_memory_that_the_process_did_not_have_before_the_charge(
    tmp_path: Path, kind: str, share: float
) -> None:
    case = CASES[kind]
    weights = RoundTask.of(case.plan).spec.initial_weights(0)
    model = b"" if not case.plan.model.parameters else weights_to_bytes(weights, case.plan.model.precision)
    with worker_for(tmp_path, case, int(share * case.most)) as worker:
        for _ in range(2):
            worker.prepare(Order(case.plan, model, {})).result(PATIENCE_S)
            assert worker._running is not None
            pid = worker._running._process.pid
            before = address_space_of(pid)
            forks = {fork: address_space_of(fork) for fork in forks_of(pid)}
            assert len(forks) == case.processes - 1
            _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
            resource.prlimit(pid, resource.RLIMIT_AS, (before, hard))
            update = worker.update().result(PATIENCE_S)
            assert update.failure is None
            resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))
            assert {fork: address_space_of(fork) for fork in forks_of(pid)} == forks


@pytest.mark.parametrize("has_odd_label", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_a_later_preparation_takes_no_memory_whatever_the_records_of_the_first_round_were(
    tmp_path: Path, share: float, has_odd_label: bool
) -> None:
    """Else a device whose memory is used up declines the second round or prepares it, by its records. Before,
    a label that is no class cost as much as all records, and what a round had left in pieces was asked for in
    one piece: 30 to 60 MiB."""
    case = CASES["kept records"]
    weights = RoundTask.of(case.plan).spec.initial_weights(0)
    order = Order(case.plan, weights_to_bytes(weights, case.plan.model.precision), {})
    with worker_for(tmp_path, case, int(share * case.most), has_odd_label=has_odd_label) as worker:
        worker.prepare(order).result(PATIENCE_S)
        assert worker._running is not None
        pid = worker._running._process.pid
        before = address_space_of(pid)
        assert worker.update().result(PATIENCE_S).failure is None
        worker.prepare(order).result(PATIENCE_S)
        assert address_space_of(pid) == before
