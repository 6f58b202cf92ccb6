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
"""

from __future__ import annotations

import multiprocessing
import resource
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from devices import KEY, started_trainer
from fleets import make_task, model_section, terms, write_agent

from agent.bounded_decoding import address_space
from agent.settings import load_agent_settings
from dpagent.learning.models.description import from_description

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


def _tell(directory: Path, records: int, told: Connection) -> None:
    told.send(answer_of(directory, records))


@pytest.mark.parametrize("records", [60, 100])
def test_the_memory_is_tried_with_as_many_records_as_any_lot_has(tmp_path: Path, records: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_tell, args=(tmp_path, records, theirs))
    child.start()
    theirs.close()
    answer = ours.recv()
    child.join()
    assert answer == "declines"
