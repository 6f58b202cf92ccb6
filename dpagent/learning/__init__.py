"""Models, per-example gradients, datasets and the optimiser's step.

What is imported here needs numpy and the standard library, so that a device can afford it.
``dpagent.learning.onnx_export`` (needs onnx) and ``dpagent.learning.evaluation`` (needs
onnxruntime) are imported by those who use them.
"""

from __future__ import annotations

from dpagent.learning.augmentation import Augmentation
from dpagent.learning.built_in_models import BUILT_IN, built_in
from dpagent.learning.data import (
    ArrayDataset,
    Dataset,
    check_fits,
    open_dataset,
    open_idx,
    open_npz,
    save_npz,
    split,
    to_float32,
)
from dpagent.learning.engine import ACCUMULATION_SLACK, ClippedSum, Engine, accumulation_slack
from dpagent.learning.layers import Conv2d, Dense, Layer, MaxPool2d, Tanh
from dpagent.learning.lots import sum_over_lot
from dpagent.learning.model_files import (
    describe,
    find_model,
    from_description,
    is_model_file,
    load_assets,
    load_model,
)
from dpagent.learning.models import ModelSpec, ParameterBlock
from dpagent.learning.numpy_engine import NumpyEngine
from dpagent.learning.optimiser import Adam, LearningRate, Optimiser, Sgd

__all__ = [
    "ACCUMULATION_SLACK",
    "BUILT_IN",
    "Adam",
    "ArrayDataset",
    "Augmentation",
    "ClippedSum",
    "Conv2d",
    "Dataset",
    "Dense",
    "Engine",
    "Layer",
    "LearningRate",
    "MaxPool2d",
    "ModelSpec",
    "NumpyEngine",
    "Optimiser",
    "ParameterBlock",
    "Sgd",
    "Tanh",
    "accumulation_slack",
    "built_in",
    "check_fits",
    "describe",
    "find_model",
    "from_description",
    "is_model_file",
    "load_assets",
    "load_model",
    "open_dataset",
    "open_idx",
    "open_npz",
    "save_npz",
    "split",
    "sum_over_lot",
    "to_float32",
]
