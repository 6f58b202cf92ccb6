"""Records of a device: reading them from files, checking them, and splitting them for experiments.

What is imported here needs numpy and the standard library. Pillow is imported when the first picture is
opened; :mod:`dpagent.learning.data.settings` (needs pydantic) by those who have a configuration.
"""

from __future__ import annotations

from dpagent.learning.data.checking import Findings, count_non_finite, examine
from dpagent.learning.data.cifar import open_cifar
from dpagent.learning.data.dataset import (
    ArrayDataset,
    Dataset,
    Origin,
    check_fits,
    to_float32,
)
from dpagent.learning.data.derived import Reshaped, Subset, Unfailing
from dpagent.learning.data.idx import open_idx
from dpagent.learning.data.images import open_images
from dpagent.learning.data.npz import open_npz, save_npz
from dpagent.learning.data.opening import KINDS, open_dataset, recognise
from dpagent.learning.data.pictures import PictureForm
from dpagent.learning.data.splits import split
from dpagent.learning.data.table_form import TableForm
from dpagent.learning.data.tables import open_table

__all__ = [
    "KINDS",
    "ArrayDataset",
    "Dataset",
    "Findings",
    "Origin",
    "PictureForm",
    "Reshaped",
    "Subset",
    "TableForm",
    "Unfailing",
    "check_fits",
    "count_non_finite",
    "examine",
    "open_cifar",
    "open_dataset",
    "open_idx",
    "open_images",
    "open_npz",
    "open_table",
    "recognise",
    "save_npz",
    "split",
    "to_float32",
]
