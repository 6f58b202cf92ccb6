"""``dpagent plan``, as a script and as a person use it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant


def dpagent(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("schedule", ["incrementing", "uniform", "linear"])
def test_json_meets_the_target_by_an_independent_accountant(schedule: str) -> None:
    result = dpagent(
        "plan", "--epsilon", "2", "--rounds", "60", "--sampling-rate", "0.1",
        "--schedule", schedule, "--json", "-",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["schedule"]["kind"] == schedule
    assert (plan["delta"], plan["sampling_rate"]) == (1e-5, 0.1)
    assert len(plan["noise_multipliers"]) == len(plan["epsilon"]) == 60
    assert plan["epsilon"] == sorted(plan["epsilon"])
    accountant = RdpAccountant()
    for noise in plan["noise_multipliers"]:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(noise)))
    assert accountant.get_epsilon(1e-5) == pytest.approx(2, rel=0.01)
    assert plan["epsilon"][-1] <= 2


def test_json_to_a_file_prints_nothing(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = dpagent("plan", "--rounds", "3", "--json", str(file))
    assert (result.returncode, result.stdout) == (0, "")
    assert len(json.loads(file.read_text())["epsilon"]) == 3


def test_json_to_a_missing_directory_is_a_sentence(tmp_path: Path) -> None:
    result = dpagent("plan", "--rounds", "3", "--json", str(tmp_path / "no" / "plan.json"))
    assert result.returncode == 8
    assert "no/plan.json" in result.stderr
    assert "Traceback" not in result.stderr


def test_table_shows_uniform_beside() -> None:
    result = dpagent("plan", "--rounds", "4")
    lines = result.stdout.splitlines()
    assert "no trusted party" in lines[0]
    assert "uniform" in lines[1]
    rows = [line.split() for line in lines[2:] if line.strip()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    incrementing, uniform = ([float(row[column]) for row in rows] for column in (1, 3))
    assert incrementing == sorted(incrementing, reverse=True)
    assert len(set(uniform)) == 1
    assert incrementing[0] > uniform[0] > incrementing[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epsilon", "0"], "epsilon is 0.0"),
        (["--epsilon", "nan"], "epsilon is nan"),
        (["--delta", "1.5"], "delta is 1.5"),
        (["--rounds", "0"], "rounds is 0"),
        (["--sampling-rate", "1.01"], "sampling rate is 1.01"),
        (["--step", "1"], "step is 1.0"),
        (["--schedule", "linear", "--ratio", "0.5"], "ratio is 0.5"),
        (["--local-steps", "0"], "steps is 0"),
    ],
)
def test_parameters_out_of_range_are_named(arguments: list[str], words: str) -> None:
    result = dpagent("plan", *arguments)
    assert result.returncode == 9, result.stderr
    assert words in result.stderr.replace("_", " ")
    assert "Traceback" not in result.stderr


def test_version_and_help() -> None:
    from dpagent import __version__

    assert dpagent("--version").stdout.strip() == f"dpagent {__version__}"
    for command in ([], ["run"], ["demo"], ["plan"], ["coordinator", "run"], ["budget", "verify"]):
        result = dpagent(*command, "--help")
        assert result.returncode == 0
        assert "Usage" in result.stdout


def test_unknown_option_is_a_usage_error() -> None:
    result = dpagent("plan", "--epsilom", "2")
    assert result.returncode == 2
    assert "epsilom" in result.stderr
