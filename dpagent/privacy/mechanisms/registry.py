"""The mechanisms of noisy sums that a plan can name, whoever adds the noise."""

from __future__ import annotations

from typing import Final

from dpagent.errors import ParameterError
from dpagent.privacy.mechanisms.central import CentralGaussian, CentralLaplace
from dpagent.privacy.mechanisms.device_noise import DeviceGaussian, DeviceLaplace
from dpagent.privacy.mechanisms.discretised_gaussian import DiscretisedGaussian
from dpagent.privacy.mechanisms.discretised_laplace import DiscretisedLaplace
from dpagent.privacy.mechanisms.mechanism import CalibratedMechanism, Mechanism, PlannedMechanism
from dpagent.privacy.mechanisms.published import PublishedLaplace
from dpagent.privacy.mechanisms.truncated_laplace import TruncatedLaplace
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRound
from dpagent.privacy.methods import Method

#: Those whose noise is chosen for a whole job before it begins.
CALIBRATED: Final[dict[str, type[CalibratedMechanism]]] = {
    mechanism.name: mechanism
    for mechanism in (
        DiscretisedGaussian,
        DiscretisedLaplace,
        CentralGaussian,
        CentralLaplace,
        DeviceGaussian,
        DeviceLaplace,
    )
}
#: By name on the wire and in ledgers.
MECHANISMS: Final[dict[str, type[PlannedMechanism]]] = {
    **CALIBRATED,
    TruncatedLaplace.name: TruncatedLaplace,
    PublishedLaplace.name: PublishedLaplace,
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


def calibrated_named(name: str) -> type[CalibratedMechanism]:
    """The mechanism of that name, whose noise is chosen for a whole job.

    Raises:
        ParameterError: there is none here.
    """
    if name not in CALIBRATED:
        raise ParameterError(f"mechanism is {name!r}; expected one of {', '.join(sorted(CALIBRATED))}.")
    return CALIBRATED[name]


def mechanism_of(method: Method, noise: str | None = None) -> type[Mechanism]:
    """The mechanism of a method for a kind of noise, by default the method's own.

    Raises:
        ParameterError: the method has no such noise.

    >>> from dpagent.privacy.methods import method_named
    >>> mechanism_of(method_named("incrementing"), "laplace").name
    'discrete-laplace'
    """
    name = method.mechanism_name(noise)
    return TwoPointRound if name == TwoPointRound.name else calibrated_named(name)
