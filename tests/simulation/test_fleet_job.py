"""The report of a real fleet's job: its rounds, of which some were given up."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from fleets import write_fleet
from gapped_rounds import keep_gapped_rounds
from matplotlib.figure import Figure
from run_records import words_of

from coordinator.database.opening import open_database
from coordinator.settings import load_fleet_settings
from simulation.fleet_job import FleetJobRecord, collect_job
from simulation.report.page import render_report


@pytest.fixture
def record(tmp_path: Path) -> FleetJobRecord:
    settings = load_fleet_settings(write_fleet(tmp_path / "fleet", None, rounds=6))
    keep_gapped_rounds(settings)
    return collect_job(settings)


def test_each_figure_is_of_its_own_round(record: FleetJobRecord) -> None:
    assert record.numbers == (1, 4)
    assert record.epsilon_spent == (0.5, 1.1)
    assert record.accuracy_history == pytest.approx((0.6, 0.8))
    assert record.given_up == 3


@pytest.mark.parametrize(
    ("rounds", "state", "ended"),
    [(6, "running", None), (6, "cancelled", None), (5, "finished", None), (6, "finished", 5)],
)
def test_a_bounded_job_has_ended_by_itself_only_if_nobody_ended_it_and_rounds_were_left(
    tmp_path: Path, rounds: int, state: str, ended: int | None
) -> None:
    """Its last round was given up: that is no end for want of ε."""
    cap = {"kind": "bounded", "regularisation": 1e-6, "floor": 0.088}
    privacy = {"method": "incrementing", "noise": "laplace", "epsilon": 16.0}
    settings = load_fleet_settings(
        write_fleet(tmp_path / "fleet", None, rounds=rounds, cap=cap, privacy=privacy)
    )
    keep_gapped_rounds(settings)
    with contextlib.closing(open_database(settings.state_dir)) as database:
        database.execute("UPDATE jobs SET state = ?", (state,))
    sentences = " ".join(collect_job(settings).cautions)
    assert (f"The job ended after {ended} of 6 rounds" in sentences) is (ended is not None)
    assert ("met the bounded cap of no further round" in sentences) is (ended is not None)


def test_what_a_round_cost_that_was_given_up_is_in_the_reports_figure(record: FleetJobRecord) -> None:
    assert record.epsilon == 1.5
    assert record.columns[0].epsilon == 1.5


def test_the_axes_have_the_rounds_numbers(
    record: FleetJobRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[float]] = []
    bars: list[list[int]] = []

    def savefig(self: Figure, stream: Any, **_options: Any) -> None:
        stream.write('<svg viewBox="0 0 1 1"></svg>')
        for axes in (each for each in self.axes if each.get_xlabel() == "round"):
            # Not a line across the whole width, such as that of the target.
            drawn.extend(
                [float(x) for x in line.get_xdata()] for line in axes.lines if line.get_linestyle() == "-"
            )
            bars.append([round(bar.get_x() + bar.get_width() / 2) for bar in axes.patches])

    monkeypatch.setattr(Figure, "savefig", savefig)
    page = render_report(record, tmp_path)
    assert drawn == [[1.0, 4.0]] * 3, "accuracy, ε, noise"
    assert [each for each in bars if each] == [[1, 4]]
    words = words_of(page)
    assert "After round 4 the model classifies" in words
    assert "Rounds 2 of 6, 3 given up" in words
    table = page[page.index("Every round in numbers") :]
    assert re.findall(r'<tr><th scope="row">(\d+)</th>', table) == ["1", "4"]
