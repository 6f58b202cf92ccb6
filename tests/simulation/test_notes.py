"""What a fleet tells beside its figures: remarks on the data, and notes between starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demos import own
from pictures import folder_of, write

from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.models.built_ins import built_in
from simulation.data.remarks import remarks_on
from simulation.data.shards import deal, prepare_data
from simulation.data.source import open_source
from simulation.fitting_model import derived_model
from simulation.fleet import Fleet
from simulation.layout import Layout
from simulation.notes import RunNotes, look_of_data, read_notes
from simulation.request import DataSelection, Request
from simulation.settings import COMMAND_FILE


def said_of(data: DataSelection) -> list[str]:
    source = open_source(data, seed=0)
    return list(remarks_on(source, derived_model(source.form.shape, source.form.classes)))


def csv(path: Path, rows: list[str], header: str = "x,label", **more: Any) -> DataSelection:
    write(path, "\n".join([header, *rows, ""]).encode())
    return own(path, **more)


def test_a_class_without_a_test_record_is_named(tmp_path: Path) -> None:
    rows = [f"{n % 7},a" for n in range(20)]
    said = " ".join(said_of(csv(tmp_path / "x.csv", [*rows, "1,b"])))
    assert "Class b has no test record" in said
    said = " ".join(said_of(csv(tmp_path / "x.csv", [*rows, "1,b", "2,c"])))
    assert "Classes b, c have no test record" in said
    assert "no test record" not in " ".join(said_of(csv(tmp_path / "x.csv", [*rows, "1,b", "2,b"])))


def test_a_record_that_cannot_count_is_said_and_not_counted(tmp_path: Path) -> None:
    rows = [f"{n % 7},{n % 2}" for n in range(20)]
    rows[3] = ",1"
    rows[8] = "nan,0"
    data = csv(tmp_path / "x.csv", rows)
    source = open_source(data, seed=0)
    assert source.form.train_records + source.form.test_records == 18
    assert "2 records hold NaN or infinity (or a missing value) and will not count." in said_of(data)
    held_out = own(tmp_path / "x.csv", test=DatasetSettings(path=tmp_path / "x.csv"))
    source = open_source(held_out, seed=0)
    assert (len(source.train), len(source.test), source.not_counted) == (18, 18, 4)
    with pytest.raises(DataError, match="every record holds NaN"):
        open_source(csv(tmp_path / "y.csv", [",0", ",1"]), seed=0)


def test_columns_that_only_grow_or_are_large_are_named(tmp_path: Path) -> None:
    rows = [f"{n},{1000 + n % 3},{n % 5},{n % 2}" for n in range(40)]
    said = " ".join(said_of(csv(tmp_path / "x.csv", rows, "t,hpa,x,label")))
    assert "A column that only grows is taken as input: t. " in said
    assert "Inputs reach 1,002 (t, hpa)" in said
    assert "`features`" in said


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([f"n{n // 2}" for n in range(40)], "20 classes"),
        ([f"{n % 8 / 8}" for n in range(40)], "decimal fractions"),
    ],
)
def test_a_column_that_is_no_label_is_refused_unless_its_classes_are_listed(
    tmp_path: Path, labels: list[str], words: str
) -> None:
    rows, reading = [f"{n % 7},{label}" for n, label in enumerate(labels)], {"csv": {"label": "price"}}
    data = csv(tmp_path / "x.csv", rows, "x,price", reading=reading)
    with pytest.raises(DataError, match=rf"x\.csv: The labels, from the column 'price'.*{words}.*`label`"):
        open_source(data, seed=0)
    listed = own(tmp_path / "x.csv", reading=reading | {"classes": list(dict.fromkeys(labels))})
    assert len(open_source(listed, seed=0).train) > 0


def test_too_few_groups_for_the_devices_say_how_many_there_may_be(tmp_path: Path) -> None:
    for number in range(4):
        csv(tmp_path / "d" / f"{number}.csv", [f"{n},{n % 2}" for n in range(10)])
    data = own(tmp_path / "d", split="file")
    with pytest.raises(DataError, match=r"^4 files or groups, 1 of them to test on: give `devices: 3`"):
        Fleet(Request(data=data), tmp_path / "run")
    settings = Fleet(Request(data=data, devices=3), tmp_path / "run").settings
    assert len(deal(settings, open_source(data, 0))) == 3


def test_pictures_are_made_as_large_as_a_model_that_was_asked_for_takes_them(tmp_path: Path) -> None:
    folder_of(tmp_path / "p", *(f"{c}/{n}.png" for c in "ab" for n in range(6)), width=11, height=9)
    assert open_source(own(tmp_path / "p"), 0).form.shape == (9, 11, 3)
    source = open_source(own(tmp_path / "p"), 0, built_in("digits"))
    assert source.form.shape == (8, 8, 1)
    assert source.test.batch(np.arange(2))[0].shape == (2, 8, 8, 1)


def test_a_run_that_goes_on_knows_what_was_said_and_whether_the_data_changed(tmp_path: Path) -> None:
    data = csv(tmp_path / "d" / "x.csv", [f"{n % 9},{n % 2}" for n in range(60)])
    request, root = Request(data=data, rounds=3), tmp_path / "d" / "run"
    first = Fleet(request, root)
    assert not first.goes_on
    first.settings.save(root)
    first.notes.save(root)
    prepare_data(first.settings, Layout(root))
    again = Fleet(request, root)
    assert (again.goes_on, again.notes, again.data_changed) == (True, first.notes, False)
    assert again.notes.columns == ("x",)
    assert any("test records" in remark for remark in again.notes.remarks)
    with (tmp_path / "d" / "x.csv").open("a") as stream:
        stream.write("1,1\n")
    assert Fleet(request, root).data_changed
    (tmp_path / "d" / "x.csv").unlink()
    assert Fleet(request, root).data_changed
    # Another run there is told the command of before.
    write(root / COMMAND_FILE, b"dpagent demo --data-dir d --rounds 3 --state-dir run\n")
    with pytest.raises(ConfigurationError, match="command of before: dpagent demo --data-dir d --rounds 3"):
        Fleet(Request(data=data, rounds=4), root)
    with pytest.raises(ConfigurationError, match=r"`state_dir`: .* is a file"):
        Fleet(request, root / COMMAND_FILE)


def test_a_folder_looks_otherwise_when_a_file_does_but_not_for_the_run_in_it(tmp_path: Path) -> None:
    write(tmp_path / "d" / "a" / "1.csv", b"1")
    data = own(tmp_path / "d")
    before = look_of_data(data)
    write(tmp_path / "d" / "run" / "demo.json", b"{}")
    write(tmp_path / "d" / "run" / "state" / "x.npz", b"1")
    write(tmp_path / "d" / ".hidden", b"1")
    assert look_of_data(data) == before
    known = (tmp_path / "d" / "a" / "1.csv").stat()
    write(tmp_path / "d" / "a" / "1.csv", b"2")
    os.utime(tmp_path / "d" / "a" / "1.csv", ns=(known.st_atime_ns, known.st_mtime_ns + 1_000_000_000))
    assert look_of_data(data) != before
    assert look_of_data(DataSelection()) == ""


def test_figures_of_all_starts_are_kept_together(tmp_path: Path) -> None:
    notes = RunNotes(remarks=("one",), columns=("x",))
    for seconds, peak, finished in ((10.0, 50.0, False), (4.0, None, True)):
        notes = notes.after_start(
            broker="b", seconds=seconds, agent_peak_mib=peak, coordinator_peak_mib=peak, restarts=1,
            finished=finished,
        )  # fmt: skip
    notes.save(tmp_path)
    assert (tmp_path / "notes.json").stat().st_mode & 0o077 == 0
    assert read_notes(tmp_path) == notes
    assert (notes.seconds, notes.agent_peak_mib, notes.restarts, notes.finished) == (14.0, 50.0, 2, True)
    for damaged in (b"", b"[]", b"{}", b'{"cats": 1, "columns": [], "remarks": []}', b"\xff"):
        write(tmp_path / "notes.json", damaged)
        assert read_notes(tmp_path) == RunNotes()


def test_rare_classes_are_named_before_training(tmp_path: Path) -> None:
    rows = [f"{n % 7},a" for n in range(300)] + [f"{n % 5},b" for n in range(6)]
    (said,) = (sentence for sentence in said_of(csv(tmp_path / "x.csv", rows)) if "differ" in sentence)
    assert "Rare beside a (240): b (5)." in said
    assert "98.0% of the records" in said
    even = [f"{n % 7},{'ab'[n % 9 == 0]}" for n in range(90)]
    assert "differ much" not in " ".join(said_of(csv(tmp_path / "y.csv", even)))


def test_arrays_with_infinities_lose_only_those_records(tmp_path: Path) -> None:
    inputs = np.zeros((12, 2, 2), np.float32)
    inputs[5, 1, 0] = np.inf
    save_npz(tmp_path / "x.npz", ArrayDataset(inputs, np.arange(12, dtype=np.int64) % 2, 2))
    source = open_source(own(tmp_path / "x.npz"), seed=0)
    assert (len(source.train) + len(source.test), source.not_counted) == (11, 1)
