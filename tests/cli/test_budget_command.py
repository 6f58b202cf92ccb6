"""``dpagent budget``: every figure carries its unit, adjacency and trust, from the one statement."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from commands import Result, dpagent
from fleets import agent_values, make_plan, records, report_plan, terms
from ledgers import BUDGET, DATASET, charge_and_spool, charge_for, open_state

from agent.charges import Budget
from cli.tables import render_table
from dpagent.errors import ExitCode
from dpagent.privacy.statement import Adjacency, Trust, Unit
from dpagent.protocol.signing import Signer, new_signing_secret

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


def test_no_table_shows_less_than_was_spent_or_more_than_is_left(tmp_path: Path) -> None:
    """Of a small job, four digits behind the point say nothing, and one that is rounded to the nearest too
    little."""
    state, path = open_state(tmp_path / "state"), str(tmp_path / "state")
    cheap = terms(noise_multipliers=[9_000.0], resolution=1024, rate=1.0, delta=1e-9)
    charge = charge_for(make_plan(**cheap), records(20), state.ledger)
    charge_and_spool(state, charge, [])
    state.close()
    assert round(charge.job_epsilon, 4) < charge.job_epsilon < 1e-3, "else this shows nothing"
    row = next(line.split() for line in budget("show", "--state-dir", path).stdout.splitlines()
               if line.startswith(DATASET))  # fmt: skip
    spent, reserved, _, left = map(float, row[1:5])
    assert min(spent, reserved) >= charge.job_epsilon
    assert left <= BUDGET.epsilon - charge.job_epsilon
    exported = budget("export", "--state-dir", path).stdout.splitlines()[-1].split()
    assert float(exported[-2]) >= charge.cumulative_epsilon


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
    assert statement["mechanism"] == make_plan().release.mechanism.name
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
        assert charge["noise_multiplier"] == make_plan().release.mechanism.noise_multipliers[number - 1]
        assert charge["resolution"] == make_plan().release.mechanism.parameters["resolution"]
    assert exported["datasets"][DATASET]["statement"]["epsilon"] > 0


def test_keys_that_disagree_are_shown_as_they_were_signed(state_dir: Path) -> None:
    none = budget("evidence", "--state-dir", str(state_dir))
    assert (none.returncode, none.stderr) == (0, "")
    assert "one key for each round" in none.stdout
    state = open_state(state_dir)
    state.keep_token_conflict(b"j" * 16, 7, b"one list", b"another list", 1_790_000_000.0)
    state.close()
    assert "two keys are signed for round 7" in budget("evidence", "--state-dir", str(state_dir)).stdout
    written = budget("evidence", "--state-dir", str(state_dir), "--json", "-")
    (conflict,) = json.loads(written.stdout)["conflicts"]
    assert [bytes.fromhex(each) for each in conflict["lists"]] == [b"one list", b"another list"]
    assert (conflict["job"], conflict["round"]) == ((b"j" * 16).hex(), 7)


def test_reports_are_exported_beside_sums_in_words_and_json(tmp_path: Path) -> None:
    state = open_state(tmp_path / "state", Budget(400.0, 1e-3))
    for plan in (make_plan(), report_plan(job=b"k" * 16)):
        charge_and_spool(state, charge_for(plan, records(20), state.ledger), [])
    state.close()
    arguments = ("export", "--state-dir", str(tmp_path / "state"))
    first, second = json.loads(budget(*arguments, "--json", "-").stdout)["charges"]
    assert (first["mechanism"], second["mechanism"]) == ("discrete-gaussian", "two-point")
    assert second["coordinates"] == 40
    assert "sampling_rate" not in second
    lines = budget(*arguments).stdout.splitlines()
    assert sum("two-point" in line for line in lines) == 1
    verified = budget("verify", "--state-dir", str(tmp_path / "state"))
    assert verified.returncode == ExitCode.OK


# --- the second head ----------------------------------------------------------------------------


def test_verify_says_that_a_ledger_is_behind_its_second_head(state_dir: Path, tmp_path: Path) -> None:
    older = Path(shutil.copytree(state_dir, tmp_path / "older"))
    verified = budget("verify", "--state-dir", str(state_dir))
    assert (verified.returncode, verified.stderr) == (ExitCode.OK, "")
    state = open_state(state_dir)
    charge_and_spool(state, charge_for(make_plan(round=3), records(20), state.ledger), [])
    state.close()
    alone = budget("verify", "--state-dir", str(older))
    assert alone.returncode == ExitCode.OK, alone.stderr
    assert "no second head" in alone.stderr
    for arguments in (
        ["--second-head", str(tmp_path / "state.head")],
        ["--second-head", str(tmp_path / "none")],
    ):
        behind = budget("verify", "--state-dir", str(older), *arguments)
        assert (behind.returncode, behind.stdout) == (ExitCode.LEDGER, "")
        assert arguments[1] in behind.stderr
    shutil.rmtree(state_dir)
    older.rename(state_dir)
    behind = budget("verify", "--state-dir", str(state_dir), "--json")
    assert (behind.returncode, behind.stdout) == (ExitCode.LEDGER, "")
    assert "had 4 and has 3" in behind.stderr


def test_verify_says_that_a_round_would_be_run_twice(tmp_path: Path) -> None:
    """The copy has as many entries as the second head."""
    state = open_state(tmp_path / "state")
    charge = charge_for(make_plan(), records(20), state.ledger)
    state.offer(charge.job, 1, bytes(32), 0.0)
    state.charge([charge], 0.0)
    between = Path(shutil.copytree(tmp_path / "state", tmp_path / "between"))
    command = ("verify", "--second-head", str(tmp_path / "state.head"), "--state-dir")
    assert budget(*command, str(between)).returncode == ExitCode.OK
    state.spool_round(charge.job, 1, [], 0.0, None)
    state.close()
    assert budget(*command, str(between)).returncode == ExitCode.LEDGER
    assert budget(*command, str(tmp_path / "state")).returncode == ExitCode.OK


# --- custody ------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """An ``agent.yaml`` without a ledger."""
    file = tmp_path / "agent.yaml"
    key = Signer(new_signing_secret(), "testers").public_key
    values = agent_values(None, key, budget={"epsilon": BUDGET.epsilon, "delta": BUDGET.delta})
    file.write_text(yaml.safe_dump(values))
    return file


def set_budget(config: Path, epsilon: float) -> None:
    values = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(values | {"budget": {"epsilon": epsilon, "delta": BUDGET.delta}}))


def test_a_ledger_is_begun_and_raised_by_commands_and_only_by_them(config: Path, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    assert budget("show", "--state-dir", state).returncode == ExitCode.LEDGER
    for command in ("raise", "restored"):
        result = budget(command, "--config", str(config))
        assert (result.returncode, result.stdout) == (ExitCode.LEDGER, "")
    begun = budget("init", "--config", str(config))
    assert begun.returncode == ExitCode.OK, begun.stderr
    assert str(tmp_path / "state.head") in begun.stdout
    assert budget("init", "--config", str(config)).returncode == ExitCode.LEDGER
    assert budget("raise", "--config", str(config)).returncode == ExitCode.LEDGER
    set_budget(config, 70.0)
    raised = budget("raise", "--config", str(config))
    assert raised.returncode == ExitCode.OK, raised.stderr
    shown = json.loads(budget("show", "--state-dir", state, "--json").stdout)["datasets"][DATASET]
    assert (shown["epsilon_budget"], shown["epsilon_left"]) == (70.0, 70.0)


def test_a_restored_backup_is_shown_with_what_was_written_off(
    config: Path, tmp_path: Path, state_dir: Path
) -> None:
    copy = str(tmp_path / "copy.db")
    assert budget("backup", copy, "--state-dir", str(state_dir)).returncode == ExitCode.OK
    state = open_state(state_dir)
    charge_and_spool(state, charge_for(make_plan(job=b"k" * 16), records(20), state.ledger), [])
    state.close()
    before = json.loads(budget("show", "--state-dir", str(state_dir), "--json").stdout)["datasets"][DATASET]
    assert (before["epsilon_written_off"], before["delta_written_off"]) == (0.0, 0.0)
    nothing = budget("restored", "--config", str(config))
    assert nothing.returncode == ExitCode.OK, nothing.stderr
    assert "nothing is written off" in nothing.stdout
    newest = budget("restored", "--config", str(config), "--from", copy)
    assert (newest.returncode, newest.stdout) == (ExitCode.LEDGER, "")
    shutil.rmtree(state_dir)
    restored = budget("restored", "--config", str(config), "--from", copy)
    assert restored.returncode == ExitCode.OK, restored.stderr
    assert DATASET in restored.stdout
    shown = json.loads(budget("show", "--state-dir", str(state_dir), "--json").stdout)["datasets"][DATASET]
    assert shown["epsilon_written_off"] > 0
    assert shown["charges"] == 2
    assert shown["epsilon_left"] == pytest.approx(before["epsilon_left"])
    assert shown["epsilon_left"] <= before["epsilon_left"]
    assert shown["statement"]["epsilon"] == shown["epsilon_reserved"] >= before["epsilon_reserved"]
    assert "unknown" in shown["statement"]["mechanism"]
    assert "Written off" in budget("show", "--state-dir", str(state_dir)).stdout
    exported = json.loads(budget("export", "--state-dir", str(state_dir), "--json", "-").stdout)
    (lost,) = exported["write_offs"]
    assert lost["epsilon"] == shown["epsilon_written_off"]
    assert lost["is_exact"] is True
    assert budget("verify", "--state-dir", str(state_dir)).returncode == ExitCode.OK


def test_a_backup_cannot_stand_in_the_state_directory(state_dir: Path) -> None:
    result = budget("backup", str(state_dir / "copy.db"), "--state-dir", str(state_dir))
    assert result.returncode == ExitCode.USAGE
    assert "copy.db" in result.stderr


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
