"""``dpagent simulate`` and ``dpagent sweep`` as commands: what they say, and what a kill leaves."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from commands import command_line, dpagent, dpagent_process

from dpagent.errors import ExitCode
from dpagent.extras import install_command
from simulation.virtual.checkpoint import Checkpoint


@pytest.mark.parametrize("command", ["simulate", "sweep"])
def test_without_ray_the_extra_is_named_and_nothing_is_written(tmp_path: Path, command: str) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("records: public\nbase: {model: digits}\nvary: {devices: [2]}\n")
    words = ["simulate"] if command == "simulate" else ["sweep", "run", str(sweep)]
    state = tmp_path / "state"
    before = "import sys; sys.modules['ray'] = None"
    ended = dpagent_process(*words, "--state-dir", state, before=before)
    assert ended.returncode == ExitCode.CONFIGURATION
    assert "A virtual fleet needs the Python package 'ray'" in ended.stderr
    assert install_command("simulation") in ended.stderr
    assert not state.exists()


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--address", "10.0.0.1:6379", "--cores", "2"], 2, "--cores: a cluster has its own"),
        (["--address", "ray://there"], 2, "--address: got 'ray://there'; expected HOST:PORT"),
        (["--cores", "0"], 9, "--cores: got 0; expected a number of at least 1"),
        (["--cap", "published", "--noise", "laplace"], 2, "--cap: got published; expected clamp or none"),
        (["--devices", "1000001"], 9, "--devices: got 1000001; expected a number of at most 1000000"),
        (["--devices", "1000000"], 4, "1,437 training records cannot be split over 1,000,000 devices"),
        (
            ["--insecure-noise-seed", "-1"],
            9,
            "--insecure-noise-seed: got -1; expected a number of at least 0",
        ),
    ],
)
def test_what_does_not_go_together_is_said(
    tmp_path: Path, words: list[str], code: int, expected: str
) -> None:
    ended = dpagent("simulate", *words, "--state-dir", tmp_path / "state")
    assert (ended.returncode, ended.stdout) == (code, "")
    assert expected in ended.stderr.replace("`", "")
    assert not (tmp_path / "state").exists()


def test_the_demo_runs_no_more_agents_than_programs(tmp_path: Path) -> None:
    ended = dpagent("demo", "--devices", "201", "--state-dir", tmp_path / "state")
    assert ended.returncode == 2
    assert "`--devices`: got 201; expected at most 200" in ended.stderr
    assert "dpagent simulate" in ended.stderr


@pytest.mark.usefixtures("executed")
@pytest.mark.slow
def test_a_killed_simulation_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    def words(state: Path) -> list[str]:
        return [
            "simulate", "--devices", "10", "--rounds", "6", "--insecure-noise-seed", "9", "--cores", "2",
            "--state-dir", str(state), "--json", str(state.with_suffix(".json")),
        ]  # fmt: skip

    whole = dpagent_process(*words(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    with subprocess.Popen(
        command_line(*words(tmp_path / "killed")), stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if line.startswith("round 3/6"):
                running.send_signal(signal.SIGKILL)
                break
        running.wait(60)
    again = dpagent_process(*words(tmp_path / "killed"))
    assert again.returncode == 0, again.stderr
    assert "after round" in again.stderr
    one, other = (Checkpoint.load(tmp_path / name) for name in ("whole", "killed"))
    assert one is not None
    assert other is not None
    assert one.model.weights.tobytes() == other.model.weights.tobytes()
    results = json.loads((tmp_path / "killed.json").read_text())
    assert results["privacy"]["ledgers"][0]["charges"] == 6
    assert results["insecure"].startswith("All lots and all noise")
    left = [
        process
        for process in Path("/proc").iterdir()
        if process.name.isdigit() and str(tmp_path) in _command_of(process)
    ]
    assert not left


def _command_of(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
