"""Opens data of any format, and recognises the format by the files at the path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dpagent.configuration import Settings
from dpagent.errors import ConfigurationError, DataError, DpagentError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.derived import Reshaped
from dpagent.learning.data.format import Format, Source
from dpagent.learning.data.location import Location
from dpagent.learning.data.registry import FORMATS
from dpagent.learning.data.settings import AUTO, DatasetSettings
from dpagent.learning.data.stored import require_readable
from dpagent.wording import named

_PACKED: Final = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".7z", ".rar")


def open_dataset(settings: DatasetSettings) -> Dataset:
    """The records that ``settings`` describe.

    Args:
        settings: with its path resolved.

    Raises:
        DataError: they are missing, damaged or of no known format; names file, line or record.
        ConfigurationError: a setting does not go with the data, or a package that reads them is missing.

    >>> from tempfile import TemporaryDirectory
    >>> import numpy as np
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder) / "trees.csv"
    ...     _ = file.write_text("height,girth,label\\n20,1.5,oak\\n30,1,fir\\n")
    ...     data = open_dataset(DatasetSettings(path=file, classes=["fir", "oak"]))
    ...     inputs, labels = data.batch(np.arange(2))
    >>> inputs.tolist(), labels.tolist()
    ([[20.0, 1.5], [30.0, 1.0]], [1, 0])
    """
    require_readable(settings.path)
    known = format_of(settings)
    _refuse_other_sections(settings, known)
    try:
        dataset = known.open(source_of(settings), section_of(settings, known))
        if settings.shape is not None:
            dataset = Reshaped(dataset, settings.shape)
    except DpagentError:
        raise
    except (OSError, MemoryError) as error:
        raise DataError(f"Cannot read {settings.path}: {error}.") from error
    if settings.kind == AUTO:
        dataset.origin = replace(dataset.origin, source=f"{dataset.origin.source} (recognised)")
    return dataset


def recognise(path: Path) -> str:
    """The kind of the format that the data at ``path`` are in.

    Raises:
        DataError: none, or several.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "monday.csv").write_text("x,label\\n1,a\\n")
    ...     recognise(Path(folder))
    'csv'
    """
    location = Location(path)
    found = _one_of(location, lambda known: known.recognises(location))
    if found is None:
        raise DataError(_nothing_known(location))
    return found


def recognise_inputs(path: Path) -> str:
    """As :func:`recognise`, also of inputs without labels, which cannot be trained on.

    Raises:
        DataError: no format, or several.
    """
    location = Location(path)
    found = _one_of(location, lambda known: known.recognises(location))
    found = found or _one_of(location, lambda known: known.recognises_unlabelled(location))
    if found is None:
        raise DataError(_nothing_known(location))
    return found


def format_of(settings: DatasetSettings) -> Format[Any]:
    """The format that is set, or recognised.

    Raises:
        DataError: the data are of no format, or of several.
    """
    return FORMATS[recognise(settings.path) if settings.kind == AUTO else settings.kind]


def source_of(settings: DatasetSettings) -> Source:
    """The settings that all formats share, for one of them."""
    classes = None if settings.classes is None else tuple(settings.classes)
    return Source(settings.path, settings.half, classes)


def section_of(settings: DatasetSettings, known: Format[Any]) -> Any:
    """The settings of one format's own."""
    section: Settings = getattr(settings, known.kind, known.section())
    return section


def has_test_half(settings: DatasetSettings) -> bool:
    """Whether the data come as two halves, one of them for tests.

    Raises:
        DataError: they cannot be read.
    """
    return format_of(settings).has_test_half(settings.path)


def fitted(settings: DatasetSettings, shape: tuple[int, ...]) -> DatasetSettings:
    """``settings`` with open ones, such as the size of pictures, chosen for records of ``shape``.

    Raises:
        DataError: the data are of no known format.
    """
    if settings.shape is not None:
        return settings
    known = format_of(settings)
    given = section_of(settings, known)
    section = known.fitted(given, shape)
    return settings if section == given else settings.model_copy(update={known.kind: section})


def _refuse_other_sections(settings: DatasetSettings, known: Format[Any]) -> None:
    for kind in FORMATS:
        if kind in settings.model_fields_set and kind != known.kind:
            keys = sorted(getattr(settings, kind).model_fields_set)
            given = ", ".join(named(f"{kind}.{key}") for key in keys) or named(kind)
            raise ConfigurationError(
                f"{given} {'are' if len(keys) > 1 else 'is'} set, and {settings.path} is taken for"
                f" {known.kind}. Leave {'them' if len(keys) > 1 else 'it'} out, or set {named('kind', kind)}."
            )


def _one_of(location: Location, takes: Callable[[Format[Any]], bool]) -> str | None:
    found = [known.kind for known in FORMATS.values() if takes(known)]
    if len(found) > 1:
        raise DataError(f"{location.path} could be {' or '.join(found)}. Set {named('kind')} to one of them.")
    return found[0] if found else None


def _nothing_known(location: Location) -> str:
    hints = [hint for known in FORMATS.values() if (hint := known.hint(location))]
    if location.name.endswith(_PACKED):
        hints.append("Unpack it first.")
    if hints:
        return f"{location.path} is of no known format. {' '.join(hints)}"
    *titles, last = (known.title for known in FORMATS.values())
    what = "an empty folder" if location.is_folder and not location.names else "of no known format"
    return f"{location.path} is {what}; expected {', '.join(titles)} or {last}. Check the path."
