"""Attacks on the promise: each a program that plays an adversary against the real programs, and fails.

Every file of ``tests/adversary`` is one attack, with its claim, its power and what it gained before in its
text, which is printed first. It runs as a test, the slow ones too: an attack that succeeds is a test that
fails. What a test measured is printed after the text. The figure is the share of an attack's tests that held,
of those that ran.

Limits: an attack that nobody has thought of is not among them. What each adversary may do and learn
stands in ``docs/threat-model.md``.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.figures import BenchmarkError, Figure
from benchmarks.programs import ROOT

_ATTACKS = ROOT / "tests" / "adversary"
_PYTEST = [
    sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
    "-m", "slow or not slow", "-o", "junit_logging=system-out",
]  # fmt: skip


def run() -> list[Figure]:
    """Run every attack.

    Raises:
        BenchmarkError: an attack could not be run.
    """
    figures = []
    for file in sorted(_ATTACKS.glob("test_*.py")):
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        print(f"\n{file.relative_to(ROOT)}\n{text}\n", file=sys.stderr, flush=True)
        tests, failed = _outcome(file)
        name = file.stem.removeprefix("test_").replace("_", " ")
        figures.append(
            Figure(
                f"{name}: tests that held", 100 * (tests - failed) / tests, "%", f"tests: {tests}",
                (tests - failed) / tests, "python -m benchmarks adversary",
            )
        )  # fmt: skip
    return figures


def _outcome(file: Path) -> tuple[int, int]:
    """How many tests of an attack ran, and how many failed.

    Raises:
        BenchmarkError: none ran, be it for want of a program that they need.
    """
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        run = subprocess.run(
            [*_PYTEST, str(file), f"--junitxml={report}"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not report.exists():
            raise BenchmarkError(f"{file.relative_to(ROOT)} could not be run: {run.stdout[-500:]}")
        suite = ElementTree.parse(report).getroot().find("testsuite")
    tests = 0 if suite is None else int(suite.attrib["tests"]) - int(suite.attrib["skipped"])
    if suite is None or not tests:
        raise BenchmarkError(f"no test of {file.relative_to(ROOT)} ran: {run.stdout[-500:]}")
    for measured in suite.iter("system-out"):
        print((measured.text or "").partition("\n")[2].strip(), file=sys.stderr)
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    if failed:
        print(run.stdout, file=sys.stderr)
    return tests, failed
