"""Privacy amplification by shuffling: a better guarantee while reports cannot be traced to their senders.

Each of n honest devices perturbs a value with an ε₀-LDP randomiser and sends the report; an
observer sees the reports of the batch in random order, and nothing about their senders. Adjacency:
one device's value is replaced by any other; all other values are arbitrary, known, and the
same in both worlds. n is the least number of *honest* reports in the batch, that device's included, not
the size of the fleet: reports which the observer knows or made up himself hide nobody.

Notation: a = 1/(e^ε₀+1), the least probability of a bit. P and Q are the observer's view in the two
worlds; H their hockey-stick divergence at e^ε. In all three bounds swapping the worlds is a
relabelling of the reports, so one direction is enough.

**Decomposed** (two-point reports for *one position*). Another device sends a 1 with a probability
p_i ∈ [a, 1−a]: with probability 2a it tosses a fair coin, else it sends a bit with probability
(p_i−a)/(1−2a) ∈ [0, 1] for a 1. Show the observer who did not toss, and what they sent: that can
only raise H. There remain C ~ Bin(n−1, 2a) fair coins, A ~ Bin(C, ½) of them ones, and the
device's own bit Δ: the view is (A+Δ, C−A+1−Δ). P is linear in the device's probability of a one,
so H is jointly convex in its two values of it and greatest at corners of [a, 1−a]²: Δ ~ Bern(1−a)
against Bern(a). (Feldman, McMillan, Talwar, SODA 2023.)

**Enumerated** (same setting, tighter). The decomposition is not tight for bits: the number of ones
S is all that the observer has, and C is not. H is convex in each other p_i too, so it is
greatest when all of them are a or 1−a; with m at 1−a,

    S ~ Bin(m, 1−a) + Bin(n−1−m, a) + Δ,     δ(ε) = max over m of H,

which is attained, hence exact. Var S is (n−1)·a(1−a) whatever m is, against a mean of (n−1)·a/2 above:
at ε₀ = 1 the squared loss is 1.46 times smaller. S has a log-concave law, so its likelihood
ratio rises and H is a difference of tails. The maximum over m is a convex function of e^ε, so the
straight lines between its values on a grid dominate it, and are again the curve of a pair (atoms at the
grid, mass the change of slope). Swapping the worlds is m ↦ n−1−m.

**Clones** (any ε₀-LDP randomiser R, the *same* for all devices; Feldman, McMillan, Talwar, *Hiding
among the clones*, FOCS 2021). Were each device to have its own, R_i could sign its reports with i, and
nothing would be hidden; of bits, bounded from both sides, the bounds above ask no such thing. With
D, D' the laws of the device's report, e^ε₀D ≥ D' and e^ε₀D' ≥ D, so E = (e^ε₀D − D')/(e^ε₀−1) and
E' likewise are laws, D = (1−a)E + aE', D' = aE + (1−a)E'. Another device's law, being R's too, is at
least e^(−ε₀)D and e^(−ε₀)D', hence at least e^(−ε₀)·(E+E')/2. Reveal the rest: C ~ Bin(n−1, e^(−ε₀))
reports from E or E' at a fair coin's choice, and the device's from one of them at the choice of Δ. Who
sees (A+Δ, C−A+1−Δ) can draw the reports himself: again the pair above, with fewer coins. The SODA
2023 paper raised e^(−ε₀) to 2a for *every* randomiser; its erratum (arXiv 2208.04591) withdraws that:
another device need not cover E and E' (where D = D' it would have to cover a law up to twice as often as
it can), and the theorem stands for some randomisers only. A bit is one of them, by the proof above. The
closed form is the FOCS paper's Theorem 3.1.

**Composition.** A device's pieces at different positions are different batches; they are shuffled
independently of each other, so the pairs compose (:mod:`dpagent.privacy.accounting.composed_loss`), over
rounds too, whatever is learnt from earlier ones. More honest reports never hurt: the
observer can be given the additional ones. Hence least numbers suffice, and where n is random a
failure probability is added to δ, see :func:`least_reports`.

**What the shuffler is trusted with**: that an observer learns neither which device a report came from,
nor which two reports came from one device, by content, size, order, time, session or message id;
and that at least n honest reports arrive. If it fails, the guarantee is the device's own.

**Numbers.** C and A are cut to a window outside which less than 1e-30 lies (Hoeffding); what is outside
counts as if there were no coins at all, which dominates. Large ranges of C are grouped, each
group at its least C. Rounding is on the safe side: a and the coins' probability are rounded down
(whoever is held to a smaller a can do more); a law of w values is off by a relative 8w·2⁻⁵² at most, by
which masses are raised, and likewise the tails whose difference is H (of its terms, one on the wrong side
of the threshold is no larger than the error of its two masses); losses are raised where they
are brought onto a grid. Masses below 10⁻³⁰⁰ are neglected.

500 devices, ε₀ = 1, 26,010 positions, one round, δ = 1e-5: central ε is 60.7 enumerated (at least 59.6
in truth, the bound for the one choice m = n−1 everywhere), 79.3 decomposed, 106.5 by clones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

import numpy as np

from dpagent.errors import ParameterError, require_between, require_count
from dpagent.privacy.accounting.composition import exact_sum
from dpagent.privacy.accounting.finite_loss import FiniteLoss, FloatArray, compose

#: Local ε, and largest number of reports in a batch, that the bounds are evaluated for.
LOCAL_EPSILON_RANGE: Final = (1e-6, 32.0)
MAX_REPORTS: Final = 10**8
#: Largest batch whose worst case is enumerated: its cost rises with the cube of n.
MAX_ENUMERATED: Final = 1024

_LEAST_ENUMERATED_EPSILON: Final = 0.05  # below it the decomposition is within 1.3 % of exact
_EPS: Final = 2.0**-52
_ROUNDED_DOWN: Final = 1 - 4 * _EPS  # more than exp, a sum and a quotient may be off by
_TAIL: Final = 1e-30
_SMALL_DELTA: Final = 1e-12
_LEAST_SHARE: Final = 1e-280  # of a failure probability, below which no masses are looked at
_MAX_ATOMS: Final = 2**20
_FEW_ATOMS: Final = 2**13
_CURVE_STEPS: Final = 128  # grid steps of a pair to the root mean square of its loss


class Bound(StrEnum):
    """Which proof of the module's text a figure rests on."""

    ENUMERATED = "enumerated"
    """Two-point reports for one position: the exact worst case, up to 1,024 reports."""
    DECOMPOSED = "decomposed"
    """Two-point reports for one position: an upper bound for any number of reports."""
    CLONES = "clones"
    """Reports of any ε₀-LDP randomiser, the same on all devices, for instance a bit at a secret position."""


@dataclass(frozen=True, slots=True)
class ShuffledBatch:
    """The reports among which one report of a device is hidden. Public.

    Attributes:
        reports: n, the least number of honest reports in the batch, the device's own included,
            in [1, 10⁸]; at most 1,024 if enumerated.
        epsilon: ε₀ of one report, in [1e-6, 32].
        bound: the analysis.

    Raises:
        ParameterError: an attribute is out of its range.
    """

    reports: int
    epsilon: float
    bound: Bound = Bound.DECOMPOSED

    def __post_init__(self) -> None:
        limit = MAX_ENUMERATED if self.bound is Bound.ENUMERATED else MAX_REPORTS
        require_count("honest reports", self.reports, maximum=limit)
        require_between("local epsilon", self.epsilon, *LOCAL_EPSILON_RANGE)
        if not isinstance(self.bound, Bound):
            raise ParameterError(f"bound is {self.bound!r}; expected one of {', '.join(Bound)}.")

    @classmethod
    def at_position(cls, reports: int, epsilon: float) -> ShuffledBatch:
        """A batch of two-point reports for one position, with the tightest bound there is for it.

        That may be the enumerated one for 1,024 of the reports: decomposed, it takes 2(1−a) times as many.

        Raises:
            ParameterError: an argument is out of its range.
        """
        batch = cls(reports, epsilon)
        reach = MAX_ENUMERATED * 2 * (1 - _rare(epsilon))
        if epsilon < _LEAST_ENUMERATED_EPSILON or reports > reach:
            return batch
        return cls(min(reports, MAX_ENUMERATED), epsilon, Bound.ENUMERATED)

    @property
    def coin_probability(self) -> float:
        """Probability with which another report counts as a fair coin."""
        if self.bound is Bound.CLONES:
            return math.exp(-self.epsilon) * _ROUNDED_DOWN
        return 2 * _rare(self.epsilon)

    @property
    def loss(self) -> FiniteLoss:
        """A pair that dominates the batch."""
        return _loss(self)

    def delta(self, epsilon: float) -> float:
        """The δ at ``epsilon``, at least 0, of one report: the series itself, on no grid.

        Raises:
            ParameterError: ``epsilon`` is negative or not finite.
        """
        require_between("epsilon", epsilon, 0.0, math.inf, high_open=True)
        if self.bound is Bound.ENUMERATED:
            return float(_worst_curve(self.reports, self.epsilon, np.array([epsilon]))[0])
        return _coins_pair(self).delta(epsilon)


def central_delta(batches: Sequence[tuple[ShuffledBatch, int]], epsilon: float) -> float:
    """δ at ``epsilon`` of everything a device sends: each batch, and how many times such a one.

    Args:
        batches: one entry for every kind of batch; the count is positions times rounds.
        epsilon: at least 0.

    Raises:
        ParameterError: a value is out of its range.
    """
    require_between("epsilon", epsilon, 0.0, math.inf, high_open=True)
    composed = compose([(batch.loss, count) for batch, count in batches])
    local = exact_sum((batch.epsilon, count) for batch, count in batches)
    if epsilon >= local:
        return 0.0
    # δ falls with ε: far out, where there are no cells for it, it is bounded by what it is less far out
    return composed.delta(min(epsilon, 2 * composed.epsilon(_SMALL_DELTA)))


def central_epsilon(batches: Sequence[tuple[ShuffledBatch, int]], delta: float) -> float:
    """ε at ``delta``, in (0, 1), of everything a device sends; arguments as :func:`central_delta`.

    Never above the local guarantee, which trusts nobody: the sum of all ε₀.

    >>> batch = ShuffledBatch.at_position(reports=500, epsilon=1.0)
    >>> round(central_epsilon([(batch, 10)], delta=1e-5), 3)
    0.531

    Raises:
        ParameterError: a value is out of its range.
    """
    require_between("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    composed = compose([(batch.loss, count) for batch, count in batches])
    local = exact_sum((batch.epsilon, count) for batch, count in batches)
    return min(composed.epsilon(delta), local)


def clones_closed_form(reports: int, epsilon: float, delta: float) -> float:
    """ε of one report among n from the same ε₀-LDP randomiser, by the FOCS 2021 paper's Theorem 3.1.

    log(1 + (e^ε₀−1)/(e^ε₀+1) · (8·√(e^ε₀·log(4/δ)/n) + 8e^ε₀/n)), proven there for
    ε₀ ≤ log(n/(16·log(2/δ))). Loose by a factor of about 5: for a quick estimate.

    Raises:
        ParameterError: a value is out of its range, or ε₀ is beyond the theorem's.
    """
    require_count("honest reports", reports, maximum=MAX_REPORTS)
    require_between("local epsilon", epsilon, *LOCAL_EPSILON_RANGE)
    require_between("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
    ratio = reports / (16 * math.log(2 / delta))
    if math.exp(epsilon) > ratio:
        raise ParameterError(
            f"local epsilon is {epsilon!r}; with {reports} honest reports and delta {delta!r} the closed "
            f"form holds up to {math.log(ratio):.4g}. Evaluate the clones bound numerically instead."
        )
    factor = math.exp(epsilon)
    spread = 8 * math.sqrt(factor * math.log(4 / delta) / reports) + 8 * factor / reports
    return math.log1p(math.tanh(epsilon / 2) * spread)


def least_reports(devices: int, probability: float, batches: int, failure: float) -> int:
    """Least number of reports in each batch a device is in, but for a failure probability.

    >>> least_reports(devices=500, probability=0.1, batches=1, failure=1e-6)
    22

    If every other honest device independently reports to a position with at least the given
    probability, the device's batch holds 1 + Bin(devices−1, probability) reports or more. The
    answer n has batches·P(fewer than n) ≤ failure, so with all batches of all rounds counted, all of them
    hold n reports but for ``failure``, to be added to δ. Nothing is assumed of how batches depend on
    each other (a device that sends k of d positions makes them do so).

    Args:
        devices: honest devices that take part, the device itself included.
        probability: with which each of the others reports to a given position, in (0, 1].
        batches: positions times rounds of the device, at least 1.
        failure: in (0, 1).

    Returns:
        At least 1.

    Raises:
        ParameterError: a value is out of its range.
    """
    require_count("honest devices", devices, maximum=MAX_REPORTS)
    require_between("reporting probability", probability, 0.0, 1.0, low_open=True)
    require_count("batches", batches)
    require_between("failure probability", failure, 0.0, 1.0, low_open=True, high_open=True)
    others = devices - 1
    if probability == 1 or others == 0:
        return devices
    share = failure / batches
    if share < _LEAST_SHARE:
        return 1
    first, masses = _binomial(others, probability, tail=share * 1e-3)
    # what the window leaves out, and the rounding of the sum, are counted as lying below it
    below = np.cumsum(masses) * (1 + _rounding(masses.size)) + share * 1e-3
    return 1 + first + int(np.searchsorted(below, share * (1 - _EPS), side="right"))


@lru_cache(maxsize=256)
def _loss(batch: ShuffledBatch) -> FiniteLoss:
    """The batch's pair, brought onto a grid of its own so that it has few atoms."""
    coins = _coins_pair(batch)
    step = coins.size / _CURVE_STEPS
    if batch.bound is not Bound.ENUMERATED or batch.reports == 1:
        if coins.losses.size <= _FEW_ATOMS:
            return coins
        atoms, masses = coins.on_grid(step)
        return FiniteLoss(np.asarray(atoms * step), masses * (1 + _rounding(coins.losses.size)))
    # Beyond ±ε₀ the curve is (1 − e^ε)₊: the grid has to reach there, and no further.
    cells = math.ceil(batch.epsilon / step)
    epsilons = np.linspace(-batch.epsilon, batch.epsilon, 2 * cells + 1)
    ratios = np.exp(epsilons)
    curve = _worst_curve(batch.reports, batch.epsilon, epsilons)
    slopes = np.concatenate(([-1.0], np.diff(curve) / np.diff(ratios), [0.0]))
    masses = np.maximum(np.diff(slopes), 0.0) * ratios
    return FiniteLoss(epsilons, masses * (1 + _rounding(masses.size)))


def _coins_pair(batch: ShuffledBatch) -> FiniteLoss:
    """Atoms of (A+Δ, C−A+1−Δ): of C = c coins and s ones, with s of c+1 fair coins showing ones,

    P has 2·((1−a)s + a(c+1−s))/(c+1) times the probability of that, and Q the same with s and c+1−s
    changed over. What a window leaves out is counted as c = 0, where the device's bit is alone.
    """
    rare = _rare(batch.epsilon)
    often = 1 - rare
    first, coins = _binomial(batch.reports - 1, batch.coin_probability, tail=_TAIL)
    width = math.isqrt(math.ceil(2 * (first + coins.size) * math.log(2 / _TAIL))) + 2
    groups = min(coins.size, max(16, _MAX_ATOMS // min(width, first + coins.size + 1)))
    starts = np.unique(np.linspace(0, coins.size, groups, endpoint=False).astype(np.int64))
    lone, losses, masses = 4 * _TAIL, [], []
    for start, mass in zip(starts, np.add.reduceat(coins, starts), strict=True):
        tosses = first + int(start) + 1
        low, fair = _binomial(tosses, 0.5, tail=_TAIL)
        ones = low + np.arange(fair.size)
        for_p, for_q = often * ones + rare * (tosses - ones), rare * ones + often * (tosses - ones)
        losses.append(np.log(for_p / for_q))
        masses.append(mass * fair * (2 * for_p / tosses * (1 + _rounding(coins.size + fair.size))))
    losses.append(np.array([batch.epsilon, -batch.epsilon]))
    masses.append(lone * np.array([often, rare]))
    return FiniteLoss(np.concatenate(losses), np.concatenate(masses))


def _worst_curve(reports: int, local: float, epsilons: FloatArray) -> FloatArray:
    """The maximum over m of H at each of ``epsilons``, of any sign, rounded up: shape of ``epsilons``."""
    rare = _rare(local)
    often = 1 - rare
    off, ratios = _rounding(2 * reports), np.exp(epsilons)
    worst = np.maximum(-np.expm1(epsilons), 0.0)
    tosses = [_binomial_masses(count, rare, 0, count) for count in range(reports)]
    for ups in range(reports):
        others = np.convolve(tosses[ups][::-1], tosses[reports - 1 - ups])
        # of a sum s: the others show s−1 and the device a one, or s and a zero
        shifted, still = np.append(0.0, others), np.append(others, 0.0)
        for_p, for_q = often * shifted + rare * still, rare * shifted + often * still
        with np.errstate(divide="ignore", invalid="ignore"):
            losses = np.log(for_p / for_q)
        # Log-concave: losses rise. Where both masses vanished, any order will do.
        losses = np.maximum.accumulate(np.nan_to_num(losses, nan=-np.inf))
        start = np.searchsorted(losses, epsilons, side="right")
        above_p = np.append(np.cumsum(for_p[::-1])[::-1], 0.0)
        above_q = np.append(np.cumsum(for_q[::-1])[::-1], 0.0)
        difference = (1 + off) * above_p[start] - (1 - off) * ratios * above_q[start]
        np.maximum(worst, difference, out=worst)
    return worst


def _binomial(trials: int, probability: float, *, tail: float) -> tuple[int, FloatArray]:
    """Bin(trials, probability) on a window outside which less than ``tail`` lies (Hoeffding).

    Returns the window's first value, and probabilities that add up to 1.
    """
    if probability == 1.0:
        return trials, np.ones(1)
    reach = math.sqrt(trials / 2 * math.log(2 / tail)) + 1
    first = max(0, math.floor(trials * probability - reach))
    last = min(trials, math.ceil(trials * probability + reach))
    return first, _binomial_masses(trials, probability, first, last)


def _binomial_masses(trials: int, probability: float, first: int, last: int) -> FloatArray:
    """Probabilities of first..last, in proportion and of sum 1.

    Ratios of neighbours are multiplied from the greatest outwards, at six roundings a step: the products,
    and so their sum, are off by a relative 3·2⁻⁵² a step at most.
    """
    k = np.arange(first + 1, last + 1, dtype=np.float64)
    ratios = (trials - k + 1) / k * (probability / (1 - probability))
    mode = min(max(math.floor((trials + 1) * probability), first), last) - first
    with np.errstate(under="ignore"):
        below, above = np.cumprod(1 / ratios[:mode][::-1])[::-1], np.cumprod(ratios[mode:])
        masses = np.concatenate((below, [1.0], above))
        return np.asarray(masses / masses.sum())


def _rounding(values: int) -> float:
    """Relative error of a law of so many values, and of sums of it."""
    return 8 * _EPS * (values + 2)


def _rare(epsilon: float) -> float:
    """a = 1/(e^ε+1), rounded down."""
    return _ROUNDED_DOWN / (math.exp(epsilon) + 1)
