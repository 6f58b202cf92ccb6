"""A coordinator makes the model so small that reading records is most of the work of a round.

Claim: a round reads as often whatever the lot is, made-up records included, and the trial before the charge
    counts that in; and from its charge to its update it executes the same steps, one by one, as does one that
    the device sits out.
Parameters: rows of a table, or of bytes, none, 1, 2, 59 or all 60; a linear model, with and without a front
    end; two local steps with all records, and plain training, whose batches hold records alone as soon as
    there is one.

Before, the trial and the filling up computed made-up records and read none. With a linear model on 20,000
rows and 16 steps, training took 0.5 s with 400 records and 1.2 s with 20,000, where 0.85 s were counted with
half as much again: with a slot that the trial just fitted, the time of the answer told how many records were
in the lots.

Later, a made-up record was read in fewer steps than a real one, or, of a front end, in more, since its
checksum was taken. Plain training of 10,000 steps with batches of 32, which may cost an ε of 0.0001, took 4 %
longer if there was any record (`digits`: 6.8 s in place of 6.5 of a PC's processor), or 15 % less long
(`scattering`: 8.1 s in place of 9.5); and acknowledgements tell when training is over.

A round that is sat out (`limits.dummy_traffic`) was one of an array without records, which is read in fewer
steps than a file: a batch of 32 took 26,500 of 693,000 instructions less, and some 0.1 s of 10,000 batches.

Power: no randomness; reads are counted, and steps of the interpreter and calls of compiled functions. On the
    code of before, a round reads as often as its lots have records; and later, it executes 5 % more or less.
Outcome: as many reads, the same steps; of features in a round that is sat out, but for 1 %. Where the data
    may not fit in memory, each record counts with a read of a slow disk.
"""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import KEY, started_trainer
from executed import executed
from failing_disks import fails_at
from fleets import DIGITS, make_task, model_section, report_plan, terms, write_agent
from numpy.typing import NDArray

from agent.settings import load_agent_settings
from agent.training import Trainer
from dpagent.learning.data.stored import RawFile
from dpagent.learning.front_end.features import FeatureRows
from dpagent.learning.models.description import from_description
from dpagent.privacy.sampling import largest_lot
from dpagent.protocol.task import RoundTask

MOST, STEPS = 60, 2
MODEL: dict[str, Any] = {"name": "line", "input_shape": [2], "classes": 2, "layers": [{"dense": 2}]}
FRONT_END = {"front_end": [{"random": {"layers": ["tanh"]}}]}


def small(changes: dict[str, Any]) -> RoundTask:
    model = model_section(from_description(MODEL | changes))
    return make_task(model=model, **terms(rate=1.0, local_steps=STEPS), wire={"block": 6})


def plain(changes: dict[str, Any]) -> RoundTask:
    """A round of two-point reports of such a model, after plain training."""
    model = model_section(from_description(MODEL | changes))
    training = {"steps": STEPS, "batch": 40, "learning_rate": 0.1}
    return RoundTask.of(
        report_plan(coordinates=6, block=6, model=model, release={"training": training, "radii": [0.5, 0.5]})
    )


def board(directory: Path, records: int, *, dtype: str = "float32") -> Trainer:
    data: dict[str, Any] = {"classes": ["0", "1"], "max_records": MOST, "features_mib": 1}
    if dtype == "uint8":
        data |= {"kind": "npz", "path": "rows.npz", "shape": [2], "dtype": dtype}
    else:
        data |= {
            "kind": "csv",
            "path": "rows.csv",
            "csv": {"features": ["a", "b"]},
            "shape": None,
            "dtype": None,
        }
    file = write_agent(directory, None, KEY, engine="numpy", data=data)
    (directory / "rows.csv").write_text(
        "a,b,label\n" + "".join(f"{row},1,{row % 2}\n" for row in range(records))
    )
    numbers = np.arange(records)
    np.savez(
        directory / "rows.npz", inputs=np.stack([numbers, numbers], axis=1).astype(dtype), labels=numbers % 2
    )
    return started_trainer(load_agent_settings(file))


@pytest.mark.parametrize("changes", [{}, FRONT_END], ids=["records", "features"])
@pytest.mark.parametrize("records", [0, 2, MOST])
def test_a_round_reads_as_often_whatever_the_lot_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: int, changes: dict[str, Any]
) -> None:
    trainer = board(tmp_path, records)
    task, weights = small(changes), np.zeros(6, np.float32)
    assert trainer.noisy_update(trainer.prepare(task, {}, weights)).failure is None  # computes the features
    read, checked = {"made up": 0, "real": 0}, list[int]()
    of_records, of_features, of_rows = RawFile.read_into, FeatureRows.at, zlib.crc32

    def checksum(row: memoryview) -> int:
        checked.append(of_rows(row))
        return checked[-1]

    def read_into(self: RawFile, target: NDArray[np.uint8], place: int) -> None:
        read["made up" if self.path.name == "made up" else "real"] += 1
        of_records(self, target, place)

    def read_features(self: FeatureRows, places: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        read["made up" if self._file.name == "made up" else "real"] += len(places)
        return of_features(self, places)

    monkeypatch.setattr(RawFile, "read_into", read_into)
    monkeypatch.setattr(FeatureRows, "at", read_features)
    monkeypatch.setattr(zlib, "crc32", checksum)
    work = trainer.prepare(task, {}, weights)
    assert read["real"] == 0
    assert read["made up"] >= MOST, "the trial"
    read["made up"] = 0
    checked.clear()
    assert trainer.noisy_update(work).failure is None
    assert read == {"made up": STEPS * (MOST - records), "real": STEPS * records}
    assert len(checked) == (0 if changes else sum(read.values())), "features have no checksum"


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({}, "float32"), ({}, "uint8"), (FRONT_END, "float32")],
    ids=["records", "bytes", "features"],
)
def test_a_round_takes_the_same_steps_whatever_the_lot_is(
    tmp_path: Path, changes: dict[str, Any], dtype: str
) -> None:
    """Also one that the device sits out: it does without a record what it does with them."""
    weights = np.zeros(6, np.float32)
    for task in (small(changes), plain(changes)):
        taken = []
        for records in (0, 1, 2, MOST - 1, MOST):
            trainer = board(tmp_path / f"{task.release.plan.method}-{records}", records, dtype=dtype)
            trainer.noisy_update(trainer.prepare(task, {}, weights))  # opens the records
            taken.append(executed(partial(trainer.noisy_update, trainer.prepare(task, {}, weights))))
        assert all(one == taken[0] for one in taken), [one - taken[0] for one in taken]
        sits_out = trainer.prepare(task, {}, weights, is_rehearsal=True)
        rehearsed = executed(partial(trainer.noisy_update, sits_out))
        others = (rehearsed - taken[0]).total() + (taken[0] - rehearsed).total()
        # Those of features are not read through the file of features, which tells of records.
        assert others <= (0.01 * rehearsed.total() if changes else 0), rehearsed - taken[0]


def test_a_row_that_the_disk_has_damaged_is_tried_once_in_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To find that out takes longer: of the only record, in each batch, it told that there is one."""
    trainer, weights, read = board(tmp_path, 1), np.zeros(6, np.float32), list[str]()
    rows, of_records = tmp_path / "state" / "records.rows", RawFile.read_into
    rows.write_bytes(bytes(byte ^ 255 for byte in rows.read_bytes()))

    def read_into(self: RawFile, target: NDArray[np.uint8], place: int) -> None:
        read.append(self.path.name)
        of_records(self, target, place)

    monkeypatch.setattr(RawFile, "read_into", read_into)
    for _ in range(2):
        work = trainer.prepare(plain({}), {}, weights)
        read.clear()
        trainer.noisy_update(work)
        assert len(read) == 2 * 40, "two steps"
        assert 1 <= read.count("records.rows") <= 32, "those that are read together, in each round"


def test_features_that_the_disk_does_not_read_are_tried_in_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards they took no read at all: of the only record, 400 steps took 139 ms in place of 164."""
    trainer, weights, read = board(tmp_path, 1), np.zeros(6, np.float32), list[str]()
    of_features = FeatureRows._read

    def read_row(self: FeatureRows, start: int, row: NDArray[np.float32]) -> None:
        read.append(self._file.name)
        of_features(self, start, row)

    monkeypatch.setattr(FeatureRows, "_read", read_row)
    rounds = []
    for number in range(3):
        if number == 1:
            fails_at(monkeypatch, "features.f32", 0, "read")
        work = trainer.prepare(plain(FRONT_END), {}, weights)
        read.clear()
        trainer.noisy_update(work)
        rounds.append([read.count("features.f32"), read.count("made up")])
    assert rounds == [[2 * 40, 0], [32, 2 * 40 - 32], [0, 2 * 40 - 32]], "32 are read together"


def test_data_that_may_not_fit_in_memory_count_with_a_read_of_the_disk_for_each_record(
    tmp_path: Path,
) -> None:
    """By the declared number: how many there are shows neither in the trial nor in what a start reads."""
    most, task = 300_000, make_task(**terms(rate=0.001))
    file = write_agent(tmp_path, None, KEY, engine="numpy", data={"max_records": most})
    work = started_trainer(load_agent_settings(file)).prepare(task, {}, DIGITS.initial_weights(0))
    assert work.longest_s > 1.5 * 0.005 * largest_lot(most, 0.001)
