"""A model for data of a form: a built-in one that fits, or one made by rule.

Under a small budget few parameters learn more than many, because noise enters every one of them, and
frozen features more than learnt ones (Tramèr and Boneh, "Differentially Private Learning Needs Better
Features", ICLR 2021). Hence the rules, which look at the shape alone:

* **Built-in or made.** Of the built-in models with this shape and number of classes, and the one made by the
  rules below: those with a front end first, then the one with fewest parameters.
* **Images** of 8 × 8 or more: wavelet scattering, as many scales J (up to 4) as leave 4 × 4 places; 8 angles
  for J ≤ 2, else 4; averaged to at most 8 places along the shorter side; group normalisation; linear.
* **Series** of 16 readings or more: two convolutions of 16 channels, kernel 5 and 3, the first with stride 2,
  each with tanh and maximum pooling, the last down to at most 2 places; linear.
* **Everything else**: a hidden layer of 16 units, tanh; linear.

Pixels in [0, 1] are shifted by 0.5 and scaled by 0.25: constants, not statistics of the data. All others are
taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import yaml

from dpagent.learning.models.built_ins import BUILT_IN
from dpagent.learning.models.layers import (
    AveragePool2d,
    Conv1d,
    Dense,
    GroupNorm,
    Layer,
    MaxPool1d,
    Tanh,
)
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import RandomLayers, Scattering, Stage

_SHORTEST_SERIES: Final = 16
_HIDDEN: Final = 16
_CHANNELS: Final = 16
_MOST_SCALES: Final = 4
_PLACES: Final = 4
_MOST_PLACES: Final = 8


def fitting_model(shape: Sequence[int], classes: int) -> ModelSpec:
    """A model for records of ``shape``; see the module.

    Args:
        shape: (features,), (length, channels) or (height, width, channels).
        classes: At least 2.
    """
    fitting = [
        spec for spec in BUILT_IN.values() if (spec.input_shape, spec.classes) == (tuple(shape), classes)
    ]
    return min(
        [*fitting, derived_model(shape, classes)],
        key=lambda spec: (not spec.front_end, spec.parameter_count),
    )


def linear_model(shape: Sequence[int], classes: int) -> ModelSpec:
    """The model with the fewest weights for records of ``shape``: for methods that pay for each of them."""
    offset, scale = (0.5, 0.25) if len(shape) == 3 else (0.0, 1.0)
    return ModelSpec(
        f"linear-{'x'.join(map(str, shape))}", tuple(shape), classes, (Dense(classes),),
        input_offset=offset, input_scale=scale,
    )  # fmt: skip


def derived_model(shape: Sequence[int], classes: int) -> ModelSpec:
    """The model that the rules make; see the module."""
    kind = {1: "table", 2: "series", 3: "image"}[len(shape)]
    name = f"{kind}-{'x'.join(map(str, shape))}"
    if len(shape) == 3 and min(shape[:2]) >= 2 * _PLACES:
        front_end, grouped = _scattering(shape)
        return ModelSpec(
            name, tuple(shape), classes, (grouped, Dense(classes)), input_offset=0.5, input_scale=0.25,
            front_end=front_end,
        )  # fmt: skip
    layers: tuple[Layer, ...] = (Dense(_HIDDEN), Tanh(), Dense(classes))
    if len(shape) == 2 and shape[0] >= _SHORTEST_SERIES:
        layers = (*_convolutions(shape[0]), Dense(classes))
    offset, scale = (0.5, 0.25) if len(shape) == 3 else (0.0, 1.0)
    return ModelSpec(name, tuple(shape), classes, layers, input_offset=offset, input_scale=scale)


def model_file(spec: ModelSpec) -> bytes:
    """``spec`` as a model file that somebody may go on from."""
    head = (
        "# Made by `dpagent demo` for the form of the data. Copy it, change it, and give it as --model, or\n"
        "# as `model: {name: PATH}` in fleet.yaml. docs/models.md lists the layers.\n"
    )
    text = yaml.safe_dump(spec.describe(), sort_keys=False, default_flow_style=None, allow_unicode=True)
    return (head + text).encode()


def _scattering(shape: Sequence[int]) -> tuple[tuple[Stage, ...], Layer]:
    """The front end for an image, and the normalisation of its features."""
    side = min(shape[:2])
    scales = max(j for j in range(1, _MOST_SCALES + 1) if side >= _PLACES << j)
    stage = Scattering(scales, 8 if scales <= 2 else 4)
    channels = shape[2] * stage.paths
    # Groups of three channels or so, where that divides them.
    groups = max(count for count in range(1, channels // 3 + 1) if channels % count == 0)
    places = -(-side >> scales) if side % (1 << scales) == 0 else (side >> scales) + 1
    if places <= _MOST_PLACES:
        return (stage,), GroupNorm(groups)
    window = -(-places // _MOST_PLACES)
    return (stage, RandomLayers((AveragePool2d(window, window),))), GroupNorm(groups)


def _convolutions(length: int) -> tuple[Layer, ...]:
    halved = (length - 1) // 2 + 1
    pooled = (halved - 2) // 2 + 1
    window = max(2, pooled // 2)
    return (
        Conv1d(_CHANNELS, kernel=5, stride=2, padding=2), Tanh(), MaxPool1d(2, 2),
        Conv1d(_CHANNELS, kernel=3, padding=1), Tanh(), MaxPool1d(window, window),
    )  # fmt: skip
