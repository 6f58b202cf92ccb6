"""The architectures that a plan can name.

``mnist-cnn`` and ``cifar-cnn`` are the networks with tanh that the literature of private learning
uses for MNIST (26,010 parameters) and CIFAR-10 (550,570): Papernot et al., "Tempered Sigmoid
Activations for Deep Learning with Differential Privacy", AAAI 2021; Tramèr and Boneh,
"Differentially Private Learning Needs Better Features", ICLR 2021. ``resnet-8`` is the smallest of
the CIFAR residual networks as used in MLPerf Tiny (Banbury et al., NeurIPS 2021), with group
normalisation in place of batch normalisation, whose statistics would mix records. ``sensor-cnn`` takes
windows of 128 readings of nine channels, the shape of "Human Activity Recognition Using Smartphones"
(Anguita et al., ESANN 2013). ``scattering`` is a linear model on wavelet-scattering features with group
normalisation, after Tramèr and Boneh.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dpagent.errors import ConfigurationError
from dpagent.learning.models.layers import (
    AveragePool2d,
    Conv1d,
    Conv2d,
    Dense,
    GroupNorm,
    Layer,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Residual,
    Tanh,
)
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import Scattering


def _activated(layer: Layer, *pools: Layer) -> tuple[Layer, ...]:
    """The block that the networks with tanh repeat: a layer, tanh, and pooling if any."""
    return (layer, Tanh(), *pools)


_DIGITS = ModelSpec(
    name="digits",
    input_shape=(8, 8, 1),
    classes=10,
    layers=(
        *_activated(Conv2d(channels=16, kernel=3, padding=1), MaxPool2d(kernel=2, stride=2)),
        *_activated(Conv2d(channels=32, kernel=3, padding=1)),
        Dense(10),
    ),
    # Roughly the mean and standard deviation of the public handwritten digits in scikit-learn.
    input_offset=0.3,
    input_scale=0.37,
)

_MNIST_CNN = ModelSpec(
    name="mnist-cnn",
    input_shape=(28, 28, 1),
    classes=10,
    layers=(
        *_activated(Conv2d(channels=16, kernel=8, stride=2, padding=3), MaxPool2d(kernel=2, stride=1)),
        *_activated(Conv2d(channels=32, kernel=4, stride=2), MaxPool2d(kernel=2, stride=1)),
        *_activated(Dense(32)),
        Dense(10),
    ),
    # Mean and standard deviation of MNIST's pixels as the literature uses them: public constants.
    input_offset=0.1307,
    input_scale=0.3081,
)

_SENSOR_CNN = ModelSpec(
    name="sensor-cnn",
    input_shape=(128, 9),
    classes=6,
    layers=(
        *_activated(Conv1d(channels=32, kernel=5, padding=2), MaxPool1d(kernel=2, stride=2)),
        *_activated(Conv1d(channels=64, kernel=5, padding=2), MaxPool1d(kernel=2, stride=2)),
        *_activated(Dense(64)),
        Dense(6),
    ),
)


def _cifar_block(channels: int) -> tuple[Layer, ...]:
    convolution = Conv2d(channels, kernel=3, padding=1)
    return (*_activated(convolution), *_activated(convolution, MaxPool2d(kernel=2, stride=2)))


# Middle and a quarter of the range of pixels: no data set's own statistics.
_IMAGE_OFFSET, _IMAGE_SCALE = 0.5, 0.25

_CIFAR_CNN = ModelSpec(
    name="cifar-cnn",
    input_shape=(32, 32, 3),
    classes=10,
    layers=(*_cifar_block(32), *_cifar_block(64), *_cifar_block(128), *_activated(Dense(128)), Dense(10)),
    input_offset=_IMAGE_OFFSET,
    input_scale=_IMAGE_SCALE,
)


def _residual_block(channels: int, stride: int) -> tuple[Layer, ...]:
    body = (
        Conv2d(channels, kernel=3, stride=stride, padding=1),
        GroupNorm(8),
        Relu(),
        Conv2d(channels, kernel=3, padding=1),
        GroupNorm(8),
    )
    shortcut = (Conv2d(channels, kernel=1, stride=stride),) if stride > 1 else ()
    return (Residual(body, shortcut), Relu())


_RESNET_8 = ModelSpec(
    name="resnet-8",
    input_shape=(32, 32, 3),
    classes=10,
    layers=(
        Conv2d(16, kernel=3, padding=1),
        GroupNorm(8),
        Relu(),
        *_residual_block(16, stride=1),
        *_residual_block(32, stride=2),
        *_residual_block(64, stride=2),
        AveragePool2d(kernel=8, stride=8),
        Dense(10),
    ),
    input_offset=_IMAGE_OFFSET,
    input_scale=_IMAGE_SCALE,
)

_SCATTERING = ModelSpec(
    name="scattering",
    input_shape=(28, 28, 1),
    classes=10,
    layers=(GroupNorm(27), Dense(10)),
    front_end=(Scattering(scales=2, angles=8),),
)

BUILT_IN: Mapping[str, ModelSpec] = MappingProxyType(
    {spec.name: spec for spec in (_CIFAR_CNN, _DIGITS, _MNIST_CNN, _RESNET_8, _SCATTERING, _SENSOR_CNN)}
)
"""Every built-in model by its name."""


def built_in(name: str) -> ModelSpec:
    """The built-in architecture called ``name``.

    >>> built_in("mnist-cnn").parameter_count
    26010

    Raises:
        ConfigurationError: there is none of that name; the text lists the choices.
    """
    try:
        return BUILT_IN[name]
    except KeyError:
        choices = ", ".join(sorted(BUILT_IN))
        raise ConfigurationError(
            f"The model is {name!r}; expected one of {choices}, or the path of a model file (.yaml)."
        ) from None
