"""The file of a sweep: its settings, and what is wrong with it, in words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dpagent.errors import ConfigurationError, DpagentError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.formats.npz import save_npz
from simulation.sweep.file import load_sweep, runs_of
from simulation.sweep.sweep import Sweep

GOOD = "records: public\nbase: {devices: 4, rounds: 2, model: digits}\nvary:\n  learning_rate: [0.5, 2]\n"


def written(directory: Path, text: str) -> Path:
    file = directory / "sweep.yaml"
    file.write_text(text)
    return file


def test_each_combination_is_a_setting_and_runs_once_for_each_seed(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD + "  schedule: [uniform, incrementing, linear]\nseeds: [3, 4]\n")
    runs = runs_of(load_sweep(file), file)
    assert [run.number for run in runs] == [*range(1, 13)]
    assert [run.setting for run in runs] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert [run.request.seed for run in runs[:3]] == [3, 4, 3]
    assert (runs[2].request.learning_rate, runs[2].request.schedule) == (0.5, "incrementing")
    assert runs[2].in_words == "learning_rate 0.5, schedule incrementing"
    assert {run.request.devices for run in runs} == {4}


def test_a_lot_becomes_a_sampling_rate(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD.replace("learning_rate: [0.5, 2]", "lot: [10, 100]"))
    sweep = Sweep(file, tmp_path / "sweep")
    assert [run.request.sampling_rate for run in sweep.runs] == [10 / 359, 100 / 359]
    with pytest.raises(ConfigurationError, match=r"a lot of 1,000 records; expected at most 359"):
        Sweep(written(tmp_path, GOOD.replace("learning_rate: [0.5, 2]", "lot: [1000]")), tmp_path / "sweep")


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path.parent)
    generator = np.random.default_rng(0)
    data = ArrayDataset(generator.random((60, 6), np.float32), np.arange(60) % 3, 3)
    save_npz(tmp_path / "mine.npz", data)
    file = written(
        tmp_path,
        "records: private\nbase: {devices: 2, rounds: 1, data: {train: {path: mine.npz}}}\n"
        "vary: {clip_norm: [0.5]}\n",
    )
    (run,) = Sweep(file, tmp_path / "sweep").runs
    assert run.request.data.train is not None
    assert run.request.data.train.path == tmp_path / "mine.npz"


def test_public_records_may_be_looked_at_without_noise_or_with_noise_from_a_seed(tmp_path: Path) -> None:
    text = GOOD.replace("rounds: 2", "rounds: 2, baseline: true, insecure_noise_seed: 7")
    run, _ = runs_of(load_sweep(written(tmp_path, text)), tmp_path / "sweep.yaml")
    assert (run.request.baseline, run.request.insecure_noise_seed) == (True, 7)


@pytest.mark.parametrize(("records", "are_apart"), [("private", True), ("public", False)])
def test_no_private_record_that_a_run_trains_on_is_tested_on_by_another(
    tmp_path: Path, records: str, are_apart: bool
) -> None:
    """Its accuracy is shown without noise: of whoever is in both, the price says nothing."""
    values = np.arange(360, dtype=np.float32).reshape(60, 6)
    save_npz(tmp_path / "mine.npz", ArrayDataset(values, np.arange(60) % 3, 3))
    text = (
        f"records: {records}\nbase: {{devices: 2, rounds: 1, data: {{train: {{path: mine.npz}}}}}}\n"
        "vary: {clip_norm: [0.5, 1]}\nseeds: [4, 5, 6]\n"
    )
    sweep = Sweep(written(tmp_path, text), tmp_path / "sweep")
    trained, tested = set[int](), set[int]()
    for run in sweep.runs:
        source = sweep.fleet_of(run.number).source
        for found, part in ((trained, source.train), (tested, source.test)):
            found.update(part.batch(np.arange(len(part)))[0][:, 0].astype(int).tolist())
    assert len(trained | tested) == 60
    assert trained.isdisjoint(tested) == are_apart
    assert [sweep.fleet_of(run.number).settings.seed for run in sweep.runs] == [4, 5, 6] * 2


@pytest.mark.parametrize("records", ["private", "public"])
def test_runs_of_an_older_version_on_private_records_are_refused_as_such(
    tmp_path: Path, records: str
) -> None:
    """Each seed held out other records, and the noise was calibrated as if it were exact."""
    text = GOOD.replace("public", records)
    sweep = Sweep(written(tmp_path, text), tmp_path / "sweep")
    (tmp_path / "sweep").mkdir()
    sweep.begin()
    kept = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    Sweep(sweep.file, sweep.root)
    kept.pop("private", None)
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(kept))
    if records == "public":
        Sweep(sweep.file, sweep.root)
        return
    with pytest.raises(ConfigurationError, match="begun by an older dpagent"):
        Sweep(sweep.file, sweep.root)
    for other in (kept | {"data": "0" * 64}, [kept]):
        (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(other))
        with pytest.raises(ConfigurationError, match="was of another file"):
            Sweep(sweep.file, sweep.root)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD + "  learning_rat: [1]\n", r"sweep.yaml:5: vary.learning_rat: unknown key. .*learning_rate"),
        (
            GOOD.replace("[0.5, 2]", "[0.5, fast]"),
            r"sweep.yaml:4: vary.learning_rate.1: got 'fast'; expected a",
        ),
        (GOOD.replace("[0.5, 2]", "[-1]"), r"vary.learning_rate.0: got -1; expected a number above 0"),
        (GOOD.replace("[0.5, 2]", "[]"), r"vary.learning_rate: got \[\]; expected a list of at least 1"),
        (GOOD.replace("[0.5, 2]", "[2, 2]"), r"learning_rate has a value twice"),
        (
            GOOD.replace("public", "mine"),
            r"sweep.yaml:1: records: got 'mine'; expected 'public' or 'private'",
        ),
        (GOOD.removeprefix("records: public\n"), r"records: this key is missing"),
        (GOOD.replace("rounds: 2", "rounds: 2, learning_rate: 1"), r"learning_rate is in base and in vary"),
        (GOOD.replace("rounds: 2", "rounds: 2, seed: 1"), r"base has a seed; expected the list seeds"),
        (GOOD.replace("rounds: 2", "round: 2"), r"base.round: unknown key"),
        (GOOD + "  devices: [1, 2]\n", r"devices is in base and in vary"),
        (GOOD + "seeds: [1, 1]\n", r"seeds has a value twice"),
        (GOOD.replace("vary:\n  learning_rate: [0.5, 2]", "vary: {}"), r"nothing is varied"),
        (GOOD + "  sampling_rate: [0.1]\n  lot: [3]\n", r"lot and sampling_rate are two names"),
        (GOOD + f"seeds: {[*range(501)]}\n", r"the sweep has 1,002 runs; expected at most 1,000"),
        (
            GOOD.replace("public", "private").replace("rounds: 2", "rounds: 2, baseline: true"),
            r"base.baseline trains without noise, which no epsilon covers, and records are private; expected",
        ),
        (
            GOOD.replace("public", "private").replace("rounds: 2", "rounds: 2, insecure_noise_seed: 7"),
            r"base.insecure_noise_seed makes noise that can be taken off, .* records are private; expected",
        ),
        (GOOD + "  method: [sgd]\n", r"setting 1 \(learning_rate 0.5, method sgd\): .*sgd"),
    ],
)
def test_what_is_wrong_is_named_with_what_was_expected(tmp_path: Path, text: str, expected: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(DpagentError, match=expected) as caught:
        runs_of(load_sweep(file), file)
    assert "Traceback" not in str(caught.value)


def test_an_impossible_setting_is_named_before_anything_runs(tmp_path: Path) -> None:
    file = written(tmp_path, "records: public\nbase: {model: digits}\nvary: {devices: [5, 100000]}\n")
    with pytest.raises(DpagentError, match=r"setting 2 \(devices 100000\): .*cannot be split"):
        Sweep(file, tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()
