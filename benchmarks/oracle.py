"""The ε of rounds by dp-accounting, an implementation that shares no code with ours."""

from __future__ import annotations

import logging
from collections.abc import Iterable

# It announces each fractional order whose series does not converge, and leaves it out.
logging.getLogger("absl").setLevel(logging.ERROR)


def rdp_epsilon(rounds: Iterable[tuple[float, float, int]], delta: float) -> float:
    """ε at ``delta`` of rounds (noise multiplier, sampling rate, steps), continuous Gaussian noise.

    Its default orders, add-or-remove-one adjacency.
    """
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    for noise_multiplier, sampling_rate, steps in rounds:
        event = PoissonSampledDpEvent(sampling_rate, GaussianDpEvent(noise_multiplier))
        accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))


def pld_epsilon(rounds: Iterable[tuple[float, float, int]], delta: float, *, grid: float) -> float:
    """The same by privacy-loss distributions (pessimistic), on a grid of that step."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=grid)
    for noise_multiplier, sampling_rate, steps in rounds:
        event = PoissonSampledDpEvent(sampling_rate, GaussianDpEvent(noise_multiplier))
        accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))
