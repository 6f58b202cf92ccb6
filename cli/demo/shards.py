"""The data of a demo on disk: each device's shard, the test data and the model, each where its program looks.

A shard is an NPZ file, in whatever form the data were given: the devices of a demo hold parts of one set, and
a folder of pictures or a CSV file would have to be copied in parts to be that. Devices of a real fleet read
their data in the form they have (docs/data.md).
"""

from __future__ import annotations

from pathlib import Path

from cli.demo.fitting_model import model_file
from cli.demo.layout import Layout
from cli.demo.options import DemoOptions
from cli.demo.source import Source, open_source
from dpagent.errors import ConfigurationError
from dpagent.learning import BUILT_IN, ModelSpec, save_npz, split
from dpagent.learning.data import Subset
from dpagent.storage import disk_errors, write_atomically


def is_prepared(layout: Layout) -> bool:
    """Whether the data are all there."""
    return layout.test_file.exists()


def deal(options: DemoOptions, source: Source) -> list[Subset]:
    """Each device's part of the training records.

    Raises:
        DataError: Too few records for so many devices or such a split.
    """
    data = options.data
    return split(
        source.train, options.devices, data.split, seed=options.seed, alpha=data.alpha,
        classes_per_part=data.classes_per_device,
    )  # fmt: skip


def prepare_data(options: DemoOptions, layout: Layout, source: Source | None = None) -> None:
    """Split the data over the devices, once.

    Raises:
        DataError: Too few records for so many devices or such a split, or one that cannot be read.
        StorageError: The disk is full.
    """
    if is_prepared(layout):
        return
    source = source or open_source(options.data, options.seed)
    for number, shard in enumerate(deal(options, source), start=1):
        _make_directory(layout.device(number))
        save_npz(layout.shard_file(number), shard)
    _make_directory(layout.test_file.parent)
    # Last, because it says that all is there.
    partial = layout.test_file.with_suffix(".part")
    save_npz(partial, source.test)
    with disk_errors(partial):
        partial.replace(layout.test_file)


def write_model(options: DemoOptions, layout: Layout, spec: ModelSpec) -> None:
    """Put a model that is no built-in one beside ``fleet.yaml``, once.

    Raises:
        ConfigurationError: The model file cannot be read.
        StorageError: The disk is full.
    """
    if options.model in BUILT_IN or layout.model_file.exists():
        return
    text = model_file(spec)
    if options.model:
        try:
            text = Path(options.model).read_bytes()
        except OSError as error:
            raise ConfigurationError(f"Cannot read {options.model}: {error.strerror or error}.") from error
    _make_directory(layout.model_file.parent)
    write_atomically(layout.model_file, text)


def _make_directory(path: Path) -> None:
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
