"""The section of a configuration file that says where records are, what they are and how they are read.

What gives a record its meaning has None for a default: it is inferred where somebody looks at data, and must
be declared on a board (:mod:`dpagent.learning.data.opening`).

Each format brings a section of its own, under the name of its kind (``csv: {window: 128}``). They stand side
by side in one schema rather than in one schema a kind, because ``kind: auto`` is known only after a look at
the path; :func:`~dpagent.learning.data.opening.open_dataset` refuses a section that is not that of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from dpagent.errors import ConfigurationError
from dpagent.learning.data.declared import MAX_CLASSES, MAX_RECORDS, DType, Half
from dpagent.learning.data.names import PlainName
from dpagent.learning.data.sections import SECTIONS
from dpagent.schema.base import with_fields
from dpagent.schema.limits import After, Limits
from dpagent.settings import FilePath, Settings

AUTO: Final = "auto"

SchemaT = TypeVar("SchemaT", bound=Settings)


def with_formats(schema: type[SchemaT]) -> type[SchemaT]:
    """``schema`` with the registered formats: choices of ``kind``, and a field for the section of each."""
    sections: dict[str, Any] = {
        kind: (section, section()) for kind, section in SECTIONS.items() if section.names
    }
    kinds: Any = Literal
    sections["kind"] = (kinds[(AUTO, *SECTIONS)], AUTO)
    return with_fields(schema, **sections)


def _all_different(names: list[str]) -> list[str]:
    if len(set(names)) != len(names):
        raise ValueError("a name stands twice; expected each class once")
    return names


ClassName = Annotated[PlainName, Limits(max_length=256)]
_Count = Annotated[int, Limits(ge=2, le=MAX_CLASSES)]
_Names = Annotated[list[ClassName], Limits(min_length=2, max_length=MAX_CLASSES), After(_all_different)]


@with_formats
class DatasetSettings(Settings):
    """Records with labels.

    >>> from pathlib import Path
    >>> given = {"path": Path("walks"), "csv": {"label": "activity", "window": 128}}
    >>> DatasetSettings.checked(given).kind
    'auto'
    """

    kind: str = AUTO
    """The format of the data, see data.md; ``auto`` recognises it."""
    path: FilePath
    """The file or directory, relative to this file."""
    half: Half = "train"
    """Which half, where the data have two."""
    classes: _Count | _Names | None = None
    """All classes of the fleet, alike on all boards: how many, if labels are the numbers from 0, else the
    names in the order that numbers them. A record with another label is left out."""
    shape: Annotated[list[Annotated[int, Limits(ge=1)]], Limits(min_length=1, max_length=3)] | None = None
    """The shape of a record, with as many values as it has in the file. A board needs it for ``npz``."""
    dtype: DType | None = None
    """The type of a record's values; uint8 is divided by 255. A board needs it for ``npz``."""
    max_records: Annotated[int, Limits(ge=1, le=MAX_RECORDS)] | None = None
    """The largest number of records. With more, the agent does not start; later ones beyond are not used. It
    is public: the bounds of lots, memory and disk follow from it. Choose twice what you expect."""


def require_kind(settings: DatasetSettings) -> list[str]:
    """See that the format of data is declared, on which it depends what else must be.

    Returns:
        The keys that every format needs, and that are missing.

    Raises:
        ConfigurationError: it is not; names these keys, too.
    """
    missing = [key for key in ("classes", "max_records") if getattr(settings, key) is None]
    if settings.kind == AUTO:
        raise not_declared(settings, ["kind", *missing])
    return missing


def not_declared(settings: DatasetSettings, missing: Sequence[str]) -> ConfigurationError:
    """An error for data that do not declare some keys."""
    return ConfigurationError(
        f"The data at {settings.path} are not declared: {', '.join(missing)}"
        f" {'is' if len(missing) == 1 else 'are'} missing. A board does not infer what its records are. Run"
        f" `dpagent data check {settings.path}`, which prints the section to paste."
    )
