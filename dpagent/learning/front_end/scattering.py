"""Wavelet scattering of images: a fixed, stable description that uses no data.

Order two (Bruna and Mallat, "Invariant Scattering Convolution Networks", IEEE TPAMI 2013): with J
scales and L angles, wavelets ψ_{j,θ} and a Gaussian φ of width 2^J,

* order 0: x ∗ φ,
* order 1: |x ∗ ψ_{j,θ}| ∗ φ for each of the JL wavelets,
* order 2: ||x ∗ ψ_{j,θ}| ∗ ψ_{j',θ'}| ∗ φ for each pair with j < j',

each sampled every 2^J pixels. The wavelets are Morlet's: a plane wave of frequency ξ_j = 3π/4·2⁻ʲ
under an elliptic Gaussian of width 0.8·2ʲ, a share of the Gaussian taken off so that the mean is zero;
φ has the width 0.8·2^(J−1) (the constants of Oyallon and Mallat, "Deep Roto-Translation Scattering
for Object Classification", CVPR 2015).

Convolutions are products of Fourier transforms over the image mirrored at its borders. A
signal of scale j holds no frequencies above π/2ʲ worth keeping, so it is taken at every 2ʲ-th pixel, by
folding its spectrum. φ is separable and real: it and the sampling are one small matrix along each axis.

**Batch invariance.** The features of a record take its place in training, so they too must be a
function of that record alone (:mod:`dpagent.learning.training.engine`). Images are transformed one by one:
numpy's transform may treat the last of several at a time otherwise than the first.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.models.stages import Scattering

Floats = NDArray[np.float32]

_SIGMA = 0.8
_FREQUENCY = 3 * math.pi / 4


class Constants(NamedTuple):
    """The factors of the transform, for its export.

    Attributes:
        rows, columns: for each padded place, the pixel it shows.
        padded: places down and across.
        wavelets: for each scale, the spectra of its wavelets, (angles, *padded).
        blurs: for each scale, φ down and across.
    """

    rows: NDArray[np.intp]
    columns: NDArray[np.intp]
    padded: tuple[int, ...]
    wavelets: list[Floats]
    blurs: list[tuple[Floats, ...]]

    def folded_filters(self, scale: int, octaves: int) -> Floats:
        """The wavelets of ``scale`` for signals taken at every 2^octaves-th place."""
        return np.asarray(_fold_filter(self.wavelets[scale], octaves))


class ScatteringTransform:
    """Scattering of images of one shape.

    Args:
        stage: J and L.
        shape: height, width and channels of an image.
    """

    def __init__(self, stage: Scattering, shape: tuple[int, int, int]) -> None:
        self._scales, self._angles, self._paths = stage.scales, stage.angles, stage.paths
        height, width, self._channels = shape
        self._step = 1 << stage.scales
        self._size = tuple(-(-size // self._step) for size in (height, width))
        # One step of margin before the image, and after it enough to fill a whole number of steps.
        self._padded = tuple((size + 2) * self._step for size in self._size)
        self._rows, self._columns = (
            _mirror(size, self._step, padded)
            for size, padded in zip((height, width), self._padded, strict=True)
        )
        self._wavelets = [
            np.stack([_morlet(self._padded, j, angle, stage.angles) for angle in range(stage.angles)])
            for j in range(stage.scales)
        ]
        self._blurs = [
            tuple(_blur(padded, j, stage.scales) for padded in self._padded) for j in range(stage.scales)
        ]

    @property
    def constants(self) -> Constants:
        """The factors of the transform."""
        return Constants(self._rows, self._columns, self._padded, self._wavelets, self._blurs)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the features; a channel's paths lie together, order by order."""
        height, width = self._size
        return (height, width, self._channels * self._paths)

    def __call__(self, images: Floats) -> Floats:
        """The features, ``(n, *output_shape)`` float32, of images ``(n, height, width, channels)``."""
        features = np.empty((len(images), *self._size, self._channels, self._paths), np.float32)
        for image, after in zip(images, features, strict=True):
            for channel in range(self._channels):
                with np.errstate(all="ignore"):  # a record may hold anything
                    self._scatter(
                        image[self._rows[:, np.newaxis], self._columns, channel], after[:, :, channel]
                    )
        return features.reshape(len(images), *self.output_shape)

    def _scatter(self, plane: Floats, after: Floats) -> None:
        """The paths of one padded plane, written to ``after`` (height, width, paths)."""
        after[..., 0] = self._smooth(plane[np.newaxis], 0)[0]
        path = 1
        second = 1 + self._scales * self._angles
        spectrum = np.fft.fft2(plane)
        for j, wavelets in enumerate(self._wavelets):
            first = np.abs(np.fft.ifft2(_fold(spectrum * wavelets, j)))
            after[..., path : path + self._angles] = np.moveaxis(self._smooth(first, j), 0, -1)
            path += self._angles
            if j + 1 == self._scales:
                break
            spectra = np.fft.fft2(first)
            for finer in range(j + 1, self._scales):
                filters = self.constants.folded_filters(finer, j)
                products = spectra[:, np.newaxis] * filters
                waves = np.abs(np.fft.ifft2(_fold(products.reshape(-1, *products.shape[2:]), finer - j)))
                after[..., second : second + len(waves)] = np.moveaxis(self._smooth(waves, finer), 0, -1)
                second += len(waves)

    def _smooth(self, planes: Floats, j: int) -> Floats:
        """``planes`` at scale j, blurred and sampled: (k, height, width)."""
        down, across = self._blurs[j]
        return np.asarray(down @ planes @ across.T, np.float32)


def _mirror(size: int, margin: int, padded: int) -> NDArray[np.intp]:
    """For each padded place, the pixel it shows: the image mirrored about its border pixels."""
    places = np.arange(padded) - margin
    period = max(1, 2 * (size - 1))
    return np.abs((places + size - 1) % period - (size - 1)).astype(np.intp)


def _fold(spectra: Any, octaves: int) -> Any:
    """Spectra of the signals taken at every 2^octaves-th place: the mean of the aliases."""
    if octaves == 0:
        return spectra
    factor = 1 << octaves
    count, height, width = spectra.shape
    aliases = spectra.reshape(count, factor, height // factor, factor, width // factor)
    return aliases.mean(axis=(1, 3))


def _fold_filter(filters: Any, octaves: int) -> Any:
    """Spectra of filters for signals that were taken at every 2^octaves-th place: the sum of the aliases."""
    if octaves == 0:
        return filters
    factor = 1 << octaves
    count, height, width = filters.shape
    return filters.reshape(count, factor, height // factor, factor, width // factor).sum(axis=(1, 3))


def _grid(padded: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Coordinates of all places about 0, in the order of a circular convolution."""
    rows, columns = (np.asarray(np.fft.fftfreq(size, 1 / size), np.float64) for size in padded)
    return rows[:, np.newaxis], columns[np.newaxis, :]


def _morlet(padded: tuple[int, ...], j: int, angle: int, angles: int) -> Floats:
    """The spectrum of ψ_{j,θ}, which is real, with θ = π·angle/angles."""
    theta = math.pi * angle / angles
    sigma, frequency, slant = _SIGMA * 2**j, _FREQUENCY / 2**j, 4.0 / angles
    down, across = _grid(padded)
    envelope = np.zeros(padded)
    wave = np.zeros(padded, np.complex128)
    # The filter repeats with the padded image: three periods hold all of it that is not zero.
    for shift_down in (-1, 0, 1):
        for shift_across in (-1, 0, 1):
            y, x = down + shift_down * padded[0], across + shift_across * padded[1]
            along, beside = (
                x * math.cos(theta) + y * math.sin(theta),
                y * math.cos(theta) - x * math.sin(theta),
            )
            gauss = np.exp(-(along**2 + (slant * beside) ** 2) / (2 * sigma**2))
            envelope += gauss
            wave += gauss * np.exp(1j * frequency * along)
    wave -= envelope * (wave.sum() / envelope.sum())
    wave *= slant / (2 * math.pi * sigma**2)
    return np.asarray(np.fft.fft2(wave).real, np.float32)


def _blur(padded: int, j: int, scales: int) -> Floats:
    """φ along one axis of a signal at scale j, taken at every step inside of the margin: a matrix."""
    step = 1 << scales
    sigma = _SIGMA * 2 ** (scales - 1)
    places = np.arange(padded // 2**j) * 2**j
    centres = np.arange(1, padded // step - 1) * step
    weights = np.zeros((len(centres), len(places)))
    for period in (-1, 0, 1):
        distance = places[np.newaxis, :] + period * padded - centres[:, np.newaxis]
        weights += np.exp(-(distance**2) / (2 * sigma**2))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float32)
