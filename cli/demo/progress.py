"""What a person sees while a demo runs: a live panel on a terminal, a line a round in a pipe."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from simulation.collection import Glimpse
from simulation.settings import DemoOptions


class Progress:
    """Shows glimpses of a run.

    Args:
        options: The run.
        console: Where to show them; standard error, so that standard output stays for results.
        shown: Rounds that were closed, and shown, before.
    """

    def __init__(self, options: DemoOptions, console: Console, *, shown: int = 0) -> None:
        self._options = options
        self._console = console
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        )
        self._shown = shown
        self._declined = False
        self._started_at = time.monotonic()

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, glimpse: Glimpse) -> None:
        """Show the state of the run."""
        if glimpse.declined and not self._declined:
            self._declined = True
            self._console.print(
                f"A device declined to take part: {glimpse.reason}", soft_wrap=True, highlight=False
            )
        if self._live is not None:
            self._live.update(self._panel(glimpse))
            return
        for record in glimpse.rounds[self._shown :]:
            if record.closed_at is None:
                break
            self._shown += 1
            self._console.print(
                f"round {record.number:>{len(str(self._options.rounds))}}/{self._options.rounds}  "
                f"accuracy {'  none' if record.accuracy is None else f'{record.accuracy:6.2%}'}  "
                f"ε {record.epsilon or 0:.3f} of {self._options.epsilon:g}  "
                f"fragments counted {record.fragments}, in flight {glimpse.in_flight}",
                highlight=False,
                soft_wrap=True,
            )

    def _panel(self, glimpse: Glimpse) -> Table:
        closed = [record for record in glimpse.rounds if record.closed_at is not None]
        accuracies = [record.accuracy for record in closed if record.accuracy is not None]
        current = glimpse.rounds[-1] if glimpse.rounds else None
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(width=32)
        table.add_column(no_wrap=True)
        options = self._options
        table.add_row(
            "round",
            _bar(len(closed), options.rounds),
            f"{current.number if current else 0} of {options.rounds}",
        )
        table.add_row(
            "accuracy",
            _bar(accuracies[-1] if accuracies else 0, 1),
            f"{accuracies[-1]:.2%} (best {max(accuracies):.2%})" if accuracies else "after the first round",
        )
        table.add_row(
            "budget",
            _bar(glimpse.epsilon_spent, options.epsilon),
            f"ε {glimpse.epsilon_spent:.3f} of {options.epsilon:g} at δ {options.delta:g}",
        )
        expected = options.devices * options.fragments_per_update
        counted = current.fragments if current is not None and current.closed_at is None else 0
        table.add_row(
            "fragments",
            _bar(counted, expected),
            f"{glimpse.in_flight} in flight, {counted} of {expected} counted",
        )
        table.add_row("time", "", f"{time.monotonic() - self._started_at:.0f} s")
        return table


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(total=total, completed=min(done, total), width=30)
