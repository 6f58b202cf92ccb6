"""Floating-point and timing attacks on Gaussian and Laplace noise: the common samplers, and ours.

Reproduces what Jin, McMurtry, Rubinstein and Ohrimenko report (*Are we there yet?*, IEEE S&P 2022): an
observer who knows that one of two neighbouring data sets was summed names the right one for at least 89 % of
the releases, with noise by numpy and PyTorch at any ε from 1 to 20, δ = 1e-5; they decide on 76 % of the
outputs or more. Here as there the sensitivity is 1/32, and σ = √(2 ln(1.25/δ))/32ε. 4,000 releases a row,
each two numbers where a sampler draws two at once, else one. For each the observer looks for the random words
that explain it, under both candidates (`benchmarks/floating_point.py`). An output that both explain is
decided by a coin. "Right of those decided" is the published success, "named" that of an observer who has to
answer always. A real (ε, δ) mechanism lets nobody name more than (e^ε + δ)/(1 + e^ε), which is no bound at
all for large ε: the attacks do not use the values' sizes, only their last bits, so without the fault it would
be 50 % at every ε.

The second part attacks by the time that one draw of discrete Laplace noise takes (ε = 1, shift and scale 50
units, 4,000 releases): a sampler that loops until it accepts, and ours, which looks up tables. PyTorch is not
installed here; the Box-Muller transform in float64 stands for its sampler. Go's Ziggurat (over 99.99 % as
published) is left out: there is no Go here.

Limits: one machine; single numbers, not the 26,010 of a model, of which each gives another chance.
"""

from __future__ import annotations

import math

from benchmarks.figures import Figure
from benchmarks.floating_point import BoxMuller, Integers, Noise, Polar, Ziggurat, attack
from benchmarks.sampling_time import Draw, looping_laplace, timed_attack
from dpagent.privacy.noise.discrete_laplace import DiscreteLaplaceSampler

_EPSILONS = (1.0, 5.0, 10.0, 20.0)
_RELEASES = 4_000
_SCALE = 50
_PUBLISHED = "published, numpy and PyTorch: at least 89"


def run() -> list[Figure]:
    """Attack each sampler at each ε, and two by their time."""
    figures: list[Figure] = []
    attacked: tuple[Noise, ...] = (Polar(), BoxMuller(), Ziggurat(), Integers(1 << 20))
    for noise in attacked:
        for epsilon in _EPSILONS:
            outcome = attack(noise, epsilon, releases=_RELEASES)
            name = f"{noise.name}, ε = {epsilon:g}"
            figures.append(Figure(f"{name}: decided", 100 * outcome.decided, "% of the outputs"))
            if not math.isnan(outcome.right):
                compared = None if noise.name.startswith("Zigg") else _PUBLISHED
                ratio = None if compared is None else outcome.right / 0.89
                figures.append(
                    Figure(f"{name}: right of those decided", 100 * outcome.right, "%", compared, ratio)
                )
            figures.append(
                Figure(f"{name}: named", 100 * outcome.success, "%", "a coin: 50", 2 * outcome.success)
            )
    sampler = DiscreteLaplaceSampler(float(_SCALE))
    draws: dict[str, Draw] = {
        "looping sampler": looping_laplace(_SCALE),
        "ours (tables)": lambda: int(sampler.sample(1)[0]),
    }
    for name, draw in draws.items():
        timed = timed_attack(draw, _SCALE, releases=_RELEASES)
        figures += [
            Figure(f"{name}: correlation of a draw's time and size", timed.correlation, ""),
            Figure(
                f"{name}: named by output and time", 100 * timed.success, "%",
                f"by the output alone: {100 * timed.without:.1f}", timed.success / timed.without,
            ),
        ]  # fmt: skip
    return figures
