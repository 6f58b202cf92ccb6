"""The mechanisms that a plan can name.

The other mechanisms in this package are not wired to the programs yet.
"""

from __future__ import annotations

from typing import Final

from dpagent.errors import ParameterError
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.discretised_laplace import DiscretisedLaplace
from dpagent.privacy.mechanisms.mechanism import PlannedMechanism

#: By name on the wire and in ledgers.
MECHANISMS: Final[dict[str, type[PlannedMechanism]]] = {
    mechanism.name: mechanism for mechanism in (DiscretisedGaussian, DiscretisedLaplace)
}

DEFAULT_MECHANISM: Final = DiscretisedGaussian.name


def mechanism_named(name: str) -> type[PlannedMechanism]:
    """The mechanism of that name.

    Raises:
        ParameterError: there is none here.

    >>> mechanism_named("discrete-gaussian").norm.value
    'L2'
    """
    if name not in MECHANISMS:
        raise ParameterError(f"mechanism is {name!r}; expected one of {', '.join(sorted(MECHANISMS))}.")
    return MECHANISMS[name]
