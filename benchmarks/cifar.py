"""CIFAR-10 as JPEG files in an archive. Accuracies are a little below those on the original pixels."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from benchmarks.figures import Skipped
from benchmarks.programs import ROOT
from dpagent.learning.data.dataset import ArrayDataset
from simulation.data.source import Source

#: A small network for it, with 10,986 parameters.
CIFAR_NETWORK: Final = {
    "name": "small-cifar-cnn", "input_shape": [32, 32, 3], "classes": 10, "input_offset": 0.5,
    "input_scale": 0.25,
    "layers": [
        {"conv2d": {"channels": 16, "kernel": 5, "stride": 2, "padding": 2}}, "tanh",
        {"max_pool2d": {"kernel": 2, "stride": 2}},
        {"conv2d": {"channels": 32, "kernel": 3, "padding": 1}}, "tanh",
        {"max_pool2d": {"kernel": 2, "stride": 2}}, {"dense": 10},
    ],
}  # fmt: skip


def cifar_10() -> Source:
    """All its records, decoded, in memory.

    Raises:
        Skipped: the archive is not there.
    """
    file = Path(os.environ.get("CIFAR_ZIP", "../shared/data/cifar10-jpeg.zip"))
    if not (ROOT / file).is_file():
        raise Skipped(
            f"There is no {file}. Set CIFAR_ZIP to a zip of train/CLASS/*.jpg and test/CLASS/*.jpg."
        )
    with zipfile.ZipFile(ROOT / file) as archive:
        return Source(_half(archive, "train"), _half(archive, "test"))


def _half(archive: zipfile.ZipFile, half: str) -> ArrayDataset:
    files = sorted(
        name for name in archive.namelist() if name.startswith(f"{half}/") and name.endswith(".jpg")
    )
    classes = sorted({name.split("/")[1] for name in files})
    labels = np.array([classes.index(name.split("/")[1]) for name in files], np.int64)
    pictures = np.array([np.asarray(Image.open(io.BytesIO(archive.read(name)))) for name in files])
    return ArrayDataset(pictures, labels, len(classes))
