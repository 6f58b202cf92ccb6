"""A job of a real fleet, read from its coordinator's database, for the same report as a simulated one's."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime

from coordinator.columns import spent_in
from coordinator.queued_job import JobState
from coordinator.reader import StoreReader
from coordinator.settings import CoordinatorSettings, FleetSettings
from dpagent.errors import ConfigurationError
from dpagent.norm import Norm
from dpagent.privacy.mechanisms.mechanism import Mechanism
from dpagent.privacy.mechanisms.published import PublishedLaplace
from dpagent.privacy.methods import method_named
from simulation.job_record import JobRecord
from simulation.settings import NOISY_UPDATES, cap_in_words


@dataclass(frozen=True, slots=True)
class FleetTerms:
    """A fleet's settings, by the names that a report has for them (:class:`~simulation.job_record.Terms`)."""

    fleet: FleetSettings

    @property
    def devices(self) -> int:
        """Expected in a round."""
        return self.fleet.devices

    @property
    def records_per_device(self) -> float:
        """The public estimate."""
        return self.fleet.records_per_device

    @property
    def rounds(self) -> int:
        """Of the job."""
        return self.fleet.rounds

    @property
    def epsilon(self) -> float:
        """The target."""
        return self.fleet.privacy.epsilon

    @property
    def delta(self) -> float:
        """Of the job."""
        return self.fleet.privacy.delta

    @property
    def method(self) -> str:
        """Its name."""
        return self.fleet.privacy.method

    @property
    def noise(self) -> str:
        """Its name."""
        return self.fleet.privacy.noise or method_named(self.method).default_noise

    @property
    def schedule(self) -> str:
        """Its kind."""
        return self.fleet.privacy.spending.kind

    @property
    def sampling_rate(self) -> float:
        """Of records, in a round."""
        return self.fleet.privacy.sampling_rate

    @property
    def clip_norm(self) -> float:
        """At first."""
        return self.fleet.privacy.clip_norm

    @property
    def clipping(self) -> str:
        """Its kind."""
        return self.fleet.privacy.clipping.kind

    @property
    def norm(self) -> Norm | None:
        """In which records are clipped, or whole updates."""
        return self.mechanism.norm

    @property
    def device_noise(self) -> float | None:
        """ε of the noise that devices add to their updates."""
        own = self.fleet.privacy.device_noise
        return None if own is None else own.epsilon

    @property
    def learning_rate(self) -> float:
        """At first."""
        return self.fleet.optimiser.learning_rate

    @property
    def cap(self) -> str:
        """The noise cap's kind."""
        return self.fleet.cap.kind

    @property
    def cap_at(self) -> str:
        """Where it acts."""
        return self.fleet.cap.where

    @property
    def cap_in_words(self) -> str:
        """Both."""
        return cap_in_words(self.cap, self.cap_at)

    @property
    def mechanism(self) -> type[Mechanism]:
        """What adds the noise."""
        return PublishedLaplace if self.cap == "published" else self.fleet.privacy.mechanism

    @property
    def mixer(self) -> bool:
        """Whether fragments pass through one."""
        return self.fleet.mixer_key is not None

    @property
    def insecure(self) -> str:
        """A fleet's noise is the system's."""
        return ""

    @property
    def sends(self) -> str:
        """What the coordinator gets of a device."""
        return method_named(self.method).sends if self.device_noise is None else NOISY_UPDATES


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetJobRecord(JobRecord):
    """A job of a real fleet."""

    fleet: str
    name: str
    state: str
    made_on: str
    """When, in words."""
    labels: tuple[str, ...]
    """Of the classes."""
    tested: int
    loss_history: tuple[float, ...]
    """Test loss after each round; NaN where it was not measured."""
    least_devices: tuple[int, ...]
    """Devices in the scarcest block of each round."""
    received: tuple[int, ...]
    published: tuple[int, ...]
    """Bytes of each round."""
    given_up: int
    """Rounds that were given up, or passed over with one that was."""
    highest_epsilon: float
    """After all rounds that are over. One that was given up counts: boards may have been charged for it."""
    last_of_its_own: int | None
    """The last round, given up or not, of a job that is finished and was to have more; else None."""
    messages: dict[str, int]
    """What became of them: counted, late, duplicates, dummies, rejected."""

    @property
    def test_records(self) -> int:
        """How many records the model is tested on."""
        return self.tested

    @property
    def ended_after(self) -> int | None:
        """As above: one that goes on, or that its operator has ended, has not ended by itself."""
        return self.last_of_its_own

    @property
    def epsilon(self) -> float:
        """ε of the job so far."""
        return self.highest_epsilon


def collect_job(shared: CoordinatorSettings, name: str | None = None) -> FleetJobRecord:
    """The record of a job so far.

    Args:
        shared: ``fleet.yaml``.
        name: of the job; by default the one that goes on, or that ended last.

    Raises:
        ConfigurationError: There is no such job, or no round of it is over.
        StorageError: The database cannot be read.
    """
    with closing(StoreReader(shared.store_place, name)) as reader:
        queued = reader.queued()
        if queued is None:
            raise ConfigurationError("There is no job yet. `dpagent coordinator job add FILE` adds one.")
        begun = reader.rounds_of(queued.number)
        measured = reader.measured_of(queued.number)
        counters = reader.counters_of(queued.number)
    rounds = [each for each in begun if each.closed_at is not None]
    if not rounds:
        raise ConfigurationError(
            f"No round of job {queued.name!r} has closed yet, so there is nothing to report."
        )
    settings = queued.settings_in(shared)
    details = [measured[each.number] for each in rounds if each.number in measured]
    evaluated = [each for each in details if each.by_class]
    by_class = evaluated[-1].by_class if evaluated else ()
    majority = evaluated[-1].majority_class_accuracy if evaluated else None
    spec = settings.model.spec()
    return FleetJobRecord(
        settings=FleetTerms(settings),
        fleet=shared.fleet,
        name=queued.name,
        state=queued.state_in_words(),
        made_on=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        model=spec.name,
        parameters=spec.parameter_count,
        labels=tuple(settings.model.classes or map(str, range(len(by_class)))),
        tested=sum(each[0] for each in by_class),
        numbers=tuple(each.number for each in rounds),
        given_up=sum(each.given_up_at is not None for each in begun),
        highest_epsilon=max(each.epsilon or 0.0 for each in begun),
        last_of_its_own=(
            queued.over_rounds
            if queued.state is JobState.FINISHED and queued.over_rounds < queued.job.rounds
            else None
        ),
        noise_multipliers=tuple(each.noise_multiplier or 0.0 for each in rounds),
        clip_norms=tuple(each.clip_norm for each in rounds if each.clip_norm is not None),
        epsilon_spent=tuple(each.epsilon or 0.0 for each in rounds),
        accuracy_history=tuple(math.nan if each.accuracy is None else each.accuracy for each in rounds),
        loss_history=tuple(math.nan if each.loss is None else each.loss for each in details),
        majority_class_accuracy=math.nan if majority is None else majority,
        clamped=tuple(each.clamped or 0 for each in rounds),
        out_of_range=tuple(dict.fromkeys(layer for each in rounds for layer in each.out_of_range)),
        kept=tuple(1.0 if each.kept is None else each.kept for each in rounds),
        columns=spent_in(queued.job, begun),
        seconds_by_round=tuple((each.closed_at or each.opened_at) - each.opened_at for each in rounds),
        least_devices=tuple(each.least_counted or 0 for each in rounds),
        received=tuple(each.received for each in details),
        published=tuple(each.published for each in details),
        messages={
            "counted": sum(each.fragments for each in rounds),
            "rejected": sum(count for reason, count in counters.items() if reason.startswith("rejected: ")),
            **{name: counters.get(name, 0) for name in ("late", "duplicates", "dummies")},
        },
    )
