"""The benchmark that runs the attacks."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks.adversary import _ATTACKS, _PYTEST


@pytest.mark.heavy
def test_an_attack_whose_tests_are_all_slow_is_run_too() -> None:
    """It had no test, and ended the benchmark."""
    file = _ATTACKS / "test_acknowledgements_tell_no_training.py"
    done = subprocess.run([*_PYTEST, "--collect-only", str(file)], capture_output=True, text=True, check=True)
    assert f"{file.name}::" in done.stdout
    assert "deselected" not in done.stdout
