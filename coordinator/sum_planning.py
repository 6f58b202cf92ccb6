"""The job's plan where devices send noisy sums (``dp-sgd``, ``incrementing``)."""

from __future__ import annotations

import bisect
import math

from coordinator.bounded_planning import bounded_round
from coordinator.published_planning import published_terms
from coordinator.settings import FleetSettings
from dpagent.errors import ConfigurationError
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.engine import ACCUMULATION_SLACK
from dpagent.privacy.clipping import COUNT_WEIGHT, Clipping
from dpagent.privacy.covariance import SecondMoments
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.privacy.mechanisms.mechanism import PlannedMechanism, Query
from dpagent.protocol.messages import MAX_PAYLOAD_BYTES, WireTerms
from dpagent.protocol.packing import MOST_BITS, payload_bytes
from dpagent.protocol.terms import (
    AugmentationTerms,
    BoundedTerms,
    CapTerms,
    ClippingTerms,
    MechanismTerms,
    NoisySumTerms,
    ProjectionTerms,
    PublishedTerms,
    SamplingTerms,
)
from dpagent.wording import counted


def clipping_of(settings: FleetSettings, spec: ModelSpec, norm: float | None = None) -> Clipping:
    """The clipping of gradients.

    Args:
        settings: The fleet's.
        spec: The model.
        norm: Of the round, if it follows a quantile; by default the first round's.

    Raises:
        ConfigurationError: The numbers of norms and layers differ.
    """
    privacy = settings.privacy
    if privacy.clipping.kind == "layers":
        sizes = spec.layer_sizes
        norms = privacy.clipping.norms or [privacy.clip_norm / len(sizes) ** 0.5] * len(sizes)
        if len(norms) != len(sizes):
            raise ConfigurationError(
                f"privacy.clipping.norms has {counted(len(norms), 'number')}; model {spec.name} has "
                f"{counted(len(sizes), 'layer')} with parameters. Give one for each."
            )
        return Clipping.layers(sizes, norms)
    weight = COUNT_WEIGHT if privacy.clipping.kind == "quantile" else 0.0
    return Clipping.whole(spec.parameter_count, norm or privacy.clip_norm, count_weight=weight)


class SumPlanning:
    """Plans the noisy sums of a job.

    Args:
        settings: The fleet's.
        spec: The model.
    """

    def __init__(self, settings: FleetSettings, spec: ModelSpec) -> None:
        self._settings, self._spec = settings, spec
        self._expected_lot = settings.privacy.sampling_rate * settings.records_per_device

    def query(self, number: int) -> Query:
        """What a round asks of a device, at the first round's clip norm."""
        return self._query(self.second_moments(number) or clipping_of(self._settings, self._spec))

    def second_moments(self, number: int) -> SecondMoments | None:
        """The sum in the first round of a job with a projection; None in other rounds."""
        terms = self._projection()
        return None if terms is None or number > 1 else SecondMoments(terms.values, terms.record_norm)

    def fragments_needed(self, noise: JobNoise) -> int:
        """The smallest number of fragments that is enough for the sum of every round.

        Raises:
            ParameterError: The noise of a round is out of range.
        """
        if self._settings.cap.kind == "bounded":
            # The noise of later rounds is not known yet.
            return _fragments_needed(self._spec.parameter_count, MOST_BITS)
        rounds = (noise.at(number, self.query(number)) for number in range(1, noise.rounds + 1))
        return max(_fragments_needed(each.dimension, each.wire_bits(self._expected_lot)) for each in rounds)

    def terms(
        self, noise: JobNoise, number: int, weights: bytes | None, clip_norm: float | None, spent: float
    ) -> tuple[NoisySumTerms, WireTerms]:
        """The terms of a round's noisy sum, and how it is cut.

        Args:
            noise: of the job.
            number: of the round.
            weights: as they are sent, or None at the end of a job, when no cap acts.
            clip_norm: of the round, if it follows a quantile.
            spent: ε of the rounds before, by which the cost of a round under a ``bounded`` cap goes.

        Raises:
            CapNotMetError: What is left of ε meets no cap of this round.
            ParameterError: The noise is out of range.
        """
        settings, privacy = self._settings, self._settings.privacy
        clipping, augmentation = clipping_of(settings, self._spec, clip_norm), settings.model.augmentation
        cap = settings.cap
        mechanism: PlannedMechanism
        cap_terms: CapTerms | BoundedTerms | PublishedTerms
        if cap.kind == "bounded":
            mechanism, cap_terms = bounded_round(settings, self._spec, noise, number, weights, spent)
            multipliers = [mechanism.noise_multiplier]
        else:
            mechanism = noise.at(number, self._query(self.second_moments(number) or clipping))
            multipliers = list(noise.multipliers)
            if cap.kind == "published":
                cap_terms = published_terms(settings)
            else:
                cap_terms = CapTerms(**cap.as_dict(exclude={"allow_unproven"}))
        release = NoisySumTerms(
            kind="noisy-sum",
            mechanism=MechanismTerms(
                name=mechanism.name,
                noise_multipliers=multipliers,
                parameters=mechanism.announced,
            ),
            clipping=ClippingTerms(
                norms=list(clipping.norms),
                shares=list(clipping.shares),
                count_weight=clipping.count_weight,
                accumulation_slack=ACCUMULATION_SLACK,
            ),
            sampling=SamplingTerms(
                rate=privacy.sampling_rate,
                expected_lot=self._expected_lot,
                local_steps=privacy.local_steps,
                local_learning_rate=privacy.local_learning_rate,
            ),
            projection=self._projection(),
            augmentation=None if augmentation is None else AugmentationTerms(**augmentation.as_dict()),
            cap=cap_terms,
            step=mechanism.wire_step,
        )
        block = -(-mechanism.dimension // settings.fragments_per_update)
        size = payload_bytes(block, mechanism.wire_bits(self._expected_lot))
        return release, WireTerms(block=block, bytes=size)

    def _query(self, summed: Clipping | SecondMoments) -> Query:
        privacy = self._settings.privacy
        return Query(
            clip_norm=summed.radius,
            accumulation_slack=ACCUMULATION_SLACK,
            dimension=summed.dimension,
            sampling_rate=privacy.sampling_rate,
            steps=privacy.local_steps,
        )

    def _projection(self) -> ProjectionTerms | None:
        if self._spec.projection is None:
            return None
        values = math.prod(self._spec.shape_before_projection)
        return ProjectionTerms(values=values, record_norm=self._settings.privacy.record_norm)


def _fragments_needed(dimension: int, bits: float) -> int:
    return bisect.bisect_left(
        range(1, dimension), True,
        key=lambda fragments: payload_bytes(-(-dimension // fragments), bits) <= MAX_PAYLOAD_BYTES,
    ) + 1  # fmt: skip
