"""The interface of a format: all that the rest of the program knows of one.

A format is opened with everything declared that gives a record its meaning. What is not declared, ``infer``
fills in by a look at the data, on the machine of somebody who may: a board opens only what is declared, so
that no record decides how another is read (docs/data.md). This is the one place where the two differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Generic, TypeVar

from dpagent.errors import DataError
from dpagent.learning.data.classes import Classes, ClassTable
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.declared import MAX_RECORDS, DType, Half
from dpagent.learning.data.glance import Glance
from dpagent.learning.data.inputs import Input, Say, Target
from dpagent.learning.data.location import Location
from dpagent.learning.data.record_form import RecordForm
from dpagent.learning.data.stored import IN_MEMORY_BYTES, RawFile, open_raw
from dpagent.settings import Settings
from dpagent.wording import counted, named

_DECODER_BYTES: Final = 64 << 20
_FEW_RECORDS: Final = 100_000
_FEW_BYTES: Final = 32 << 20


SectionT = TypeVar("SectionT", bound=Settings)


@dataclass(frozen=True, slots=True)
class Source:
    """Which records are asked for, and what they are, in any format.

    Attributes:
        path: the file or folder.
        half: ``train`` or ``test``, where data have two halves.
        classes: all classes; None: not declared.
        shape: of a record; None: not declared, or follows from the section of the format.
        dtype: of a record's values; None as for ``shape``.
        max_records: the largest number of records; None: of files that grow, of more the first are read.
        declared_records: on a board, the largest number of records that its owner declares. What is unpacked
            in memory follows from it, and nothing is unpacked onto the disk, whose free space others may
            choose: whether there is room would tell how many records there are. None: it follows from the
            files.
        glance: at the files, of which a look lists what there was then; None: they are opened as they are.
    """

    path: Path
    half: Half = "train"
    classes: Classes | None = None
    shape: tuple[int, ...] | None = None
    dtype: DType | None = None
    max_records: int | None = MAX_RECORDS
    declared_records: int | None = None
    glance: Glance | None = None

    @property
    def class_table(self) -> ClassTable:
        """The number of each label.

        Raises:
            DataError: the classes are not declared.
        """
        if self.classes is None:
            raise DataError(f"{self.path} is opened without {named('classes')}; expected them declared.")
        return ClassTable(self.classes)

    def opened(self, file: Path) -> RawFile:
        """One of the files; a packed one is unpacked.

        Raises:
            DataError: it cannot be read.
        """
        return open_raw(file) if self.glance is None else self.glance.opened(file)

    def most_listed(self, unit_bytes: int = 1, *, units: int = 1) -> int:
        """How many records, or other units, a board looks at: the first where there are far more than
        declared. So a look ends in time, and one record more moves at most the last one out of it.

        Args:
            unit_bytes: of a unit, at least.
            units: which come with each record: names, lines.
        """
        assert self.declared_records is not None
        return min(_FEW_RECORDS, _FEW_BYTES // unit_bytes) + 4 * self.declared_records * units

    def keeps_in_memory(self, records: int, record_bytes: int) -> bool:
        """Whether so many records are kept in memory, where their format can do that."""
        number = records if self.declared_records is None else self.declared_records
        return number * record_bytes <= IN_MEMORY_BYTES

    def require_room(self, records: int) -> None:
        """Refuse more records than there may be at the start, before any of them is read.

        Raises:
            DataError: there are more.
        """
        if self.max_records is not None and records > self.max_records:
            raise DataError(
                f"{self.path} holds {counted(records, 'record')}; expected at most {self.max_records:,}."
                f" Raise {named('max_records')}, or remove records."
            )


@dataclass(frozen=True, slots=True)
class Inferred(Generic[SectionT]):
    """A source and a section in which nothing is left undeclared.

    Attributes:
        source, section: complete.
        warnings: what was taken from the data and had better be declared, a sentence each.
    """

    source: Source
    section: SectionT
    warnings: tuple[str, ...] = ()


class Format(ABC, Generic[SectionT]):
    """A way to store records.

    Attributes:
        kind: its name in settings, the key of its section there, and the kind of its datasets' origin.
        title: its name in a list of all formats.
        example: the name of a file with new inputs, where users have such.
        decoder_seconds: processor time that decoding a record may take by default.
        section: the settings of its own, with a default for each.
        form: what of these says what a record is, whatever file it stands in; None: no setting does.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    example: ClassVar[str | None] = None
    decoder_seconds: ClassVar[float] = 5.0
    dtype: ClassVar[DType | None] = None
    """Of a record's values; None: as declared."""
    form: ClassVar[type[RecordForm] | None] = None
    section: type[SectionT]

    @abstractmethod
    def recognises(self, location: Location) -> bool:
        """Whether ``location`` holds labelled records of this format, by names and first bytes."""

    @abstractmethod
    def undeclared(self, source: Source, section: SectionT) -> list[str]:
        """The keys that :meth:`open` needs and that are not set, besides those that all formats need."""

    @abstractmethod
    def infer(self, source: Source, section: SectionT) -> Inferred[SectionT]:
        """Fill in what is undeclared from the data. Never on a board.

        Raises:
            DataError: the data are missing or damaged, there are none, or they do not agree with each other.
            ConfigurationError: as of :meth:`open`.
        """

    @abstractmethod
    def open(self, source: Source, section: SectionT) -> Dataset:
        """The labelled records.

        A record that is not as declared is left out, alone. Whether the data can be opened depends on the
        frame of the files (headers, folders), and on no record.

        Args:
            source: with its classes.
            section: with nothing undeclared.

        Raises:
            DataError: files are missing, or damaged in their frame; names the file.
            ConfigurationError: a setting does not go with them, or a package is missing.
        """

    def listed(self, source: Source, section: SectionT, *, growing: bool) -> Dataset:
        """The same records, each to be decoded once: less is read of them here than :meth:`open` may read.

        Of a source with a glance, those of then; what may be newer is :attr:`Dataset.unfinished`.

        Args:
            source, section: as of :meth:`open`.
            growing: whether what was written to a moment ago is left for later: the files are in use.

        Raises:
            DataError, ConfigurationError: as of :meth:`open`.
        """
        return self.open(source, section)

    def glance(self, source: Source, section: SectionT) -> Glance | None:
        """The files as they are now, by which a look begins; None: one lists them each time.

        Raises:
            DataError: There are no such files.
        """
        return None

    def decoder_bytes(self, section: SectionT) -> int:
        """Memory that decoding any one record takes at most, besides the program that does it."""
        return _DECODER_BYTES

    def hint(self, location: Location) -> str:
        """A sentence on what to do about ``location``, which no format recognises; or nothing."""
        return ""

    def has_test_half(self, path: Path, section: SectionT) -> bool:
        """Whether the data come as two halves, one of them for tests."""
        return False

    def fitted(self, section: SectionT, shape: tuple[int, ...]) -> SectionT:
        """``section`` with its open settings chosen for records of ``shape``, where that is possible."""
        return section

    def advice_on_shape(self, shape: tuple[int, ...]) -> str:
        """How to set the section so that a record has ``shape``, without a full stop; or nothing."""
        return ""

    def recognises_unlabelled(self, location: Location) -> bool:
        """Whether ``location``, which no format recognises, holds inputs that :meth:`unlabelled` reads."""
        return False

    def unlabelled(
        self, source: Source, section: SectionT, target: Target, say: Say
    ) -> Iterator[Input] | None:
        """Inputs for a model, in their order; one that cannot be read says so, and takes no other with it.

        Args:
            source: where they are. Its classes are those of the model.
            section: the settings of this format.
            target: the model.
            say: is told what is skipped or assumed.

        Returns:
            The inputs; None if the records have labels, and are to be opened as for training.

        Raises:
            DataError: nothing can be read.
            ConfigurationError: a setting does not go with the data or the model.
        """
        return None
