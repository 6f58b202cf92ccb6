"""A record that is slow to decode, and then fails, keeps the records that came with it out of a round.

Claim: a look at the data takes no more processor time than :data:`agent.decoding.LOOK_S`, whatever the
    records are, so that what it found counts from a time on that no record moves; and a round that takes in
    new records computes features of as many, however many there are and whoever asked for them last; after a
    power cut among them too.
Parameters: records that spin for 0.8 of their limit and then fail, or that get next to nothing of a core; a
    model with a front end, and pictures that come between two rounds, which the same training process or a
    new one takes in.

Before, a record that failed was tried once more at the same price, so that a look took up to twice its time,
960 s, while it counted after 600 s: one record more decided on all. And features of new records were counted
only where a look's result was adopted within a round: a training process that had just been started, as it is
after ten idle minutes, computed features of new records that its trial had not counted, so that the slot of
its answer told how many there were. And the features of a round counted as computed when those of its
records were, so that after the end of a training process among them, the slots of its answer told whether
it was before or after that (15 s with 40 records of 400, 21 s with 300).

By the clock, a record had thirty times its processor time, and so a look of 24 pictures two hours, where it
counted after fifteen minutes. A coordinator leaves it little of a core: on a board with one, the agent that
it keeps busy and training take 91 %, since a look is nine and four steps of niceness behind them. Then 23
pictures of 3.3 s each (12 Mpixels on a Raspberry Pi Zero) take 816 s, and with one that fails after 4.9 s,
twice, 921 s: so one record kept 23 others out of a round. One that waits for its disk took 150 s without any
other load.

Power: no randomness. The first test measures processor time, with a margin of a third on either side.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
from devices import started_trainer
from fleets import DIGITS, make_task, model_section, terms, write_agent
from neighbours import children_s, look_again, look_only
from numpy.typing import NDArray
from pictures import folder_of

from agent.bounded_decoding import Limits, decode_apart
from agent.data_settings import DataSettings
from agent.decoding import LOOK_S, PATIENCE, most_new
from agent.effort import Effort
from agent.look_messages import LookResult
from agent.profile import load_profile
from agent.row_files import COUNTS_AFTER_S
from agent.settings import AgentSettings, load_agent_settings
from agent.training import Trainer
from agent.worker import training_settings
from dpagent.errors import DataError
from dpagent.learning.data.dataset import ArrayDataset, Dataset, Indices
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.data.stored import RawFile
from dpagent.learning.front_end import features
from dpagent.learning.front_end.features import FrontEnd
from dpagent.learning.models.description import from_description
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.task import RoundTask

COUNT, SECONDS = 4, 0.3
KEY = Signer(new_signing_secret(), "testers").public_key
PICTURES: dict[str, Any] = {
    "kind": "images", "dtype": "uint8", "features_mib": 1,
    "images": {"size": [8, 8], "mode": "grey", "folder": "."},
}  # fmt: skip


class SlowToFail(Dataset):
    """Records that take most of their time, and are none."""

    def __init__(self) -> None:
        super().__init__(np.zeros(COUNT, np.int64), 2, shape=(2,), dtype=np.dtype(np.uint8))

    def _read(self, indices: Indices) -> NDArray[Any]:
        until = time.process_time() + 0.8 * SECONDS
        while time.process_time() < until:
            pass
        raise DataError("no picture.")


def test_a_look_is_counted_with_all_the_attempts_that_its_records_have(tmp_path: Path) -> None:
    settings = DataSettings.checked(
        {"name": "mine", "path": tmp_path, "kind": "images", "decoding": {"seconds": SECONDS}}
    )
    priced_s = LOOK_S / most_new(settings)
    descriptor = os.open(tmp_path / "rows", os.O_RDWR | os.O_CREAT)
    before_s = children_s()
    outcomes = decode_apart(SlowToFail(), range(COUNT), range(COUNT), descriptor, Limits(64 << 20, SECONDS))
    assert all(outcome.problem for outcome in outcomes)
    os.close(descriptor)
    taken_s = children_s() - before_s
    assert taken_s > 0.8 * SECONDS * COUNT
    assert taken_s < priced_s * COUNT


class Starved(SlowToFail):
    """Records of which every other one stands still, as one does that gets nothing of a core."""

    def _read(self, indices: Indices) -> NDArray[Any]:
        if indices[0] % 2:
            time.sleep(60.0)
        return np.zeros((len(indices), 2), np.uint8)


def test_a_look_is_done_when_it_counts_however_little_of_a_core_it_gets(tmp_path: Path) -> None:
    """A record that gets too little waits for the next look, and no other waits with it."""
    descriptor = os.open(tmp_path / "rows", os.O_RDWR | os.O_CREAT)
    limits = Limits(64 << 20, SECONDS)
    outcomes = decode_apart(Starved(), range(COUNT), range(COUNT), descriptor, limits, PATIENCE)
    found = [(outcome.problem, outcome.is_final) for outcome in outcomes]
    os.close(descriptor)
    late = f"it is not decoded after {PATIENCE * SECONDS:g} s. It is tried again."
    assert [problem.partition("record ")[2] for problem, _ in found] == ["", f"1: {late}", "", f"3: {late}"]
    assert [is_final for _, is_final in found] == [True, False, True, False]
    # What all records of a look may take, in all their attempts, and something to list them.
    assert PATIENCE * LOOK_S < 0.97 * COUNTS_AFTER_S


def pooled() -> RoundTask:
    """Of a model whose front end makes 4 features of a record."""
    pooling = {"random": {"layers": [{"average_pool2d": {"kernel": 4, "stride": 4}}]}}
    spec = from_description(DIGITS.describe() | {"front_end": [pooling], "layers": [{"dense": 10}]})
    model = {
        "description": cbor2.dumps(spec.describe(), canonical=True),
        "parameters": spec.parameter_count,
        "architecture": spec.digest(),
    }
    return make_task(model=model, **terms(rate=1.0), wire={"block": 50}, step=1_025)


def features_computed(trainer: Trainer, found: LookResult | None = None) -> int:
    """How many records' features a round computes, made-up ones included."""
    work = trainer.prepare(pooled(), {}, np.zeros(50, np.float32), adopts=found is not None)
    made: list[int] = []
    original = FrontEnd.__call__

    def counting(self: FrontEnd, inputs: NDArray[Any]) -> NDArray[np.float32]:
        made.append(len(inputs))
        return original(self, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrontEnd, "__call__", counting)
        assert trainer.noisy_update(work, found).failure is None
    return sum(made)


@pytest.fixture
def settings(tmp_path: Path) -> AgentSettings:
    folder_of(
        tmp_path / "photos", *(f"{number}/a.png" for number in range(10)), width=8, height=8, channels=1
    )
    data = {"path": str(tmp_path / "photos"), **PICTURES}
    return load_agent_settings(write_agent(tmp_path, None, KEY, engine="numpy", data=data))


@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("is_new", [False, True])
def test_features_of_as_many_records_are_computed_however_many_came(
    settings: AgentSettings, tmp_path: Path, new: int, *, is_new: bool, goes_on: bool
) -> None:
    """Also where the look has not ended, and in a process that has computed none."""
    trainer = started_trainer(settings)
    assert features_computed(trainer) >= 10
    for number in range(new):
        folder_of(tmp_path / "photos", f"{number}/b.png", width=8, height=8, channels=1)
    found = look_only(settings.data, settings.state_dir)._replace(goes_on=goes_on)
    if is_new:
        trainer = Trainer(training_settings(settings, load_profile("generic-x86-64")))
    most = most_new(settings.data)
    assert most <= features_computed(trainer, found) <= most + 4
    assert len(trainer.records.dataset) == 10 + (0 if goes_on else new)


def test_a_new_process_compares_no_record_with_its_features(
    settings: AgentSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read all that there are, which its trial did not count: the number of records showed."""
    assert features_computed(started_trainer(settings)) >= 10
    read: list[int] = []
    original = RawFile.read_into

    def reading(self: RawFile, target: NDArray[np.uint8], place: int) -> None:
        if self.path.name == "records.rows":
            read.append(place)
        original(self, target, place)

    monkeypatch.setattr(RawFile, "read_into", reading)
    trainer = Trainer(training_settings(settings, load_profile("generic-x86-64")))
    features_computed(trainer)
    assert read == []
    folder_of(tmp_path / "photos", "3/a.png", width=8, height=8, channels=1)
    (tmp_path / "photos" / "3" / "a.png").write_bytes((tmp_path / "photos" / "4" / "a.png").read_bytes())
    os.utime(tmp_path / "photos" / "3" / "a.png", (1, 1))
    look_again(trainer.records)
    features_computed(trainer)
    assert len(read) == 1, "one that has changed"


ROW_BYTES = 16
"""Of the features of a record."""


class _PowerCutError(BaseException):
    """Ends the process, as far as the test goes."""


def test_after_a_power_cut_among_the_features_the_trial_counts_with_all_that_may_be_missing(
    settings: AgentSettings,
) -> None:
    """Before, a front end whose features had been begun was taken for one that has them: the trial counted
    with those of one look, and the slot of the answer told how many records there are."""
    trainer = started_trainer(settings)
    written: list[bytes] = []
    overwrite = features.overwrite

    def write(descriptor: int, data: bytes, offset: int) -> None:
        overwrite(descriptor, data, offset)
        if len(data) == ROW_BYTES:  # and no digests
            written.append(data)
        if len(written) == 3:
            raise _PowerCutError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "overwrite", write)
        with pytest.raises(_PowerCutError):
            features_computed(trainer)
    assert len(written) == 3
    again = Trainer(training_settings(settings, load_profile("generic-x86-64")))
    assert features_computed(again) == settings.data.max_records
    assert features_computed(again) < 60


@pytest.mark.parametrize("records", [0, 1, 5])
def test_whether_there_is_any_record_does_not_show_in_what_the_trial_counts_with(
    tmp_path: Path, records: int
) -> None:
    """Before, a device without records did not note that it has the features of a second front end: its
    trial counted with those of all records in each round, and that of a device with one record did not."""
    (tmp_path / "rows.csv").write_text("a,b,label\n" + "1,2,0\n" * records)
    data = {
        "kind": "csv", "path": "rows.csv", "classes": ["0", "1"], "csv": {"features": ["a", "b"]},
        "shape": None, "dtype": None, "features_mib": 1, "decoding": {"seconds": 60},
    }  # fmt: skip
    trainer = started_trainer(
        load_agent_settings(write_agent(tmp_path, None, KEY, engine="numpy", data=data))
    )
    counted = []
    for seed in (0, 1, 1):
        front_end = [{"random": {"layers": ["tanh"], "seed": seed}}]
        line = {"name": "line", "input_shape": [2], "classes": 2, "layers": [{"dense": 2}]}
        spec = from_description(line | {"front_end": front_end})
        task = make_task(model=model_section(spec), wire={"block": 6})
        work = trainer.prepare(task, {}, np.zeros(6, np.float32))
        assert work.effort is not None
        counted.append(work.effort.new_records)
        assert trainer.noisy_update(work).failure is None
    assert counted == [60, 60, 0]


def test_a_file_that_was_replaced_counts_whole_once_a_round_takes_it_in(tmp_path: Path) -> None:
    """How many features are computed shows in no slot, in whatever process."""
    inputs = np.random.default_rng(0).random((9, 8, 8, 1), np.float32)
    file = tmp_path / "mine.npz"
    save_npz(file, ArrayDataset(inputs[:6], np.arange(6), 10))
    data = {"path": str(file), "kind": "npz", "shape": [8, 8, 1], "dtype": "float32", "max_records": 20,
            "features_mib": 1}  # fmt: skip
    settings = load_agent_settings(write_agent(tmp_path, None, KEY, engine="numpy", data=data))
    assert features_computed(started_trainer(settings)) >= 20
    for records in (6, 9):
        save_npz(file, ArrayDataset(inputs[:records], np.arange(records), 10))
        again = Trainer(training_settings(settings, load_profile("generic-x86-64")))
        assert features_computed(again) == 0
        found = look_only(settings.data, settings.state_dir)
        assert 20 <= features_computed(again, found) < 28
        assert features_computed(again) == 0


def test_a_new_process_computes_no_features_again_with_whichever_the_front_end_fails(
    settings: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where processes do not stay, that is each round: how many it fails with showed in all of them, or each
    had as many made-up ones computed as a look may find."""
    trainer, original = started_trainer(settings), FrontEnd.__call__

    def failing(self: FrontEnd, inputs: NDArray[Any]) -> NDArray[np.float32]:
        if inputs.dtype == np.uint8:  # Those of the device; made-up ones are real numbers.
            raise ValueError
        return original(self, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(FrontEnd, "__call__", failing)
        features_computed(trainer)
    for _ in range(2):
        again = Trainer(training_settings(settings, load_profile("generic-x86-64")))
        written = (settings.state_dir / "features.index").stat().st_mtime_ns
        assert features_computed(again) == 0
        assert (settings.state_dir / "features.index").stat().st_mtime_ns == written


def cut(*_: object) -> None:
    raise _PowerCutError


@pytest.mark.parametrize("new", [None, 0, 3])
@pytest.mark.parametrize("at", [(FrontEnd, "__call__"), (Effort, "_compute_features")], ids=["first", "rest"])
def test_a_power_cut_among_the_features_leaves_as_many_to_be_computed_again(
    settings: AgentSettings, tmp_path: Path, at: tuple[type, str], new: int | None
) -> None:
    """In the first round (None), or in one that takes in some new records or none: the slots of the round
    that is run again told when the records' own features were done, or that there was a new one."""
    trainer, found = started_trainer(settings), None
    if new is not None:
        features_computed(trainer)
        for number in range(new):
            folder_of(tmp_path / "photos", f"{number}/b.png", width=8, height=8, channels=1)
        found = look_only(settings.data, settings.state_dir)
    work = trainer.prepare(pooled(), {}, np.zeros(50, np.float32), adopts=found is not None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*at, cut)
        with pytest.raises(_PowerCutError):
            trainer.noisy_update(work, found)
    again = Trainer(training_settings(settings, load_profile("generic-x86-64")))
    effort = again.prepare(pooled(), {}, np.zeros(50, np.float32)).effort
    assert effort is not None
    assert effort.new_records == settings.data.max_records
