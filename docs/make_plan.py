"""Regenerate the outputs in ``plan.md``, and its picture, by running the commands on the page.

python docs/make_plan.py
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent.parent))

from cli.main import app

PAGE = Path(__file__).parent / "plan.md"
_BLOCK = re.compile(r"^```\n\$ dpagent (.*)\n(?:.*\n)*?```$", flags=re.MULTILINE)
_DRAWING = re.compile(r"^dpagent (plan .*--picture) plan\.svg$", flags=re.MULTILINE)


def output(arguments: str) -> str:
    """The command's output on a terminal of 80 columns."""
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, shlex.split(arguments), catch_exceptions=False)
    return result.stdout


def render() -> str:
    """The page with the current output of every ``$ dpagent`` block."""
    return _BLOCK.sub(
        lambda block: f"```\n$ dpagent {block[1]}\n{output(block[1])}```", PAGE.read_text(encoding="utf-8")
    )


if __name__ == "__main__":
    page = render()
    PAGE.write_text(page, encoding="utf-8")
    for command in _DRAWING.findall(page):
        output(f"{command} {PAGE.parent / 'plan.svg'}")
