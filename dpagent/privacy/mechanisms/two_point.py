"""The LDP-FL two-point mechanism: one random bit stands for one weight.

After Sun, Qian, Chen, *LDP-FL: Practical private aggregation in federated learning with local
differential privacy* (IJCAI 2021). A weight w, cut to its layer's public range [c−r, c+r], becomes
c ± r·B with B = (e^ε+1)/(e^ε−1) = coth(ε/2), the upper one with probability ½ + (w−c)/(2rB).
Its mean is w, its variance r²B² − (w−c)². The device sends a bit for the choice, and the weight's
position. :mod:`dpagent.privacy.mechanisms.two_point_budget` states the cost.

**As implemented.** With low = ⌈2⁶⁴/(e^ε+1)⌉ and half = 2⁶³ − low, the bit is 1 if a uniform 64-bit
word is below t = 2⁶³ + round(x·half), x = (w−c)/r cut to [−1, 1]. t is an integer in
[low, 2⁶⁴−low] for every weight, and P(1) is t/2⁶⁴ exactly. So for any two weights and either
bit, the ratio of probabilities is at most (2⁶⁴−low)/low ≤ e^ε, as low·(e^ε+1) ≥ 2⁶⁴: ε-LDP, with δ = 0
and no slack for rounding; floating-point rounding affects the value of t, and never takes it out of
bounds. A weight that is not finite counts as the centre. The mean of the bit is linear in x
but for rounding, with B = 2⁶³/half in place of coth(ε/2), larger by less than 1 in 10¹²: the estimate's
bias is at most r·(½/half + 4·2⁻⁵³), a 10⁻¹² of r at the least ε and a 10⁻¹⁵ at ε = 1.

**Coordinate sampling.** A device sends k of its d weights. The weights are cut into k blocks of
consecutive positions, ⌊d/k⌋ or ⌈d/k⌉ each, and the device draws one position of each block, uniformly:
⌊u·size/2⁶⁴⌋ for a uniform word u, off by a relative size/2⁶⁴ at most, no loop. Departure from drawing
k of d without replacement: each position is still sent with probability 1/size, k/d where k divides
d; not all sets of k positions can come up, only those with one of each block; and (1) each
block is a shuffle of its own in which *every* device has one report, so that a report hides among
all n honest devices and not among the n·k/d that drew the same position; (2) every stretch of
2⌈d/k⌉ weights has a report from every device. Positions do not depend on the data: no ε is spent on them.

For a device's budget ε_d in one round, each coordinate gets ε_d/k. The variance of a position's mean
goes with coth²(ε_d/(2k))/k, least where sinh(2y) = 4y, y = ε_d/(2k): at 2.18 per coordinate.
So the better of the whole numbers next to ε_d/2.18 is the default k (Wang et al., ICDE 2019, choose
likewise for a related mechanism). Estimates divide by the number of reports that arrived for a position,
which the paper's rescaling by d/k estimates with more variance.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dpagent.blank_rows import blank_all_but
from dpagent.errors import ParameterError, require_between, require_count, require_positive
from dpagent.privacy.accounting.composition import exact_sum
from dpagent.privacy.mechanisms.layer_ranges import LayerRange
from dpagent.privacy.noise.entropy import Entropy, uniform_words
from dpagent.privacy.ranges import MAX_DIMENSION

#: ε of one coordinate: the thresholds have 64 bits.
EPSILON_RANGE: Final = (1e-6, 32.0)
#: The ε of a coordinate at which a device's budget for a round buys most: the y of sinh(2y) = 4y, doubled.
BEST_EPSILON: Final = 2.1773189849653067

_DECIMAL: Final = Context(prec=60)
_BELOW_ONE: Final = Decimal("0." + "9" * 50)

Floats = NDArray[np.floating[Any]]


class TwoPointReport(NamedTuple):
    """A device's report: private already.

    Attributes:
        positions: one position of each block, rising, shape (k,), int64.
        bits: whether the upper value was drawn, shape (k,), bool.
    """

    positions: NDArray[np.int64]
    bits: NDArray[np.bool_]


class Estimate(NamedTuple):
    """The coordinator's estimate of each weight's mean.

    Attributes:
        mean: in weight units, shape (d,), float64; the centre where no device reported.
        standard_error: upper bound rB/√n on the mean's standard deviation, shape (d,), counting also
            that the devices which reported are a random choice; infinite where none did.
    """

    mean: NDArray[np.float64]
    standard_error: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TwoPoint:
    """One round's mechanism; the record states all an accountant or auditor needs. Public.

    Attributes:
        layers: ranges of consecutive stretches of the weight vector, in its order.
        epsilon: ε of each coordinate sent, in [1e-6, 32].
        coordinates: k, how many weights a device sends, in [1, d].

    Raises:
        ParameterError: an attribute is out of its range.
    """

    layers: tuple[LayerRange, ...]
    epsilon: float
    coordinates: int

    def __post_init__(self) -> None:
        if not self.layers:
            raise ParameterError("layers is empty; expected the range of at least one layer.")
        require_between("epsilon of a coordinate", self.epsilon, *EPSILON_RANGE)
        require_count("dimension", self.dimension, maximum=MAX_DIMENSION)
        require_count("coordinates", self.coordinates, maximum=self.dimension)

    @classmethod
    def for_device(cls, layers: Sequence[LayerRange], epsilon: float, coordinates: int | None = None) -> Self:
        """The mechanism that costs a device ``epsilon`` in one round, with no trusted party.

        Args:
            layers: as the attribute.
            epsilon: of all that the device sends in the round, above 0; each coordinate gets ε/k.
            coordinates: k; by default the number that makes the estimates best.

        Raises:
            ParameterError: a value is out of its range, or ε/k is.
        """
        require_positive("epsilon of a device", epsilon)
        if coordinates is None:
            dimension = sum(layer.size for layer in layers)
            below = max(0, math.floor(min(epsilon / BEST_EPSILON, dimension - 1)))
            coordinates = max(below or 1, below + 1, key=lambda k: k * math.tanh(epsilon / (2 * k)) ** 2)
        require_count("coordinates", coordinates)
        share = epsilon / coordinates
        # rounded down, so that k shares never add up to more than was asked for
        return cls(tuple(layers), math.nextafter(share, 0.0) if coordinates > 1 else share, coordinates)

    @property
    def dimension(self) -> int:
        """d, number of weights."""
        return sum(layer.size for layer in self.layers)

    @property
    def device_epsilon(self) -> float:
        """ε of a device's round with no trusted party: k·ε, rounded up."""
        return exact_sum([(self.epsilon, self.coordinates)])

    @property
    def rescale(self) -> float:
        """d/k: the factor for a sum over devices in place of a mean over reports."""
        return self.dimension / self.coordinates

    @property
    def amplitude(self) -> float:
        """B: the two values are c ± r·B."""
        return 2.0**63 / _half_range(self.epsilon)

    def variance(self, offset: float, radius: float) -> float:
        """Variance of one value of a weight at c + ``offset`` in a range of ``radius``: r²B² − offset².

        Raises:
            ParameterError: the radius is not above 0, or the offset is beyond it.
        """
        require_positive("radius", radius)
        require_between("offset", offset, -radius, radius)
        return (radius * self.amplitude) ** 2 - offset**2

    def report(self, weights: Floats, *, entropy: Entropy = os.urandom) -> TwoPointReport:
        """Draw positions and bits. The work does not depend on weights, positions or bits.

        Args:
            weights: the device's weights, private, shape (d,), floating point of up to 64 bits; a
                weight that is not finite counts as the centre, one beyond the range as its end.
            entropy: gives n uniform bytes for an argument n; to be replaced in tests only.

        Raises:
            ParameterError: ``weights`` has another shape or type.
        """
        is_float = weights.dtype.kind == "f" and weights.dtype.itemsize <= 8
        if weights.shape != (self.dimension,) or not is_float:
            raise ParameterError(
                f"weights have shape {weights.shape} and type {weights.dtype}; "
                f"expected ({self.dimension},) floating-point numbers of up to 64 bits."
            )
        positions = self._draw_positions(entropy)
        thresholds = self._thresholds(weights, positions)
        return TwoPointReport(positions, uniform_words(self.coordinates, entropy) < thresholds)

    def tally(self, reports: Sequence[TwoPointReport]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Count, for each position, the ones and the reports: two int64 vectors of shape (d,).

        Raises:
            ParameterError: a report has a position that is no integer in [0, d), or not one bit a position.
        """
        ones, counts = np.zeros(self.dimension, dtype=np.int64), np.zeros(self.dimension, dtype=np.int64)
        for positions, bits in reports:
            if positions.shape != bits.shape or positions.ndim != 1 or bits.dtype != np.bool_:
                raise ParameterError(
                    f"a report has positions of shape {positions.shape} and bits of shape {bits.shape} and "
                    f"type {bits.dtype}; expected one boolean a position."
                )
            if positions.dtype.kind not in "iu":
                raise ParameterError(f"a report has positions of type {positions.dtype}; expected integers.")
            if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < self.dimension:
                raise ParameterError(f"a report has a position outside [0, {self.dimension}).")
            np.add.at(counts, positions, 1)
            np.add.at(ones, positions[bits], 1)
        return ones, counts

    def estimate(self, ones: NDArray[np.int64], reports: NDArray[np.int64]) -> Estimate:
        """The unbiased mean of each weight over the devices that reported it: c + rB(2·ones/n − 1).

        Args:
            ones: for each position, how many reports had a 1, shape (d,).
            reports: for each position, n, how many reports arrived, shape (d,); 0 is possible.

        Raises:
            ParameterError: shapes or types differ, or not 0 ≤ ones ≤ reports.
        """
        shape = (self.dimension,)
        if (
            ones.shape != shape
            or reports.shape != shape
            or {ones.dtype.kind, reports.dtype.kind} - {"i", "u"}
        ):
            raise ParameterError(
                f"ones have shape {ones.shape} and reports {reports.shape}; expected {shape} integers each."
            )
        if bool(np.any(ones < 0)) or bool(np.any(ones > reports)):
            raise ParameterError("ones are below 0 or above reports; expected 0 <= ones <= reports.")
        centres, radii = self._ranges()
        some = np.maximum(reports, 1).astype(np.float64)
        mean = np.where(reports > 0, 2 * ones / some - 1, 0.0)
        reach = radii * self.amplitude
        error = np.where(reports > 0, reach / np.sqrt(some), np.inf)
        return Estimate(centres + reach * mean, error)

    def block_edges(self) -> NDArray[np.int64]:
        """Where the k blocks begin and, last, d: shape (k+1,)."""
        return group_edges(self.dimension, self.coordinates, 0, self.coordinates)

    def _draw_positions(self, entropy: Entropy) -> NDArray[np.int64]:
        edges = self.block_edges()
        sizes = np.diff(edges).astype(np.uint64)
        words = uniform_words(self.coordinates, entropy)
        # ⌊word·size/2⁶⁴⌋ in two halves of 32 bits, exactly: sizes are below 2³²
        high, low = words >> np.uint64(32), words & np.uint64(2**32 - 1)
        drawn = (high * sizes + (low * sizes >> np.uint64(32))) >> np.uint64(32)
        return np.asarray(edges[:-1] + drawn.astype(np.int64))

    def _thresholds(self, weights: Floats, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        """t of the module's text: how many of the 2⁶⁴ words give a 1, shape of ``positions``."""
        centres, radii = self._ranges()
        chosen = weights[positions].astype(np.float64)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            scaled = np.clip((chosen - centres[positions]) / radii[positions], -1.0, 1.0)
        blank_all_but(np.isfinite(chosen), scaled)
        half = _half_range(self.epsilon)
        offsets = np.clip(np.rint(scaled * half).astype(np.int64), -half, half)
        return offsets.view(np.uint64) + np.uint64(2**63)  # modulo 2⁶⁴

    def _ranges(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        sizes = [layer.size for layer in self.layers]
        return (
            np.repeat([float(layer.centre) for layer in self.layers], sizes),
            np.repeat([float(layer.radius) for layer in self.layers], sizes),
        )


def group_edges(dimension: int, coordinates: int, first: int, last: int) -> NDArray[np.int64]:
    """Where those blocks begin that are numbered ``first`` to ``last`` − 1, of the k blocks of d weights, and
    where the last of them ends: shape (last − first + 1,).

    >>> group_edges(10, 3, 0, 3).tolist()
    [0, 3, 6, 10]
    """
    return np.arange(first, last + 1, dtype=np.int64) * dimension // coordinates


@lru_cache(maxsize=1024)
def _half_range(epsilon: float) -> int:
    """2⁶³ − ⌈2⁶⁴/(e^ε+1)⌉, with certainty: e^ε is made smaller by more than its error.

    All steps are the context's: operators would round to the thread's own decimal context.
    """
    exponential = _DECIMAL.multiply(_DECIMAL.exp(Decimal(epsilon)), _BELOW_ONE)
    quotient = _DECIMAL.divide(Decimal(2**64), _DECIMAL.add(exponential, Decimal(1)))
    return 2**63 - math.ceil(quotient)
