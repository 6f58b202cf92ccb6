"""The job's plan: the operator's settings as the announcement of each round."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal

import cbor2

from coordinator.bounded_planning import bounded_rounds
from coordinator.job import Job, NoiseOfDevices
from coordinator.published_planning import published_rounds
from coordinator.report_planning import (
    first_radii,
    fragments_for_reports,
    report_rounds,
    report_terms,
    report_wire,
)
from coordinator.settings import FleetSettings
from coordinator.store import OpenRound
from coordinator.sum_planning import SumPlanning
from coordinator.update_planning import (
    fragments_for_update,
    update_clipping,
    update_noise,
    update_terms,
)
from dpagent.errors import ParameterError, PlanError
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.accounting.composition import composed
from dpagent.privacy.mechanisms.bounded import CapNotMetError
from dpagent.privacy.mechanisms.central import CentralMechanism
from dpagent.privacy.mechanisms.job_noise import JobNoise, calibrated_noise
from dpagent.privacy.mechanisms.mechanism import CalibratedMechanism, Query
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRounds
from dpagent.protocol.chunks import content_digest
from dpagent.protocol.messages import (
    MAX_PAYLOAD_BYTES,
    MAX_WHOLE_BYTES,
    AssetTerms,
    ModelTerms,
    Plan,
)
from dpagent.protocol.mixing import raw_key
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.task import Release, RoundTask
from dpagent.protocol.terms import (
    BoundedTerms,
    NoisySumTerms,
    ReportTerms,
    UpdateTerms,
)
from dpagent.protocol.updates import query_of_update
from dpagent.protocol.weights import weights_to_bytes
from dpagent.schema.problems import SchemaError
from dpagent.wording import counted


def job_noise(
    settings: FleetSettings, spec: ModelSpec
) -> tuple[JobNoise | TwoPointRounds, tuple[float, ...], NoiseOfDevices | None]:
    """The noise that spends the target over the rounds, and the ε that each round brings it to; and the same
    of noise that devices add besides, if they do.

    Raises:
        PlanError: No noise meets a target.
    """
    mechanism = settings.privacy.mechanism
    if issubclass(mechanism, CentralMechanism):
        return update_noise(settings, spec, mechanism)
    return (*_noise_without_trust(settings, spec), None)


def _noise_without_trust(
    settings: FleetSettings, spec: ModelSpec
) -> tuple[JobNoise | TwoPointRounds, tuple[float, ...]]:
    """The noise where devices add all of it, and the ε that each round brings it to."""
    privacy = settings.privacy
    if not issubclass(privacy.mechanism, CalibratedMechanism):
        return report_rounds(settings, spec)
    if settings.cap.kind == "bounded":
        return bounded_rounds(settings)
    if settings.cap.kind == "published":
        return published_rounds(settings)
    budget = calibrated_noise(
        privacy.mechanism,
        privacy.spending,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        rounds=settings.rounds,
        sampling_rate=privacy.sampling_rate,
        steps=privacy.local_steps,
    )
    return JobNoise.chosen(privacy.mechanism.name, budget.noise_multipliers), budget.epsilon_by_round


def new_job(settings: FleetSettings) -> Job:
    """A job with a fresh random id.

    Raises:
        PlanError: No noise meets the target.
    """
    return Job(os.urandom(16), settings.job_terms(), *job_noise(settings, settings.model.spec()))


def gradient_steps(settings: FleetSettings, spec: ModelSpec) -> int:
    """Rounds of the job that step the model: all except the one that finds the directions of a projection.

    Raises:
        PlanError: There are none.
    """
    steps = settings.rounds - (spec.projection is not None)
    if steps < 1:
        raise PlanError(
            f"rounds is {settings.rounds}; expected at least 2: the first one finds the directions for the "
            f"projection of model {spec.name!r}."
        )
    return steps


def require_sendable(spec: ModelSpec, assets: Mapping[str, bytes]) -> None:
    """Refuse weights or an asset that exceed the protocol's limit, at any precision.

    Args:
        spec: The model.
        assets: By role.

    Raises:
        PlanError: Naming the weights or asset that is too large.
    """
    sizes = {"weights": 4 * spec.parameter_count} | {role: len(data) for role, data in assets.items()}
    for what, size in sizes.items():
        if size > MAX_WHOLE_BYTES:
            raise PlanError(
                f"{what} of model {spec.name!r}: {counted(size, 'byte')}; expected at most "
                f"{MAX_WHOLE_BYTES:,}, the limit of devices. Choose a smaller model."
            )


class Planner:
    """Makes the plan of each round of a job, and checks beforehand that devices can accept all of them.

    Args:
        settings: The fleet's.
        spec: The model.
        job: Every plan announces its whole schedule.
        sealing_key: Devices seal fragments to it.
    """

    def __init__(self, settings: FleetSettings, spec: ModelSpec, job: Job, sealing_key: bytes) -> None:
        self._settings, self._spec, self._job, self._sealing_key = settings, spec, job, sealing_key
        self._sums = SumPlanning(settings, spec)

    def task(
        self,
        current: OpenRound,
        weights: bytes,
        *,
        clip_norm: float | None = None,
        radii: Sequence[float] = (),
        spent: float = 0.0,
        assets: Mapping[str, bytes] | None = None,
        state: Literal["open", "finished"] = "open",
    ) -> RoundTask:
        """The task of a round, derived from its plan in the same way as on devices.

        Args:
            current: The round.
            weights: The model's bytes, as they are sent.
            clip_norm: Of this round, if it follows a quantile.
            radii: Of this round's reports, for each tensor; by default those of the first round.
            spent: ε of the rounds before, by which the cost of a round under a ``bounded`` cap goes.
            assets: The devices' inputs besides the weights, by role.
            state: Whether the job continues.

        Raises:
            CapNotMetError: What is left of ε meets no cap of this round.
            PlanError: No device would accept the plan.
        """
        try:
            plan = self._plan(current, weights, clip_norm, radii, spent, assets or {}, state)
            return RoundTask.of(plan)
        except SchemaError as error:
            raise PlanError(f"No device would accept this plan: {error.first.sentence()}.") from error
        except CapNotMetError:
            raise
        except PlanError as error:
            raise PlanError(f"No device would accept this plan. {error}") from error

    def epsilon_after(self, release: Release) -> float:
        """ε that a round brings the job to."""
        match release:
            case NoisySum(terms=NoisySumTerms(cap=BoundedTerms(spent=spent))):
                return spent + composed(release.mechanism.event).epsilon
        return self._job.epsilon_by_round[release.plan.round - 1]

    def fragments_needed(self) -> int:
        """The smallest number of fragments that is enough for the update of every round.

        Raises:
            ParameterError: The noise of a round is out of range.
        """
        noise = self._job.noise
        if isinstance(noise, TwoPointRounds):
            return fragments_for_reports(noise, self._spec)
        if issubclass(noise.mechanism, CentralMechanism):
            return fragments_for_update(self._settings, self._spec, noise, self._noise_of_devices)
        return self._sums.fragments_needed(noise)

    def require_acceptable(self) -> None:
        """Refuse a job that never steps the model, or with a round that every device would decline.

        A round with less noise needs more bytes on the wire, so a job could start and fail
        in a later round. And at an absurdly large ε, the sampler's distance from an exact one
        exceeds its share of δ.

        Raises:
            PlanError: No round steps the model; or naming the first declined round, and the reason.
        """
        settings, job = self._settings, self._job
        gradient_steps(settings, self._spec)
        if isinstance(job.noise, JobNoise) and settings.cap.kind != "bounded":
            try:
                job.noise.require_acceptable(
                    self._query_of_round, job.epsilon_by_round[-1], settings.privacy.delta
                )
                if job.device is not None:
                    job.device.noise.require_acceptable(
                        self._query_of_round, job.device.epsilon_by_round[-1], settings.privacy.delta
                    )
            except ParameterError as error:
                raise PlanError(f"No device would accept this job. Its {error}") from error
        if (needed := self.fragments_needed()) > settings.fragments_per_update:
            raise PlanError(
                f"fragments_per_update is {settings.fragments_per_update}; expected at least {needed}: "
                f"a fragment's values must fit {MAX_PAYLOAD_BYTES:,} bytes in every round."
            )
        weights = self._spec.initial_weights(self._settings.model.seed)
        for number in sorted({1} | self._rounds_of_extreme_noise()):
            self.task(OpenRound(number, 0, 0), weights_to_bytes(weights, settings.model.precision))

    def _rounds_of_extreme_noise(self) -> set[int]:
        """The rounds with the least and the most noise: what they can be planned with, the others can."""
        if not isinstance(self._job.noise, JobNoise) or self._settings.cap.kind == "bounded":
            return set()
        jobs = [self._job.noise.multipliers]
        if self._noise_of_devices is not None:
            jobs.append(self._noise_of_devices.multipliers)
        return {1 + each.index(pick(each)) for each in jobs for pick in (min, max)}

    @property
    def _job_noise(self) -> JobNoise:
        assert isinstance(self._job.noise, JobNoise)
        return self._job.noise

    @property
    def _noise_of_devices(self) -> JobNoise | None:
        """That which they add to updates, besides the coordinator's on the sum."""
        return None if self._job.device is None else self._job.device.noise

    def _query_of_round(self, number: int) -> Query:
        if issubclass(self._job_noise.mechanism, CentralMechanism):
            return query_of_update(update_clipping(self._settings, self._spec))
        return self._sums.query(number)

    def _plan(
        self,
        current: OpenRound,
        weights: bytes,
        clip_norm: float | None,
        radii: Sequence[float],
        spent: float,
        assets: Mapping[str, bytes],
        state: Literal["open", "finished"],
    ) -> Plan:
        settings, spec = self._settings, self._spec
        release: NoisySumTerms | ReportTerms | UpdateTerms
        if isinstance(reports := self._job.noise, TwoPointRounds):
            release = report_terms(settings, reports, radii or first_radii(settings, spec))
            wire = report_wire(settings, reports, spec)
        elif issubclass(self._job_noise.mechanism, CentralMechanism):
            release, wire = update_terms(
                settings, spec, self._job_noise, self._noise_of_devices, current.number, clip_norm
            )
        else:
            if self._sums.second_moments(current.number) is not None:
                # The directions are on disk already after a crash just before the round closed.
                assets = {role: data for role, data in assets.items() if role != "projection"}
            # At the end of a job no cap acts: nobody draws that noise.
            at = None if state == "finished" else weights
            release, wire = self._sums.terms(self._job_noise, current.number, at, clip_norm, spent)
        return Plan(
            fleet=settings.fleet,
            job=self._job.id,
            round=current.number,
            state=state,
            method=settings.privacy.method,
            model=ModelTerms(
                description=cbor2.dumps(spec.describe(), canonical=True),
                parameters=spec.parameter_count,
                architecture=spec.digest(),
                digest=content_digest(weights),
                precision=settings.model.precision,
            ),
            assets=[
                AssetTerms.checked({"role": role, "digest": content_digest(data), "size": len(data)})
                for role, data in assets.items()
            ],
            release=release,
            delta=settings.privacy.delta,
            wire=wire,
            sealing_key=self._sealing_key,
            linkability=settings.linkability,
            mixer=None if settings.mixer_key is None else raw_key(settings.mixer_key),
            receipts=settings.receipt_topics,
            deadline=current.deadline,
            compute_slot_s=settings.round.compute_slot_s,
            jitter_window_s=settings.round.jitter_window_s,
        )
