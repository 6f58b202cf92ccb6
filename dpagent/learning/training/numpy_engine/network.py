"""An architecture compiled for a microbatch of fixed size: stages in a row, bound to their memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from dpagent.learning.models.layers import (
    Activation,
    AveragePool,
    Convolution,
    Dense,
    GroupNorm,
    MaxPool,
    Relu,
    Residual,
    Tanh,
    Windowed,
)
from dpagent.learning.models.part import Shape
from dpagent.learning.models.spec import ModelSpec, Node
from dpagent.learning.models.windows import Windows
from dpagent.learning.training.numpy_engine.activations import ReluStage, TanhStage
from dpagent.learning.training.numpy_engine.average_pooling import AveragePoolStage
from dpagent.learning.training.numpy_engine.convolution import ConvolutionStage
from dpagent.learning.training.numpy_engine.dense import AveragedDenseStage, DenseStage
from dpagent.learning.training.numpy_engine.loss import SoftmaxCrossEntropy
from dpagent.learning.training.numpy_engine.normalisation import GroupNormStage
from dpagent.learning.training.numpy_engine.pooling import (
    CopyStage,
    GroupedMaxPoolStage,
    MaxPoolStage,
    SlidingMaxPoolStage,
)
from dpagent.learning.training.numpy_engine.products import Choice
from dpagent.learning.training.numpy_engine.residual import ForkStage, SumStage
from dpagent.learning.training.numpy_engine.stages import Stage, TrainedStage
from dpagent.learning.training.numpy_engine.workspaces import Floats, Memory, Signal, cropped
from dpagent.norm import Norm


class Network:
    """Forward and backward passes over ``records`` records of ``views`` views each.

    Attributes:
        norm: in which records are clipped.
        records: computed at a time.
        trained: the stages with parameters, in the order of the flat vector.
        loss: of the logits.
    """

    def __init__(self, spec: ModelSpec, records: int, views: int, norm: Norm, *, microbatch: int) -> None:
        self.records, self.norm = records, norm
        self._labels = np.zeros(records, np.int64)
        memory = Memory(records, views)
        self._input = Signal(memory.workspace(spec.input_shape), None)
        self._centring = [
            (operation, _constant(value, spec.input_shape))
            for operation, value, neutral in (
                (np.subtract, spec.input_offset, 0.0),
                (np.divide, spec.input_scale, 1.0),
            )
            if np.any(np.not_equal(value, neutral))
        ]
        builder = _Builder(memory, norm, microbatch)
        self._output, _ = builder.chain(spec.nodes, self._input)
        self._stages = builder.stages
        in_place = {stage.path: stage for stage in self._stages if isinstance(stage, TrainedStage)}
        self.trained = [in_place[node.path] for top in spec.nodes for node in top.walk() if node.blocks]
        self.loss = SoftmaxCrossEntropy(self._output, memory)

    @property
    def logits(self) -> Floats:
        """``(records, views, classes)``, a workspace."""
        return self._output.values.values

    @property
    def choices(self) -> dict[str, Choice]:
        """All that can be computed in several forms, by stage and purpose."""
        return {
            f"stage {number}, {purpose}": choice
            for number, stage in enumerate(self._stages)
            for purpose, choice in stage.choices.items()
        }

    def load(self, weights: Floats) -> None:
        """Take over the parameters ``(d,)``."""
        for stage in self.trained:
            stage.load(weights[stage.parameters])

    def total(self) -> NDArray[np.float64]:
        """The clipped sum ``(d,)`` of all microbatches since ``load``."""
        return np.concatenate([stage.total() for stage in self.trained])

    def forward(self, inputs: NDArray[Any]) -> None:
        """Compute the logits of ``(n, views, *input_shape)`` inputs; the records beyond n are blank."""
        count = len(inputs)
        values = self._input.values.values
        np.copyto(values[:count], inputs)
        values[count:] = 0
        if inputs.dtype == np.uint8:
            np.divide(values, np.float32(255), out=values)
        for operation, constant in self._centring:
            operation(values, constant, out=values)
        for stage in self._stages:
            stage.forward()

    def backward(self, labels: NDArray[np.int64]) -> None:
        """Compute the gradient of each record of the last ``forward``, for its labels ``(n,)``; that of a row
        without one, for any."""
        np.maximum(labels, 0, out=self._labels[: len(labels)])
        self.loss.backward(self._labels)
        for stage in reversed(self._stages):
            stage.backward()


class _Builder:
    """Makes the stages of a row of layers and the signals between them."""

    def __init__(self, memory: Memory, norm: Norm, microbatch: int) -> None:
        self._memory, self._norm, self._microbatch = memory, norm, microbatch
        self._in_residual = False
        self.stages: list[Stage] = []

    def chain(self, nodes: Sequence[Node], source: Signal, *, reserved: bool = False) -> tuple[Signal, bool]:
        """Append the stages of ``nodes``.

        ``reserved`` says of the source, and the second result of the output, that its values are needed
        once more, so that no activation may take over their memory.
        """
        nodes = _cropped(_pooling_first(nodes))
        for index, node in enumerate(nodes):
            source, reserved = self._append(node, nodes[index + 1 :], source, reserved=reserved)
        return source, reserved

    def _append(
        self, node: Node, following: Sequence[Node], source: Signal, *, reserved: bool
    ) -> tuple[Signal, bool]:
        layer = node.layer
        match layer:
            case Convolution():
                return self._convolution(layer, node, following, source), False
            case MaxPool():
                return self._max_pool(layer, node, following, source), False
            case AveragePool():
                target = self._signal_after(source, node.output_shape)
                self.stages.append(AveragePoolStage(_windows(layer, node), source, target, self._memory))
                return target, False
            case Dense():
                return self._dense(node, source), False
            case Tanh():
                return self._activation(TanhStage, source, reserved=reserved), True
            case Relu():
                return self._activation(ReluStage, source, reserved=reserved), True
            case GroupNorm():
                target = self._signal_after(source, node.output_shape)
                self.stages.append(GroupNormStage(layer.groups, source, target, self._memory))
                return target, True
            case Residual():
                return self._residual(node, source), False
            case _:
                assert_never(layer)

    def _convolution(
        self, layer: Convolution, node: Node, following: Sequence[Node], source: Signal
    ) -> Signal:
        over, grouping = _windows(layer, node), _grouping(following)
        shape = node.output_shape
        if grouping != (1, 1):
            groups = (count // of for count, of in zip(over.count, grouping, strict=True))
            shape = (*grouping, *groups, layer.channels)
        target = self._signal(shape, trained=True)
        self.stages.append(ConvolutionStage(node, over, source, target, grouping, self._norm, self._memory))
        return target

    def _dense(self, node: Node, source: Signal) -> Signal:
        # Its gradient is needed until the end of the microbatch.
        target = Signal(*(self._memory.workspace(node.output_shape) for _ in range(2)))
        if self._memory.views == 1:
            self.stages.append(DenseStage(node, source, target, self._norm, self._microbatch))
        else:
            self.stages.append(AveragedDenseStage(node, source, target, self._norm))
        return target

    def _activation(
        self, stage: Callable[[Signal, Signal, Memory], Stage], source: Signal, *, reserved: bool
    ) -> Signal:
        target = source
        if reserved:
            target = Signal(self._memory.workspace(source.values.values.shape[2:]), source.gradient)
        self.stages.append(stage(source, target, self._memory))
        return target

    def _max_pool(self, layer: MaxPool, node: Node, following: Sequence[Node], source: Signal) -> Signal:
        over = _windows(layer, node)
        if source.values.values.ndim == 7:
            target = self._signal_after(source, node.output_shape)
            self.stages.append(GroupedMaxPoolStage(source, target, self._memory))
            return target
        slides = layer.stride == 1 < layer.kernel and _is_mostly_windows(node)
        if not slides or not source.values.is_gapless:
            target = self._signal_after(source, node.output_shape)
            self.stages.append(MaxPoolStage(over, source, target, self._memory))
            return target
        whole = self._signal_after(source, node.input_shape)
        self.stages.append(SlidingMaxPoolStage(over, source, whole, self._memory))
        part = cropped(whole, node.output_shape)
        if _is_gathered(following):
            return part
        target = self._signal_after(source, node.output_shape)
        self.stages.append(CopyStage(part, target))
        return target

    def _residual(self, node: Node, source: Signal) -> Signal:
        # Both branches read the source's values; each has a gradient of its own, which the fork adds up.
        entries = [
            Signal(source.values, self._memory.workspace(node.input_shape) if source.gradient else None)
            for _ in range(2)
        ]
        self.stages.append(ForkStage(source, entries))
        self._in_residual = True
        body, _ = self.chain(node.body, entries[0], reserved=True)
        shortcut, _ = self.chain(node.shortcut, entries[1], reserved=True)
        self._in_residual = False
        target = self._signal(node.output_shape, trained=bool(body.gradient or shortcut.gradient))
        self.stages.append(SumStage((body, shortcut), target))
        return target

    def _signal(self, shape: Shape, *, trained: bool) -> Signal:
        gradient = None
        if trained:
            # The branches of a residual do not follow each other: shared memory would be overwritten.
            gradient = self._memory.workspace(shape) if self._in_residual else self._memory.gradient(shape)
        return Signal(self._memory.workspace(shape), gradient)

    def _signal_after(self, source: Signal, shape: Shape) -> Signal:
        return self._signal(shape, trained=source.gradient is not None)


def _constant(value: float | tuple[float, ...], shape: Shape) -> NDArray[np.float32]:
    """A constant of the input, written out for every number of a record unless it is one for all."""
    constant = np.asarray(value, np.float32)
    return np.broadcast_to(constant, shape).copy() if constant.size > 1 else constant.reshape(())


def _cropped(nodes: Sequence[Node]) -> list[Node]:
    """The nodes, without the last rows and columns of images that nothing reads.

    The windows of a stride need not reach the end of their input. Values beyond them have no
    influence and a gradient of zero: the convolutions and pooling layers before them need not compute it.
    """
    read: list[Shape] = [nodes[-1].output_shape] if nodes else []
    for node in reversed(nodes[1:]):
        read.insert(0, _read(node, read[0]))
    cropped: list[Node] = []
    for node, output in zip(nodes, read, strict=True):
        shape = cropped[-1].output_shape if cropped else node.input_shape
        if isinstance(node.layer, Activation):  # They run over whole workspaces: over all there is.
            output = shape
        elif not isinstance(node.layer, Windowed):
            output = node.output_shape
        cropped.append(replace(node, input_shape=shape, output_shape=output))
    return cropped


def _read(node: Node, output: Shape) -> Shape:
    """The part of its input that a layer reads to give the first rows and columns of its output."""
    if isinstance(node.layer, Activation):
        return output
    if not isinstance(node.layer, Windowed):
        return node.input_shape
    over = node.layer.windows(node.input_shape)
    ends = (
        (count - 1) * stride + kernel - padding
        for count, stride, kernel, padding in zip(
            _down_and_across(output), over.stride, over.kernel, over.padding, strict=True
        )
    )
    # Windows may lie in the padding altogether; an image has a pixel all the same.
    sizes = [max(1, min(end, size)) for end, size in zip(ends, over.image[:2], strict=True)]
    return (*sizes[3 - len(output) :], over.image[2])


def _windows(layer: Windowed, node: Node) -> Windows:
    """The windows of a layer that give its output, which may be cropped."""
    return replace(layer.windows(node.input_shape), count=_down_and_across(node.output_shape))


def _down_and_across(shape: Shape) -> tuple[int, int]:
    """Height and width of an image; a series is one of height one."""
    return (shape[0], shape[1]) if len(shape) == 3 else (1, shape[0])


def _is_gathered(following: Sequence[Node]) -> bool:
    """Whether a convolution reads the output of a layer, perhaps through an activation."""
    layers = [node.layer for node in following[:2]]
    if layers and isinstance(layers[0], Activation):
        del layers[0]
    return bool(layers) and isinstance(layers[0], Convolution)


def _is_mostly_windows(node: Node) -> bool:
    """Whether windows begin at half of an image's pixels or more, but not at all of them."""
    before, after = (math.prod(shape[:-1]) for shape in (node.input_shape, node.output_shape))
    return before / 2 <= after < before


def _grouping(following: Sequence[Node]) -> tuple[int, int]:
    """How a convolution lays out its positions for the layer that follows it."""
    match following[0].layer if following else None:
        case MaxPool(axes=axes, kernel=kernel, stride=stride) if kernel == stride > 1:
            return (kernel if axes == 2 else 1, kernel)
        case _:
            return (1, 1)


def _pooling_first(nodes: Sequence[Node]) -> list[Node]:
    """The nodes with maxima taken before an activation, which never falls, instead of after it.

    The result is the same, and there is less of it to compute.
    """
    ordered = list(nodes)
    for index in range(len(ordered) - 1, 0, -1):
        place = index
        while (
            place < len(ordered)
            and isinstance(ordered[place].layer, MaxPool)
            and isinstance(ordered[place - 1].layer, Activation)
        ):
            activation, pooling = ordered[place - 1 : place + 1]
            shape = pooling.output_shape
            ordered[place - 1 : place + 1] = (
                pooling,
                replace(activation, input_shape=shape, output_shape=shape),
            )
            place += 1
    return ordered
