"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["dpagent", "agent", "coordinator", "simulation", "cli"]


def modules_with_examples() -> list[str]:
    """Found by their text: a module without examples need not be imported, whatever it would ask for."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    parts = [file.relative_to(ROOT).with_suffix("").parts for file in files if ">>> " in file.read_text()]
    return [".".join(names[:-1] if names[-1] == "__init__" else names) for names in parts]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings_are_true(name: str) -> None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testmod(importlib.import_module(name), optionflags=options)
    assert results.attempted > 0
    assert results.failed == 0, "see the output above"
