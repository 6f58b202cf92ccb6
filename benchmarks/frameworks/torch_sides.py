"""The other sides of the comparison: Opacus in each of its modes, and PyTorch without privacy.

Opacus runs as ``opacus.PrivacyEngine`` and its ``BatchMemoryManager`` set it up: its module around the
network, its optimiser told to skip the step after each physical batch, so that the clipped
gradients add up in ``summed_grad``. No noise is drawn and no weight changes.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.frameworks import LOT
from benchmarks.frameworks.networks import Network
from benchmarks.frameworks.ours import CLIP_NORM
from dpagent.learning.models.spec import ModelSpec

torch: Any = import_module("torch")
grad_sample: Any = import_module("opacus.grad_sample")
optimizers: Any = import_module("opacus.optimizers")
fast_clipping: Any = import_module("opacus.utils.fast_gradient_clipping_utils")

# PyTorch says that inputs need no gradient where Opacus has put its hooks: they need none.
warnings.filterwarnings("ignore", "Full backward hook is firing")


class TorchSide(ABC):
    """One way of computing a gradient sum over a lot in PyTorch.

    Attributes:
        network: the architecture in PyTorch.
        inputs, labels: the lot as tensors, once :meth:`take` has been called.
    """

    #: Whether each example's gradient is clipped before the sum.
    private = True

    def __init__(self, spec: ModelSpec) -> None:
        self.network = self._network(spec)
        self.inputs = self.labels = torch.empty(0)
        self._loss = torch.nn.CrossEntropyLoss(reduction="sum")
        self._sgd = torch.optim.SGD(self.network.module.parameters(), lr=0.0)

    def take(self, inputs: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
        """Take a lot: ``(n, *input_shape)`` float32, as an engine takes it, and ``(n,)``."""
        self.inputs = self.network.inputs(inputs)
        self.labels = torch.from_numpy(labels)

    @abstractmethod
    def step(self, batch: int) -> None:
        """Sum over the lot in physical batches of ``batch`` examples."""

    @abstractmethod
    def total(self) -> NDArray[np.float32]:
        """The last step's sum, ``(d,)`` in our order."""

    def _network(self, spec: ModelSpec) -> Network:
        return Network(spec)

    def _batches(self, batch: int) -> Iterator[tuple[Any, Any]]:
        return zip(self.inputs.split(batch), self.labels.split(batch), strict=True)


class PlainPyTorch(TorchSide):
    """Forward, backward and an SGD step, as in training without privacy."""

    private = False

    def step(self, batch: int) -> None:
        self._sgd.zero_grad()
        for inputs, labels in self._batches(batch):
            self._loss(self.network.module(inputs), labels).backward()
        self._sgd.step()

    def total(self) -> NDArray[np.float32]:
        return self.network.flat([parameter.grad for parameter in self.network.module.parameters()])


class ChannelsLastPyTorch(PlainPyTorch):
    """The same with channels last in memory, which PyTorch's convolutions prefer."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.network.module.to(memory_format=torch.channels_last)

    def take(self, inputs: NDArray[np.float32], labels: NDArray[np.int64]) -> None:
        super().take(inputs, labels)
        self.inputs = self.inputs.contiguous(memory_format=torch.channels_last)

    def _network(self, spec: ModelSpec) -> Network:
        return Network(spec, images=True)


class _Opacus(TorchSide):
    """The common base of Opacus's modes: clipping and summing after each physical batch."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._private = self._wrap(self.network.module)
        self._optimizer = self._optimizer_kind()(
            self._sgd,
            noise_multiplier=0.0,
            max_grad_norm=CLIP_NORM,
            expected_batch_size=LOT,
            loss_reduction="sum",
        )

    def step(self, batch: int) -> None:
        for parameter in self._optimizer.params:
            parameter.summed_grad = None
        for inputs, labels in self._batches(batch):
            self._backward(inputs, labels)
            self._optimizer.signal_skip_step(do_skip=True)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def total(self) -> NDArray[np.float32]:
        return self.network.flat([parameter.summed_grad for parameter in self._optimizer.params])

    def _optimizer_kind(self) -> Any:
        return optimizers.DPOptimizer

    def _backward(self, inputs: Any, labels: Any) -> None:
        self._loss(self._private(inputs), labels).backward()

    @abstractmethod
    def _wrap(self, module: Any) -> Any: ...


class Hooks(_Opacus):
    """Opacus's default: a formula of its own for each kind of layer."""

    def _wrap(self, module: Any) -> Any:
        return grad_sample.GradSampleModule(module, loss_reduction="sum")


class Functorch(_Opacus):
    """Every layer's gradients by ``torch.func``."""

    def _wrap(self, module: Any) -> Any:
        return grad_sample.GradSampleModule(module, loss_reduction="sum", force_functorch=True)


class ExpandedWeights(_Opacus):
    """PyTorch's own per-example gradients."""

    def _wrap(self, module: Any) -> Any:
        return grad_sample.GradSampleModuleExpandedWeights(module, loss_reduction="sum")


class Ghost(_Opacus):
    """Norms first, then a second backward pass; convolutions by Opacus's fast gradient clipping."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._two_passes = fast_clipping.DPLossFastGradientClipping(
            self._private, self._optimizer, self._loss, loss_reduction="sum"
        )

    def _optimizer_kind(self) -> Any:
        return optimizers.DPOptimizerFastGradientClipping

    def _wrap(self, module: Any) -> Any:
        return grad_sample.GradSampleModuleFastGradientClipping(
            module, loss_reduction="sum", max_grad_norm=CLIP_NORM
        )

    def _backward(self, inputs: Any, labels: Any) -> None:
        self._private.enable_hooks()
        self._two_passes(self._private(inputs), labels).backward()


OPACUS: MappingProxyType[str, type[TorchSide]] = MappingProxyType(
    {"hooks": Hooks, "ghost": Ghost, "ExpandedWeights": ExpandedWeights, "functorch": Functorch}
)
PYTORCH: MappingProxyType[str, type[TorchSide]] = MappingProxyType(
    {"as it is": PlainPyTorch, "channels last": ChannelsLastPyTorch}
)


def per_example_gradients(
    spec: ModelSpec, records: NDArray[np.float32], labels: NDArray[np.int64], *, batch: int = 16
) -> Iterator[NDArray[np.float64]]:
    """The oracle: ``torch.func.vmap(grad)`` over single examples in float64, ``(m, d)`` in our order."""
    network = Network(spec)
    module = network.module.double()
    parameters = {name: tensor.detach() for name, tensor in module.named_parameters()}

    def loss(values: Any, example: Any, label: Any) -> Any:
        logits = torch.func.functional_call(module, values, (example[None],))
        return torch.nn.functional.cross_entropy(logits, label[None])

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
    for start in range(0, len(records), batch):
        part = slice(start, start + batch)
        gradients = each(parameters, network.inputs(records[part]).double(), torch.from_numpy(labels[part]))
        yield network.flat(list(gradients.values()))
