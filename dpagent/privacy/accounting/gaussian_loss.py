"""The privacy loss of single mechanisms, on a grid.

**Gaussian noise, sampled.** Turned so that the record's vector points along one axis, and scaled, one
run with continuous noise is dominated by the pair

    P = (1−q)·N(0, σ²) + q·N(1, σ²),  Q = N(0, σ²)   (record removed),

or the same with P and Q exchanged (record added): scaling the vector up to norm 1, and averaging over
the other records' lot, only makes the two harder to tell apart (Zhu, Dong, Wang, AISTATS 2022). The
loss log(P/Q)(x) = log(1−q + q·e^((2x−1)/(2σ²))) rises with x, so a stretch of losses is a stretch of x,
and its masses are differences of normal distribution functions.

**Discrete noise costs no more.** The device adds N_ℤ(0, s²), s = σΔ grid steps, to vectors of whole
numbers. Let τ = 3, and let k be drawn from a discrete Gaussian of parameter τ centred at the *real*
number y, itself drawn from N(x, s²−τ²). Completing the square, for whole x and k,

    P(k) = ∫ N(y; x, s²−τ²) · e^(−(k−y)²/(2τ²)) / Z(y) dy,  Z(y) = Σ_j e^(−(j−y)²/(2τ²)),

and by Poisson summation Z(y) is within a factor 1 ± η of τ√(2π), η = 2·Σ_m e^(−2π²τ²m²) < 10⁻⁷⁶; so
P(k) is e^(−(k−x)²/(2s²)) up to a constant and a factor in [1/(1+η), 1/(1−η)]: N_ℤ(x, s²), within a total
variation of 2η. Drawing k from y does not look at x. Hence a noisy sum of d coordinates is within
2ηd of a post-processing of *continuous* noise with √(s²−τ²) in place of s. For s of at least
:data:`MIN_SIGMA_UNITS` this is at least (1 − 10⁻⁶)·s; that is priced. (2ηd joins the
sampler's distance, which is forty orders of magnitude larger.)

**Any (ε, δ)-DP mechanism** is dominated, in both directions, by the pair with losses ε, −ε and ∞ of P-masses
(1−δ)e^ε/(1+e^ε), (1−δ)/(1+e^ε) and δ (Kairouz, Oh, Viswanath, *The composition theorem for differential
privacy*, ICML 2015), so composing these is the optimal composition theorem.

**Grid.** The smaller its step h, the tighter the price and the longer it takes.

*Gaussian mechanisms alone.* h = √(6·share·V/T), with V the variance of the total loss over T runs: the grid
then adds a share of 2·10⁻⁴ to that variance, and 10⁻⁴ or so to ε; more where hundreds of different mechanisms
have to share 2²¹ cells. Where sampling is rare, the losses that decide are rare and great, and V says little.
At the tilt θ the grid raises K by T·θ(θ+1)h²/12 at most, or so, and ε by 1/θ of that; so h² =
12·share·ε/(T(θ+1)) does, which for normal losses is the same, as then ε/θ is V (θ+1 is the Rényi order).
Rényi's ε and order are taken for them at first, and once more with the ε found on that grid.

*With (ε, δ)-DP mechanisms* the losses are atoms. If all of these mechanisms have the same ε, h divides it
and nothing is lost. If not, an atom is split between its two neighbours on the grid. That raises a loss by
at most h, so n runs raise ε by at most n·h, which is what counts where few runs decide. And it raises
E_P[e^(θL)] at most as the chord of the convex function y^(−θ), y = e^(−L), between these neighbours does,
by a factor of 1 + θ(θ+1)h²/8; so n runs raise ε by at most n(θ+1)h²/8 or so, which is what counts where
many do. h is the largest step at which the lesser of the two, and the share of the T Gaussian runs as
above, are within 10⁻⁵·ε each. For ε and θ+1 Rényi's ε and order are taken; both can be off where rare great
losses decide, hence a share that small. Of 600 random mixes of one to six different mechanisms, none cost
over 0.1 % more than on a grid eight times as fine, and half of them less than 0.01 % more.

The step may be given instead. The masses of single runs are differences of normal distribution functions,
good to a relative 10⁻¹² or so; for that, ε is raised by 10⁻⁹ of itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpagent.privacy.accounting.composed_loss import GridTooFineError, LossBlock, split_masses
from dpagent.privacy.accounting.divergences import ORDERS
from dpagent.privacy.accounting.normal_form import Component, Runs, SampledGaussian
from dpagent.privacy.accounting.rdp import conversion_offsets, renyi_divergences
from dpagent.privacy.events import ApproximateEvent

FloatArray = NDArray[np.float64]

#: Least parameter of the discrete noise, in grid steps, for which prices hold: 3/√(2·10⁻⁶), rounded up.
MIN_SIGMA_UNITS: Final = 2_122
#: Share of the noise multiplier by which discrete noise counts for less than continuous noise.
DISCRETE_SHARE: Final = 1e-6
#: Grid steps that may be given.
GRID_RANGE: Final = (1e-7, 1.0)
#: Grid cells to the ε of pure mechanisms where all are alike, at least.
CELLS_TO_EPSILON: Final = 64

_SHARE: Final = 2e-4
_RENYI_SHARE: Final = 0.25  # of ε by Rényi divergence, which may be far too large
_MIXED_SHARE: Final = 0.05  # the same where losses are of both kinds: Rényi's order may be far too low, too
_MAX_CELLS: Final = 2**26  # in both directions 1 GiB, for a grid that was asked for
_BLOCK: Final = 16
_MOST_UNLIKE: Final = 2.0
_AUTO_CELLS: Final = 2**21
_MAX_LOSS: Final = 700.0
_SQRT_HALF: Final = math.sqrt(0.5)


def coarse_step(charges: Sequence[Runs], delta: float, epsilon: float = math.inf) -> float:
    """The step that the text gives for rare and great losses; 0 if not all charges are Gaussian.

    Args:
        charges: all that is composed.
        delta: at which ε is asked for.
        epsilon: a bound on that ε, if one is known.
    """
    if not all(isinstance(mechanism, SampledGaussian) for mechanism, _ in charges):
        return 0.0
    return _tilted_step(charges, 0, delta, _RENYI_SHARE, epsilon)


def fine_step(charges: Sequence[Runs], delta: float, tail: float) -> tuple[float, int]:
    """The grid step of the module's text, coarser if losses would not fit the memory; and their cells."""
    gaussian = [(part, count) for part, count in charges if isinstance(part, SampledGaussian)]
    atoms: Counter[float] = Counter()
    for part, count in charges:
        if isinstance(part, ApproximateEvent) and part.epsilon > 0:
            atoms[part.epsilon] += count
    step, width = GRID_RANGE[1], 2 * math.fsum(atoms)
    if gaussian:
        sigma, rate = _parameters([part for part, _ in gaussian])
        reach = _reach(tail)
        top, bottom = _loss(1 + sigma * reach, sigma, rate), _loss(-sigma * reach, sigma, rate)
        width += float((top - bottom).sum())
        if not atoms:
            counts = np.array([count for _, count in gaussian], dtype=np.float64)
            step = math.sqrt(6 * _SHARE * float(counts @ _variances(sigma, rate)) / float(counts.sum()))
    if atoms and (gaussian or len(atoms) > 1):
        between = sum(atoms.values()) if len(atoms) > 1 else 0
        step = _tilted_step(charges, between, delta, _MIXED_SHARE)
    step = max(step, width / _AUTO_CELLS, GRID_RANGE[0])
    if len(atoms) == 1:
        (epsilon,) = atoms
        step = epsilon / math.ceil(max(epsilon / step, 1 if gaussian else CELLS_TO_EPSILON))
    return step, math.ceil(width / step)


def _tilted_step(
    charges: Sequence[Runs], atoms: int, delta: float, share: float, epsilon: float = math.inf
) -> float:
    """The step at which the grid raises ε by a share of it, by Rényi's ε and order.

    Args:
        charges: all that is composed.
        atoms: how many runs have losses between grid points of which all mass is in two atoms.
        delta: at which ε is asked for.
        share: of Rényi's ε that is taken for ε, which may be far less.
        epsilon: taken for ε where it is less than that.
    """
    pure = [
        (ApproximateEvent(part.epsilon) if isinstance(part, ApproximateEvent) else part, count)
        for part, count in charges
    ]
    epsilons = renyi_divergences(pure).sum(axis=0) + conversion_offsets(np.array(ORDERS), delta)
    best = int(epsilons.argmin())
    order, allowed = ORDERS[best], _SHARE * min(share * max(float(epsilons[best]), 0.0), epsilon)
    smooth = sum(count for part, count in charges if isinstance(part, SampledGaussian))
    steps = [GRID_RANGE[1]]
    if smooth:
        steps.append(math.sqrt(12 * allowed / (order * smooth)))
    if atoms:
        steps.append(max(allowed / atoms, math.sqrt(8 * allowed / (order * atoms))))
    return min(steps)


def _variances(sigma: FloatArray, rate: FloatArray) -> FloatArray:
    """Of the loss of a sampled Gaussian, the record removed: shape (n,) for parameters of shape (n, 1)."""
    z = np.linspace(-8.0, 8.0, 129)
    weight = np.exp(-(z**2) / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    plain, shifted = _loss(sigma * z, sigma, rate), _loss(1 + sigma * z, sigma, rate)
    q = rate[:, 0]
    mean = (1 - q) * (plain @ weight) + q * (shifted @ weight)
    square = (1 - q) * (plain**2 @ weight) + q * (shifted**2 @ weight)
    return np.asarray(np.maximum(square - mean**2, 0.0))


def on_grid(
    mechanisms: Sequence[Component], step: float, tail: float
) -> tuple[list[LossBlock], list[LossBlock]]:
    """Losses of single runs of mechanisms in canonical order, with the record removed and with it added."""
    gaussian = [part for part in mechanisms if isinstance(part, SampledGaussian)]
    removed, added, cells = [], [], 0
    for alike in _alike(gaussian, tail):
        pair = _gaussian_block(alike, step, tail, _MAX_CELLS - cells)
        cells += pair[0].masses.size
        removed.append(pair[0])
        added.append(pair[1])
    for like in _like([part for part in mechanisms if isinstance(part, ApproximateEvent)]):
        block = _approximate_block(like, step)
        removed.append(block)
        added.append(block)
    return removed, added


def _alike(events: Sequence[SampledGaussian], tail: float) -> Iterator[Sequence[SampledGaussian]]:
    """Sorted mechanisms, cut into blocks with at most twice the cells that their own losses take."""
    if not events:
        return
    sigma, rate = _parameters(events)
    reach = _reach(tail)
    tops, bottoms = _loss(1 + sigma * reach, sigma, rate), _loss(-sigma * reach, sigma, rate)
    start = 0
    for end in range(1, len(events) + 1):
        top, bottom = tops[start : end + 1], bottoms[start : end + 1]
        taken = len(top) * float(top.max() - bottom.min())
        if len(top) > _BLOCK or end == len(events) or taken > _MOST_UNLIKE * float((top - bottom).sum()):
            yield events[start:end]
            start = end


def _like(events: Sequence[ApproximateEvent]) -> Iterator[Sequence[ApproximateEvent]]:
    """Sorted mechanisms, cut into blocks with at most twice the cells that their own losses take, or so."""
    start = 0
    for end in range(1, len(events) + 1):
        if (
            end == len(events)
            or end - start == _BLOCK
            or events[end].epsilon > _MOST_UNLIKE * events[start].epsilon
        ):
            yield events[start:end]
            start = end


def _gaussian_block(
    events: Sequence[SampledGaussian], step: float, tail: float, cells_left: int
) -> tuple[LossBlock, LossBlock]:
    sigma, rate = _parameters(events)
    reach = _reach(tail)
    first = math.floor(float(_loss(-sigma * reach, sigma, rate).min()) / step)
    last = math.ceil(float(_loss(1 + sigma * reach, sigma, rate).max()) / step)
    cells = len(events) * (last + 1 - first)
    if cells > cells_left:
        raise GridTooFineError(
            f"grid step {step:g} is too fine: the charges' losses take more than {_MAX_CELLS:,} cells. "
            "Choose a coarser grid.",
            (_MAX_CELLS - cells_left + cells) / _MAX_CELLS,
        )
    losses = np.arange(first, last + 1, dtype=np.float64) * step
    # x(t) = σ²·log((e^t − (1−q))/q) + 1/2: −∞ below the least loss, log(1−q).
    share = (1 - rate) * np.exp(-np.maximum(losses, -_MAX_LOSS))
    with np.errstate(divide="ignore"):
        bounds = sigma**2 * (losses + np.log1p(-np.minimum(share, 1.0)) - np.log(rate)) + 0.5
    under, over, inside = _normal_masses(bounds / sigma)
    under_1, over_1, inside_1 = _normal_masses((bounds - 1) / sigma)
    mixed = (1 - rate) * inside + rate * inside_1
    # Record removed: the mixture, at losses that rise with x. Below the first, a loss is raised to it.
    right = split_masses(mixed, inside, losses[:-1], step)
    masses = np.zeros((len(events), losses.size))
    masses[:, :-1] += mixed - right
    masses[:, 1:] += right
    masses[:, 0] += (1 - rate[:, 0]) * under + rate[:, 0] * under_1
    removed = LossBlock(first, masses, (1 - rate[:, 0]) * over + rate[:, 0] * over_1)
    # Record added: plain noise, at the negatives of these losses, so that right and left change places.
    right = split_masses(inside, mixed, -losses[1:], step)
    masses = np.zeros((len(events), losses.size))
    masses[:, :-1] += right
    masses[:, 1:] += inside - right
    masses[:, -1] += over
    return removed, LossBlock(-last, np.ascontiguousarray(masses[:, ::-1]), under)


def _approximate_block(events: Sequence[ApproximateEvent], step: float) -> LossBlock:
    first = math.floor(-events[-1].epsilon / step)
    masses = np.zeros((len(events), math.floor(events[-1].epsilon / step) - first + 2))
    for row, event in enumerate(events):
        for loss in (event.epsilon, -event.epsilon):
            mass = (1 - event.delta) * (1 / (1 + math.exp(-loss)) if loss > 0 else _odds(loss))
            column = math.floor(loss / step)
            share = math.expm1(column * step - loss) / math.expm1(-step) + 8 * 2.0**-52 / step
            right = mass * min(max(share, 0.0), 1.0)
            masses[row, column - first] += mass - right
            masses[row, column - first + 1] += right
    return LossBlock(first, masses, np.array([event.delta for event in events]))


def _odds(loss: float) -> float:
    """e^t/(1+e^t) for t ≤ 0."""
    return math.exp(loss) / (1 + math.exp(loss))


def _parameters(events: Sequence[SampledGaussian]) -> tuple[FloatArray, FloatArray]:
    """Noise multipliers of the continuous noise, and sampling rates, shape (n, 1) each."""
    pairs = [(event.noise_multiplier, event.sampling_rate) for event in events]
    sigma, rate = np.array(pairs, dtype=np.float64).T
    return sigma[:, np.newaxis] * (1 - DISCRETE_SHARE), rate[:, np.newaxis]


def _loss(x: FloatArray, sigma: FloatArray, rate: FloatArray) -> FloatArray:
    """log(1−q + q·e^((2x−1)/(2σ²))), without overflow."""
    exponent = (2 * x - 1) / (2 * sigma**2)
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log1p(-rate), np.log(rate) + exponent))


def _reach(tail: float) -> float:
    """A z beyond which a standard normal has a mass of at most ``tail``: e^(−z²/2)/2 bounds it."""
    return math.sqrt(2 * math.log(1 / min(tail, 0.5)))


def _normal_masses(z: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Standard normal masses below the first, above the last and between neighbours of rising ``z``."""
    tails = 0.5 * _erfc(np.abs(z) * _SQRT_HALF)
    positive = z >= 0
    left, right = tails[:, :-1], tails[:, 1:]
    inside = np.where(
        positive[:, :-1], left - right, np.where(positive[:, 1:], 1 - left - right, right - left)
    )
    under = np.where(positive[:, 0], 1 - tails[:, 0], tails[:, 0])
    over = np.where(positive[:, -1], tails[:, -1], 1 - tails[:, -1])
    return under, over, np.maximum(inside, 0.0)


def _erfc(values: FloatArray) -> FloatArray:
    flat = values.ravel().tolist()
    return np.fromiter(map(math.erfc, flat), dtype=np.float64, count=len(flat)).reshape(values.shape)
