"""Opens data of any format, declared or inferred, and recognises the format by the files at the path."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dpagent.errors import ConfigurationError, DataError, DpagentError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.declared import MAX_RECORDS
from dpagent.learning.data.derived import Reshaped
from dpagent.learning.data.format import Format, Source
from dpagent.learning.data.glance import Glance
from dpagent.learning.data.location import Location
from dpagent.learning.data.registry import FORMATS
from dpagent.learning.data.settings import AUTO, DatasetSettings, not_declared, require_kind
from dpagent.learning.data.stored import require_readable
from dpagent.settings import Settings
from dpagent.wording import named

_PACKED: Final = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".7z", ".rar")


def open_dataset(settings: DatasetSettings) -> Dataset:
    """The records that ``settings`` describe; what they do not declare is inferred. Never on a board.

    Args:
        settings: with its path resolved.

    Raises:
        DataError: there are none, or they are damaged or of no known format; names file, line or record.
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
    return open_inferred(settings)[0]


def open_inferred(settings: DatasetSettings) -> tuple[Dataset, DatasetSettings]:
    """As :func:`open_dataset`, and the settings with which a board opens the same records."""
    declared, warnings = declare(settings)
    dataset = open_declared(declared)
    if not len(dataset):
        raise DataError(f"{settings.path} holds no record. {' '.join(dataset.origin.left_out[:3])}".rstrip())
    origin = dataset.origin
    recognised = " (recognised)" if settings.kind == AUTO else ""
    dataset.origin = replace(
        origin, source=f"{origin.source}{recognised}", warnings=(*warnings, *origin.warnings)
    )
    return dataset, declared


def declare(settings: DatasetSettings) -> tuple[DatasetSettings, tuple[str, ...]]:
    """Infer from the data what ``settings`` leave undeclared; ``max_records`` becomes the most there may be.

    Returns:
        Settings that :func:`open_declared` takes, and what had better be declared, a sentence each.

    Raises:
        DataError, ConfigurationError: as of :func:`open_dataset`.
    """
    require_readable(settings.path)
    known = format_of(settings)
    _refuse_other_sections(settings, known)
    source, section = source_of(settings), section_of(settings, known)
    with _reading_any(settings.path):
        found = known.infer(source, section)
    changes: dict[str, Any] = {"kind": known.kind, "max_records": source.max_records}
    if found.section != section:
        changes[known.kind] = found.section
    classes = found.source.classes
    if source.classes is None:
        changes["classes"] = list(classes) if isinstance(classes, tuple) else classes
    if source.shape is None and found.source.shape is not None:
        changes["shape"] = list(found.source.shape)
    if source.dtype is None and found.source.dtype is not None:
        changes["dtype"] = found.source.dtype
    return settings.with_values(changes), found.warnings


def open_declared(settings: DatasetSettings) -> Dataset:
    """The records that ``settings`` describe, which declare what gives them their meaning; maybe none.

    Whether they can be opened depends on the files' frame and on their number, settled here, and on nothing
    that a record holds. A board lists them (:func:`list_declared`).

    Args:
        settings: with its path resolved.

    Raises:
        ConfigurationError: something is not declared; names the keys. Or as of :func:`open_dataset`.
        DataError: the files are missing or damaged, are not as declared, or hold more than ``max_records``.
    """
    known = require_declared(settings)
    source = source_of(settings)
    require_readable(settings.path)
    with _reading_any(settings.path):
        dataset = known.open(source, section_of(settings, known))
    source.require_room(len(dataset))
    return _as_declared(dataset, settings, source)


def list_declared(settings: DatasetSettings, *, growing: bool, glance: Glance | None = None) -> Dataset:
    """As :func:`open_declared`, on a board: to decode each record once, while files may grow. What is
    unpacked in memory follows from ``max_records``, and nothing is unpacked onto the disk.

    Args:
        settings: with its path resolved.
        growing: the files are in use: there may be more records than declared, and what was written to a
            moment ago is left for later, or unfinished.
        glance: at the files, of :func:`glance_declared`; what came in since is left for later, or unfinished.

    Raises:
        ConfigurationError, DataError: as of :func:`open_declared`.
    """
    known = require_declared(settings)
    source = replace(_on_a_board(settings), glance=glance)
    if growing:
        source = replace(source, max_records=None)
    require_readable(settings.path)
    with _reading_any(settings.path):
        dataset = known.listed(source, section_of(settings, known), growing=growing)
    if not growing:
        source.require_room(len(dataset))
    return _as_declared(dataset, settings, source)


def glance_declared(settings: DatasetSettings) -> Glance | None:
    """The files as they are now (:meth:`Format.glance`), on a board; None: they are to be listed.

    Raises:
        ConfigurationError: as of :func:`require_declared`.
        DataError: There are no such files.
    """
    known = require_declared(settings)
    require_readable(settings.path)
    return known.glance(_on_a_board(settings), section_of(settings, known))


def _on_a_board(settings: DatasetSettings) -> Source:
    return replace(source_of(settings), declared_records=settings.max_records)


def require_declared(settings: DatasetSettings) -> Format[Any]:
    """The format of data that declare what gives a record its meaning. Looks at no file.

    Raises:
        ConfigurationError: something is not declared; names the keys.
    """
    missing = require_kind(settings)
    known = FORMATS[settings.kind]
    _refuse_other_sections(settings, known)
    if missing := [*missing, *known.undeclared(source_of(settings), section_of(settings, known))]:
        raise not_declared(settings, missing)
    return known


def _as_declared(dataset: Dataset, settings: DatasetSettings, source: Source) -> Dataset:
    if source.dtype is not None and dataset.dtype != source.dtype:
        raise DataError(
            f"{settings.path} holds values of type {dataset.dtype}; expected {source.dtype}, as"
            f" {named('dtype')} declares. Correct it, or write the file with that type."
        )
    return dataset if source.shape in (None, dataset.shape) else Reshaped(dataset, source.shape or ())


@contextlib.contextmanager
def _reading_any(path: Path) -> Iterator[None]:
    try:
        yield
    except DpagentError:
        raise
    except (OSError, MemoryError) as error:
        raise DataError(f"Cannot read {path}: {error}.") from error


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
    classes = tuple(settings.classes) if isinstance(settings.classes, list) else settings.classes
    shape = None if settings.shape is None else tuple(settings.shape)
    most = MAX_RECORDS if settings.max_records is None else settings.max_records
    return Source(settings.path, settings.half, classes, shape, settings.dtype, most)


def section_of(settings: DatasetSettings, known: Format[Any]) -> Any:
    """The settings of one format's own."""
    section: Settings = getattr(settings, known.kind, known.section())
    return section


def has_test_half(settings: DatasetSettings) -> bool:
    """Whether the data come as two halves, one of them for tests.

    Raises:
        DataError: they cannot be read.
    """
    known = format_of(settings)
    return known.has_test_half(settings.path, section_of(settings, known))


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
    return settings if section == given else settings.with_values({known.kind: section})


def advice_on_shape(kind: str, shape: tuple[int, ...]) -> str:
    """How to have records of a format with a shape, without a full stop; or nothing.

    Args:
        kind: of the format, if it is one.
        shape: that a model takes.
    """
    known = FORMATS.get(kind)
    return "" if known is None else known.advice_on_shape(shape)


def _refuse_other_sections(settings: DatasetSettings, known: Format[Any]) -> None:
    for kind in FORMATS:
        if kind in settings.given and kind != known.kind:
            keys = sorted(getattr(settings, kind).given)
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
