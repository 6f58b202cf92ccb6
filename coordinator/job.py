"""A job: what was asked for, and the noise that spends its budget, both fixed when it is queued."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRounds


@dataclass(frozen=True, slots=True)
class NoiseOfDevices:
    """Noise that devices add to their updates besides the coordinator's, and the ε without trust that each
    round brings it to."""

    noise: JobNoise
    epsilon_by_round: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """The job's definition, fixed before it begins."""

    id: bytes
    terms: dict[str, object]
    noise: JobNoise | TwoPointRounds
    epsilon_by_round: tuple[float, ...]
    device: NoiseOfDevices | None = None

    @property
    def rounds(self) -> int:
        """Rounds of the job."""
        rounds: Any = self.terms["rounds"]
        return int(rounds)

    @property
    def delta(self) -> float:
        """δ of the job."""
        privacy: Any = self.terms["privacy"]
        return float(privacy["delta"])

    @property
    def fragments_per_update(self) -> int:
        """Fragments of a device's update."""
        fragments: Any = self.terms["fragments_per_update"]
        return int(fragments)

    @property
    def linkability(self) -> str:
        """What tokens of members let the coordinator link."""
        return str(self.terms.get("linkability", "none"))

    def stored(self) -> tuple[bytes, str, str]:
        """Id, terms and budget as they are stored."""
        own = self.device and _budget_of(self.device.noise, self.device.epsilon_by_round)
        budget = _budget_of(self.noise, self.epsilon_by_round) | {"device": own}
        return self.id, json.dumps(self.terms, sort_keys=True), json.dumps(budget)

    @classmethod
    def read(cls, identity: bytes, terms: str, budget: str) -> Job:
        """Inverse of :meth:`stored`."""
        values = json.loads(budget)
        own, device = values["device"], None
        if own is not None:
            added = JobNoise.announced(own["mechanism"], own["noise_multipliers"], own["parameters"])
            device = NoiseOfDevices(added, tuple(own["epsilon_by_round"]))
        return cls(identity, json.loads(terms), _noise_of(values), tuple(values["epsilon_by_round"]), device)


def _budget_of(noise: JobNoise | TwoPointRounds, epsilon_by_round: Sequence[float]) -> dict[str, Any]:
    return {
        "mechanism": noise.mechanism.name,
        "noise_multipliers": noise.multipliers,
        "parameters": dict(noise.parameters),
        "epsilon_by_round": epsilon_by_round,
    }


def _noise_of(budget: dict[str, Any]) -> JobNoise | TwoPointRounds:
    name, multipliers, parameters = budget["mechanism"], budget["noise_multipliers"], budget["parameters"]
    if name == TwoPointRounds.mechanism.name:
        return TwoPointRounds(tuple(multipliers), parameters["coordinates"])
    return JobNoise.announced(name, multipliers, parameters)
