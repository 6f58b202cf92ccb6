"""Clipping and noise by layer, at the cost of one Gaussian mechanism.

A record's gradient g is cut into layers; layer ℓ is clipped to an L2 norm of C_ℓ of its own,
brought onto an integer grid of its own, and gets discrete Gaussian noise with the noise
multiplier σ_ℓ (Abadi et al., CCS 2016, Section 3.2, allow C and σ to differ by layer).

*Cost.* Let s_ℓ be the integer vector of layer ℓ of the record by which two data sets differ,
‖s_ℓ‖ ≤ Δ_ℓ, and let the coordinates of layer ℓ get independent noise N_ℤ(0, σ_ℓ²Δ_ℓ²). Prop. 5 of
Canonne, Kamath and Steinke (2020), which :mod:`dpagent.privacy.accounting` rests on, holds for
each coordinate with its own variance, and for independent coordinates the moments multiply:

    E_P0[(P1/P0)^k] ≤ Π_ℓ exp(k(k−1)·‖s_ℓ‖²/(2σ_ℓ²Δ_ℓ²)) ≤ exp(k(k−1)/2 · Σ_ℓ 1/σ_ℓ²).

That is the bound for one Gaussian mechanism with 1/σ² = Σ_ℓ 1/σ_ℓ². The involution x ↦ s − x, which
the other direction needs, does not ask for equal variances, and the lot is drawn once for all
layers. So a release is charged as one event with σ. With σ_ℓ = σ/√p_ℓ for shares p_ℓ that add up
to 1, Σ 1/σ_ℓ² = Σ p_ℓ/σ² = 1/σ².

Equal shares of n layers give each the multiplier σ√n. Shares in proportion to C_ℓ² give all
coordinates noise of nearly one size: that of clipping to √ΣC_ℓ² as a whole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ParameterError, require_between, require_count, require_positive
from dpagent.privacy.approximate import imperfect_delta
from dpagent.privacy.entropy import Entropy
from dpagent.privacy.events import PrivacyLossEvent
from dpagent.privacy.gaussian import DiscretisedGaussian, release_epsilon
from dpagent.privacy.grid import FINE_STEPS, Constrained, Norm
from dpagent.privacy.statement import Adjacency, BudgetStatement, Trust, Unit

_SHARE_TOLERANCE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Layer:
    """A run of coordinates that is clipped and perturbed by itself. Public.

    Attributes:
        name: for reports.
        size: number of coordinates, at least 1.
        clip_norm: C_ℓ, in [1e-9, 1e9].
        share: p_ℓ, its part of the release's budget, in (0, 1].

    Raises:
        ParameterError: an attribute is out of its range.
    """

    name: str
    size: int
    clip_norm: float
    share: float

    def __post_init__(self) -> None:
        require_count(f"size of layer {self.name!r}", self.size)
        require_between(f"clip norm of layer {self.name!r}", self.clip_norm, 1e-9, 1e9)
        require_positive(f"share of layer {self.name!r}", self.share, maximum=1.0)


@dataclass(frozen=True, slots=True)
class PerLayerGaussian:
    """One release with a clip norm and a noise multiplier for each layer. Public.

    Attributes:
        layers: in the order of the coordinates; names differ, shares add up to 1.
        noise_multiplier: σ of the whole release.
        sampling_rate: q, the probability with which each record enters a lot, in (0, 1].
        steps: noisy local steps in one release, each with a fresh lot and fresh noise.
        fine_steps: grid steps to each layer's clip norm, in [1, 2²⁰].

    Raises:
        ParameterError: an attribute is out of range, shares do not add up to 1, names repeat, or
            a layer's noise is too small or too large to be drawn.
    """

    name: ClassVar[str] = "per-layer-gaussian"
    unit: ClassVar[Unit] = Unit.RECORD
    adjacency: ClassVar[Adjacency] = Adjacency.ADD_OR_REMOVE_ONE
    trust: ClassVar[Trust] = Trust.NONE
    norm: ClassVar[Norm] = Norm.L2

    layers: tuple[Layer, ...]
    noise_multiplier: float
    sampling_rate: float
    steps: int = 1
    fine_steps: int = FINE_STEPS

    def __post_init__(self) -> None:
        require_positive("noise multiplier", self.noise_multiplier)
        if not self.layers:
            raise ParameterError("layers are empty; expected at least one.")
        if len({layer.name for layer in self.layers}) < len(self.layers):
            raise ParameterError("two layers have the same name; expected a name for each.")
        total = math.fsum(layer.share for layer in self.layers)
        if abs(total - 1) > _SHARE_TOLERANCE:
            raise ParameterError(f"shares of the layers add up to {total!r}; expected 1.")
        _ = self.parts, self.event

    @property
    def parts(self) -> tuple[DiscretisedGaussian, ...]:
        """Each layer's own mechanism. Its ``event`` is no charge: the release has one of its own."""
        # What the shares' sum is off 1 is made good here, and rounding upwards by the last factor.
        total = math.fsum(layer.share for layer in self.layers) * (1 + 2.0**-50)
        return tuple(
            DiscretisedGaussian(
                layer.clip_norm,
                self.noise_multiplier * math.sqrt(total / layer.share),
                self.sampling_rate,
                layer.size,
                self.steps,
                self.fine_steps,
            )
            for layer in self.layers
        )

    @property
    def dimension(self) -> int:
        """d, number of coordinates released."""
        return sum(layer.size for layer in self.layers)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where each layer's coordinates are in a vector of all."""
        ends = accumulate(layer.size for layer in self.layers)
        return tuple(slice(end - layer.size, end) for layer, end in zip(self.layers, ends, strict=True))

    @property
    def granularities(self) -> tuple[float, ...]:
        """One fine-grid step of each layer in gradient units."""
        return tuple(part.granularity for part in self.parts)

    @property
    def event(self) -> PrivacyLossEvent:
        """The charge for one release."""
        return PrivacyLossEvent(self.noise_multiplier, self.sampling_rate, self.steps)

    @property
    def statistical_distance(self) -> float:
        """Total variation distance of one release from ideal noise; see ``docs/privacy.md``."""
        return math.fsum(part.statistical_distance for part in self.parts)

    def statement(self, delta: float) -> BudgetStatement:
        """What one release guarantees, at ``delta`` in (0, 1) and what imperfect noise adds to it."""
        epsilon = release_epsilon(self.event, min(part.sigma_steps for part in self.parts), delta)
        return BudgetStatement(
            self.unit,
            self.adjacency,
            self.trust,
            self.name,
            epsilon,
            imperfect_delta(epsilon, delta, self.statistical_distance),
        )

    def constrain(self, gradients: NDArray[np.float32]) -> Constrained:
        """Clip and round each layer of each record, and add up the records of a microbatch.

        A record with an infinite or undefined entry in any layer counts as zeros in all.

        Args:
            gradients: per-example gradients, shape (m, d), float32; m may be 0.

        Raises:
            ParameterError: ``gradients`` has another shape or type.
        """
        shape = gradients.shape
        if len(shape) != 2 or shape[1] != self.dimension or gradients.dtype != np.float32:
            raise ParameterError(
                f"gradients have shape {shape} and type {gradients.dtype}; "
                f"expected (records, {self.dimension}) float32 numbers."
            )
        finite = np.isfinite(gradients).all(axis=1)
        kept = gradients if finite.all() else gradients[finite]
        totals = [part.constrain(kept[:, place]).total for part, place in self._places()]
        return Constrained(np.concatenate(totals), int(shape[0] - np.count_nonzero(finite)))

    def perturb(self, total: NDArray[np.int64], *, entropy: Entropy = os.urandom) -> NDArray[np.int64]:
        """Add discrete Gaussian noise, each layer with its own parameter.

        Args:
            total: exact sum over one lot, shape (d,), in each layer's fine-grid steps.
            entropy: gives n uniform bytes for an argument n; to be replaced in tests only.

        Raises:
            ParameterError: ``total`` is not an integer vector of d entries.
        """
        if total.shape != (self.dimension,) or total.dtype.kind != "i":
            raise ParameterError(
                f"total has shape {total.shape} and type {total.dtype}; "
                f"expected ({self.dimension},) integers."
            )
        return np.concatenate([part.perturb(total[place], entropy=entropy) for part, place in self._places()])

    def in_units(self, released: NDArray[np.int64]) -> NDArray[np.float64]:
        """A release in gradient units, shape (d,): each layer times its granularity."""
        repeated = np.repeat(self.granularities, [layer.size for layer in self.layers])
        return np.asarray(released * repeated)

    def _places(self) -> Iterator[tuple[DiscretisedGaussian, slice]]:
        return zip(self.parts, self.slices, strict=True)
