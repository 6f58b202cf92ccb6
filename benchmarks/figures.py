"""Figures, and the JSON file that keeps those of all benchmarks, from the last run of each.

The file is a list with one record a figure: ``name`` (``benchmark: figure``), ``value``, ``unit``,
``compared_with`` and ``ratio`` (this value over the other side's; both null when there is no
other side), ``command`` (to measure the figure again) and ``machine`` (with the day).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dpagent.errors import DataError, DpagentError
from dpagent.storage import disk_errors, write_atomically

#: How the name of a figure ends that is the standard error of the figure before it.
STANDARD_ERROR = ", standard error"


class BenchmarkError(DpagentError):
    """A benchmark could not be run to its end."""


class Skipped(Exception):
    """A benchmark cannot run here; the text names the missing part and where to get it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that was measured.

    Attributes:
        name: In words; unique within its benchmark.
        value: The number.
        unit: Its unit.
        compared_with: The other side and its value, if there is one.
        ratio: ``value`` over the other side's.
        command: To measure it again; left empty, ``make bench ARGS=…`` of its benchmark.
        machine: The machine and the day; filled in by the runner.
    """

    name: str
    value: float
    unit: str
    compared_with: str | None = None
    ratio: float | None = None
    command: str = ""
    machine: str = ""

    @property
    def benchmark(self) -> str:
        """The benchmark that a stamped figure belongs to."""
        return self.name.partition(": ")[0]


def stamp(figures: Iterable[Figure], benchmark: str, machine: str, options: str = "") -> list[Figure]:
    """The figures as they are kept: with the names of benchmark and machine, and a command.

    Args:
        figures: Fresh ones.
        benchmark: That measured them.
        machine: On which, and when.
        options: Of the command, each with a space before it.

    Raises:
        BenchmarkError: Two figures have one name.
    """
    command = f'make bench ARGS="{benchmark}{options}"' if options else f"make bench ARGS={benchmark}"
    stamped = [
        replace(
            figure,
            name=f"{benchmark}: {figure.name}",
            command=figure.command or command,
            machine=machine,
        )
        for figure in figures
    ]
    if len({figure.name for figure in stamped}) < len(stamped):
        raise BenchmarkError(
            f"Two figures of {benchmark} have one name; expected names that tell them apart."
        )
    return stamped


def merge(kept: Sequence[Figure], fresh: Sequence[Figure], order: Sequence[str]) -> list[Figure]:
    """``fresh`` in place of the earlier figures of its benchmarks, in the ``order`` of the benchmarks."""
    replaced = {figure.benchmark for figure in fresh}
    merged = [*(figure for figure in kept if figure.benchmark not in replaced), *fresh]
    place = {name: number for number, name in enumerate(order)}
    return sorted(merged, key=lambda figure: place.get(figure.benchmark, len(place)))


def read_figures(file: Path) -> list[Figure]:
    """The figures kept in ``file``; none if there is no such file.

    Raises:
        DataError: It is not a list of figures.
        StorageError: It cannot be read.
    """
    if not file.exists():
        return []
    with disk_errors(file):
        text = file.read_text(encoding="utf-8")
    try:
        return [Figure(**record) for record in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise DataError(f"{file} is not a list of figures ({error}). Delete it to start afresh.") from error


def write_figures(file: Path, figures: Sequence[Figure]) -> None:
    """Write ``figures`` to ``file``, whole or not at all.

    Raises:
        StorageError: It cannot be written.
    """
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(figure) for figure in figures], indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(file, text.encode() + b"\n")
