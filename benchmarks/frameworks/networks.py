"""Our models as PyTorch networks with the same weights, and PyTorch's gradients in our order.

Our activations keep the channels last, PyTorch's have them first, so weights and inputs are permuted
here, once, and copied to the strides that PyTorch gives them itself. Opacus depends on that: its
hooks give wrong gradients of an example, without a word, for activations that keep their channels last.
"""

from __future__ import annotations

import copy
import math
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import BenchmarkError
from dpagent.learning.models.layers import Conv1d, Conv2d, Dense, MaxPool1d, MaxPool2d, Tanh
from dpagent.learning.models.part import Shape
from dpagent.learning.models.spec import ModelSpec

# Not a dependency of the project: typed as Any whether it is installed or not.
torch: Any = import_module("torch")


class Network:
    """One architecture in PyTorch, with our initial weights of seed 0.

    Args:
        spec: the architecture; convolutions, max-pooling, dense layers and tanh.
        images: a series is computed as an image of height one, which can keep its channels last.

    Attributes:
        module: the ``nn.Sequential``.

    Raises:
        BenchmarkError: it has a layer of another kind.
    """

    def __init__(self, spec: ModelSpec, *, images: bool = False) -> None:
        self.spec = spec
        self._images = images or len(spec.input_shape) == 3
        self.module = torch.nn.Sequential(*self._layers())
        self._order = np.concatenate([place.ravel() for place in self._places()])
        self._load(spec.initial_weights(0))

    def inputs(self, records: NDArray[np.float32]) -> Any:
        """Our records ``(n, *input_shape)``, after the fixed preprocessing, as the network takes them."""
        offset, scale = np.asarray(self.spec.input_offset), np.asarray(self.spec.input_scale)
        channels_first = np.moveaxis((records - offset) / scale, -1, 1)
        if self._images and channels_first.ndim == 3:
            channels_first = channels_first[:, :, np.newaxis]
        # Copied into strides of PyTorch's own: with a single channel, numpy takes channels-last strides
        # for contiguous ones, and PyTorch then goes on with channels last in all that follows.
        inputs = torch.empty(channels_first.shape)
        inputs.copy_(torch.from_numpy(channels_first))
        return inputs

    def flat(self, gradients: list[Any]) -> NDArray[Any]:
        """One tensor a parameter, with any axes before the parameter's, as ``(…, d)`` in our order."""
        arrays = [
            gradient.detach().numpy().reshape(*gradient.shape[: gradient.dim() - parameter.dim()], -1)
            for gradient, parameter in zip(gradients, self.module.parameters(), strict=True)
        ]
        theirs = np.concatenate(arrays, axis=-1)
        ours = np.empty_like(theirs)
        ours[..., self._order] = theirs
        return ours

    def pooling_margins(self, records: NDArray[np.float32]) -> NDArray[np.float64]:
        """How far each record is from another gradient, ``(n,)``, in units of an activation.

        The least difference between the two largest values of a window of max-pooling, in float64.
        Where it is as small as the rounding of float32, an engine may take either for the maximum,
        rightly, and the record's gradient is one of two that differ by a percent.

        Only for a network of images.
        """
        module = copy.deepcopy(self.module).double()
        values = self.inputs(records).double()
        margins = np.full(len(records), np.inf)
        with torch.no_grad():
            for layer in module:
                if isinstance(layer, torch.nn.MaxPool2d):
                    planes = values.flatten(0, 1).unsqueeze(1)
                    windows = torch.nn.functional.unfold(planes, layer.kernel_size, stride=layer.stride)
                    largest, second = windows.topk(2, dim=1).values.unbind(1)
                    margin = (largest - second).reshape(len(records), -1).amin(1)
                    margins = np.minimum(margins, margin.numpy())
                values = layer(values)
        return margins

    def _layers(self) -> list[Any]:
        nn = torch.nn
        modules: list[Any] = []
        for node in self.spec.nodes:
            channels = node.input_shape[-1]
            match node.layer:
                case Conv1d() as layer if self._images:
                    kernel, stride, padding = (1, layer.kernel), (1, layer.stride), (0, layer.padding)
                    modules.append(nn.Conv2d(channels, layer.channels, kernel, stride, padding))
                case Conv1d() | Conv2d() as layer:
                    kind = nn.Conv1d if isinstance(layer, Conv1d) else nn.Conv2d
                    modules.append(kind(channels, layer.channels, layer.kernel, layer.stride, layer.padding))
                case MaxPool1d() as layer if self._images:
                    modules.append(nn.MaxPool2d((1, layer.kernel), (1, layer.stride)))
                case MaxPool1d() | MaxPool2d() as layer:
                    kind = nn.MaxPool1d if isinstance(layer, MaxPool1d) else nn.MaxPool2d
                    modules.append(kind(layer.kernel, layer.stride))
                case Dense() as layer:
                    if len(node.input_shape) > 1:
                        modules.append(nn.Flatten())
                    modules.append(nn.Linear(math.prod(node.input_shape), layer.units))
                case Tanh():
                    modules.append(nn.Tanh())
                case layer:
                    raise BenchmarkError(f"{self.spec.name}, {node.path}: not compared with PyTorch yet.")
        return modules

    def _places(self) -> list[NDArray[np.intp]]:
        """For each of PyTorch's parameters, where its numbers lie in our flat vector."""
        places = []
        for node in self.spec.nodes:
            for block in node.blocks:
                place = np.arange(block.offset, block.offset + block.size).reshape(block.shape)
                if len(block.shape) > 1:
                    place = _channels_first(place, node.input_shape)
                places.append(place)
        return places

    def _load(self, weights: NDArray[np.float32]) -> None:
        parameters = list(self.module.parameters())
        with torch.no_grad():
            for parameter, place in zip(parameters, self._places(), strict=True):
                parameter.copy_(torch.from_numpy(weights[place]).reshape(parameter.shape))


def _channels_first(place: NDArray[np.intp], input_shape: Shape) -> NDArray[np.intp]:
    """From (…, in, out) to (out, in, …); a dense layer's inputs too are flattened channels first."""
    if place.ndim == 2:
        place = place.reshape(*input_shape, -1)
    out_in_first = np.moveaxis(place, (-1, -2), (0, 1))
    return np.ascontiguousarray(out_in_first)
