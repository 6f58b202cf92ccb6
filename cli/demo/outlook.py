"""How much can be learnt from so many records under so much noise: a rule of thumb, known before training.

Over a run of T rounds, each of D devices with n records adds noise of σ_t·C to sums over lots of q·n records.
Were all records' clipped gradients to point the same way in all rounds, their means would add up to a length
of T·C. The noise adds up to √(Σσ_t²·d/D)·C/(q·n) over d parameters. The ratio

    r = T·q·n·√D / √(d·Σσ_t²)

is how many times longer than the noise the signal can be at most. Since σ_t grows with q·√T, r depends
little on either: it is about n·√(2ρ·D/d), ρ being the budget in zCDP. Only more records, more devices, a
larger ε or fewer parameters help.

What that does to the accuracy was tried in simulations (images, series and tables made up with structure, 20
to 130 records on each of 5 devices, ε from 0.25 to 4): below 0.5 nearly all of what could be learnt was
lost, between 0.5 and 2 much of it, and above 2 most of it stayed. A real gradient points many ways, so r is
no guarantee; and directions without signal count as noise, so a model with good features may do better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dpagent.privacy import Clipping

_HOPELESS: Final = 0.5
_DOUBTFUL: Final = 2.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a run can be expected to learn.

    Attributes:
        signal_to_noise: r, see the module.
    """

    signal_to_noise: float

    @property
    def verdict(self) -> str:
        """``good``, ``doubtful`` or ``hopeless``."""
        if self.signal_to_noise < _HOPELESS:
            return "hopeless"
        return "doubtful" if self.signal_to_noise < _DOUBTFUL else "good"

    def sentence(self, *, records_per_device: int, devices: int, epsilon: float, parameters: int) -> str:
        """The verdict with its reason, for a person."""
        ratio = f"{self.signal_to_noise:.2g}"
        setting = (
            f"{records_per_device:,} records on each of {devices} devices, {parameters:,} parameters and "
            f"ε = {epsilon:g}"
        )
        helps = "More records or devices, a larger --epsilon or a model with fewer parameters would help"
        match self.verdict:
            case "hopeless":
                return (
                    f"Expect hardly anything to be learnt. With {setting}, all gradients together are at "
                    f"most {ratio} times as long as the noise. {helps}; more rounds would not."
                )
            case "doubtful":
                return (
                    f"Expect noise to cost accuracy. With {setting}, all gradients together are at most "
                    f"{ratio} times as long as the noise. {helps}."
                )
        return f"With {setting}, all gradients together can be {ratio} times as long as the noise."


def outlook_of(
    clipping: Clipping,
    noise_multipliers: Sequence[float],
    *,
    sampling_rate: float,
    records_per_device: float,
    devices: int,
) -> Outlook:
    """The outlook of a run.

    Args:
        clipping: How gradients are clipped; of layers, each has its own noise.
        noise_multipliers: Of each round.
        sampling_rate: In (0, 1].
        records_per_device: Above 0.
        devices: That take part.
    """
    # Noise of σ·R·C_ℓ/(√p_ℓ·R) a coordinate of layer ℓ; R is the norm of the whole.
    spread = math.sqrt(
        sum(
            size * norm**2 / share
            for size, norm, share in zip(clipping.sizes, clipping.norms, clipping.shares, strict=True)
        )
    )
    noise = spread * math.hypot(1.0, clipping.count_weight / 2) * math.hypot(*noise_multipliers)
    signal = len(noise_multipliers) * clipping.reference * sampling_rate * records_per_device
    return Outlook(signal * math.sqrt(devices) / noise)
