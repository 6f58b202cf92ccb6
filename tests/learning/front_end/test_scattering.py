"""Scattering against its definition, computed as slowly as it is written."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dpagent.learning.front_end.scattering import ScatteringTransform
from dpagent.learning.models.stages import Scattering

Plane = NDArray[np.float64]


def periodic(values: Any, places: NDArray[np.float64], period: int) -> Any:
    """Σ over shifts by whole periods of a function on the line."""
    return sum(values(places + shift * period) for shift in range(-3, 4))


def morlet(shape: tuple[int, int], j: int, theta: float, angles: int) -> NDArray[np.complex128]:
    """ψ in space, about place (0, 0), from its formula."""
    sigma, xi, slant = 0.8 * 2**j, 3 * math.pi / 4 / 2**j, 4 / angles
    envelope = np.zeros(shape)
    wave = np.zeros(shape, complex)
    for row in range(shape[0]):
        for column in range(shape[1]):
            for a in range(-3, 4):
                for b in range(-3, 4):
                    y, x = row + a * shape[0], column + b * shape[1]
                    along = x * math.cos(theta) + y * math.sin(theta)
                    beside = -x * math.sin(theta) + y * math.cos(theta)
                    gauss = math.exp(-(along**2 + slant**2 * beside**2) / (2 * sigma**2))
                    envelope[row, column] += gauss
                    wave[row, column] += gauss * np.exp(1j * xi * along)
    wave -= envelope * wave.sum() / envelope.sum()
    return wave * slant / (2 * math.pi * sigma**2)


def convolve(signal: Any, kernel: Any) -> Any:
    """Circular convolution by its sum."""
    result = np.zeros(signal.shape, complex)
    for row in range(signal.shape[0]):
        for column in range(signal.shape[1]):
            result += kernel[row, column] * np.roll(signal, (row, column), (0, 1))
    return result


def low_pass(signal: Plane, j: int, scales: int) -> Plane:
    """∗ φ of a signal at every 2^j-th place, taken at every step inside of the margin."""
    step, sigma = 1 << scales, 0.8 * 2 ** (scales - 1)

    def weights(places: int) -> Plane:
        size = places << j
        rows = []
        for centre in np.arange(step, size - step, step):
            distances = (np.arange(places) << j) - centre
            row = periodic(lambda z: np.exp(-(z**2) / (2 * sigma**2)), distances, size)
            rows.append(row / row.sum())
        return np.array(rows)

    return weights(signal.shape[0]) @ signal @ weights(signal.shape[1]).T


def by_definition(image: Plane, scales: int, angles: int) -> list[Plane]:
    """All paths of one channel, order by order; a wave of scale j is taken at every 2^j-th place."""
    step = 1 << scales
    height, width = image.shape
    below, beside = ((-(-size // step) + 1) * step - size for size in (height, width))
    padded = np.pad(image, ((step, below), (step, beside)), mode="reflect")
    filters = [
        [morlet(padded.shape, j, math.pi * t / angles, angles) for t in range(angles)] for j in range(scales)
    ]
    first = {
        (j, t): np.abs(convolve(padded, filters[j][t]))[:: 1 << j, :: 1 << j]
        for j in range(scales)
        for t in range(angles)
    }
    orders = [low_pass(padded, 0, scales)]
    orders += [low_pass(wave, j, scales) for (j, _), wave in first.items()]
    for j in range(scales):
        for finer in range(j + 1, scales):
            for t in range(angles):
                for kernel in filters[finer]:
                    coarse = 4**j * kernel[:: 1 << j, :: 1 << j]
                    further = 1 << (finer - j)
                    wave = np.abs(convolve(first[j, t], coarse))[::further, ::further]
                    orders.append(low_pass(wave, finer, scales))
    return orders


@pytest.mark.parametrize(("shape", "scales", "angles"), [((12, 10), 2, 3), ((9, 8), 1, 2), ((16, 17), 3, 2)])
def test_every_path_is_what_the_definition_says(shape: tuple[int, int], scales: int, angles: int) -> None:
    image = np.random.default_rng(0).random(shape)
    transform = ScatteringTransform(Scattering(scales, angles), (*shape, 1))
    features = transform(image[np.newaxis, ..., np.newaxis].astype(np.float32))[0]
    expected = np.stack(by_definition(image, scales, angles), axis=-1)
    assert features.shape == expected.shape == Scattering(scales, angles).shape_after((*shape, 1))
    assert np.abs(features - expected).max() < 1e-6


def test_channels_lie_one_after_the_other() -> None:
    images = np.random.default_rng(1).random((2, 16, 12, 3), np.float32)
    whole = ScatteringTransform(Scattering(2, 4), (16, 12, 3))(images)
    alone = ScatteringTransform(Scattering(2, 4), (16, 12, 1))
    paths = Scattering(2, 4).paths
    for channel in range(3):
        part = alone(images[..., channel : channel + 1])
        assert np.array_equal(whole[..., channel * paths : (channel + 1) * paths], part)


def test_a_flat_image_has_no_waves_and_a_moved_one_nearly_the_same() -> None:
    transform = ScatteringTransform(Scattering(2, 8), (28, 28, 1))
    flat = transform(np.full((1, 28, 28, 1), 0.7, np.float32))[0]
    assert np.abs(flat[..., 0] - 0.7).max() < 1e-5
    assert np.abs(flat[..., 1:]).max() < 1e-5
    spot = np.zeros((2, 28, 28, 1), np.float32)
    spot[0, 10:16, 10:16] = 1
    spot[1, 11:17, 10:16] = 1
    still, moved = transform(spot).astype(np.float64)
    pixels = np.linalg.norm(spot[0] - spot[1]) / np.linalg.norm(spot[0])
    assert np.linalg.norm(still - moved) / np.linalg.norm(still) < 0.7 * pixels
