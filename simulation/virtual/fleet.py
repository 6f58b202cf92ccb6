"""A fleet of virtual devices, from a request to the record of its run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.job import Job
from coordinator.models import ModelFiles
from coordinator.planning import job_noise
from coordinator.settings import FleetSettings
from coordinator.stepping import Stepper
from dpagent.errors import ConfigurationError, UsageError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.fitting import check_fits
from dpagent.learning.model_files import find_model
from dpagent.privacy.statement import Unit, delta_warning, epsilon_warning
from dpagent.storage import StateDirectory, disk_errors, write_atomically
from dpagent.wording import named
from simulation.choices import choose_model, settle, wanted_model
from simulation.data.remarks import remarks_on
from simulation.data.shards import deal, write_model
from simulation.data.source import Source, open_source
from simulation.layout import Layout
from simulation.notes import RunNotes, look_of_data
from simulation.programs.configurations import fleet_settings
from simulation.record import RunRecord
from simulation.settings import COMMAND_FILE, load_settings_of_run
from simulation.virtual.checkpoint import Checkpoint
from simulation.virtual.cluster import ClusterRequest, cores_of, ray_on
from simulation.virtual.crew import Crew, LocalCrew, RayCrew
from simulation.virtual.ledger import opened_ledger
from simulation.virtual.outcome import record_of, write_final_model
from simulation.virtual.rounds import PlainRounds, VirtualRounds
from simulation.virtual.settings import VirtualRequest, VirtualSettings


class Listener:
    """Is told how a run goes. It does nothing; derive from it to show something."""

    def begins(self, fleet: VirtualFleet, done: int) -> None:
        """Everything is settled, and so many rounds are done already; Ray is started next."""

    def starts(self, fleet: VirtualFleet, cores: int, nodes: int) -> None:
        """Ray is there, and the records are with it."""

    def computed(self, round_number: int, devices: int) -> None:
        """So many devices of a round are done."""

    def closed(self, fleet: VirtualFleet, checkpoint: Checkpoint) -> None:
        """A round is closed and kept."""


class VirtualFleet:
    """Devices that are computed on Ray, and a directory with all that the run leaves.

    Making one opens the data, chooses the model and settles the rest; it writes and starts nothing.
    A directory that holds a run goes on with it: the request has to be the same.

    Args:
        request: The run to make.
        state_dir: New, empty, or of the same run.
        command: A command line that goes on with the run, kept for people.
        source: The records, if they are open.

    Attributes:
        settings: All values settled.
        spec: The model.
        outlook: The expected outcome of the run.
        notes: On the data.
        layout: Where the files are.

    Raises:
        DpagentError: It cannot be run.
    """

    def __init__(
        self, request: VirtualRequest, state_dir: Path, *, command: str = "", source: Source | None = None
    ) -> None:
        began = time.monotonic()
        if request.cap == "published":
            raise UsageError(
                f"{named('cap')}: got published, under which devices keep private state from round to round, "
                "and virtual ones keep none. Expected clamp, none or bounded; `dpagent demo` has published."
            )
        self.layout, self._root, self._command = Layout(state_dir), state_dir, command
        before = load_settings_of_run(state_dir, VirtualSettings)
        wanted = wanted_model(request)
        self._source = source or open_source(
            request.data, request.seed, None if wanted is None else find_model(wanted)
        )
        model, self.spec = choose_model(wanted, self._source.form, self.layout, request.method)
        check_fits(self._source.train, self.spec)
        settings, self.outlook = settle(request, self._source.form, model, self.spec)
        self.settings = VirtualSettings.of(settings, request)
        self.settings.require_match(state_dir)
        self._shards: Sequence[Dataset] = deal(self.settings, self._source)
        self.notes = self._notes(look_of_data(request.data))
        self.checkpoint = None if before is None else Checkpoint.load(state_dir)
        self._preparation_s = time.monotonic() - began

    def run(self, cluster: ClusterRequest | None = None, listener: Listener | None = None) -> RunRecord:
        """Run to the end, or go on to it. Whatever was started is stopped in every case.

        Args:
            cluster: Which Ray to use; by default all cores of this machine.
            listener: Is told how the run goes.

        Raises:
            DpagentError: It cannot run. The rounds that are done are kept.
        """
        listener = Listener() if listener is None else listener
        with self._begun(listener):
            if not self.is_finished:
                records = sum(map(len, self._shards)) * self._source.train.record_bytes
                with ray_on(ClusterRequest() if cluster is None else cluster, records) as ray:
                    self._train(RayCrew(ray, self._shards), listener, cores_of(ray), len(ray.nodes()))
            return self.record()

    def run_on(self, ray: Any, listener: Listener | None = None) -> RunRecord:
        """As :meth:`run`, on a Ray that is there.

        Raises:
            DpagentError: It cannot run. The rounds that are done are kept.
        """
        return self._run_with(RayCrew(ray, self._shards), listener, cores_of(ray), len(ray.nodes()))

    def run_here(self, listener: Listener | None = None) -> RunRecord:
        """As :meth:`run`, in this process, one device after the other.

        Raises:
            DpagentError: It cannot run. The rounds that are done are kept.
        """
        return self._run_with(LocalCrew(self._shards), listener, 1, 1)

    def _run_with(self, crew: Crew, listener: Listener | None, cores: int, nodes: int) -> RunRecord:
        listener = Listener() if listener is None else listener
        with self._begun(listener):
            if not self.is_finished:
                self._train(crew, listener, cores, nodes)
            return self.record()

    @property
    def source(self) -> Source:
        """The records that it trains on, and those that it is tested on. Private."""
        return self._source

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        now = self.checkpoint
        return now is not None and now.is_over and self.layout.trained_model.exists()

    def _train(self, crew: Crew, listener: Listener, cores: int, nodes: int) -> None:
        """Run the rounds that are left."""
        began = time.monotonic() - self._preparation_s
        fleet = self._fleet_settings()
        checkpoint = self.checkpoint or self._first_checkpoint(fleet)
        models = self._models(fleet)
        listener.starts(self, cores, nodes)

        def keep(now: Checkpoint) -> Checkpoint:
            self.checkpoint = replace(now, seconds=checkpoint.seconds + time.monotonic() - began)
            self.checkpoint.save(self._root)
            listener.closed(self, self.checkpoint)
            return self.checkpoint

        now = checkpoint
        if not now.is_over:
            seed = self.settings.insecure_noise_seed
            rounds = VirtualRounds(fleet, now, crew, models, seed, listener.computed)
            with opened_ledger(self.settings, self.layout.agent_state(1)) as ledger:
                while not now.is_over:
                    now = keep(rounds.next(ledger))
                    rounds.tell_of_norm()
        if self._lacks_baseline(now):
            plain = PlainRounds(fleet, now, crew, models)
            while self._lacks_baseline(now):
                now = keep(plain.next())
        write_final_model(self.settings, self.layout, models, now)

    def _lacks_baseline(self, checkpoint: Checkpoint) -> bool:
        return self.settings.baseline and len(checkpoint.baseline) < len(checkpoint.rounds)

    def _models(self, fleet: FleetSettings) -> ModelFiles:
        directory = self.layout.trained_model.parent
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return ModelFiles(fleet, self.spec, directory, self._source.test)

    def record(self) -> RunRecord:
        """The record of the run, as far as it has come."""
        assert self.checkpoint is not None
        return record_of(
            self.settings,
            self.notes,
            self.outlook,
            self.layout,
            self.spec,
            self._source.test,
            self.checkpoint,
        )

    def _fleet_settings(self) -> FleetSettings:
        """The coordinator's, as a demo's coordinator has them."""
        fleet, file = fleet_settings(self.settings), self.layout.model_file
        if not file.exists():
            return fleet
        return fleet.with_values({"model": fleet.model.with_values({"name": str(file)})})

    @contextmanager
    def _begun(self, listener: Listener) -> Iterator[None]:
        """The directory locked, with what a run begins with."""
        with StateDirectory(self._root):
            self._begin()
            listener.begins(self, 0 if self.checkpoint is None else len(self.checkpoint.rounds))
            yield

    def _begin(self) -> None:
        """Write what a run begins with, once.

        Raises:
            ConfigurationError: The data have changed since.
        """
        self.settings.save(self._root)
        known = self._root / "data.digest"
        look = self.notes.data
        with disk_errors(known):
            if known.exists() and known.read_text() != look:
                raise ConfigurationError(
                    f"The data have changed since the run in {self._root} began, and its rounds would be of "
                    f"two different sets. Give another {named('state_dir')}."
                )
        write_atomically(known, look.encode())
        if self._command:
            write_atomically(self._root / COMMAND_FILE, f"{self._command}\n".encode(errors="replace"))
        write_model(self.settings, self.layout, self.spec)
        if not self.layout.test_file.exists():
            with disk_errors(self.layout.test_file):
                self.layout.test_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            save_npz(self.layout.test_file, self._source.test)

    def _first_checkpoint(self, fleet: FleetSettings) -> Checkpoint:
        """Before the first round.

        Raises:
            PlanError: No noise meets the target.
        """
        job = Job(os.urandom(16), fleet.job_terms(), *job_noise(fleet, self.spec))
        checkpoint = Checkpoint(job, Stepper(fleet, self.spec).initial())
        checkpoint.save(self._root)
        return checkpoint

    def _notes(self, look: str) -> RunNotes:
        settings, unit = self.settings, self.settings.mechanism.unit
        units = settings.devices if unit is Unit.DEVICE else settings.records_per_device
        warnings = [delta_warning(settings.delta, units, unit)]
        if settings.mechanism.is_private:
            warnings.append(epsilon_warning(settings.epsilon, unit))
        return RunNotes(
            kind=self._source.train.origin.kind,
            columns=self._source.columns,
            remarks=(
                *remarks_on(self._source, self.spec),
                *filter(None, warnings),
            ),
            data=look,
            broker="none",
        )
