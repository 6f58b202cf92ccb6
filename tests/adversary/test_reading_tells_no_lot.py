"""A coordinator makes the model so small that reading records is most of the work of a round.

Claim: a round reads as often whatever the lot is, made-up records included, and the trial before the charge
    counts that in.
Parameters: rows of a table, 2 of 60 or all 60; a linear model, with and without a front end; two local steps
    with all records.

Before, the trial and the filling up computed made-up records and read none. With a linear model on 20,000
rows and 16 steps, training took 0.5 s with 400 records and 1.2 s with 20,000, where 0.85 s were counted with
half as much again: with a slot that the trial just fitted, the time of the answer told how many records were
in the lots.

Power: no randomness; reads are counted. On the code of before, a round reads as often as its lots have
    records.
Outcome: as many reads. Where the data may not fit in memory, each record counts with a read of a slow disk.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import KEY, started_trainer
from fleets import DIGITS, make_task, model_section, terms, write_agent
from numpy.typing import NDArray

from agent.settings import load_agent_settings
from dpagent.learning.data.stored import RawFile
from dpagent.learning.front_end.features import FeatureSet
from dpagent.learning.models.description import from_description
from dpagent.privacy.sampling import largest_lot
from dpagent.protocol.task import RoundTask

MOST, STEPS = 60, 2
MODEL: dict[str, Any] = {"name": "line", "input_shape": [2], "classes": 2, "layers": [{"dense": 2}]}
FRONT_END = {"front_end": [{"random": {"layers": ["tanh"]}}]}


def small(changes: dict[str, Any]) -> RoundTask:
    model = model_section(from_description(MODEL | changes))
    return make_task(model=model, **terms(rate=1.0, local_steps=STEPS), wire={"block": 6})


@pytest.mark.parametrize("changes", [{}, FRONT_END], ids=["records", "features"])
@pytest.mark.parametrize("records", [0, 2, MOST])
def test_a_round_reads_as_often_whatever_the_lot_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: int, changes: dict[str, Any]
) -> None:
    data = {
        "kind": "csv", "path": "rows.csv", "classes": ["0", "1"], "csv": {"features": ["a", "b"]},
        "max_records": MOST, "shape": None, "dtype": None, "features_mib": 1,
    }  # fmt: skip
    (tmp_path / "rows.csv").write_text(
        "a,b,label\n" + "".join(f"{row},1,{row % 2}\n" for row in range(records))
    )
    trainer = started_trainer(
        load_agent_settings(write_agent(tmp_path, None, KEY, engine="numpy", data=data))
    )
    task, weights = small(changes), np.zeros(6, np.float32)
    assert trainer.noisy_update(trainer.prepare(task, {}, weights)).failure is None  # computes the features
    read, checked = {"made up": 0, "real": 0}, list[int]()
    of_records, of_features, of_rows = RawFile.read_into, FeatureSet._read, zlib.crc32

    def checksum(row: memoryview) -> int:
        checked.append(of_rows(row))
        return checked[-1]

    def read_into(self: RawFile, target: NDArray[np.uint8], place: int) -> None:
        read["made up" if self.path.name == "made up" else "real"] += 1
        of_records(self, target, place)

    def read_features(self: FeatureSet, indices: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        read["real"] += len(indices)
        return of_features(self, indices)

    monkeypatch.setattr(RawFile, "read_into", read_into)
    monkeypatch.setattr(FeatureSet, "_read", read_features)
    monkeypatch.setattr(zlib, "crc32", checksum)
    work = trainer.prepare(task, {}, weights)
    assert read["real"] == 0
    assert read["made up"] >= MOST, "the trial"
    read["made up"] = 0
    checked.clear()
    assert trainer.noisy_update(work).failure is None
    assert read == {"made up": STEPS * (MOST - records), "real": STEPS * records}
    assert len(checked) == sum(read.values()) or changes, "features have no checksum"


def test_data_that_may_not_fit_in_memory_count_with_a_read_of_the_disk_for_each_record(
    tmp_path: Path,
) -> None:
    """By the declared number: how many there are shows neither in the trial nor in what a start reads."""
    most, task = 300_000, make_task(**terms(rate=0.001))
    file = write_agent(tmp_path, None, KEY, engine="numpy", data={"max_records": most})
    work = started_trainer(load_agent_settings(file)).prepare(task, {}, DIGITS.initial_weights(0))
    assert work.longest_s > 1.5 * 0.005 * largest_lot(most, 0.001)
