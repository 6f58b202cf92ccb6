"""A run on a terminal: what it is, then a live panel; in a pipe, a line for each round."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from dpagent.notation import plain_bound, plain_bounds, upwards
from dpagent.privacy.methods import method_named
from dpagent.wording import counted
from simulation.choices import model_in_words
from simulation.fleet import Fleet, Listener
from simulation.observer import Glimpse
from simulation.presets import local_training_in_words
from simulation.programs.broker import BrokerAddress
from simulation.programs.timing import RoundTimes
from simulation.settings import RunSettings

_WORTH_SAYING_S: Final = 10.0
_MOST_COLUMNS: Final = 20


class FleetConsole(Listener):
    """Shows a run on standard error, so that standard output stays for results. A context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live: Live | None = None
        self._settings: RunSettings | None = None
        self._shown = 0
        self._has_declined = False
        self._started_at = time.monotonic()

    def __enter__(self) -> FleetConsole:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def goes_on(self, fleet: Fleet, closed: int, *, is_finished: bool) -> None:
        """Say that no run begins here, and what it goes on with."""
        self._shown = closed
        root = fleet.layout.root
        if is_finished:
            self._say(f"The run in {root} is finished: nothing is trained, and this is its summary.")
        else:
            self._say(f"Goes on with the run in {root} after round {closed} of {fleet.settings.rounds}.")
        if fleet.data_changed:
            self._say(
                "Note: the data have changed since; this run goes on with the earlier ones. Give another "
                "--state-dir to start a run on the new ones."
            )

    def begins(self, fleet: Fleet) -> None:
        """Say data, model and settings, and what is to be expected of them."""
        settings, form, spec = fleet.settings, fleet.settings.form, fleet.spec
        shape = " × ".join(map(str, form.shape)) + " features" * (len(form.shape) == 1)
        self._say(
            f"Data: {settings.data.name}, {counted(form.train_records, 'record')} to train on and "
            f"{form.test_records:,} to test on, {shape}, {counted(form.classes, 'class')}; dealt to "
            f"{counted(settings.devices, 'device')} {settings.data.split_in_words}"
        )
        file = f"; written to {fleet.layout.model_file}" if fleet.layout.model_file.exists() else ""
        self._say(
            f"Model: {model_in_words(settings, spec)}, {counted(spec.parameter_count, 'parameter')}{file}"
        )
        self._say(
            f"Settings: {counted(settings.rounds, 'round')}, {_target(settings)}, {_lots(settings)}, "
            f"learning rate {settings.learning_rate:g}"
        )
        if columns := fleet.notes.columns:
            more = f" and {len(columns) - _MOST_COLUMNS:,} more" if len(columns) > _MOST_COLUMNS else ""
            self._say(f"Inputs: {', '.join(columns[:_MOST_COLUMNS])}{more}")
        for remark in fleet.notes.remarks:
            self._say(f"Note: {remark}")
        if (warning := fleet.outlook.warning) is not None:
            self._say(f"Note: {warning}")

    def starts(self, fleet: Fleet, times: RoundTimes, broker: BrokerAddress) -> None:
        """Say which broker the agents use, and what the first round takes."""
        text = (
            f"Training with {counted(fleet.settings.devices, 'agent')} over {broker.name} ({broker.url}); "
            f"state in {fleet.layout.root}"
        )
        if times.features_s > _WORTH_SAYING_S:
            text += (
                f". The first round takes about {times.features_s:.0f} s longer: each agent computes its "
                "features, once"
            )
        self._say(text)
        self._settings = fleet.settings
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def looked(self, glimpse: Glimpse) -> None:
        """Show the state of the run."""
        assert self._settings is not None
        if glimpse.declined and not self._has_declined:
            self._has_declined = True
            self._say(f"A device declined to take part: {glimpse.reason}")
        if self._live is not None:
            self._live.update(_panel(self._settings, glimpse, time.monotonic() - self._started_at))
            return
        for record in glimpse.rounds[self._shown :]:
            if record.closed_at is None:
                break
            self._shown += 1
            rounds = self._settings.rounds
            self._say(
                f"round {record.number:>{len(str(rounds))}}/{rounds}  "
                f"accuracy {'  none' if record.accuracy is None else f'{record.accuracy:6.2%}'}  "
                f"{_spent(self._settings, record.epsilon or 0.0)}  "
                f"fragments counted {record.fragments}, in flight {glimpse.in_flight}"
            )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)


def _target(settings: RunSettings) -> str:
    if not settings.mechanism.is_private:
        return f"no guarantee (the algorithm counts {plain_bound(settings.epsilon)})"
    return plain_bounds(settings.epsilon, settings.delta)


def _spent(settings: RunSettings, epsilon: float) -> str:
    if not settings.mechanism.is_private:
        return "no guarantee"
    return f"ε {upwards(epsilon, of=settings.epsilon)} of {plain_bound(settings.epsilon)}"


def _panel(settings: RunSettings, glimpse: Glimpse, seconds: float) -> Table:
    closed = [record for record in glimpse.rounds if record.closed_at is not None]
    accuracies = [record.accuracy for record in closed if record.accuracy is not None]
    current = glimpse.rounds[-1] if glimpse.rounds else None
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(width=32)
    table.add_column(no_wrap=True)
    table.add_row(
        "round",
        _bar(len(closed), settings.rounds),
        f"{current.number if current else 0} of {settings.rounds}",
    )
    table.add_row(
        "accuracy",
        _bar(accuracies[-1] if accuracies else 0, 1),
        f"{accuracies[-1]:.2%} (best {max(accuracies):.2%})" if accuracies else "after the first round",
    )
    table.add_row(
        "budget",
        _bar(glimpse.epsilon_spent, settings.epsilon),
        f"{_spent(settings, glimpse.epsilon_spent)} at δ {plain_bound(settings.delta)}",
    )
    expected = settings.devices * settings.fragments_per_update
    counted = current.fragments if current is not None and current.closed_at is None else 0
    table.add_row(
        "fragments",
        _bar(counted, expected),
        f"{glimpse.in_flight} in flight, {counted} of {expected} counted",
    )
    table.add_row("time", "", f"{seconds:.0f} s")
    return table


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(total=total, completed=min(done, total), width=30)


def _lots(settings: RunSettings) -> str:
    """How much of its records a device uses, in the method's own terms."""
    if method_named(settings.method).trains_locally:
        trained = local_training_in_words()
        clipped = f", updates clipped to {settings.clip_norm:g} in {settings.norm} ({settings.clipping})"
        return trained if settings.norm is None else trained + clipped
    return (
        f"sampling rate {settings.sampling_rate:g}, clip norm {settings.clip_norm:g} in {settings.norm} "
        f"({settings.clipping})"
    )
