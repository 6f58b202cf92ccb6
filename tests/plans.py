"""What ``dpagent plan`` tells a script, what it refuses, and the tables of its page."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from cli.main import app
from dpagent.errors import DpagentError


def plan_json(*arguments: str) -> dict[str, Any]:
    """What the command tells a script, in this process."""
    result = CliRunner().invoke(app, ["plan", *arguments, "--json", "-"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert isinstance(plan, dict)
    return plan


def refusal(*arguments: str) -> DpagentError:
    """The error with which the command refuses to plan, in this process."""
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(result.exception, DpagentError), result.output
    assert result.output == ""
    return result.exception


def rows_under(output: str, *heads: str) -> list[list[str]]:
    """The rows of the table whose header's last line has these words, split at white space."""
    lines = output.splitlines()
    start = next(n for n, line in enumerate(lines) if line.split()[: len(heads)] == list(heads))
    rows: list[list[str]] = []
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        rows.append(line.split())
    return rows
