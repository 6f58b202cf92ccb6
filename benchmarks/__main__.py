"""``python -m benchmarks [--list] [NAME …]``: measure, keep the figures, write the page."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

# One BLAS thread, as the programs set it themselves. Read when numpy is first imported.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

from benchmarks.figures import Figure, Skipped, merge, read_figures, stamp, write_figures
from benchmarks.machine import describe_machine
from benchmarks.page import render, title
from benchmarks.programs import ROOT
from benchmarks.registry import BENCHMARKS
from dpagent.errors import DpagentError, ExitCode
from dpagent.storage import write_atomically

_FIGURES = ROOT / "benchmarks" / "figures.json"
_PAGE = ROOT / "docs" / "benchmarks.md"


def main(arguments: Sequence[str]) -> int:
    """Run the benchmarks that the command line names; returns the exit code."""
    names = _chosen(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    failed = ExitCode.OK
    skipped: set[str] = set()
    done: list[str] = []
    try:
        figures = read_figures(_FIGURES)
        for name in names:
            try:
                measured = _measure(name)
            except Skipped as reason:
                skipped.add(name)
                _say(f"{name}: SKIPPED. {reason}")
                continue
            except ModuleNotFoundError as error:
                failed = failed or ExitCode.CONFIGURATION
                _say(f"{name}: {error.name} is not installed; `make bench` installs it.")
                continue
            except DpagentError as error:
                failed = failed or error.exit_code
                _say(f"{name}: {error}")
                continue
            # After each, so that an interruption loses no more than the one that is running; read
            # again, because another run may have written meanwhile.
            figures = merge(read_figures(_FIGURES), measured, list(BENCHMARKS))
            write_figures(_FIGURES, figures)
            done.append(name)
        _write_page(figures, skipped)
    except KeyboardInterrupt:
        _say(
            f"Interrupted. {_FIGURES.relative_to(ROOT)} has the new figures of: {', '.join(done) or 'none'}."
        )
        return ExitCode.INTERRUPTED
    except DpagentError as error:
        _say(str(error))
        return error.exit_code
    return failed


def _chosen(arguments: Sequence[str]) -> list[str]:
    """The benchmarks to run, in the order of the registry."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Run benchmarks; write benchmarks/figures.json and docs/benchmarks.md. Figures of "
        "benchmarks that are not run are kept.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="benchmarks to run; all of them if none is named"
    )
    parser.add_argument("--list", action="store_true", help="list the benchmarks and exit")
    options = parser.parse_args(arguments)
    if options.list:
        for name, module in BENCHMARKS.items():
            print(f"{name:<16} {title(module)}")
        sys.exit(ExitCode.OK)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(
            f"there is no benchmark {', '.join(map(repr, unknown))}; expected {', '.join(BENCHMARKS)}"
        )
    return [name for name in BENCHMARKS if not options.names or name in options.names]


def _measure(name: str) -> list[Figure]:
    """Run one benchmark and show its figures."""
    _say(f"{name}: {title(BENCHMARKS[name])} …")
    start = time.monotonic()
    figures = stamp(BENCHMARKS[name].run(), name, describe_machine())
    for figure in figures:
        other = (
            "" if figure.compared_with is None else f"   ({figure.compared_with}; ratio {figure.ratio:.4g})"
        )
        _say(f"    {figure.name.partition(': ')[2]}: {figure.value:.6g} {figure.unit}{other}")
    _say(f"    took {time.monotonic() - start:.0f} s")
    return figures


def _write_page(figures: Sequence[Figure], skipped: set[str]) -> None:
    """Write the page, unless figures that it may have are missing from the JSON file."""
    measured = {figure.benchmark for figure in figures}
    missing = [name for name in BENCHMARKS if name not in measured and name not in skipped]
    if missing:
        _say(
            f"{_PAGE.relative_to(ROOT)} is left as it is: there are no figures yet of {', '.join(missing)}. "
            "Run these too."
        )
        return
    write_atomically(_PAGE, render(figures, BENCHMARKS).encode())
    _say(f"Wrote {_FIGURES.relative_to(ROOT)} and {_PAGE.relative_to(ROOT)}.")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
