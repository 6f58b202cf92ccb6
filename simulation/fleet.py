"""A fleet on this machine, from a request to the record of its run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dpagent.errors import BrokerError, PlanError, UsageError
from dpagent.learning.fitting import check_fits
from dpagent.learning.model_files import find_model
from dpagent.privacy.statement import Unit, delta_warning, epsilon_warning
from dpagent.storage import StateDirectory, write_atomically
from dpagent.wording import counted, named
from simulation.choices import choose_model, settle, wanted_model
from simulation.collection import collect
from simulation.data.remarks import remarks_on
from simulation.data.shards import deal, is_prepared, prepare_data, write_model
from simulation.data.source import Source, open_source
from simulation.layout import Layout
from simulation.notes import RunNotes, look_of_data, read_notes
from simulation.observer import Glimpse, Observer, closed_rounds
from simulation.programs.baseline import read_baseline
from simulation.programs.broker import BrokerAddress, BrokerChild, choose_broker, wait_until_ready
from simulation.programs.configurations import write_configurations
from simulation.programs.ledgers import begin_ledgers
from simulation.programs.supervisor import Supervisor, python_module
from simulation.programs.timing import RoundTimes
from simulation.record import RunRecord
from simulation.request import BrokerRequest, Request
from simulation.settings import COMMAND_FILE, RunSettings, load_settings_of_run

MOST_AGENTS: Final = 200
"""Agents of a fleet, each a program of its own."""
_LOOK_S: Final = 0.3
_SETTLE_S: Final = 3.0
"""After the last round: time for the last receipts to reach the devices."""
_BASELINE_SHARE: Final = 0.5
"""The baseline may go on for this part of the run's time after its end."""
_BASELINE_LEAST_S: Final = 15.0


class Listener:
    """Is told how a run goes. It does nothing; derive from it to show something."""

    def goes_on(self, fleet: Fleet, closed: int, *, is_finished: bool) -> None:
        """No run begins: the directory holds this one, with so many closed rounds."""

    def begins(self, fleet: Fleet) -> None:
        """Everything is settled, and the model is in its place; data are dealt next."""

    def starts(self, fleet: Fleet, times: RoundTimes, broker: BrokerAddress) -> None:
        """The broker answers, and the other programs are started next."""

    def looked(self, glimpse: Glimpse) -> None:
        """The state of the run, a few times a second."""


class Fleet:
    """A broker, a coordinator and agents as processes of their own, and a directory with all they keep.

    Making one opens the data, chooses the model and settles the rest; it writes and starts nothing.
    A directory that holds a run goes on with it: the request has to be the same.

    Args:
        request: The run to make.
        state_dir: New, empty, or of the same run.
        broker: Which broker to use.
        command: A command line that goes on with the run, kept for people.

    Attributes:
        settings: All values settled.
        spec: The model.
        outlook: The expected outcome of the run.
        notes: On the data, and on earlier starts.
        layout: Where the files are.
        goes_on: Whether the directory holds this run already.
        data_changed: Whether the data have changed since the run began. It goes on with the records as dealt.

    Raises:
        DpagentError: It cannot be run.

    Example (a minute's work; see ``tests/simulation/test_fleet.py``)::

        from simulation.fleet import Fleet
        from simulation.request import Request

        fleet = Fleet(Request(devices=3, rounds=10), Path("my-fleet"))
        print(fleet.outlook.verdict, fleet.notes.remarks)
        record = fleet.run()
        print(record.accuracy, record.epsilon, record.has_learned)
    """

    def __init__(
        self,
        request: Request,
        state_dir: Path,
        *,
        broker: BrokerRequest | None = None,
        command: str = "",
    ) -> None:
        if request.devices is not None and request.devices > MOST_AGENTS:
            raise UsageError(
                f"{named('devices')}: got {request.devices:,}; expected at most {MOST_AGENTS}, since each is "
                "a program of its own. `dpagent simulate` runs more, as virtual devices."
            )
        self._broker = BrokerRequest() if broker is None else broker
        self._command = command
        self._root = state_dir
        began = time.monotonic()
        self.layout = Layout(state_dir)
        before, look = load_settings_of_run(state_dir, RunSettings), look_of_data(request.data)
        wanted = wanted_model(request)
        self._source: Source | None = None
        if before is not None and is_prepared(self.layout):
            form = before.form
        else:
            self._source = open_source(
                request.data, request.seed, None if wanted is None else find_model(wanted)
            )
            form = self._source.form
        model, self.spec = choose_model(wanted, form, self.layout, request.method)
        if self._source is not None:
            check_fits(self._source.train, self.spec)
        self.settings, self.outlook = settle(request, form, model, self.spec)
        self.settings.require_match(state_dir)
        self.goes_on = self._source is None
        if self._source is None:
            self.notes = read_notes(state_dir)
        else:
            deal(self.settings, self._source)  # Refuses data that cannot be dealt.
            settings, unit = self.settings, self.settings.mechanism.unit
            units = settings.devices if unit is Unit.DEVICE else settings.records_per_device
            warnings = [delta_warning(settings.delta, units, unit)]
            if settings.mechanism.is_private:
                warnings.append(epsilon_warning(settings.epsilon, unit))
            self.notes = RunNotes(
                kind=self._source.train.origin.kind,
                columns=self._source.columns,
                remarks=(*remarks_on(self._source, self.spec), *filter(None, warnings)),
                data=look,
            )
        self.data_changed = self.notes.data not in ("", look)
        self._preparation_s = time.monotonic() - began

    def run(self, listener: Listener | None = None) -> RunRecord:
        """Run to the end. All programs that were started are stopped in every case.

        Args:
            listener: Is told how the run goes.

        Raises:
            DpagentError: It cannot run.
        """
        started_at = time.monotonic() - self._preparation_s
        listener = Listener() if listener is None else listener
        self.settings.save(self._root)
        with StateDirectory(self._root):
            if self.goes_on:
                closed = closed_rounds(self.layout)
                # The notes alone do not say it: a coordinator that lost its database begins anew.
                is_finished = self.notes.finished and closed >= self.settings.rounds
                listener.goes_on(self, closed, is_finished=is_finished)
                if is_finished:
                    return self._record()
            else:
                self.notes.save(self._root)
                command = f"{self._command}\n".encode(errors="replace")
                write_atomically(self._root / COMMAND_FILE, command, mode=0o600)
            write_model(self.settings, self.layout, self.spec)
            listener.begins(self)
            prepare_data(self.settings, self.layout, self._source)
            with choose_broker(self._broker, self._root / "broker") as broker:
                self._run_programs(broker, listener, started_at)
        # Everybody has stopped and written its last counters.
        return self._record()

    def _record(self) -> RunRecord:
        return collect(self.settings, self.notes, self.outlook, self.layout, self.spec)

    def _run_programs(
        self, broker: BrokerChild | BrokerAddress, listener: Listener, started_at: float
    ) -> None:
        address = broker if isinstance(broker, BrokerAddress) else broker.address
        times = write_configurations(self.settings, self.layout, address)
        agents = [f"agent-{number:03d}" for number in range(1, self.settings.devices + 1)]
        with Supervisor(self.layout.logs) as supervisor:
            finished = False
            try:
                _start_broker(broker, supervisor)
                listener.starts(self, times, address)
                self._start_programs(agents, supervisor)
                self._watch(supervisor, listener)
                finished = True
            finally:
                peaks = [peak for peak in map(supervisor.peak_mib, agents) if peak is not None]
                self.notes = self.notes.after_start(
                    broker=address.name,
                    seconds=time.monotonic() - started_at,
                    agent_peak_mib=max(peaks, default=None),
                    coordinator_peak_mib=supervisor.peak_mib("coordinator"),
                    restarts=supervisor.restarts,
                    finished=finished,
                )
                self.notes.save(self._root)

    def _start_programs(self, agents: Sequence[str], supervisor: Supervisor) -> None:
        """As on a real board and at a real operator's: by the ``dpagent`` command."""
        begin_ledgers(self.layout, len(agents))
        if self.settings.mixer:
            configuration = str(self.layout.mixer_file)
            supervisor.start("mixer", python_module("cli.main", "mixer", "run", "--config", configuration))
        supervisor.start(
            "coordinator",
            python_module("cli.main", "coordinator", "run", "--config", str(self.layout.fleet_file)),
            may_end=True,
        )
        for number, name in enumerate(agents, start=1):
            configuration = str(self.layout.agent_file(number))
            supervisor.start(name, python_module("cli.main", "run", "--config", configuration))
        if not self._baseline_is_done():
            supervisor.start(
                "baseline",
                python_module("simulation.programs.baseline", str(self._root)),
                may_end=True,
                nice=19,
            )

    def _watch(self, supervisor: Supervisor, listener: Listener) -> None:
        """Look after the programs until the job is done, and the baseline too or its time is over."""
        observer = Observer(self.layout, self.settings.devices)
        began = time.monotonic()
        ended: float | None = None
        try:
            while True:
                supervisor.watch()
                glimpse = observer.glimpse()
                listener.looked(glimpse)
                if glimpse.declined > self.settings.devices - self.settings.minimum_devices:
                    raise PlanError(
                        f"{glimpse.declined} of {counted(self.settings.devices, 'device')} declined to take "
                        f"part, so no round can close: {glimpse.reason}. See `dpagent budget show`; a new "
                        f"{named('state_dir')} has new budgets."
                    )
                if supervisor.has_ended("coordinator"):
                    now = time.monotonic()
                    ended = ended or now
                    settled = glimpse.in_flight == 0 or now >= ended + _SETTLE_S
                    patience_s = max(_BASELINE_LEAST_S, _BASELINE_SHARE * (ended - began))
                    if settled and (self._baseline_is_done() or now >= ended + patience_s):
                        return
                time.sleep(_LOOK_S)
        finally:
            observer.close()

    def _baseline_is_done(self) -> bool:
        done = len(read_baseline(self.layout.baseline_file))
        return not self.settings.baseline or done >= self.settings.rounds


def _start_broker(broker: BrokerChild | BrokerAddress, supervisor: Supervisor) -> None:
    if isinstance(broker, BrokerAddress):
        wait_until_ready(broker)
        return
    supervisor.start("broker", broker.command)
    try:
        wait_until_ready(broker.address)
    except BrokerError:
        supervisor.watch()  # A broker that died says more by its log.
        raise
