"""``dpagent profiles``: listed, shown with where each value is from, detected, checked."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from commands import dpagent

from agent.board import Board
from agent.profile import detect_profile, profile_names
from dpagent.errors import ExitCode

HERE = detect_profile(Board.this())
ELSEWHERE = "raspberry-pi-5" if platform.machine() == "x86_64" else "generic-x86-64"


def test_the_list_has_every_profile_and_marks_this_boards() -> None:
    lines = dpagent("profiles", "list").stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines] == profile_names()
    assert [line.split()[0] for line in lines if line.split()[1] == "*"] == [HERE]
    listed = json.loads(dpagent("profiles", "list", "--json", "-").stdout)
    assert {each["name"]: each["this_board"] for each in listed} == {
        name: name == HERE for name in profile_names()
    }


def test_a_profile_is_shown_with_the_file_that_each_value_is_from(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: raspberry-pi-cm4\nprocesses: 3\n")
    lines = dpagent("profiles", "show", str(mine)).stdout.splitlines()
    origins = {line.split()[0]: line.split()[-1] for line in lines if "." in line or "processes" in line}
    assert origins["processes"] == str(mine)
    assert origins["board.storage"] == "raspberry-pi-cm4"
    assert origins["board.cores"] == "raspberry-pi-4"
    assert origins["board.architecture"] == "generic-arm64"
    assert origins["limits.minimum_fragments"] == "default"
    assert "https://datasheets.raspberrypi.com/cm4/cm4-datasheet.pdf" in lines
    assert json.loads(dpagent("profiles", "show", str(mine), "--json", "-").stdout)["processes"] == 3


def test_this_board_is_described_with_the_profile_that_auto_takes() -> None:
    found = json.loads(dpagent("profiles", "detect", "--json", "-").stdout)
    assert (found["profile"], found["architecture"]) == (HERE, Board.this().architecture)
    assert HERE in dpagent("profiles", "detect").stdout
    assert dpagent("profiles", "show").stdout.startswith(f"{HERE}: ")


def test_the_profile_of_this_board_fits() -> None:
    checked = dpagent("profiles", "check")
    assert checked.returncode == 0
    assert [line.split()[0] for line in checked.stdout.splitlines()[2:]] == ["ok"] * 4


@pytest.mark.parametrize(
    ("text", "check", "words"),
    [
        (f"extends: {ELSEWHERE}\nprocesses: 1\n", "architecture", "mine.yaml is for"),
        (f"extends: {HERE}\nboard: {{memory_mib: 99999999}}\n", "board memory", "`dpagent profiles detect`"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, text: str, check: str, words: str
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    checked = dpagent("profiles", "check", str(mine))
    assert checked.returncode == ExitCode.CONFIGURATION
    (line,) = (line for line in checked.stdout.splitlines() if line.startswith("PROBLEM"))
    assert line.removeprefix("PROBLEM ").strip().startswith(check)
    assert words in checked.stdout
    found = json.loads(dpagent("profiles", "check", str(mine), "--json", "-").stdout)
    assert [each["check"] for each in found["checks"] if each["verdict"] == "problem"] == [check]
    assert not found["ok"]


def test_more_processes_than_cores_are_no_problem(tmp_path: Path) -> None:
    """The agent tries how many pay."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: {HERE}\nprocesses: 64\n")
    checked = dpagent("profiles", "check", str(mine))
    assert checked.returncode == 0
    assert "processes is 64" in checked.stdout


def test_an_unknown_profile_gets_the_names_of_the_known() -> None:
    refused = dpagent("profiles", "show", "cray-1")
    assert refused.returncode == ExitCode.CONFIGURATION
    assert all(name in refused.stderr for name in ("'cray-1'", "auto", *profile_names()))
