"""``docs/plan.md`` shows what the commands print."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_holds_todays_output() -> None:
    page = (DOCS / "plan.md").read_text()
    assert page.count("$ dpagent plan") == 2
    assert runpy.run_path(str(DOCS / "make_plan.py"))["render"]() == page, "run: python docs/make_plan.py"


def test_the_page_names_every_option_that_has_a_file_or_fleet() -> None:
    page = (DOCS / "plan.md").read_text()
    for option in ("config", "custom", "picture", "json", "explain", "all-rounds", "devices", "parameters"):
        assert f"--{option}" in page
