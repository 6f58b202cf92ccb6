"""The section of a configuration file that says where records are and how they are read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dpagent.configuration import FilePath, Settings
from dpagent.errors import DpagentError
from dpagent.learning.data.dataset import MAX_CLASSES
from dpagent.learning.data.table_form import TableForm, require_possible


def _class_name(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("YAML reads yes, no, on and off as truth values; expected a name: put it in quotes")
    return str(value) if isinstance(value, int) else value


def _all_different(names: list[str]) -> list[str]:
    if len(set(names)) != len(names):
        raise ValueError("a name stands twice; expected each class once")
    return names


def _delimiter(value: str) -> str:
    return {"tab": "\t"}.get(value, value)


ClassName = Annotated[str, Field(min_length=1, max_length=256), BeforeValidator(_class_name)]
ColumnName = Annotated[str, Field(min_length=1), BeforeValidator(_class_name)]
Number = Annotated[float, Field(strict=False)]
Pixels = Annotated[int, Field(ge=1, le=4096)]


class ImageSettings(Settings):
    """How pictures become records."""

    size: Annotated[list[Pixels], Field(min_length=2, max_length=2)] | None = None
    """Width and height that every picture is scaled until it covers, then cut to. Without it, all must have
    one size."""
    mode: Literal["grey", "rgb"] | None = None
    """One channel or three; without it, as the first picture has it."""


class CsvSettings(Settings):
    """How rows become records. All of it is public."""

    label: ColumnName = "label"
    """The column of the label, by its name."""
    features: Annotated[list[ColumnName], Field(min_length=1)] | None = None
    """The columns of the inputs, in order; all others but those of the label and the group by default."""
    offset: Number | dict[str, Number] = 0.0
    """An input is (cell − offset) / scale: one number, or one by the column's name. Public constants, never
    computed from the data: that would be a release without noise."""
    scale: Number | dict[str, Number] = 1.0
    """See ``offset``; above 0."""
    window: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    """Rows in a record, for a time series; without it each row is a record."""
    stride: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    """Rows from one window to the next; by default ``window``. Below it a reading is in several records and
    protected that many times less."""
    group: ColumnName | None = None
    """A column, such as a person or a session: no window goes across a change of its value."""
    mixed: Literal["majority", "drop"] = "majority"
    """A window whose rows have several labels takes that of most rows, or is left out."""
    delimiter: Annotated[str, AfterValidator(_delimiter)] = ","
    """One character, or ``tab``."""
    header: bool = True
    """Whether the first row names the columns; without it they are called 1, 2, …."""

    @model_validator(mode="after")
    def _is_possible(self) -> CsvSettings:
        try:
            require_possible(self.form())
        except DpagentError as error:
            raise ValueError(str(error)) from error
        return self

    def form(self) -> TableForm:
        """The same for those who read the rows."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return TableForm(**values | {"features": None if self.features is None else tuple(self.features)})


class DatasetSettings(Settings):
    """Records with labels."""

    kind: Literal["auto", "npz", "idx", "cifar", "images", "csv"] = "auto"
    """What the data are; ``auto`` recognises it. ``npz``: arrays ``inputs`` and ``labels``; ``idx``: a folder
    of MNIST-style files; ``cifar``: the binary files; ``images``: a folder of pictures by class, or a zip
    archive of one; ``csv``: a file or a folder of them."""
    path: FilePath
    """The file or directory, relative to this file."""
    half: Literal["train", "test"] = "train"
    """Which half, where data have two (idx, cifar, images in folders ``train`` and ``test``)."""
    classes: (
        Annotated[
            list[ClassName],
            Field(min_length=2, max_length=MAX_CLASSES),
            AfterValidator(_all_different),
        ]
        | None
    ) = None
    """All classes of the fleet in the order that numbers them, alike on all boards."""
    shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=3)] | None = None
    """Another shape for each record, with as many values."""
    images: ImageSettings = ImageSettings()
    csv: CsvSettings = CsvSettings()
