"""Models, per-example gradients, datasets and the optimiser's step.

What is imported here needs numpy and the standard library, so that a device can afford it.
``dpagent.learning.onnx_export`` (needs onnx) and ``dpagent.learning.evaluation`` (needs
onnxruntime) are imported by those who use them.
"""

from __future__ import annotations

from dpagent.learning.datasets import Dataset, check_fits, load_idx, load_npz, save_npz, split_iid
from dpagent.learning.models import (
    BUILT_IN,
    Conv2d,
    Dense,
    Layer,
    MaxPool2d,
    ModelSpec,
    ParameterBlock,
    Tanh,
    built_in,
)
from dpagent.learning.numpy_engine import NumpyEngine
from dpagent.learning.optimiser import MomentumSgd

__all__ = [
    "BUILT_IN",
    "Conv2d",
    "Dataset",
    "Dense",
    "Layer",
    "MaxPool2d",
    "ModelSpec",
    "MomentumSgd",
    "NumpyEngine",
    "ParameterBlock",
    "Tanh",
    "built_in",
    "check_fits",
    "load_idx",
    "load_npz",
    "save_npz",
    "split_iid",
]
