"""A simulation on a terminal: what it is, then a live line; in a pipe, a line for each round."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cli.run_request import Stop
from dpagent.notation import plain_bound, upwards
from dpagent.wording import counted
from simulation.choices import model_in_words
from simulation.virtual.checkpoint import Checkpoint
from simulation.virtual.fleet import Listener, VirtualFleet


class SimulationConsole(Listener):
    """Shows a run on standard error, so that standard output stays for results. A context manager.

    Args:
        stop: Is looked at between Ray's calls, which no exception may interrupt.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._console = Console(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._began = time.monotonic()

    def __enter__(self) -> SimulationConsole:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begins(self, fleet: VirtualFleet, done: int) -> None:
        """Say data, model and settings, and where the run is."""
        self._stop.defer()
        settings, form, spec = fleet.settings, fleet.settings.form, fleet.spec
        if done >= settings.rounds:
            self._say(
                f"The run in {fleet.layout.root} is finished: nothing is trained, and this is its summary."
            )
            return
        if done:
            self._say(f"Goes on with the run in {fleet.layout.root} after round {done} of {settings.rounds}.")
        self._say(
            f"Data: {settings.data.name}, {counted(form.train_records, 'record')} to train on and "
            f"{form.test_records:,} to test on; dealt to {counted(settings.devices, 'device')} "
            f"{settings.data.split_in_words}"
        )
        self._say(f"Model: {model_in_words(settings, spec)}, {counted(spec.parameter_count, 'parameter')}")
        for remark in (*filter(None, [settings.insecure]), *fleet.notes.remarks):
            self._say(f"Note: {remark}")
        if (warning := fleet.outlook.warning) is not None:
            self._say(f"Note: {warning}")

    def starts(self, fleet: VirtualFleet, cores: int, nodes: int) -> None:
        """Say on what the run is computed."""
        self._stop.check()
        self._say(
            f"Training {counted(fleet.settings.devices, 'virtual device')} on {counted(cores, 'core')} of "
            f"{counted(nodes, 'node')}; state in {fleet.layout.root}"
        )
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                console=self._console, transient=True,
            )  # fmt: skip
            self._task = self._progress.add_task("round 1", total=fleet.settings.devices)
            self._progress.start()

    def computed(self, round_number: int, devices: int) -> None:
        """Show how many devices of a round are done."""
        self._stop.check()
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=devices, description=f"round {round_number}")

    def closed(self, fleet: VirtualFleet, checkpoint: Checkpoint) -> None:
        """Say what a round has come to."""
        settings = fleet.settings
        if checkpoint.baseline:
            number, accuracy = len(checkpoint.baseline), checkpoint.baseline[-1]
            what, spent = "without noise ", ""
        else:
            number, accuracy = len(checkpoint.rounds), checkpoint.rounds[-1].accuracy
            what = ""
            spent = "  no guarantee"
            if not settings.insecure:
                spent = upwards(checkpoint.rounds[-1].epsilon, of=settings.epsilon)
                spent = f"  ε {spent} of {plain_bound(settings.epsilon)}"
        self._say(
            f"{what}round {number:>{len(str(settings.rounds))}}/{settings.rounds}  "
            f"accuracy {'  none' if accuracy is None else f'{accuracy:6.2%}'}{spent}  "
            f"{checkpoint.rounds[-1].seconds:.1f} s"
        )
        self._stop.check()

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)
