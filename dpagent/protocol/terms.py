"""The terms of a *release*, by which a device's records become what it sends.

A plan's section ``release`` names its kind, and holds what that kind needs. What all rounds have in
common, whatever they ask for, is in :mod:`dpagent.protocol.messages`.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from dpagent.privacy.ranges import (
    MAX_DIMENSION,
    MAX_NORM,
    MAX_RADIUS,
    MAX_SCHEDULE_STEP,
    MAX_WIRE_STEP,
    MIN_NORM,
    MIN_RADIUS,
    ScheduleKind,
)
from dpagent.schema.base import Schema, rule
from dpagent.schema.limits import After, By, Limits

MIN_EXPECTED_LOT = 1e-6
"""No noisy sum that is divided by so much leaves floating point: a device that failed then would tell, by its
silence, of a sum for which it charged nothing."""

MAX_ROUNDS = 5_000

Name = Annotated[str, Limits(pattern=r"^[a-z][a-z0-9-]{0,63}$")]
Probability = Annotated[float, Limits(gt=0, le=1)]
NoiseMultipliers = Annotated[
    list[Annotated[float, Limits(gt=0)]], Limits(min_length=1, max_length=MAX_ROUNDS)
]


class Message(Schema):
    """Base of all maps on the wire: strict types, no unknown keys, no NaN or infinity."""


class ClippingTerms(Message):
    """The norm that each record's gradient is clipped to; see ``dpagent.privacy.clipping``.

    A norm that follows a quantile changes from round to round; the noise is proportional to it, so the
    price does not change.
    """

    norms: Annotated[
        list[Annotated[float, Limits(ge=MIN_NORM, le=MAX_NORM)]], Limits(min_length=1, max_length=512)
    ]
    """One for the whole gradient, or one for each layer with parameters."""
    shares: Annotated[list[Annotated[float, Limits(gt=0, le=1)]], Limits(min_length=1, max_length=512)]
    """Of the budget, one for each norm."""
    count_weight: Annotated[float, Limits(ge=0, le=1)]
    """Weight of the coordinate that counts the records within the norm; 0 without one."""
    accumulation_slack: Annotated[float, Limits(ge=0, le=0.01)]
    """The most that summing in floating point adds to a record's influence, relative to the norm."""

    @rule
    def _fits_together(self) -> None:
        if len(self.norms) != len(self.shares):
            raise ValueError(f"there are {len(self.norms)} norms and {len(self.shares)} shares")
        if self.count_weight and len(self.norms) > 1:
            raise ValueError("records are counted with a single norm only")


class MechanismTerms(Message):
    """The mechanism of the job, by name, and its public parameters.

    Names and ranges of the parameters are the mechanism's own
    (:class:`dpagent.privacy.mechanisms.mechanism.PlannedMechanism`). The noise multipliers of all rounds are
    announced with the first and pinned by the device, so that the coordinator cannot choose later ones after
    seeing earlier results.
    """

    name: Name
    noise_multipliers: NoiseMultipliers
    """One for each round; with a ``bounded`` cap that of this round."""
    parameters: Annotated[
        dict[Annotated[str, Limits(pattern=r"^[a-z][a-z0-9_]{0,63}$")], int | float], Limits(max_length=16)
    ]


class SamplingTerms(Message):
    """The lots of a round."""

    rate: Probability
    """Probability that a record enters a lot."""
    expected_lot: Annotated[float, Limits(ge=MIN_EXPECTED_LOT, le=1e7)]
    """Public expectation of a lot's size; the divisor of sums."""
    local_steps: Annotated[int, Limits(ge=1, le=64)]
    """Noisy steps in a round, each with a fresh lot."""
    local_learning_rate: Annotated[float, Limits(ge=0, le=1e3)]


class ProjectionTerms(Message):
    """A first round that sums second moments, for the directions on which the other rounds project."""

    values: Annotated[int, Limits(ge=1, le=4_096)]
    """Numbers in a record before the projection."""
    record_norm: Annotated[float, Limits(ge=1e-4, le=1e4)]
    """L2 norm that a record is scaled down to."""


class AugmentationTerms(Message):
    """Views of each record, whose gradients are averaged before clipping."""

    views: Annotated[int, Limits(ge=2, le=64)]
    shift: Annotated[int, Limits(ge=0, le=1024)]
    flip: bool


class CapTerms(Message):
    """The ``clamp`` noise cap (post-processing), and where it is applied."""

    kind: Literal["none", "clamp"]
    where: Literal["device", "coordinator"]
    regularisation: Annotated[float, Limits(gt=0, le=1e6)]
    floor: Annotated[float, Limits(gt=0, le=1e6)]


class ScheduleTerms(Message):
    """How a budget is spread over the rounds; see ``dpagent.privacy.schedules``."""

    kind: ScheduleKind
    step: Annotated[float, Limits(ge=0, le=MAX_SCHEDULE_STEP)]
    ratio: Annotated[float, Limits(ge=1, le=100)]
    weights: Annotated[list[Annotated[float, Limits(gt=0)]], Limits(max_length=MAX_ROUNDS)]


class BoundedTerms(Message):
    """The ``bounded`` noise cap: no noise exceeds the regulariser's pull on the weights as they are sent.

    The job reserves its ε with the first round. What a round costs follows from its weights
    (:mod:`dpagent.privacy.mechanisms.bounded`), so a plan has the noise of its own round only.
    """

    kind: Literal["bounded"]
    regularisation: Annotated[float, Limits(gt=0, le=1e6)]
    floor: Annotated[float, Limits(gt=0, le=1e6)]
    epsilon: Annotated[float, Limits(gt=0, le=1000)]
    """Of the job."""
    rounds: Annotated[int, Limits(ge=1, le=MAX_ROUNDS)]
    """Of the job."""
    schedule: ScheduleTerms
    spent: Annotated[float, Limits(ge=0, le=1000)]
    """ε of the rounds before, as the coordinator took them."""


class PublishedTerms(Message):
    """The ``published`` noise cap: Algorithm 1 of Luo, Xu and Guan, which guarantees nothing; see
    :mod:`dpagent.privacy.mechanisms.published`. The noise multipliers are those of its schedule."""

    kind: Literal["published"]
    regularisation: Annotated[float, Limits(gt=0, le=1e6)]
    epsilon: Annotated[float, Limits(gt=0, le=1000)]
    """What the algorithm counts for the job."""
    step: Annotated[float, Limits(ge=0, le=1000)]
    """Rise of ε a round."""


def _odd(step: int) -> int:
    if step % 2 == 0:
        raise ValueError(f"step is {step}; expected an odd number")
    return step


class NoisySumTerms(Message):
    """A sum of clipped gradients, or of second moments, with noise that each device adds itself."""

    kind: Literal["noisy-sum"]
    mechanism: MechanismTerms
    clipping: ClippingTerms
    sampling: SamplingTerms
    projection: ProjectionTerms | None
    augmentation: AugmentationTerms | None
    cap: Annotated[CapTerms | BoundedTerms | PublishedTerms, By("kind")]
    step: Annotated[int, Limits(ge=1, le=MAX_WIRE_STEP), After(_odd)]
    """Grid units to a unit of a value on the wire; odd."""

    @rule
    def _announces_what_is_known(self) -> None:
        if isinstance(self.cap, BoundedTerms) and (known := len(self.mechanism.noise_multipliers)) != 1:
            raise ValueError(f"with a bounded cap, {known} noise multipliers are announced; expected one")

    @property
    def rounds(self) -> int:
        """Number of rounds of the job."""
        if isinstance(self.cap, BoundedTerms):
            return self.cap.rounds
        return len(self.mechanism.noise_multipliers)


class TrainingTerms(Message):
    """Training on a device, without noise; see ``dpagent.learning.training.local_sgd``."""

    steps: Annotated[int, Limits(ge=1, le=10_000)]
    batch: Annotated[int, Limits(ge=1, le=65_536)]
    """Records of a step, drawn with replacement."""
    learning_rate: Annotated[float, Limits(gt=0, le=1e3)]


class ReportTerms(Message):
    """Random bits of weights that a device has trained."""

    kind: Literal["two-point"]
    noise_multipliers: NoiseMultipliers
    """One over ε of a bit, for each round."""
    coordinates: Annotated[int, Limits(ge=1, le=MAX_DIMENSION)]
    """Bits that a device sends in a round, each of a weight of its own."""
    radii: Annotated[
        list[Annotated[float, Limits(ge=MIN_RADIUS, le=MAX_RADIUS)]], Limits(min_length=1, max_length=512)
    ]
    """Greatest change of a weight that this round reports, for each tensor of the model in its order, in
    weight units; see ``dpagent.privacy.mechanisms.layer_ranges``."""
    training: TrainingTerms

    @property
    def rounds(self) -> int:
        """Number of rounds of the job."""
        return len(self.noise_multipliers)


class UpdateTerms(Message):
    """The change of a device's weights, clipped as a whole, to whose sum the coordinator adds noise."""

    kind: Literal["update"]
    mechanism: MechanismTerms
    clip_norm: Annotated[float, Limits(ge=MIN_NORM, le=MAX_NORM)]
    """Of the change, in the mechanism's norm. Where it follows a quantile, it differs from round to round."""
    count_weight: Annotated[float, Limits(ge=0, le=1)]
    """Weight of the coordinate that counts the devices within the norm; 0 without one."""
    device_noise: MechanismTerms | None
    """What each device adds to its own update besides, on the same grid; its noise multipliers are over twice
    the norm of an update. None: it adds nothing."""
    largest: Annotated[int, Limits(ge=1, le=1 << 40)]
    """Bound on a value's magnitude, and without noise of devices on the norm of all, in grid units."""
    expected_devices: Annotated[int, Limits(ge=1, le=1_000_000)]
    """The divisor of the sum, whoever takes part."""
    training: TrainingTerms

    @property
    def rounds(self) -> int:
        """Number of rounds of the job."""
        return len(self.mechanism.noise_multipliers)


ReleaseTerms: TypeAlias = Annotated[NoisySumTerms | ReportTerms | UpdateTerms, By("kind")]
