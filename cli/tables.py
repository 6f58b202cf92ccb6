"""Tables on a terminal, and plain aligned columns in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cli.notation import printable

# Wider than any line: lets a table take its natural width.
_UNBOUNDED: Final = 10_000


def render_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None, words: int = 1
) -> str:
    """``rows`` under ``header``, as one string.

    A narrow terminal wraps the lines; figures are never truncated.

    Args:
        header: names of the columns; a name may have several lines.
        rows: cells as text.
        title: of the table.
        words: number of leading columns with words, aligned left; the others are aligned right.
    """
    console = Console()
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        pad_edge=False,
    )
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    console.width = _UNBOUNDED
    console.width = max(console.measure(table).maximum, 1)
    with console.capture() as capture:
        console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """Print ``rows`` under ``header``, the first column aligned left, all others right."""
    typer.echo(render_table(header, rows, title=title), nl=False)
