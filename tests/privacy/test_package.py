"""The package's front: every name is there, from the module that the type checker sees, and only if used."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module

import pytest

import dpagent.privacy


def test_every_name_comes_from_the_module_that_type_checkers_are_told() -> None:
    declared = {
        alias.name: node.module
        for node in ast.walk(ast.parse(inspect.getsource(dpagent.privacy)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpagent.privacy.")
        for alias in node.names
    }
    assert sorted(declared) == sorted(dpagent.privacy.__all__)
    for name, module in declared.items():
        assert module is not None
        assert getattr(dpagent.privacy, name) is getattr(import_module(module), name)
    assert set(dpagent.privacy.__all__) <= set(dir(dpagent.privacy))
    # Once each, and where the type checker is told: a second home would load a module for nothing.
    homes = [
        (name, f"dpagent.privacy.{home}") for home, names in dpagent.privacy._HOMES.items() for name in names
    ]
    assert sorted(homes) == sorted(declared.items())


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"dpagent\.privacy.*'Nothing'"):
        dpagent.privacy.Nothing  # noqa: B018
    with pytest.raises(ImportError):
        exec("from dpagent.privacy import Nothing")


def test_the_agent_carries_only_what_it_runs() -> None:
    program = "import sys, agent.daemon; print(*sorted(m for m in sys.modules if 'dpagent.privacy.' in m))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert "dpagent.privacy.pld" in loaded
    for module in (
        "shuffling",
        "two_point",
        "published",
        "central",
        "truncated_laplace",
        "filters",
    ):
        assert f"dpagent.privacy.{module}" not in loaded.split()
