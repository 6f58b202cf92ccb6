"""Tables on a terminal, and plain aligned columns in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """Print ``rows`` under ``header``: the first column left, all others right."""
    console = Console()
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        pad_edge=False,
    )
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if not console.is_terminal:
        # A pipe has no width to fit into.
        console.width = 200
    console.print(table)
