"""The agent's records between rounds: what cannot be read does not stop it, and does not show."""

from __future__ import annotations

import gc
import logging
import resource
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
from devices import started_trainer
from fleets import DIGITS, make_task, terms, write_agent
from neighbours import look_again, look_only
from pictures import damaged_inside, encoded, folder_of, noise, write, zip_of

from agent.data_settings import DataSettings
from agent.decoding import bring_up_to_date, most_new
from agent.first_rows import open_records
from agent.look_messages import LookOrder, LookResult
from agent.noisy_sums import clipped_sum, noisy_sum, sum_of_moments
from agent.records import Records
from agent.row_index import Index
from agent.rows import RowStore
from agent.settings import load_agent_settings
from agent.training import Trainer
from dpagent.errors import DataError, StorageError
from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.data.opening import declare
from dpagent.learning.front_end.features import FeatureSet, FrontEnd, has_features
from dpagent.learning.models.description import from_description
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.lots import sum_over_lot
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.privacy.covariance import SecondMoments
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.task import RoundTask

COUNT = 12
DIGIT: dict[str, Any] = {"width": 8, "height": 8, "channels": 1}
KEY = Signer(new_signing_secret(), "testers").public_key
TASK = make_task(sampling={"rate": 1.0}, step=1_025)
WEIGHTS = DIGITS.initial_weights(0)


def settings(path: Path, **declared: Any) -> DataSettings:
    """What a board declares; the rest as `dpagent data check` prints it."""
    given = DataSettings.checked({"name": "mine", "path": path, "max_records": 1000, **declared})
    return DataSettings.checked(declare(given)[0].as_dict(only_given=True))


def sizes(dataset: Dataset) -> int:
    """Reads everything."""
    return sum(len(labels) for _, labels in dataset.readable_batches())


def photos(root: Path, *damaged: int) -> Path:
    """A picture of each of the first classes in turn; some of them cannot be decoded."""
    names = [f"{number % 10}/{number:02}.png" for number in range(COUNT)]
    folder_of(root, *names, **DIGIT)
    for number in damaged:
        write(root / names[number], damaged_inside(encoded(noise(number, **DIGIT))))
    return root


def trainer(directory: Path, path: Path, **declared: Any) -> Trainer:
    pictures = {
        "kind": "images", "dtype": "uint8", "features_mib": 1,
        "images": {"size": [8, 8], "mode": "grey", "folder": "."},
    }  # fmt: skip
    file = write_agent(directory, None, KEY, engine="numpy", data={"path": str(path), **pictures, **declared})
    return started_trainer(load_agent_settings(file))


def opened(path: Path, state: Path, **declared: Any) -> Records:
    """With its rows in ``state``."""
    state.mkdir(exist_ok=True)
    return open_records(settings(path, **declared), state)


def test_records_that_vanish_or_break_do_not_count_and_are_told_to_the_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "photos"
    folder_of(root, *(f"a/{number}.png" for number in range(5)), "b/x.png")
    records = opened(root, tmp_path / "state")
    (root / "a" / "1.png").unlink()
    write(root / "a" / "3.png", damaged_inside(encoded(noise(3))), age_s=30)
    assert records.attempt(sizes) == 6  # as they were decoded
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            look_again(records)
            assert records.attempt(sizes) == 4
    assert caplog.text.count("left out: ") == 1
    assert "a/3.png: broken data stream" in caplog.text


@pytest.mark.parametrize("damaged", [pytest.param((3,), marks=pytest.mark.slow), tuple(range(1, COUNT))])
def test_a_damaged_picture_makes_no_round_fail_and_adds_nothing(
    tmp_path: Path, damaged: tuple[int, ...]
) -> None:
    """It begins and ends like a whole one, so that no look at a folder finds it."""
    board = trainer(tmp_path, photos(tmp_path / "photos", *damaged))
    update = board.noisy_update(board.prepare(TASK, {}, WEIGHTS)).values
    assert update.shape == (DIGITS.parameter_count,)
    engine = NumpyEngine(DIGITS, microbatch=2)
    total = board.records.attempt(lambda records: clipped_sum(TASK.release, WEIGHTS, records, engine))
    good = [number for number in range(COUNT) if number not in damaged]
    rest = ArrayDataset(
        np.stack([noise(number, **DIGIT) for number in good]), np.array([number % 10 for number in good]), 10
    )
    expected = sum_over_lot(engine, WEIGHTS, rest, np.arange(len(rest)), TASK.release.clipping.norms)
    np.testing.assert_allclose(total, expected.total, rtol=1e-4, atol=1e-6)
    assert len(board.records.dataset) == len(good)


def test_when_nothing_can_be_read_any_more_the_board_sends_noise_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Were it to decline, then with one readable record it would not: that one would show."""
    board = trainer(tmp_path, photos(tmp_path / "photos"))
    shutil.rmtree(tmp_path / "photos")
    with caplog.at_level(logging.WARNING):
        look_again(board.records)
        update = board.noisy_update(board.prepare(TASK, {}, WEIGHTS)).values
    sigma = TASK.release.mechanism.deviation_units / TASK.release.terms.step
    assert np.abs(update).max() < 8 * sigma
    assert np.std(update) == pytest.approx(sigma, rel=0.1)
    assert "left out: There is no file" in caplog.text
    photos(tmp_path / "photos")
    look_again(board.records)
    assert board.records.attempt(sizes) == COUNT


def test_a_board_without_records_takes_part_with_noise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Were it not to start, its first record would show."""
    (tmp_path / "photos").mkdir()
    board = trainer(tmp_path, tmp_path / "photos")
    assert "there are no records" in caplog.text
    assert board.noisy_update(board.prepare(TASK, {}, WEIGHTS)).failure is None
    for _ in range(2):
        update = board.noisy_update(board.prepare(front_end_task(), {}, np.zeros(50, np.float32)))
        assert update.values.shape == (50,)
        assert update.failure is None
        photos(tmp_path / "photos")
        look_again(board.records)


def test_a_board_uses_no_more_records_than_it_has_room_for(tmp_path: Path) -> None:
    board = trainer(tmp_path, photos(tmp_path / "photos"), max_records=COUNT)
    work = board.prepare(front_end_task(), {}, np.zeros(50, np.float32))
    (file,) = (tmp_path / "state").glob("features.f32")
    room = file.stat().st_size
    folder_of(tmp_path / "photos", *(f"{number}/more.png" for number in range(10)), **DIGIT)
    look_again(board.records)
    assert board.noisy_update(work).failure is None
    assert len(board.records.dataset) == COUNT
    assert any("10 records beyond" in sentence for sentence in board.records.dataset.origin.left_out)
    assert file.stat().st_size == room == 1 << 20


def test_second_moments_are_those_of_the_records_that_can_be_read(tmp_path: Path) -> None:
    spec = from_description(DIGITS.describe() | {"front_end": [{"projection": 6}], "layers": [{"dense": 10}]})
    task = make_task(
        model=model_of(spec),
        projection={"values": 64, "record_norm": 4.0},
        **terms(rate=1.0, noise_multipliers=[0.05, 1.0, 1.0]),
        step=17,
    )
    records = opened(photos(tmp_path / "photos", 3, 7), tmp_path / "state")
    weights = np.zeros(task.spec.parameter_count, np.float32)
    released = records.attempt(
        lambda dataset: noisy_sum(task.release, weights, lambda _: sum_of_moments(task.release, dataset))
    )
    good = [number for number in range(COUNT) if number not in (3, 7)]
    values = np.stack([noise(number, **DIGIT).ravel() / 255 for number in good])
    mechanism = task.release.mechanism
    expected = SecondMoments(64, 4.0).total(values) / mechanism.granularity / task.release.terms.step
    sigma = mechanism.deviation_units / task.release.terms.step
    length = np.linalg.norm(expected)
    assert abs((released - expected) @ expected / length) < 6 * sigma
    assert length / COUNT > 12 * sigma  # one record more would show


def model_of(spec: ModelSpec) -> dict[str, Any]:
    """The section of a plan."""
    return {
        "description": cbor2.dumps(spec.describe(), canonical=True),
        "parameters": spec.parameter_count,
        "architecture": spec.digest(),
    }


def front_end_task() -> RoundTask:
    """The task of a model whose front end makes 4 features of a record."""
    pooling = {"random": {"layers": [{"average_pool2d": {"kernel": 4, "stride": 4}}]}}
    spec = from_description(DIGITS.describe() | {"front_end": [pooling], "layers": [{"dense": 10}]})
    return make_task(model=model_of(spec), sampling={"rate": 1.0}, wire={"block": 50}, step=1_025)


def test_a_process_that_comes_later_computes_features_of_as_many_as_a_look_may_have_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last look of the process before found some, or none: its first round takes the same time."""
    task, weights, root = front_end_task(), np.zeros(50, np.float32), photos(tmp_path / "photos")
    first, made = trainer(tmp_path, root, max_records=1_000), 0
    a_look_may_find = most_new(first._settings.data)
    assert COUNT < a_look_may_find < 1_000
    compute = FrontEnd.__call__

    def counting(front_end: FrontEnd, inputs: Any) -> Any:
        nonlocal made
        made += len(inputs)
        return compute(front_end, inputs)

    monkeypatch.setattr(FrontEnd, "__call__", counting)

    def computed_in_a_round(board: Trainer, found: LookResult | None = None) -> int:
        nonlocal made
        work = board.prepare(task, {}, weights, adopts=found is not None)
        made = 0
        assert board.noisy_update(work, found).failure is None
        return made

    assert computed_in_a_round(first) == 1000
    assert computed_in_a_round(first) == 0
    for name in ([], ["0/more.png", "1/more.png"]):
        folder_of(root, *name, **DIGIT)
        found = look_only(first._settings.data, first._settings.state_dir)
        later = Trainer(first._settings)
        assert computed_in_a_round(later, found) == a_look_may_find
        assert len(later.records.dataset) == COUNT + len(name)
        assert computed_in_a_round(later) == 0
        first = later


@pytest.mark.slow
def test_features_do_not_count_as_computed_once_what_a_look_found_counts(tmp_path: Path) -> None:
    """Else a crash before those of new records are computed would tell whether there are any."""
    spec = front_end_task().spec
    front_end, state = FrontEnd(spec), tmp_path / "state"
    records = opened(
        photos(tmp_path / "photos"), state, images={"size": [8, 8], "mode": "grey", "folder": "."}
    )
    FeatureSet(records.dataset, front_end, state, lambda done: None).close()
    found = look_only(settings(tmp_path / "photos"), state)
    assert has_features(state, front_end), "it does not count yet"
    records.adopt(found._replace(goes_on=True))
    assert not has_features(state, front_end), "also where it goes on: whether it does tells of records"
    FeatureSet(records.dataset, front_end, state, lambda done: None).close()
    records.adopt(found)
    assert not has_features(state, front_end)


def test_what_a_look_leaves_out_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "photos"
    folder_of(root, "a/1.png", "b/2.png")
    records = opened(root, tmp_path / "state")
    write(root / "a" / "2.png", encoded(noise(2)))
    write(root / "a" / "bad.png", b"no picture")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            look_again(records)
    assert len(records.dataset) == 3
    assert caplog.text.count("the data changed: 3 records, 2 before") == 1
    assert caplog.text.count(f"left out: {root}: a/bad.png") == 1


def test_one_bad_row_of_a_table_neither_keeps_the_agent_from_starting_nor_takes_other_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    file = write(tmp_path / "tables" / "1.csv", b"x,label\n" + b"1,0\n2,1\n" * 50)
    running = opened(file.parent, tmp_path / "state")
    write(file, file.read_bytes() + b"oops,0\n")
    look_again(running)
    started = opened(file.parent, tmp_path / "other")
    assert len(running.dataset) == len(started.dataset) == 100
    assert caplog.text.count("1.csv:102: the column 'x' holds 'oops'") == 2


def test_training_reads_rows_and_no_picture(tmp_path: Path) -> None:
    """The folder is gone, and training finds all it needs; so no picture can cost it anything."""
    board = trainer(tmp_path, photos(tmp_path / "photos"))
    shutil.rmtree(tmp_path / "photos")
    work = board.prepare(TASK, {}, WEIGHTS)
    assert board.records.attempt(sizes) == COUNT
    assert board.noisy_update(work).failure is None
    look_again(board.records)
    assert board.records.attempt(sizes) == 0


def test_without_room_for_its_rows_an_agent_does_not_start(tmp_path: Path) -> None:
    """In the process that decodes, with a limit on files in the place of a full disk."""
    root, state = photos(tmp_path / "photos"), tmp_path / "state"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(
            StorageError, match=r"records\.rows: the rows of 20,000 records take 1,280,000 bytes"
        ):
            opened(root, state, max_records=20_000)
        assert opened(root, state, max_records=10_000).attempt(sizes) == COUNT
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_process_that_comes_later_takes_the_rows_as_they_are(tmp_path: Path) -> None:
    root, state = photos(tmp_path / "photos"), tmp_path / "state"
    first = opened(root, state)
    (root / "0" / "00.png").unlink()
    later = Records(settings(root), state)
    assert later.attempt(sizes) == COUNT
    look_again(later)
    assert later.attempt(sizes) == COUNT - 1
    assert first.attempt(sizes) == COUNT, "rows are not overwritten under a reader of before"


def test_a_process_that_comes_later_takes_nothing_of_before_the_restart(tmp_path: Path) -> None:
    """The start has told it what counts, and a look that was done by then has been cut short."""
    root, state = photos(tmp_path / "photos"), tmp_path / "state"
    opened(root, state)
    folder_of(root, "0/more.png", **DIGIT)
    bring_up_to_date(LookOrder(settings(root), state, at_once=False))
    assert opened(root, state).attempt(sizes) == COUNT
    assert Records(settings(root), state).attempt(sizes) == COUNT


@pytest.mark.parametrize("change", ["other limits", "no rows"])
def test_an_agent_starts_with_no_rows_that_are_gone_or_were_tried_under_other_limits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    root, state = photos(tmp_path / "photos"), tmp_path / "state"
    opened(root, state)
    limits: dict[str, Any] = {}
    if change == "other limits":
        limits = {"decoding": {"seconds": 9}}
    else:
        (state / "records.rows").unlink()
    caplog.set_level(logging.INFO)
    for decodes in (True, False):
        caplog.clear()
        assert opened(root, state, **limits).attempt(sizes) == COUNT
        assert ("decoding the records" in caplog.text) is decodes


@pytest.mark.slow
def test_what_a_look_found_before_a_restart_does_not_count(tmp_path: Path) -> None:
    """Whether it was done depends on what its records took."""
    root, state = photos(tmp_path / "photos"), tmp_path / "state"
    opened(root, state)
    folder_of(root, "0/more.png", **DIGIT)
    look_only(settings(root), state)
    again = opened(root, state)
    assert again.attempt(sizes) == COUNT
    look_again(again)
    assert again.attempt(sizes) == COUNT + 1


def test_an_agent_whose_data_are_gone_starts_again_as_with_one_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file may go with its last record. Before, whoever refused the board's connection saw it: the board
    did not come back."""
    root, state = photos(tmp_path / "photos"), tmp_path / "state"
    opened(root, state)
    declared = settings(root)
    root.rename(tmp_path / "elsewhere")
    again = open_records(declared, state)
    assert again.attempt(sizes) == COUNT
    assert "There is no file or directory" in caplog.text
    look_again(again)
    assert again.attempt(sizes) == 0


def test_an_agent_whose_data_are_not_there_does_not_start_for_the_first_time(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos")
    declared = settings(root)
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="There is no file or directory"):
        open_records(declared, tmp_path)


def test_a_first_start_that_is_cut_short_is_finished_by_the_next(tmp_path: Path) -> None:
    root, state = photos(tmp_path / "photos"), tmp_path / "state"
    opened(root, state)
    store = RowStore(state, settings(root))
    index = store.load()
    assert index is not None
    assert index.header.is_complete
    store.publish(Index(replace(index.header, is_complete=False, glance=None), index.table))
    folder_of(root, "0/more.png", **DIGIT)
    assert opened(root, state).attempt(sizes) == COUNT + 1


@pytest.mark.slow
def test_a_look_that_fails_leaves_the_records_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {f"{number % 2}/{number}.png": encoded(noise(number)) for number in range(4)}
    root = tmp_path / "photos"
    for name, data in files.items():
        write(root / name, data)
    records = opened(root, tmp_path / "state", classes=2)
    root.rename(tmp_path / "elsewhere")
    zip_of(root, files)
    look_again(records)
    assert "a look at the data failed, and what is new waits: " in caplog.text
    assert "is no folder; expected one" in caplog.text
    assert records.attempt(sizes) == 4
    root.unlink()
    for name, data in list(files.items())[:3]:
        write(root / name, data)
    look_again(records)
    assert records.attempt(sizes) == 3


def test_records_that_are_not_finite_are_told_to_the_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = np.zeros((3, 2), np.float32)
    inputs[1, 0] = np.nan
    save_npz(tmp_path / "x.npz", ArrayDataset(inputs, np.zeros(3, np.int64), 2))
    with caplog.at_level(logging.WARNING):
        opened(tmp_path / "x.npz", tmp_path / "state")
    assert "1 of 3 records contain NaN or infinity" in caplog.text


def test_what_is_in_memory_does_not_depend_on_how_many_records_there_are(tmp_path: Path) -> None:
    """Of up to 2,000 records: 72 kB."""
    most, held = 2_000, []
    for count in (0, 1, most):
        folder = tmp_path / str(count)
        folder.mkdir()
        inputs, labels = np.ones((count, 64), np.float32), np.arange(count) % 2
        np.savez(folder / "data.npz", inputs=inputs, labels=labels)
        declared: dict[str, Any] = {"kind": "npz", "path": folder / "data.npz", "classes": 2}
        declared |= {"max_records": most, "shape": [64], "dtype": "float32"}
        data = DataSettings.checked({"name": "mine", **declared})
        open_records(data, folder)  # What an agent's start does.
        gc.collect()
        tracemalloc.start()
        records = Records(data, folder)
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert len(records.dataset) == count
    assert held[0] > most * 36
    assert max(held) - min(held) < 8 << 10, held
