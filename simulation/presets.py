"""A fleet's settings of training, where the request leaves them open.

Known data sets have settings of their own, by model; their results are measured in
docs/benchmarks.md. Those of ``scattering`` on MNIST were found by a search with its test set in view, so they
are neither private nor a fair estimate of the result of a search without it.

For all other data and models the settings follow from the number of records and parameters, by rule:

* **Sampling rate**: a lot of about 10·√n of a device's n records, at most all of them.
* **Learning rate**: so that the step of a gradient of norm C, with momentum μ summed up, is L = η·C/(1 − μ)
  with L = 16·r/T in [0.5, 4], where r is the run's ratio of signal to noise (``outlook.py``) and T its number
  of rounds. The noise of all rounds then walks about 16 in weight space, for every ε: this is what the
  settings above, found one by one, have in common within a factor of 2. With so short a step the noise cap
  has nothing to guard against, and is off.
* **Clip norm in L1**: as long as a gradient that is clipped to the L2 norm above typically is in L1, 0.6·√d
  times that norm for d parameters (0.57·√d in ``digits``, 0.72·√d in ``mnist-cnn``, 0.68·√d in ``sensor-cnn``
  at the first weights; √(2/π)·√d for normal numbers). Steps are as long, in L2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dpagent.norm import Norm
from dpagent.privacy.mechanisms.registry import mechanism_of
from dpagent.privacy.methods import method_named
from dpagent.wording import counted
from simulation.request import CapKind, KnownData, Request


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings of one data set and model. An empty or zero value follows a rule."""

    model: str
    devices: int
    rounds: int
    epsilon: float
    clip_norm: float
    momentum: float
    jitter_window_s: float
    cap: CapKind
    sampling_rate: float = 0.0
    learning_rate: float = 0.0
    compute_slot_s: float = 0.0


PRESETS: Final[dict[KnownData, Preset]] = {
    "digits": Preset(
        model="digits", devices=5, rounds=40, epsilon=4.0, sampling_rate=0.5, clip_norm=0.5, cap="clamp",
        learning_rate=2.0, momentum=0.5, compute_slot_s=0.3, jitter_window_s=0.4,
    ),
    "mnist": Preset(
        model="mnist-cnn", devices=10, rounds=100, epsilon=2.0, sampling_rate=0.1, clip_norm=1.0, cap="clamp",
        learning_rate=2.4, momentum=0.5, compute_slot_s=1.0, jitter_window_s=0.5,
    ),
}  # fmt: skip
"""By data set, of the model that it is trained with unless another is asked for."""

_MNIST_SCATTERING: Final = Preset(
    model="scattering", devices=10, rounds=200, epsilon=2.0, sampling_rate=0.1, clip_norm=0.2, cap="none",
    learning_rate=3.0, momentum=0.9, jitter_window_s=0.5,
)  # fmt: skip

OWN_DATA: Final = Preset(
    model="", devices=5, rounds=60, epsilon=4.0, clip_norm=0.5, cap="none", momentum=0.9,
    jitter_window_s=0.4,
)  # fmt: skip
"""Of data of one's own, and of known data with a model that has no settings of its own."""

_REPORTS: Final = Preset(
    model="", devices=10, rounds=20, epsilon=900.0, clip_norm=1.0, cap="none", learning_rate=0.5,
    momentum=0.0, jitter_window_s=0.4,
)  # fmt: skip
"""Of ``ldp-fl`` with any data, and a linear model. The learning rate is the share of the devices' mean change
that a reported weight takes. A guarantee for whole devices that trusts nobody needs so large an ε for so few
of them to learn anything."""
_UPDATES: Final = Preset(
    model="", devices=20, rounds=10, epsilon=8.0, clip_norm=1.0, cap="none", learning_rate=1.0,
    momentum=0.0, jitter_window_s=0.4,
)  # fmt: skip
"""Of ``central`` with any data, and a linear model: the mean update is added to the weights. One noise for
the whole fleet is less than one for each device, but it hides a whole device among twenty."""
LOCAL_TRAINING: Final = {"steps": 20, "batch": 32, "learning_rate": 0.5}
"""Of ``ldp-fl`` and ``central``: from the first weights of a small model, nearly as far as training on all
data goes."""

_TRAINED: Final = (("steps", "local step"), ("batch", "record"))

_L1_STRETCH: Final = 0.6

# ε at which settings were searched for; between them, all follow the logarithm of ε.
_SEARCHED_EPSILONS: Final = (0.5, 2.0, 8.0)
_SCATTERING_ROUNDS: Final = (100, 200, 200)
_SCATTERING_LEARNING_RATES: Final = (1.5, 3.0, 6.0)
# With little noise, small lots waste budget: at ε = 8 in 200 rounds, a rate of 0.1 leaves a ratio of signal
# to noise of 116, 0.3 one of 148, and all records 156.
_SCATTERING_SAMPLING_RATES: Final = (0.1, 0.1, 0.3)


def preset_of(request: Request) -> Preset:
    """The settings to start from; those of ``scattering`` on MNIST follow ε."""
    if method_named(request.method).trains_locally:
        return _REPORTS if mechanism_of(method_named(request.method)).norm is None else _UPDATES
    if request.data.dataset is None:
        return OWN_DATA
    preset = PRESETS[request.data.dataset]
    if request.model is None or request.model == preset.model:
        return preset
    if (request.data.dataset, request.model) == ("mnist", "scattering"):
        at = math.log(request.epsilon or _MNIST_SCATTERING.epsilon)
        known = [math.log(searched) for searched in _SEARCHED_EPSILONS]
        return replace(
            _MNIST_SCATTERING,
            rounds=round(float(np.interp(at, known, _SCATTERING_ROUNDS))),
            learning_rate=float(np.interp(at, known, _SCATTERING_LEARNING_RATES)),
            sampling_rate=float(np.interp(at, known, _SCATTERING_SAMPLING_RATES)),
        )
    return replace(OWN_DATA, devices=preset.devices, epsilon=preset.epsilon)


def local_training_in_words() -> str:
    """How much a device trains in a round of ``ldp-fl`` or ``central``."""
    steps, batch = (counted(round(LOCAL_TRAINING[key]), what) for key, what in _TRAINED)
    return f"{steps} of {batch}"


def typical_stretch(norm: Norm, parameters: int) -> float:
    """How many times as long as in L2 a gradient typically is in the mechanism's norm, by the rule."""
    return 1.0 if norm is Norm.L2 else _L1_STRETCH * math.sqrt(parameters)


def sampling_rate_for(records_per_device: int) -> float:
    """The rule's sampling rate, two digits of it."""
    return min(1.0, float(f"{10 / math.sqrt(records_per_device):.2g}"))


def learning_rate_for(signal_to_noise: float, rounds: int, clip_norm: float, momentum: float) -> float:
    """The rule's learning rate, three digits of it."""
    step = min(max(16 * signal_to_noise / rounds, 0.5), 4.0)
    return float(f"{step * (1 - momentum) / clip_norm:.3g}")
