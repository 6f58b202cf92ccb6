"""``python -m benchmarks [--list] [--long] [NAME …]``: measure, keep the figures, write the page."""

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

from benchmarks.document import render, title
from benchmarks.figures import Figure, Skipped, merge, read_figures, stamp, write_figures
from benchmarks.machine import describe_machine
from benchmarks.programs import ROOT
from benchmarks.registry import BENCHMARKS
from dpagent.errors import DpagentError, ExitCode
from dpagent.storage import write_atomically

_FIGURES = ROOT / "benchmarks" / "figures.json"
_PAGE = ROOT / "docs" / "benchmarks.md"
_LONGER = [name for name, module in BENCHMARKS.items() if hasattr(module, "run_long")]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmarks that the command line names; returns the exit code."""
    names, long = _chosen(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    failed = ExitCode.OK
    done: list[str] = []
    try:
        figures = read_figures(_FIGURES)
        for name in names:
            try:
                measured = _measure(name, long=long)
            except Skipped as reason:
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
        write_atomically(_PAGE, render(figures, BENCHMARKS).encode())
        _say(f"Wrote {_FIGURES.relative_to(ROOT)} and {_PAGE.relative_to(ROOT)}.")
    except KeyboardInterrupt:
        _say(
            f"Interrupted. {_FIGURES.relative_to(ROOT)} has the new figures of: {', '.join(done) or 'none'}."
        )
        return ExitCode.INTERRUPTED
    except DpagentError as error:
        _say(str(error))
        return error.exit_code
    return failed


def _chosen(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The benchmarks to run, in the order of the registry, and whether in their longer settings."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Run benchmarks; write benchmarks/figures.json and docs/benchmarks.md. Figures of "
        "benchmarks that are not run are kept.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="benchmarks to run; all of them if none is named"
    )
    parser.add_argument(
        "--long", action="store_true", help=f"run them in their longer settings: {', '.join(_LONGER)}"
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
    names = [name for name in BENCHMARKS if not options.names or name in options.names]
    if options.long and (short := [name for name in names if name not in _LONGER]):
        parser.error(f"there is no longer setting of {', '.join(short)}; expected {', '.join(_LONGER)}")
    return names, options.long


def _measure(name: str, *, long: bool) -> list[Figure]:
    """Run one benchmark, if ``long`` in its longer setting, and show its figures."""
    _say(f"{name}: {title(BENCHMARKS[name])} …")
    start = time.monotonic()
    module = BENCHMARKS[name]
    measured = module.run_long() if long else module.run()
    figures = stamp(measured, name, describe_machine(), options=" --long" * long)
    for figure in figures:
        beside = [] if figure.compared_with is None else [figure.compared_with]
        beside += [] if figure.ratio is None else [f"ratio {figure.ratio:.4g}"]
        other = f"   ({'; '.join(beside)})" if beside else ""
        _say(f"    {figure.name.partition(': ')[2]}: {figure.value:.6g} {figure.unit}{other}")
    _say(f"    took {time.monotonic() - start:.0f} s")
    return figures


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
