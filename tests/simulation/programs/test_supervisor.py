"""The programs of a fleet are started with their own files, whatever is set where the demo runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from brokers import wait_until

from simulation.programs.supervisor import Supervisor


def test_no_setting_of_the_environment_reaches_all_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPAGENT_STATE_DIR", str(tmp_path / "one-for-all"))
    monkeypatch.setenv("ANOTHER_VARIABLE", "kept")
    command = [sys.executable, "-c", "import os; print(sorted(os.environ))"]
    with Supervisor(tmp_path) as fleet:
        fleet.start("program", command, may_end=True)
        wait_until(lambda: fleet.has_ended("program"), "its end")
    said = (tmp_path / "program.log").read_text()
    assert "'ANOTHER_VARIABLE'" in said
    assert "DPAGENT_" not in said
