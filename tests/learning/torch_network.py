"""A specification as a PyTorch function, whose gradients ``torch.func`` takes record by record."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.func import grad, vmap
from torch.nn import functional

from dpagent.learning.models.layers import (
    GROUP_NORM_EPSILON,
    AveragePool1d,
    AveragePool2d,
    Conv1d,
    Conv2d,
    Dense,
    GroupNorm,
    MaxPool1d,
    MaxPool2d,
    Relu,
    Residual,
    Tanh,
)
from dpagent.learning.models.spec import ModelSpec, Node


def gradients_of(spec: ModelSpec, weights: Any, inputs: Any, labels: Any) -> Any:
    """Each record's gradient of the softmax cross-entropy, ``(n, d)`` float64."""
    scaled = (inputs.astype(np.float64) - np.array(spec.input_offset)) / np.array(spec.input_scale)

    def loss(flat: Any, record: Any, label: Any) -> Any:
        channels_first = record.movedim(-1, 0)[None]
        return functional.cross_entropy(_forward(spec.nodes, flat, channels_first), label[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    flat = torch.from_numpy(weights.astype(np.float64))
    return each(flat, torch.from_numpy(scaled), torch.from_numpy(labels)).numpy()


def _forward(nodes: tuple[Node, ...], flat: Any, x: Any) -> Any:
    for node in nodes:
        tensors = [
            flat[block.offset : block.offset + block.size].reshape(block.shape) for block in node.blocks
        ]
        match node.layer:
            case Conv1d(stride=stride, padding=padding):
                x = functional.conv1d(x, tensors[0].permute(2, 1, 0), tensors[1], stride, padding)
            case Conv2d(stride=stride, padding=padding):
                x = functional.conv2d(x, tensors[0].permute(3, 2, 0, 1), tensors[1], stride, padding)
            case MaxPool1d(kernel=kernel, stride=stride):
                x = functional.max_pool1d(x, kernel, stride)
            case MaxPool2d(kernel=kernel, stride=stride):
                x = functional.max_pool2d(x, kernel, stride)
            case AveragePool1d(kernel=kernel, stride=stride):
                x = functional.avg_pool1d(x, kernel, stride)
            case AveragePool2d(kernel=kernel, stride=stride):
                x = functional.avg_pool2d(x, kernel, stride)
            case Dense():
                x = x.movedim(1, -1).flatten(1) @ tensors[0] + tensors[1]
            case GroupNorm(groups=groups):
                x = functional.group_norm(x, groups, eps=GROUP_NORM_EPSILON)
            case Tanh():
                x = torch.tanh(x)
            case Relu():
                x = torch.relu(x)
            case Residual():
                x = _forward(node.body, flat, x) + _forward(node.shortcut, flat, x)
    return x
