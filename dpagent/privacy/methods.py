"""The methods that a fleet can train with: what each protects, from whom, and by which mechanisms.

A *method* is the operator's choice (``privacy.method`` in ``fleet.yaml``): a published way to train, as it is
run here. Its noise comes from a *mechanism* (:mod:`dpagent.privacy.mechanisms.registry`), which a plan names
too, and which alone determines the price. A method knows its mechanisms by name, so that a program can know
methods without the mathematics. Each method has a page in ``docs/methods/``: what its paper says,
what is wrong in it, what runs here, and what is guaranteed to whom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from dpagent.errors import ParameterError
from dpagent.privacy.statement import Trust
from dpagent.schema.limits import After


@dataclass(frozen=True, slots=True)
class Method:
    """A method. Public.

    Attributes:
        name: as plans and settings spell it.
        title: in a few words.
        source: the paper it comes from.
        summary: what a round does.
        device: what a device does before anything leaves it.
        sends: what the coordinator gets of it.
        learns: what the coordinator learns of one device.
        trust: the party on which the guarantee of its default mechanism rests.
        trains_locally: whether devices train without noise first, and clip and hide what comes of it.
        mechanisms: names of its mechanisms by the kind of noise, the default first.
        caps: kinds of noise caps that go with it, the default first.
        schedule: how its rounds share the budget where nothing else is asked for.
    """

    name: str
    title: str
    source: str
    summary: str
    device: str
    sends: str
    learns: str
    trust: Trust
    trains_locally: bool
    mechanisms: dict[str, str]
    caps: tuple[str, ...]
    schedule: Literal["uniform", "incrementing"] = "uniform"

    @property
    def default_noise(self) -> str:
        """The kind of noise where none is asked for."""
        return next(iter(self.mechanisms))

    def mechanism_name(self, noise: str | None = None) -> str:
        """The name of the mechanism for a kind of noise, by default the method's own.

        Raises:
            ParameterError: the method has no such noise.
        """
        noise = noise or self.default_noise
        if noise not in self.mechanisms:
            raise ParameterError(
                f"noise is {noise!r}; expected one of {', '.join(self.mechanisms)}, with which the method "
                f"{self.name} runs."
            )
        return self.mechanisms[noise]


_GAUSSIAN: Final = {"gaussian": "discrete-gaussian"}
_OF_A_NOISY_SUM: Final = (
    "clips the gradients of a random lot of its records, adds them up and adds noise",
    "noisy sums",
    "One noisy sum a round, in fragments that it cannot link unless it is the broker too: no record of the "
    "device changes the probability of anything it sees by more than ε and δ say.",
    Trust.NONE,
    False,
)

METHODS: Final[dict[str, Method]] = {
    method.name: method
    for method in (
        Method(
            "dp-sgd",
            "Clipped gradients with discrete Gaussian noise, added on each device",
            "Abadi et al., Deep learning with differential privacy, CCS 2016; noise after Kairouz, Liu, "
            "Steinke, ICML 2021",
            "Each device draws a random lot, clips each record's gradient, adds them up in integers and adds "
            "its own noise before anything leaves; the coordinator takes a step with the mean.",
            *_OF_A_NOISY_SUM,
            _GAUSSIAN,
            ("clamp", "none"),
        ),
        Method(
            "incrementing",
            "A budget that grows from round to round, and noise within bounds",
            "Luo, Xu, Guan, Differential privacy budget optimization based on deep learning in IoT, 2022",
            "As dp-sgd; the early rounds get little of the budget and the last ones most, and no step is "
            "longer than the regulariser's pull.",
            *_OF_A_NOISY_SUM,
            _GAUSSIAN | {"laplace": "discrete-laplace"},
            ("clamp", "none", "bounded", "published"),
            schedule="incrementing",
        ),
        Method(
            "ldp-fl",
            "A random bit for some of the weights that each device trained",
            "Sun, Qian, Chen, LDP-FL: Practical private aggregation in federated learning with local "
            "differential privacy, IJCAI 2021",
            "Each device trains without noise, and sends for some weights, drawn without a look at its "
            "records, one random bit each; the coordinator counts bits by weight and steps towards their "
            "unbiased mean.",
            "trains on its records, and draws one random bit for some of the weights",
            "random bits",
            "A few random bits a round, in fragments that it cannot link unless it is the broker too: no "
            "records of the device, whatever they are, change the probability of anything it sees by more "
            "than ε and δ say.",
            Trust.NONE,
            True,
            {"two-point": "two-point"},
            ("none",),
        ),
        Method(
            "central",
            "Federated averaging, with noise that the coordinator adds",
            "Huang, Differential-privacy-based data privacy and security for federated learning, 2022; after "
            "McMahan, Ramage, Talwar, Zhang, ICLR 2018",
            "Each device trains without noise, and sends the change of its weights, clipped whole, in whole "
            "numbers; the coordinator adds noise to their sum, once, steps by it and deletes the sum. The "
            "clip norm is given, or follows a quantile of the devices (privacy.clipping). Devices may add "
            "noise of their own besides (privacy.device_noise): then a second ε trusts nobody.",
            "trains on its records, and clips the change of its weights",
            "updates without noise",
            "All of its update, in fragments that it cannot link unless it is the broker too: ε and δ bound "
            "what everybody else learns from the models, and nothing bounds what the coordinator learns, "
            "unless devices add noise of their own: then the second ε does.",
            Trust.COORDINATOR,
            True,
            {"gaussian": "central-gaussian", "laplace": "central-laplace"},
            ("none",),
        ),
    )
}
"""By name."""

DEFAULT_METHOD: Final = "dp-sgd"


def method_named(name: str) -> Method:
    """The method of that name.

    Raises:
        ParameterError: there is none here.

    >>> method_named("dp-sgd").trust.value
    'none'
    """
    if name not in METHODS:
        raise ParameterError(f"method is {name!r}; expected one of {', '.join(METHODS)}.")
    return METHODS[name]


def _known(name: str) -> str:
    try:
        return method_named(name).name
    except ParameterError as error:
        raise ValueError(str(error)) from error  # No number is out of range.


MethodName: TypeAlias = Annotated[str, After(_known)]
"""A method's name in a settings file."""
