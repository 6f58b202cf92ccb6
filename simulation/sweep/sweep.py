"""The runs of a sweep as Ray tasks, side by side: each on a core of its own, and kept once it is done."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpagent.errors import ClusterError, ConfigurationError, DpagentError
from dpagent.learning.data.dataset import ArrayDataset, Dataset
from dpagent.learning.model_files import find_model
from dpagent.schema.json_values import json_values
from dpagent.storage import StateDirectory, disk_errors, write_atomically
from dpagent.wording import named
from simulation.choices import wanted_model
from simulation.data.source import Source, open_source
from simulation.notes import look_of_data
from simulation.presets import preset_of
from simulation.programs.configurations import fleet_settings
from simulation.report.results import as_json
from simulation.sweep.file import SweepFile, SweepRun, load_sweep, runs_of, with_lot
from simulation.sweep.price import RunEvents, ScopePrice, events_of, price_of
from simulation.virtual.fleet import VirtualFleet
from simulation.virtual.settings import VirtualRequest, VirtualSettings

_KEPT: Final = "sweep.json"
_PRIVATE: Final = {"private": 2}
"""How runs on private records are made. The first way, which has no number, held out others for each seed,
and calibrated noise as if it were exact: what such runs cost is not what is computed here."""
_RETRIES: Final = 3
_LOOK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A run that is done.

    Attributes:
        run: Which.
        results: As the demo's JSON has them.
        settings: All values settled, as JSON.
        seconds: That its task took.
    """

    run: SweepRun
    results: dict[str, Any]
    settings: dict[str, Any]
    seconds: float

    @property
    def accuracy(self) -> float:
        """Of the final model."""
        value = self.results["accuracy"]
        return float("nan") if value is None else float(value)


class Sweep:
    """All runs of a sweep. Making one opens the data and settles every run; it starts nothing.

    Args:
        file: The sweep's.
        state_dir: New, empty, or of the same sweep.

    Attributes:
        asked: The file's content.
        runs: All of them.
        done: The outcomes so far, by the number of the run.

    Raises:
        ConfigurationError: The file is invalid, or the directory holds something else.
        DpagentError: A run is impossible; the text names it.
    """

    def __init__(self, file: Path, state_dir: Path) -> None:
        self.file, self.root = file, state_dir
        self.asked: SweepFile = load_sweep(file)
        self._sources: dict[tuple[int, str | None], Source] = {}
        self.runs = [self._with_lot(run) for run in runs_of(self.asked, file)]
        self._fleets = {run.number: self._settled(run) for run in self.runs}
        self._require_match()
        self.done: dict[int, RunOutcome] = {}
        for run in self.runs:
            if (outcome := self._load(run)) is not None:
                self.done[run.number] = outcome

    def compute(
        self,
        ray: Any,
        tell: Callable[[RunOutcome], None] = lambda _: None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute the runs that are left, as many at a time as there are cores.

        Args:
            ray: The package, connected.
            tell: Is told of each run that is done.
            look: Is called now and then; what it raises ends the sweep.

        Raises:
            ClusterError: The workers end again and again.
            DpagentError: A run failed. Those that are done are kept.
        """
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(computed)
        kept: dict[tuple[int, str | None], Any] = {}
        for key, source in self._sources.items():
            kept[key] = ray.put(in_memory(source))
        waiting = {
            task.remote(run.request, kept[self._key(run.request)]): run
            for run in self.runs
            if run.number not in self.done
        }
        try:
            while waiting:
                look()
                ready, _ = ray.wait([*waiting], num_returns=1, timeout=_LOOK_S)
                for each in ready:
                    results, settings, seconds = ray.get(each)
                    outcome = RunOutcome(waiting.pop(each), results, settings, seconds)
                    self._keep(outcome)
                    tell(outcome)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, DpagentError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"Ray lost the worker of a run {_RETRIES} times and more ({type(error).__name__}). It may "
                "have run out of memory: use fewer cores, or more nodes. The runs before are kept."
            ) from error
        finally:
            for each in waiting:
                ray.cancel(each, force=True)

    @property
    def is_done(self) -> bool:
        """Whether all runs are done."""
        return len(self.done) == len(self.runs)

    def prices(self) -> list[ScopePrice]:
        """What the sweep costs private records, in each scope."""
        known: dict[int, RunEvents] = {}
        found = []
        for run in self.runs:
            fleet = self._fleets[run.number]
            settings = fleet.settings
            # A run with another seed has the same noise, but for the deal.
            if run.setting not in known:
                known[run.setting] = events_of(fleet_settings(settings), fleet.spec, (0, 0))
            found.append(replace(known[run.setting], dealt=(settings.devices, settings.seed)))
        return price_of(found)

    def locked(self) -> StateDirectory:
        """The state directory, for this program alone.

        Raises:
            StateInUseError: Another uses it.
        """
        return StateDirectory(self.root)

    def begin(self) -> None:
        """Write what a sweep begins with.

        Raises:
            StorageError: It cannot be written.
        """
        write_atomically(self.root / _KEPT, f"{json.dumps(self._identity(), indent=2)}\n".encode())

    @property
    def record_bytes(self) -> int:
        """Bytes that all records take in memory."""
        return sum(
            (len(each.train) + len(each.test)) * each.train.record_bytes for each in self._sources.values()
        )

    def fleet_of(self, number: int) -> VirtualFleet:
        """The settled fleet of a run."""
        return self._fleets[number]

    def _settled(self, run: SweepRun) -> VirtualFleet:
        try:
            return VirtualFleet(run.request, self.root / "none", source=self._source(run.request))
        except DpagentError as error:
            text = f"{self.file}: setting {run.setting} ({run.in_words}): {error}"
            raise type(error)(text) from error

    def _with_lot(self, run: SweepRun) -> SweepRun:
        if (lot := run.varied.get("lot")) is None:
            return run
        source = self._source(run.request)
        devices = run.request.devices or preset_of(run.request).devices
        where = f"{self.file}: setting {run.setting} ({run.in_words})"
        return replace(run, request=with_lot(run.request, lot, len(source.train) // devices, where))

    def _key(self, request: VirtualRequest) -> tuple[int, str | None]:
        """Of the records: by which seed some are held out, and for which model they are read.

        Of private records, all runs hold out the same ones. What a model says of a test record is shown
        without noise: that one run trains on it, with noise, would protect it no more.
        """
        seed = self.asked.seeds[0] if self.asked.records == "private" else request.seed
        return seed, wanted_model(request)

    def _source(self, request: VirtualRequest) -> Source:
        key = self._key(request)
        if key not in self._sources:
            held_out_by, wanted = key
            self._sources[key] = open_source(
                request.data, held_out_by, None if wanted is None else find_model(wanted)
            )
        return self._sources[key]

    def _identity(self) -> dict[str, Any]:
        asked = json_values(self.asked.as_dict(only_given=True))
        found = {"sweep": asked, "data": look_of_data(self.asked.base.data)}
        return found | _PRIVATE if self.asked.records == "private" else found

    def _require_match(self) -> None:
        kept = self.root / _KEPT
        with disk_errors(self.root):
            if kept.exists():
                known, wanted = json.loads(kept.read_text()), json.loads(json.dumps(self._identity()))
                if known != wanted and known == {key: wanted[key] for key in wanted.keys() - _PRIVATE.keys()}:
                    raise ConfigurationError(
                        f"The sweep in {self.root} was begun by an older dpagent, whose runs on private "
                        f"records cost more than is computed now. Give another {named('state_dir')}."
                    )
                if known != wanted:
                    raise ConfigurationError(
                        f"The sweep in {self.root} was of another file, or the data have changed since. Give "
                        f"another {named('state_dir')}."
                    )
            elif self.root.exists() and any(entry.name != "lock" for entry in self.root.iterdir()):
                raise ConfigurationError(
                    f"{self.root} is not empty and holds no sweep. Give {named('state_dir')} a new or empty "
                    "directory."
                )

    def _file_of(self, run: SweepRun) -> Path:
        return self.root / "runs" / f"{run.number:04d}.json"

    def _keep(self, outcome: RunOutcome) -> None:
        file = self._file_of(outcome.run)
        with disk_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        run = outcome.run
        values = {
            "run": run.number,
            "setting": run.setting,
            "varied": dict(run.varied),
            "seed": run.request.seed,
            "seconds": outcome.seconds,
            "settings": outcome.settings,
            "results": json_values(outcome.results),
        }
        write_atomically(file, json.dumps(values).encode())
        self.done[outcome.run.number] = outcome

    def _load(self, run: SweepRun) -> RunOutcome | None:
        try:
            values = json.loads(self._file_of(run).read_text())
            return RunOutcome(run, values["results"], values["settings"], values["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def computed(request: VirtualRequest, source: Source) -> tuple[dict[str, Any], dict[str, Any], float]:
    """A whole run, in the process of a worker: its results, its settings, and the seconds it took."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dpagent-sweep-") as directory:
        fleet = VirtualFleet(request, Path(directory) / "run", source=source)
        record = fleet.run_here()
    return as_json(record), json_values(fleet.settings), time.monotonic() - began


def in_memory(source: Source) -> Source:
    """A source whose records are arrays, so that a worker on any node has them."""
    return replace(source, train=_array(source.train), test=_array(source.test))


def _array(dataset: Dataset) -> Dataset:
    if isinstance(dataset, ArrayDataset):
        return dataset
    inputs, labels = dataset.batch(np.arange(len(dataset)))
    return ArrayDataset(
        inputs, labels, dataset.classes, dataset.class_names, groups=dataset.groups, origin=dataset.origin
    )


def settings_of(outcome: RunOutcome) -> VirtualSettings:
    """The settings of a run that is done."""
    return VirtualSettings.from_json(json.dumps(outcome.settings))
