"""``fleet.yaml``, and job files: the operator's settings for the fleet and for what it is to train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from coordinator.database.settings import StorePlace, StoreSettings
from coordinator.enrolment_settings import EnrolmentSettings
from coordinator.job_settings import CapSettings, ModelSettings, OptimiserSettings, PrivacySettings
from coordinator.page_settings import PageSettings
from coordinator.token_settings import TokenSettings
from dpagent.configuration import changed_settings, load_settings, resolve
from dpagent.errors import ConfigurationError
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.model_files import is_model_file
from dpagent.overrides import Override
from dpagent.privacy.mechanisms.discretised_laplace import DiscretisedLaplace
from dpagent.privacy.methods import method_named
from dpagent.protocol.messages import MIN_SLOT_S, Linkability, ReceiptTopics
from dpagent.protocol.mixing import MixerKey
from dpagent.protocol.tokens import MAX_TOKENS
from dpagent.protocol.topics import FleetName
from dpagent.schema.base import rule
from dpagent.schema.json_values import json_of, json_values
from dpagent.schema.limits import Limits
from dpagent.schema.problems import SchemaError
from dpagent.settings import FilePath, Settings
from dpagent.transport.settings import MqttSettings
from dpagent.wording import counted
from dpagent.yaml_file import load_yaml, read_document

FIRST_JOB: Final = "first"
"""The name of the job in ``fleet.yaml`` itself."""
_TERMS: Final = (
    "fleet", "records_per_device", "rounds", "privacy", "model", "cap", "optimiser", "fragments_per_update",
    "current_models", "linkability",
)  # fmt: skip
"""The keys that may not change once a job has begun."""


class RoundSettings(Settings):
    """Timing of a round."""

    deadline_s: Annotated[float, Limits(gt=0, le=86_400)] = 120.0
    """An incomplete round closes this long after it opened."""
    compute_slot_s: Annotated[float, Limits(ge=MIN_SLOT_S, le=86_400)] = 5.0
    """Devices publish a whole number of slots after the plan; choose it above their training time. A board
    declines one below its ``limits.minimum_compute_slot_s``, 5 by default."""
    device_grid_s: Annotated[float, Limits(ge=MIN_SLOT_S, le=86_400)] | None = None
    """The longest ``limits.minimum_compute_slot_s`` of the devices, at whose multiples their slots begin; by
    default ``compute_slot_s``."""
    jitter_window_s: Annotated[float, Limits(ge=0, le=86_400)] = 10.0
    """Maximum random delay of each fragment. A board declines one below its
    ``limits.minimum_jitter_window_s``, 5 by default."""
    minimum_devices: Annotated[int, Limits(ge=1)] = 1
    """If a block of the update has fewer fragments at the deadline, the round stays open for another
    deadline."""

    @property
    def honest_s(self) -> float:
        """Seconds after which a device has sent that got the plan at once and trained within one slot.

        It decides, within a quarter of a period of its grid, and waits for a point of that, for a slot in
        whole periods, and for its jitter.
        """
        grid_s = self.device_grid_s or self.compute_slot_s
        return 1.25 * grid_s + math.ceil(self.compute_slot_s / grid_s) * grid_s + self.jitter_window_s

    @rule
    def _leaves_time(self) -> None:
        if self.deadline_s <= self.honest_s:
            raise ValueError(
                f"deadline_s is {self.deadline_s:g}; expected more than {self.honest_s:g}, when the devices"
                " have sent: 1.25 times device_grid_s (by default compute_slot_s), compute_slot_s in whole"
                " ones of these, and jitter_window_s"
            )


class AggregationSettings(Settings):
    """How devices' fragments become one mean, and how much one of them can weigh. Without privacy cost."""

    kind: Literal["mean", "median-of-means"] = "mean"
    """``median-of-means``: the median of the means of random groups of fragments, coordinate by coordinate. A
    few hostile devices then move it little; for five groups of honest ones its noise has 1.43 times the
    variance."""
    groups: Annotated[int, Limits(ge=2, le=1_000)] = 5
    """``median-of-means``: number of groups. Hostile fragments in less than half of them cannot drag a
    coordinate beyond the honest groups."""
    largest_signal: Annotated[float, Limits(gt=0, le=1e6)] = 1.0
    """Largest signal of an honest device in a block, in clip norms a record of its expected lot. At 1, the
    range of honest norms holds every device with at most ``records_per_device`` records, whatever they are;
    at 2, with twice as many. Below 1, it relies on gradients that do not all point one way within one block.
    A hostile fragment can weigh as much."""
    false_rejection: Annotated[float, Limits(ge=1e-30, lt=1)] = 1e-9
    """Probability that any fragment of the honest devices is rejected for its norm, in the whole job."""

    @property
    def dealt(self) -> int:
        """Groups that a block's fragments are dealt to: one for the mean."""
        return self.groups if self.kind == "median-of-means" else 1


class TestDataSettings(DatasetSettings):
    """Public data for the evaluation of each round's model; the keys are those of ``agent.yaml``."""

    half: Literal["train", "test"] = "test"
    """Which half to use, for data with two (idx, cifar, images in folders ``train`` and ``test``)."""


class CoordinatorSettings(Settings):
    """The keys of ``fleet.yaml`` that hold for every job of the fleet."""

    fleet: FleetName
    """The fleet's name, part of its MQTT topics."""
    devices: Annotated[int, Limits(ge=1, le=1_000_000)]
    """Expected devices in a round. No block counts more fragments than this; the round closes once all are in
    and honest devices have had their slot and their jitter."""
    mixer_key: MixerKey | None = None
    """Public key of a mixer (``dpagent mixer key``) that devices' sealed fragments pass through. Someone else
    than you should run it, and than the broker's operator. Devices trust it only if their owners list it."""
    state_dir: FilePath = Path("coordinator-state")
    """Directory of the queue of jobs, their state and their models, relative to this file."""
    keys_dir: FilePath = Path("keys")
    """Directory of the coordinator's keys, relative to this file; created at the first start, mode 0600.
    Boards recognise the coordinator by them."""
    members_dir: FilePath = Path("members")
    """Directory of the fleet's certificate authority and its table of devices, relative to this file;
    ``dpagent coordinator ca init`` creates it. Keep it as you keep ``keys_dir``."""
    broker_dir: FilePath = Path("broker")
    """Directory of the broker that ``dpagent coordinator broker-config`` sets up, relative to this file.
    While boards enrol and are revoked, its files follow."""
    enrolment: EnrolmentSettings = EnrolmentSettings()
    tokens: TokenSettings = TokenSettings()
    page: PageSettings = PageSettings()
    mqtt: MqttSettings = MqttSettings()
    store: StoreSettings = StoreSettings()

    @property
    def store_place(self) -> StorePlace:
        """Where the coordinator's state is.

        Raises:
            ConfigurationError: The password of its database cannot be read.
        """
        return self.store.address() or self.state_dir

    @property
    def members_place(self) -> StorePlace:
        """Where the members and what they were granted are.

        Raises:
            ConfigurationError: The password of its database cannot be read.
        """
        return self.store.address() or self.members_dir

    @property
    def has_members(self) -> bool:
        """Whether there may be members."""
        return self.store.url is not None or self.members_dir.is_dir()

    @property
    def revocation_file(self) -> Path:
        """Where a broker reads whose certificates are revoked that ``broker-config`` did not set up."""
        return self.enrolment.revocation_file or self.members_dir / "revoked.crl"

    def directory_of(self, name: str) -> Path:
        """The directory of a job's models."""
        return self.state_dir / "jobs" / name

    def with_job(self, job: JobSettings, source: str) -> FleetSettings:
        """These settings with a job.

        Args:
            job: its paths resolved.
            source: where it is from, for an error.

        Raises:
            ConfigurationError: They do not go together.
        """
        shared = {key: getattr(self, key) for key in CoordinatorSettings.names}
        try:
            return FleetSettings.checked(shared | {key: getattr(job, key) for key in job.given})
        except SchemaError as error:
            raise ConfigurationError(f"{source}: {error.first.complaint()}.") from error


class JobSettings(Settings):
    """A job file, or the job in ``fleet.yaml``: what a fleet is to train."""

    records_per_device: Annotated[float, Limits(gt=0)]
    """Public estimate. Sums are divided by sampling rate × this number, never by a true count."""
    rounds: Annotated[int, Limits(ge=1, le=5000)]
    """Rounds of the job."""
    privacy: PrivacySettings
    model: ModelSettings = ModelSettings()
    cap: CapSettings = CapSettings()
    optimiser: OptimiserSettings = OptimiserSettings()
    round: RoundSettings = RoundSettings()
    aggregation: AggregationSettings = AggregationSettings()
    fragments_per_update: Annotated[int, Limits(ge=1, le=4096)] = 16
    """Fragments of a device's update."""
    linkability: Linkability = "none"
    """Whether fragments carry one-time tokens of enrolled devices. ``fragment``: one each; only members'
    count, each device's once, and nobody can tell whose they are or which belong together. ``round``: one a
    round, which shows which belong together. ``none``: no tokens, and fragments of anybody count. Where
    devices enrol, there is no default: each job says which."""
    receipts: ReceiptTopics | None = None
    """Where receipts go. ``fleet``: all to all boards, so that each hears those of all others. ``fragment``:
    each to its board alone, on a topic of its own; boards without a certificate decline, and with a mixer it
    would show who sent what. By default ``fragment`` where fragments carry tokens and pass through no mixer,
    otherwise ``fleet``."""
    test_data: TestDataSettings | None = None
    keep_models: Literal["all", "last"] = "all"
    """Keep each round's model, in ``jobs/NAME/models`` of the state directory, or only the last one."""
    current_models: bool = False
    """Whether devices can keep the model of each round as a file (``model.keep: current`` in agent.yaml), and
    not only the finished one: each is sent the file without its weights, once a connection."""

    @rule
    def _tokens_fit_a_message(self) -> None:
        if self.linkability == "fragment" and self.fragments_per_update > MAX_TOKENS:
            raise ValueError(
                f"fragments_per_update is {self.fragments_per_update}; expected at most {MAX_TOKENS} with "
                "linkability fragment: a device asks for its tokens of a round in one message"
            )

    @rule
    def _cap_goes_with_the_method(self) -> None:
        method = method_named(self.privacy.method)
        if self.cap.kind not in method.caps:
            raise ValueError(
                f"cap.kind is {self.cap.kind}; expected {' or '.join(method.caps)}, the caps of "
                f"privacy.method {method.name}"
            )
        if self.cap.kind == "published":
            self._require_algorithm_1()
        if self.cap.kind in ("bounded", "published") and self.privacy.mechanism is not DiscretisedLaplace:
            raise ValueError(
                f"cap.kind is {self.cap.kind} and privacy.noise is "
                f"{self.privacy.noise or method.default_noise}; expected laplace, whose noise it cuts off"
            )

    def _require_algorithm_1(self) -> None:
        if not self.cap.allow_unproven:
            raise ValueError(
                "cap.kind is published, which guarantees no privacy: it releases exact gradients wherever it "
                "acts; expected clamp or bounded, or, for data that are not private, cap.allow_unproven: true"
            )
        for key, value, expected in (
            ("privacy.local_steps", self.privacy.local_steps, 1),
            ("privacy.schedule.kind", self.privacy.spending.kind, "incrementing"),
        ):
            if value != expected:
                raise ValueError(
                    f"{key} is {value}; expected {expected}, as in the paper, with cap.kind published"
                )

    @rule
    def _trained_weights_go_with_the_rest(self) -> None:
        if not method_named(self.privacy.method).trains_locally:
            return
        for is_set, key, expected in (
            (self.aggregation.kind != "mean", "aggregation.kind", "mean"),
            (self.model.augmentation is not None, "model.augmentation", "none"),
        ):
            if is_set:
                raise ValueError(
                    f"{key} is set; expected {expected}, which is all that privacy.method "
                    f"{self.privacy.method} has"
                )

    @rule
    def _cap_on_the_device_knows_one_norm(self) -> None:
        if self.cap.kind == "clamp" and self.cap.where == "device" and self.privacy.clipping.kind != "whole":
            raise ValueError(
                f"cap.where is device and privacy.clipping.kind is {self.privacy.clipping.kind}; expected "
                "whole, or the cap at the coordinator"
            )

    @rule
    def _has_a_weight_for_each_round(self) -> None:
        weights = self.privacy.schedule.weights or []
        if weights and len(weights) != self.rounds:
            raise ValueError(
                f"privacy.schedule.weights has {counted(len(weights), 'number')}; expected rounds = "
                f"{self.rounds}"
            )

    def stored(self) -> str:
        """As JSON, with what was set alone; its paths are resolved.

        Raises:
            ConfigurationError: A path is not UTF-8.
        """
        try:
            return json_of(self.as_dict(only_given=True)).decode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"A path of the job cannot be kept in the queue, which is in UTF-8 ({error}). Rename "
                "the file, or the directory that it is in."
            ) from error

    def resolved(self, file: Path) -> Self:
        """The same, with paths relative to the directory of ``file``."""
        changes: dict[str, object] = {}
        if is_model_file(self.model.name):
            name = str(resolve(Path(self.model.name), file))
            changes["model"] = self.model.with_values({"name": name})
        if self.test_data is not None:
            path = resolve(self.test_data.path, file)
            changes["test_data"] = self.test_data.with_values({"path": path})
        return self.with_values(changes)


class FleetSettings(JobSettings, CoordinatorSettings):
    """A job in its fleet: all that its rounds are made of."""

    @rule
    def _quorum_is_possible(self) -> None:
        if self.round.minimum_devices > self.devices:
            raise ValueError(
                f"round.minimum_devices is {self.round.minimum_devices}; "
                f"expected at most devices = {self.devices}"
            )

    @rule
    def _groups_are_not_empty(self) -> None:
        wanted = self.aggregation
        if wanted.kind == "median-of-means" and wanted.groups > self.devices:
            raise ValueError(
                f"aggregation.groups is {wanted.groups}; expected at most devices = {self.devices}"
            )

    @rule
    def _receipts_go_with_the_mixer(self) -> None:
        if self.receipts == "fragment" and self.mixer_key is not None:
            raise ValueError(
                "receipts is fragment and mixer_key is set; expected fleet: receipts on topics of their own "
                "would show who sent what passes through the mixer"
            )

    @property
    def receipt_topics(self) -> ReceiptTopics:
        """Where receipts go."""
        if self.receipts is not None:
            return self.receipts
        return "fleet" if self.linkability == "none" or self.mixer_key is not None else "fragment"

    @property
    def seats(self) -> int | None:
        """Of each block, the fragments that count: as many as there are devices; None where each is paid for
        with a member's token, so that nobody can flood."""
        return self.devices if self.linkability == "none" else None

    @property
    def keeps_values(self) -> bool:
        """Whether the values of each fragment are kept until its round closes, and not only their sums."""
        return self.seats is not None or self.aggregation.dealt > 1

    def with_deadline(self, deadline_s: float, source: str) -> FleetSettings:
        """The same, with another deadline of rounds, in seconds.

        Args:
            deadline_s: of a round, in seconds.
            source: where it is from, for an error.

        Raises:
            ConfigurationError: It leaves devices no time to send.
        """
        return self._with_round("deadline_s", deadline_s, source)

    def with_minimum(self, devices: int, source: str) -> FleetSettings:
        """The same, with another least number of devices in a round.

        Args:
            devices: that a round needs to close.
            source: where it is from, for an error.

        Raises:
            ConfigurationError: The fleet has not so many.
        """
        if devices > self.devices:
            raise ConfigurationError(
                f"{source}: a round is to need {counted(devices, 'board')}; expected at most devices = "
                f"{self.devices}."
            )
        return self._with_round("minimum_devices", devices, source)

    def _with_round(self, key: str, value: float, source: str) -> FleetSettings:
        values = {known: getattr(self.round, known) for known in self.round.given}
        try:
            changed = RoundSettings.checked(values | {key: value})
        except SchemaError as error:
            raise ConfigurationError(f"{source}: {error.first.complaint()}.") from error
        return self.with_values({"round": changed})

    def job(self) -> JobSettings:
        """The job alone."""
        return JobSettings.checked(
            {key: getattr(self, key) for key in JobSettings.names if key in self.given}
        )

    def job_terms(self) -> dict[str, object]:
        """The settings that define the job and may not change after its start."""
        terms: dict[str, Any] = json_values(self.as_dict(include=_TERMS))
        # A model file can change without a change of its path, and the reverse.
        terms["model"]["name"] = self.model.spec().name
        # So can the kind of schedule that follows from other keys, or that no key names.
        terms["privacy"]["schedule"]["kind"] = self.privacy.spending.kind
        # A board sends what it has spooled for no plan but that which it was charged for.
        return terms | {"architecture": self.model.spec().digest().hex(), "receipts": self.receipt_topics}


def load_coordinator_settings(
    file: Path, overrides: Sequence[Override] = ()
) -> CoordinatorSettings | FleetSettings:
    """Read ``fleet.yaml``, which may hold a job, with its paths, and those of overrides, made relative to it.

    Returns:
        The settings, with the job if there is one.

    Raises:
        ConfigurationError: The file or an override is invalid.
    """
    keys = set(load_yaml(file, example="fleet: meadow")) | {each.key[0] for each in overrides}
    if keys & set(JobSettings.names):
        return load_fleet_settings(file, overrides)
    return _resolved(load_settings(file, CoordinatorSettings, overrides=overrides), file)


def load_fleet_settings(file: Path, overrides: Sequence[Override] = ()) -> FleetSettings:
    """Read a ``fleet.yaml`` that holds a job; see :func:`load_coordinator_settings`.

    Raises:
        ConfigurationError: The file or an override is invalid, or there is no job.
    """
    return _resolved(load_settings(file, FleetSettings, overrides=overrides), file).resolved(file)


def load_job_settings(file: Path, overrides: Sequence[Override] = (), text: str | None = None) -> JobSettings:
    """Read a job file, with its paths, and those of overrides, made relative to it.

    Args:
        file: The file.
        overrides: What holds in place of its values.
        text: What it would hold; it is not read then, and need not be there.

    Raises:
        ConfigurationError: The file or an override is invalid.
    """
    document = read_document(file, example="rounds: 40", text=text)
    for key in CoordinatorSettings.names:
        if key in document.values:
            raise ConfigurationError(
                f"{document.place((key,))}: {key} is a key of the whole fleet; expected the keys of a job "
                "alone. Remove it here: fleet.yaml has it."
            )
    return load_settings(file, JobSettings, overrides=overrides, text=text).resolved(file)


CoordinatorSettingsT = TypeVar("CoordinatorSettingsT", bound=CoordinatorSettings)


def _resolved(settings: CoordinatorSettingsT, file: Path) -> CoordinatorSettingsT:
    return settings.with_values(
        {
            "state_dir": resolve(settings.state_dir, file),
            "keys_dir": resolve(settings.keys_dir, file),
            "members_dir": resolve(settings.members_dir, file),
            "broker_dir": resolve(settings.broker_dir, file),
            "enrolment": settings.enrolment.resolved(file),
            "page": settings.page.resolved(file),
            "mqtt": settings.mqtt.resolved(file),
            "store": settings.store.resolved(file),
        }
    )


def require_same_job(before: dict[str, object], now: dict[str, object], name: str) -> None:
    """Refuse to continue a job under other terms.

    Raises:
        ConfigurationError: Naming every change.
    """
    if changes := changed_settings(before, now):
        raise ConfigurationError(
            f"Job {name!r} was added with other settings: {'; '.join(map(str, changes))}. Restore them. A "
            "new job goes into a file of its own, for `dpagent coordinator job add FILE`."
        )
