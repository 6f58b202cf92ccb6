"""The engine: lots in, clipped sums out; see the package's text for how."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from dpagent.blank_rows import blank_all_but
from dpagent.errors import DataError, ParameterError, require_count, require_positive
from dpagent.learning.models.layers import Dense
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.training.arguments import are_finite, require_inputs, require_labels
from dpagent.learning.training.batch_invariance import CLIP_NORM, Computed, is_invariant
from dpagent.learning.training.engine import MAX_MICROBATCH, NOBODY, ClippedSum, parts_of
from dpagent.learning.training.numpy_engine.network import Network
from dpagent.learning.training.numpy_engine.workspaces import Floats
from dpagent.learning.trial_numbers import TrialNumbers
from dpagent.norm import Norm

# Floats of activations and gradients of the records computed at a time: 4 MiB, of which each moment's part
# stays in a core's cache; but never so few records that Python's own work shows.
_AT_ONCE = 1 << 20
_LEAST_BLOCK = 4
# Fewer than of other engines: a product of several records was tried for itself, with 2,048 numbers
# (products.py), and all numbers of each gradient are compared, not its norm alone.
_TRIED_MICROBATCHES = 8


class NumpyEngine:
    """Computes one architecture with numpy alone; keeps its workspaces between calls.

    Args:
        spec: the architecture; with a front end, its head, which takes features.
        microbatch: records whose gradients are added in float32, at most ``MAX_MICROBATCH``. More of them
            cost less work in float64.
        views: augmented copies of each record.
        products: "calibrated" tries and times the forms of every matrix product, and of tanh, when the engine
            is made (:mod:`~dpagent.learning.training.numpy_engine.products`); "stacked" takes the plain form
            of all.
        block: how many records of a microbatch are computed at a time. Chosen by the size of the model if
            None: many amortise Python's overhead, few stay in the cache.
        norm: in which records are clipped.

    Raises:
        ParameterError: a number is out of its range.

    The engine is not thread-safe: one call at a time.

    >>> from dpagent.learning.models.built_ins import built_in
    >>> spec = built_in("digits")
    >>> engine = NumpyEngine(spec, microbatch=4)
    >>> inputs, labels = np.zeros((6, 8, 8, 1), np.float32), np.arange(6)
    >>> clipped = engine.clipped_sum(spec.initial_weights(seed=0), inputs, labels, [1e-3])
    >>> clipped.total.shape, clipped.within.tolist(), clipped.excluded
    ((9930,), [0], 0)
    """

    processes: Final = 1
    elsewhere_s: Final = 0.0

    def __init__(
        self,
        spec: ModelSpec,
        *,
        microbatch: int = 32,
        views: int = 1,
        products: Literal["calibrated", "stacked"] = "calibrated",
        block: int | None = None,
        norm: Norm = Norm.L2,
    ) -> None:
        self.spec, self.norm = spec, norm
        self._head = spec.head  # a front end's features are computed once, before training
        self.microbatch = require_count("microbatch", microbatch, maximum=MAX_MICROBATCH)
        self.views = require_count("views", views, maximum=64)
        if products not in ("calibrated", "stacked"):
            raise ParameterError(f"products is {products!r}; expected 'calibrated' or 'stacked'.")
        size = _block(self._head, microbatch, views)
        if block is not None:
            size = require_count("block", block, maximum=microbatch)
        self._network = Network(self._head, size, views, norm, microbatch=microbatch)
        if products == "calibrated":
            numbers = TrialNumbers(0)
            with np.errstate(all="ignore"):
                for choice in self._network.choices.values():
                    choice.calibrate(numbers)

    @property
    def forms(self) -> dict[str, str]:
        """In which of its forms each matrix product and each tanh is computed, by stage and purpose."""
        return {name: choice.form for name, choice in self._network.choices.items()}

    def clipped_sum(
        self,
        weights: Floats,
        inputs: NDArray[Any],
        labels: NDArray[np.int64],
        clip_norms: Sequence[float],
        microbatches: Iterable[int] | None = None,
    ) -> ClippedSum:
        """Clip each record's gradient and add up; see :meth:`SingleEngine.clipped_sum`."""
        self._head.require_weights(weights)
        require_inputs(self._head, inputs, self.views)
        require_labels(self._head, labels, len(inputs))
        norms = self._checked_norms(clip_norms)
        images = inputs.reshape((len(inputs), self.views, *self._head.input_shape))
        network = self._network
        network.load(np.ascontiguousarray(weights))
        within, excluded = np.zeros(len(norms), np.int64), 0
        for part in parts_of(len(inputs), self.microbatch, microbatches):
            found = _add_microbatch(network, images[part], labels[part], norms)
            within += found[0]
            excluded += found[1]
        return ClippedSum(network.total(), within, excluded)

    def logits(self, weights: Floats, inputs: NDArray[Any]) -> Floats:
        """The ``(n, classes)`` scores before the softmax, of inputs ``(n, *input_shape)``."""
        self._head.require_weights(weights)
        require_inputs(self._head, inputs)
        logits = np.empty((len(inputs), self.spec.classes), np.float32)
        for part, network in self._forward(weights, inputs):
            logits[part] = network.logits.reshape(-1, self.spec.classes)[: len(logits[part])]
        return logits

    def accuracy(self, weights: Floats, inputs: NDArray[Any], labels: NDArray[Any]) -> float:
        """The fraction of records whose largest logit is that of their label."""
        require_labels(self._head, labels, len(inputs))
        if len(inputs) == 0:
            raise DataError("There are no records; expected at least one to measure an accuracy.")
        return float(np.mean(self.logits(weights, inputs).argmax(axis=1) == labels))

    def is_batch_invariant(self, seed: int | None = None) -> bool:
        """Whether this machine computes a record alike at every place and beside any other; see
        :func:`~dpagent.learning.training.batch_invariance.is_invariant`."""
        record = (self.views, *self._head.input_shape)
        rows = self._network.records
        return is_invariant(self._head, record, rows, self._computed, seed, trials=_TRIED_MICROBATCHES)

    def _computed(self, weights: Floats, inputs: Floats, labels: NDArray[np.int64], counted: int) -> Computed:
        network = self._network
        alone = np.full_like(labels, NOBODY)
        alone[counted] = labels[counted]
        network.load(weights)
        _add_microbatch(network, inputs, alone, np.array([CLIP_NORM]))
        parts: list[NDArray[Any]] = [part for stage in network.trained for part in stage.evidence()]
        with np.errstate(all="ignore"):
            parts += [stage.power_sums() for stage in network.trained]
        rows = [np.ascontiguousarray(part).reshape(len(labels), -1).view(np.uint8) for part in parts]
        return Computed(np.concatenate(rows, axis=1), network.total())

    def _forward(self, weights: Floats, inputs: NDArray[Any]) -> Iterator[tuple[slice, Network]]:
        """Runs all inputs through one network, as many at a time as it has room for."""
        network = self._network
        network.load(np.ascontiguousarray(weights))
        room = network.records * self.views
        for start in range(0, len(inputs), room):
            part = slice(start, start + room)
            chunk = inputs[part]
            records = -(-len(chunk) // self.views)
            images = np.zeros((records * self.views, *self._head.input_shape), inputs.dtype)
            images[: len(chunk)] = chunk
            with np.errstate(all="ignore"):
                network.forward(images.reshape((records, self.views, *self._head.input_shape)))
            yield part, network

    def _checked_norms(self, clip_norms: Sequence[float]) -> NDArray[np.float64]:
        layers = len(self._network.trained)
        if len(clip_norms) not in (1, layers):
            raise ParameterError(
                f"There are {len(clip_norms)} clip norms; expected one for the whole gradient, or one for"
                f" each of the {layers} layers with parameters."
            )
        return np.array([require_positive("a clip norm", float(norm)) for norm in clip_norms])


def _add_microbatch(
    network: Network,
    images: NDArray[Any],
    labels: NDArray[Any],
    clip_norms: NDArray[np.float64],
) -> tuple[NDArray[np.int64], int]:
    """Add a microbatch's clipped gradients to the network's; how many were within the norms, and excluded."""
    within, excluded = np.zeros(len(clip_norms), np.int64), 0
    # A record may hold anything: its norm decides whether its gradient counts.
    with np.errstate(all="ignore"):
        for start in range(0, len(images), network.records):
            part = slice(start, start + network.records)
            network.forward(images[part])
            network.backward(labels[part])
            sums = np.array([stage.power_sums() for stage in network.trained])
            if len(clip_norms) == 1:
                sums = np.add.reduce(sums, axis=0, keepdims=True)
            norms, squares = (np.sqrt(sums), sums) if network.norm is Norm.L2 else (sums, np.square(sums))
            # In float32, so that no clip factor is so small that it loses bits.
            usable = np.isfinite(np.add.reduce(squares, axis=0).astype(np.float32))
            count = len(images[part])
            if images.dtype != np.uint8:
                # A value that no window reads does not show in a gradient, and a maximum may lose a NaN.
                usable[:count] &= are_finite(images[part])
            present = np.zeros(len(usable), np.bool_)
            np.not_equal(labels[part], NOBODY, out=present[:count])
            factors = np.minimum(clip_norms[:, np.newaxis] / norms, 1).astype(np.float32)
            blank_all_but(present & usable, factors.T)
            # Whatever there is to leave out: who chooses the weights may choose what that is, and see how
            # long many steps take.
            for stage, layer in zip(network.trained, cycle(factors)):
                stage.add_clipped(layer, usable)
            fitting = (norms <= clip_norms[:, np.newaxis]) & usable & present
            within += np.add.reduce(fitting, axis=1)
            excluded += int(np.count_nonzero(present & ~usable))
        for stage in network.trained:
            stage.finish()
    return within, excluded


def _block(spec: ModelSpec, microbatch: int, views: int) -> int:
    """How many records to compute at a time, in equal parts of a microbatch."""
    floats = 0
    for node in (inner for top in spec.nodes for inner in top.walk()):
        floats += 2 * views * math.prod(node.output_shape)
        if node.blocks and not isinstance(node.layer, Dense):
            floats += node.parameters.stop - node.parameters.start
    most = max(_AT_ONCE // floats, _LEAST_BLOCK)
    return -(-microbatch // -(-microbatch // most))
