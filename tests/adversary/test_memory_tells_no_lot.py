"""A coordinator asks for so many views that a small lot fits the memory of a board and a larger one does not.

Claim: whether training has the memory that it takes is tried before the charge with as many records as any
    lot has in memory together; so it depends on no lot.
Parameters: 64 views of 60 or 100 records, all in the lot, of which there may be 110; a limit on memory
    within which the views of 64 records fit, which the trial of before computed, but not those of 100.

Before, the device with 60 records answered with their sum, and that with 100 with noise alone, under one
charge: of two numbers of records next to each other, one gave the clipped gradients of all and the other
nothing, where the budget pays for those of one.

Power: no randomness; the limit is the kernel's, on a process of its own.
Outcome: both decline, before any charge.

The same of a round of second moments: of 250 or 2,000 records, of which there may be 2,100, on a board that
has 12 MiB left. Before, pieces of a lot were as large as 4 MiB of records, of which the trial computed 256:
the device with 250 records answered with their sum, that with 2,000 with noise alone.
Outcome: pieces are as large as what is tried, and both answer with their sum.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from devices import KEY, started_trainer
from fleets import make_task, model_section, terms, write_agent

from agent.bounded_decoding import address_space
from agent.settings import load_agent_settings
from dpagent.learning.models.description import from_description
from dpagent.protocol.task import RoundTask

SHAPE, VIEWS, MOST = (96, 96, 3), 64, 110
MODEL = {
    "name": "few", "input_shape": list(SHAPE), "classes": 2,
    "layers": [{"max_pool2d": {"kernel": 2, "stride": 32}}, {"dense": 2}],
}  # fmt: skip
ROOM_BYTES = 850 << 20
"""64 views of 64 records take 432 MiB, of 100 records 675 MiB, besides what is held anyway."""


def answer_of(directory: Path, records: int) -> str:
    """What a device does with the plan, whose memory is limited."""
    made = np.random.default_rng(0).random((records, *SHAPE), np.float32)
    data = {"shape": list(SHAPE), "classes": 2, "max_records": MOST}
    file = write_agent(directory, None, KEY, engine="numpy", data=data)
    np.savez(directory / "data.npz", inputs=made, labels=np.arange(records) % 2)
    trainer = started_trainer(load_agent_settings(file))
    spec = from_description(MODEL)
    task = make_task(
        model=model_section(spec), **terms(rate=1.0), wire={"block": 10},
        augmentation={"views": VIEWS, "shift": 1, "flip": False},
    )  # fmt: skip
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + ROOM_BYTES,) * 2)
    try:
        work = trainer.prepare(task, {}, spec.initial_weights(0))
    except MemoryError:
        return "declines"
    return "noise alone" if trainer.noisy_update(work).failure else "the sum"


MOMENTS_SHAPE, MOMENTS_MOST = (16, 16, 2), 2_100
MOMENTS_MODEL = {
    "name": "directions", "input_shape": list(MOMENTS_SHAPE), "classes": 2,
    "front_end": [{"projection": 2}], "layers": [{"dense": 2}],
}  # fmt: skip
MOMENTS_ROOM_BYTES = 20 << 20
"""Second moments of 2,000 records take four times 8 MiB, of 256 an eighth of it, and libraries a few more."""


def answer_with_moments(directory: Path, records: int) -> str:
    """What a device, which has taken part before, does with a plan for second moments."""
    made = np.random.default_rng(0).integers(0, 256, (records, *MOMENTS_SHAPE), np.uint8)
    declared = {"shape": list(MOMENTS_SHAPE), "classes": 2, "dtype": "uint8"}
    data = declared | {"max_records": MOMENTS_MOST, "features_mib": 30}
    file = write_agent(directory, None, KEY, engine="numpy", data=data)
    np.savez(directory / "data.npz", inputs=made, labels=np.arange(records) % 2)
    trainer = started_trainer(load_agent_settings(file))
    spec = from_description(MOMENTS_MODEL)
    weights = spec.initial_weights(0)

    def task_at(rate: float) -> RoundTask:
        projection = {"values": int(np.prod(MOMENTS_SHAPE)), "record_norm": 4.0}
        wire = {"block": 20_000, "bytes": 20_000}
        return make_task(model=model_section(spec), **terms(rate=rate), wire=wire, projection=projection)

    # The libraries' own memory, and the features, are there from then on.
    trainer.noisy_update(trainer.prepare(task_at(1e-9), {}, weights))
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + MOMENTS_ROOM_BYTES,) * 2)
    work = trainer.prepare(task_at(1.0), {}, weights)
    return "noise alone" if trainer.noisy_update(work).failure else "the sum"


def _tell(answer: Callable[[Path, int], str], directory: Path, records: int, told: Connection) -> None:
    told.send(answer(directory, records))


def told_by(answer: Callable[[Path, int], str], directory: Path, records: int) -> str:
    """The answer of a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=_tell, args=(answer, directory, records, theirs)
    )
    child.start()
    theirs.close()
    told: str = ours.recv()
    child.join()
    return told


@pytest.mark.parametrize("records", [60, 100])
def test_the_memory_is_tried_with_as_many_records_as_any_lot_has(tmp_path: Path, records: int) -> None:
    assert told_by(answer_of, tmp_path, records) == "declines"


@pytest.mark.parametrize("records", [250, 2_000])
def test_second_moments_of_a_large_lot_take_no_more_memory(tmp_path: Path, records: int) -> None:
    assert told_by(answer_with_moments, tmp_path, records) == "the sum"
