"""A sweep on a real Ray, its page and JSON, and the job of its best setting on a coordinator's queue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import dpagent
from pages import Structure
from run_records import words_of

from cli.sweep.command import report_of
from dpagent.errors import ConfigurationError
from simulation.sweep.page import render_sweep
from simulation.sweep.sweep import Sweep

pytestmark = pytest.mark.heavy

_FILE = (
    "records: {records}\nbase: {{devices: 4, rounds: 2, model: digits}}\n"
    "vary:\n  learning_rate: [0.001, 2]\n  schedule: [uniform, incrementing]\n"
)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, ray: Any) -> Sweep:
    root = tmp_path_factory.mktemp("sweeps")
    file = root / "sweep.yaml"
    file.write_text(_FILE.format(records="private"))
    sweep = Sweep(file, root / "sweep")
    with sweep.locked():
        sweep.begin()
        sweep.compute(ray)
    return sweep


def test_the_best_setting_is_first_and_the_page_has_all(swept: Sweep) -> None:
    report = report_of(swept)
    assert [each.number for each in report.settings][:2] in ([3, 4], [4, 3])
    assert report.best.accuracy == max(outcome.accuracy for outcome in swept.done.values())
    values = report.as_json()
    assert len(values["settings"]) == 4
    assert values["owed"]
    (price,) = values["price"]
    assert 4.0 < price["all_runs"]["epsilon"] < 16.0
    # What is remarked of the training records is counted on them, without noise.
    assert any(outcome.results["minds"] for outcome in swept.done.values())
    assert all(not run["results"]["minds"] for each in values["settings"] for run in each["runs"])
    page = render_sweep(report)
    words = words_of(page)
    assert "What this page costs the records" in words
    assert "Papernot and Steinke, ICLR 2022" in words
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert Structure(page).open == []


def test_with_public_records_nothing_is_owed(swept: Sweep, tmp_path: Path) -> None:
    from dataclasses import replace

    report = replace(report_of(swept), records="public", prices=[])
    words = words_of(render_sweep(report))
    assert "Nothing is owed" in words
    assert "Papernot" not in words
    assert report.as_json()["owed"] is False


def test_what_is_done_is_not_run_again_and_another_file_is_refused(swept: Sweep, ray: Any) -> None:
    again = Sweep(swept.file, swept.root)
    assert again.is_done
    assert {n: each.accuracy for n, each in again.done.items()} == {
        n: each.accuracy for n, each in swept.done.items()
    }
    (swept.root / "runs" / "0002.json").write_text("{")
    assert len(Sweep(swept.file, swept.root).done) == 3
    other = swept.root.parent / "other.yaml"
    other.write_text(_FILE.format(records="public"))
    with pytest.raises(ConfigurationError, match="was of another file"):
        Sweep(other, swept.root)
    resumed = Sweep(swept.file, swept.root)
    resumed.compute(ray)
    assert resumed.is_done


def test_the_chosen_setting_goes_into_a_coordinators_queue(
    swept: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "chosen.yaml"
    written = dpagent("sweep", "job", swept.root, "--output", job, "--setting", "4")
    assert written.returncode == 0, written.stderr
    assert "learning_rate 2, schedule incrementing" in job.read_text()
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text("fleet: meadow\ndevices: 4\n")
    added = dpagent("coordinator", "job", "add", job, "--config", fleet)
    assert added.returncode == 0, added.stderr
    listed = dpagent("coordinator", "job", "show", "chosen", "--config", fleet, "--json", "-")
    settings = json.loads(listed.stdout)["settings"]
    assert settings["optimiser"]["learning_rate"] == 2
    assert settings["privacy"]["schedule"]["kind"] == "incrementing"
    assert settings["rounds"] == 2
    options = ["--add", "--paused", "--set", "round.deadline_s=90", "--config", fleet]
    at_once = dpagent("sweep", "job", swept.root, "--output", tmp_path / "best.yaml", *options)
    assert at_once.returncode == 0, at_once.stderr
    listed = dpagent("coordinator", "job", "show", "best", "--config", fleet, "--json", "-")
    assert json.loads(listed.stdout)["settings"]["round"]["deadline_s"] == 90
    alone = dpagent("sweep", "job", swept.root, "--output", job, "--replace", "--paused")
    assert (alone.returncode, "--add" in alone.stderr) == (2, True)
    kept = job.read_bytes()
    unused = dpagent("sweep", "job", swept.root, "--output", job, "--replace", "--config", fleet)
    assert (unused.returncode, "--config is given without --add" in unused.stderr) == (2, True)
    both = dpagent(
        "sweep", "job", swept.root, "--output", job, "--replace", "--paused", "--set", "round.deadline_s=9"
    )
    assert (both.returncode, "--paused and --set are given without --add" in both.stderr) == (2, True)
    assert job.read_bytes() == kept
    monkeypatch.setenv("DPAGENT_CONFIG", str(fleet))
    elsewhere = dpagent("sweep", "job", swept.root, "--output", tmp_path / "other.yaml")
    assert (elsewhere.returncode, elsewhere.stderr) == (0, ""), "the machine's own fleet is given to nobody"
    monkeypatch.delenv("DPAGENT_CONFIG")

    again = dpagent("sweep", "job", swept.root, "--output", job)
    assert again.returncode == 3
    assert "--replace" in again.stderr
    missing = dpagent("sweep", "job", swept.root, "--output", job, "--setting", "9")
    assert missing.returncode == 2
    assert "expected one of 1, 2, 3, 4" in missing.stderr
    nothing = dpagent("sweep", "job", tmp_path, "--output", tmp_path / "other.yaml")
    assert nothing.returncode == 3
