"""Findings of a diagnosis, as lines and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from cli.notation import printable
from dpagent.diagnosis import Finding, Verdict
from dpagent.errors import ExitCode
from dpagent.wording import counted

_WORDS: Final = {
    Verdict.OK: "ok",
    Verdict.WARNING: "warning",
    Verdict.PROBLEM: "PROBLEM",
    Verdict.SKIPPED: "-",
}


def lines_of(finding: Finding) -> str:
    """A finding in one line, and its remedy in the next."""
    line = f"{_WORDS[finding.verdict]:8} {finding.check:13} {printable(finding.text)}"
    return f"{line}\n{'':23}→ {printable(finding.remedy)}" if finding.remedy else line


def summary_of(findings: Iterable[Finding]) -> str:
    """How many problems and warnings there are."""
    number = Counter(finding.verdict for finding in findings)
    parts = [
        counted(number[verdict], verdict.value)
        for verdict in (Verdict.PROBLEM, Verdict.WARNING)
        if number[verdict]
    ]
    return f"{' and '.join(parts)}." if parts else "Nothing is wrong."


def exit_code_of(findings: Sequence[Finding]) -> ExitCode:
    """That of the first problem, or 0."""
    problems = (finding.exit_code for finding in findings if finding.verdict is Verdict.PROBLEM)
    return next(problems, ExitCode.OK)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """For scripts."""
    return {
        "ok": exit_code_of(findings) is ExitCode.OK,
        "checks": [
            {
                "check": finding.check,
                "verdict": finding.verdict.value,
                "finding": finding.text,
                "remedy": finding.remedy or None,
            }
            for finding in findings
        ],
    }
