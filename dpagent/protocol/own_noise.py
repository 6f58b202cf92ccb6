"""The noise that each device adds to its own update, as a plan announces it: a second guarantee of the round,
which trusts nobody, with a price of its own (:mod:`dpagent.privacy.mechanisms.device_noise`)."""

from __future__ import annotations

from dataclasses import dataclass

from dpagent.errors import ParameterError, PlanError
from dpagent.privacy.events import Event
from dpagent.privacy.mechanisms.central import CentralMechanism
from dpagent.privacy.mechanisms.device_noise import DeviceNoise
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.privacy.mechanisms.mechanism import Mechanism, Query
from dpagent.protocol.terms import MechanismTerms


@dataclass(frozen=True, slots=True)
class OwnNoise:
    """Of one round. Public.

    Attributes:
        number: of the round.
        query: that it answers.
        noise: of the whole job.
        mechanism: of this round.
    """

    number: int
    query: Query
    noise: JobNoise
    mechanism: DeviceNoise

    @classmethod
    def of(cls, announced: MechanismTerms, number: int, query: Query, beside: JobNoise) -> OwnNoise:
        """Derive what a plan announces.

        Args:
            announced: by the plan.
            number: of the round.
            query: of the round.
            beside: the coordinator's noise, of the whole job.

        Raises:
            DpagentError: no device could add it; the text says why.
        """
        noise = JobNoise.announced(announced.name, announced.noise_multipliers, announced.parameters)
        mechanism = noise.at(number, query)
        if not (
            isinstance(mechanism, DeviceNoise)
            and issubclass(beside.mechanism, CentralMechanism)
            and mechanism.norm is beside.mechanism.norm
        ):
            raise PlanError(
                f"Noise of mechanism {announced.name} is not for a device to add beside that of "
                f"{beside.mechanism.name}."
            )
        if (noise.rounds, noise.parameters) != (beside.rounds, beside.parameters):
            raise PlanError(
                f"Noise of devices is for {noise.rounds} rounds on a grid of {dict(noise.parameters)}; the "
                f"coordinator's for {beside.rounds} on one of {dict(beside.parameters)}."
            )
        return cls(number, query, noise, mechanism)

    @property
    def reserved_epsilon(self) -> None:
        """None: what the job costs follows from its rounds."""
        return

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of this round and all later ones of the job, in order.

        Raises:
            PlanError: a later round has parameters that no device could run.
        """
        return tuple(each.event for each in self.mechanisms)

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """Those of the same rounds.

        Raises:
            PlanError: as of :attr:`events`.
        """
        return mechanisms_from(self.number, self.query, self.noise)


def mechanisms_from(number: int, query: Query, noise: JobNoise) -> tuple[Mechanism, ...]:
    """The mechanisms of a round and all later ones of a job that ask the same, in order.

    Raises:
        PlanError: one has parameters that no device could run.
    """
    try:
        return tuple(noise.at(each, query) for each in range(number, noise.rounds + 1))
    except ParameterError as error:
        raise PlanError(f"A later round of the job cannot be run: {error}") from error
