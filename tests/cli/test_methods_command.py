"""``dpagent methods``, and the pages it points to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import dpagent

from dpagent.errors import ExitCode
from dpagent.privacy.mechanisms.registry import mechanism_of
from dpagent.privacy.methods import METHODS, method_named

PAGES = Path(__file__).parents[2] / "docs" / "methods"
SECTIONS = ["What is wrong in", "What runs here", "What is guaranteed to whom", "Figures"]


def test_the_list_has_every_method_with_what_it_hides_and_whom_it_trusts() -> None:
    lines = dpagent("methods", "list").stdout.splitlines()
    for name in METHODS:
        mechanism = mechanism_of(method_named(name))
        (line,) = (line for line in lines if line.split()[0] == name)
        assert line.split()[1:3] == [str(mechanism.unit), str(mechanism.trust)]
    assert [each["name"] for each in json.loads(dpagent("methods", "list", "--json", "-").stdout)] == [
        *METHODS
    ]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_shown_and_has_a_page(name: str) -> None:
    shown = dpagent("methods", "show", name)
    assert shown.returncode == 0
    assert f"dpagent demo --method {name}" in shown.stdout
    assert ("Records are clipped" in shown.stdout) == (not method_named(name).trains_locally)
    assert all(len(line) <= 100 for line in shown.stdout.splitlines())
    values = json.loads(dpagent("methods", "show", name, "--json", "-").stdout)
    assert values["noise"].keys() == method_named(name).mechanisms.keys()
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert all(f"\n## {section}" in page for section in SECTIONS)
    assert f"`dpagent methods show {name}`" in page
    assert "board 17" in page


def test_an_unknown_method_gets_the_names_of_the_known() -> None:
    refused = dpagent("methods", "show", "central-dogma")
    assert refused.returncode == ExitCode.USAGE
    assert all(name in refused.stderr for name in ("'central-dogma'", *METHODS))
