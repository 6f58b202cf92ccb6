"""The page of a comparison: its table, its pictures, its links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pages import Structure
from run_records import record_of, with_settings, words_of

from simulation.report.comparison_page import comparison_rows, label_heights, write_comparison

RUNS = {
    "dp-sgd": record_of(rounds=4),
    "ldp-fl": with_settings(record_of(rounds=3), method="ldp-fl", noise="two-point"),
}


def test_page_has_a_row_a_figure_and_a_picture_a_method(tmp_path: Path) -> None:
    pages = {method: tmp_path / "report" / method / "index.html" for method in RUNS}
    path = write_comparison(RUNS, pages, tmp_path / "report")
    text = path.read_text(encoding="utf-8")
    page = Structure(text)
    assert page.open == []
    assert page.seen.count("svg") == 1 + len(RUNS)
    assert len(set(page.ids)) == len(page.ids)
    assert page.seen.count("tr") == 1 + len(comparison_rows(list(RUNS.values())))
    links = [reference for reference in page.references if not reference.startswith("#")]
    assert links == ["dp-sgd/index.html", "ldp-fl/index.html"]
    assert "dp-sgd: all that leaves a device has its noise already" in words_of(text)
    assert "://" not in text


def test_what_has_no_bound_says_so() -> None:
    rows = {row[0]: row[1:] for row in comparison_rows(list(RUNS.values()))}
    assert rows["ε of a device, nobody trusted"] == ["no bound", "1.993"]
    assert rows["ε of a record, nobody trusted"] == ["1.993", "1.993"]


def test_labels_of_lines_that_end_together_are_apart() -> None:
    assert label_heights([0.54, 0.91, 0.56], 0.05) == pytest.approx([0.54, 0.91, 0.59])


def test_runs_without_any_round_are_drawn(tmp_path: Path) -> None:
    empty = replace(
        RUNS["dp-sgd"], accuracy_history=(), baseline_history=(), epsilon_spent=(), budgets=(), arrivals=()
    )
    path = write_comparison({"dp-sgd": empty, "ldp-fl": empty}, {}, tmp_path)
    assert "Accuracy was not measured" in words_of(path.read_text(encoding="utf-8"))
