"""A fleet's data on disk: each device's shard, the test data and the model, each where its program looks.

A shard is an NPZ file, for data of any format: the devices hold parts of one set, and a folder of
pictures or a CSV file would have to be copied in parts to be that. Devices of a real fleet read
their data in the form they have (docs/data.md).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml

from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.data.derived import Subset
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.data.splits import split
from dpagent.learning.model_files import load_assets
from dpagent.learning.models.built_ins import BUILT_IN
from dpagent.learning.models.spec import ModelSpec
from dpagent.storage import disk_errors, write_atomically
from dpagent.wording import counted, named
from dpagent.yaml_file import load_yaml
from simulation.data.source import Source, open_source
from simulation.fitting_model import model_file
from simulation.layout import Layout
from simulation.settings import RunSettings


def is_prepared(layout: Layout) -> bool:
    """Whether the data are all there."""
    return layout.test_file.exists()


def deal(settings: RunSettings, source: Source) -> list[Subset]:
    """Each device's part of the training records.

    Raises:
        DataError: Too few records for so many devices or such a split.
    """
    data = settings.data
    if data.split == "file":
        _require_enough_groups(source, settings.devices)
    return split(
        source.train, settings.devices, data.split, seed=settings.seed, alpha=data.alpha,
        classes_per_part=data.classes_per_device,
    )  # fmt: skip


def _require_enough_groups(source: Source, devices: int) -> None:
    if source.train.groups is None:
        return  # which the split itself refuses
    here = len(np.unique(source.train.groups))
    if here >= devices:
        return
    held_out = 0 if source.test.groups is None else len(np.unique(source.test.groups))
    raise DataError(
        f"{counted(here + held_out, 'file')} or groups, {held_out} of them to test on: give "
        f"{named('devices', here)}{' or fewer' * (here > 1)}, or another {named('split')}."
    )


def prepare_data(settings: RunSettings, layout: Layout, source: Source | None = None) -> None:
    """Split the data over the devices, once.

    Raises:
        DataError: Too few records for so many devices or such a split, or one that cannot be read.
        StorageError: The disk is full.
    """
    if is_prepared(layout):
        return
    source = source or open_source(settings.data, settings.seed)
    for number, shard in enumerate(deal(settings, source), start=1):
        _make_directory(layout.device(number))
        save_npz(layout.shard_file(number), shard)
    _make_directory(layout.test_file.parent)
    # Last, because it says that all is there.
    partial = layout.test_file.with_suffix(".part")
    save_npz(partial, source.test)
    with disk_errors(partial):
        partial.replace(layout.test_file)


def write_model(settings: RunSettings, layout: Layout, spec: ModelSpec) -> None:
    """Put a model that is no built-in one beside ``fleet.yaml``, once.

    Raises:
        ConfigurationError: The model file cannot be read.
        StorageError: The disk is full.
    """
    if settings.model in BUILT_IN or layout.model_file.exists():
        return
    _make_directory(layout.model_file.parent)
    text = _with_network_beside(Path(settings.model), layout) if settings.model else model_file(spec)
    write_atomically(layout.model_file, text)


def _with_network_beside(file: Path, layout: Layout) -> bytes:
    """A copy of a model file; a network that it names by its path is copied beside it."""
    assets = load_assets(file)
    if not assets:
        try:
            return file.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"Cannot read {file}: {error.strerror or error}.") from error
    (network,) = assets.values()
    write_atomically(layout.network_file, network)
    description = load_yaml(file, example="name: …")
    for stage in description["front_end"]:
        if isinstance(stage, dict) and "onnx" in stage:
            stage["onnx"]["file"] = layout.network_file.name
    return yaml.safe_dump(description, sort_keys=False, allow_unicode=True).encode()


def _make_directory(path: Path) -> None:
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
