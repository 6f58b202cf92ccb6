"""The benchmark that runs the attacks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.adversary import _ATTACKS, _PYTEST


@pytest.mark.heavy
def test_every_attack_is_run_the_slow_ones_too() -> None:
    """An attack whose tests are all slow had none, and ended the benchmark."""
    listed = subprocess.run(
        [*_PYTEST, "--collect-only", str(_ATTACKS)],
        cwd=_ATTACKS.parent.parent, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "deselected" not in listed
    found = {Path(line.partition("::")[0]) for line in listed.splitlines() if "::" in line}
    assert {file.name for file in found} == {file.name for file in _ATTACKS.glob("test_*.py")}
