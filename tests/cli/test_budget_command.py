"""``dpagent budget``: every figure carries its unit, adjacency and trust, from the one statement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Result, dpagent
from fleets import make_plan, records
from ledgers import BUDGET, DATASET, charge_and_spool, charge_for, open_state

from cli.tables import render_table
from dpagent.privacy.statement import Adjacency, Trust, Unit

SCOPE = {"unit": "record", "adjacency": "add-or-remove-one", "trust": "none"}


def budget(*arguments: str) -> Result:
    return dpagent("budget", *arguments)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """A ledger with two charges of a job of three rounds."""
    state = open_state(tmp_path / "state")
    for number in (1, 2):
        charge_and_spool(state, charge_for(make_plan(round=number), records(20), state.ledger), [])
    state.close()
    return tmp_path / "state"


def test_show_says_what_its_figures_refer_to(state_dir: Path) -> None:
    result = budget("show", "--state-dir", str(state_dir))
    assert result.returncode == 0, result.stderr
    first = result.stdout.splitlines()[0]
    assert Unit.RECORD.meaning in first
    assert Adjacency.ADD_OR_REMOVE_ONE in first
    assert Trust.NONE.meaning in first
    assert DATASET in result.stdout


def test_statement_is_of_what_is_reserved(state_dir: Path) -> None:
    result = budget("show", "--state-dir", str(state_dir), "--json")
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    assert {key: shown[key] for key in SCOPE} == SCOPE
    dataset = shown["datasets"][DATASET]
    statement = dataset["statement"]
    assert {key: statement[key] for key in SCOPE} == SCOPE
    assert statement["epsilon"] == dataset["epsilon_reserved"] > dataset["epsilon_spent"] > 0
    assert statement["delta"] == dataset["delta_reserved"] == make_plan().delta
    assert statement["mechanism"] == make_plan().mechanism.name
    assert statement["guarantee"] == "differential privacy"


def test_a_ledger_without_charges_states_that_nothing_was_released(tmp_path: Path) -> None:
    open_state(tmp_path / "state").close()
    result = budget("show", "--state-dir", str(tmp_path / "state"), "--json")
    assert result.returncode == 0, result.stderr
    dataset = json.loads(result.stdout)["datasets"][DATASET]
    assert dataset["epsilon_budget"] == BUDGET.epsilon
    assert dataset["statement"]["epsilon"] == dataset["statement"]["delta"] == 0
    assert dataset["statement"]["mechanism"] == "nothing released"


def test_export_states_the_same(state_dir: Path) -> None:
    result = budget("export", "--state-dir", str(state_dir), "--json", "-")
    assert result.returncode == 0, result.stderr
    exported = json.loads(result.stdout)
    assert {key: exported[key] for key in SCOPE} == SCOPE
    assert len(exported["charges"]) == 2
    for number, charge in enumerate(exported["charges"], start=1):
        assert charge.keys() >= {
            "entry", "hash", "dataset", "job", "round", "mechanism", "noise_multiplier", "sampling_rate",
            "steps", "clip_norm", "granularity", "dimension", "statistical_distance", "schedule",
            "job_epsilon", "delta", "cumulative_epsilon", "cumulative_delta", "charged_at", "loss_grid",
            "accumulation_slack",
        }  # fmt: skip
        assert "parameters" not in charge
        assert charge["noise_multiplier"] == make_plan().mechanism.noise_multipliers[number - 1]
        assert charge["resolution"] == make_plan().mechanism.parameters["resolution"]
    assert exported["datasets"][DATASET]["statement"]["epsilon"] > 0


@pytest.mark.parametrize("columns", ["10", "40", "200"])
def test_a_table_never_cuts_a_figure_short(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    cells = ["a name of some length", "1234567.8901", "0.000012345", "999999999999"]
    table = render_table(["dataset", "one\nline", "ε", "more"], [cells, cells], words=1)
    assert table.count("1234567.8901") == table.count("999999999999") == 2
    assert len(table.splitlines()) == 4
    assert "…" not in table
    # Words stand left, figures right: their ends are in one column.
    assert all(line.startswith("a name of some length  ") for line in table.splitlines()[-2:])
    assert {line.index("1234567.8901") for line in table.splitlines()[-2:]} == {23}


def test_a_table_shows_names_as_they_are() -> None:
    text = render_table(["name", "n"], [["[bold red]data[/x]", "1"], ["a\nb\0", "2"]])
    assert "[bold red]data[/x]" in text
    assert "a�b�" in text
