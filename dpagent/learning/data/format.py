"""The interface of a format: all that the rest of the program knows of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Literal, TypeVar

from dpagent.configuration import Settings
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.inputs import Input, Say, Target
from dpagent.learning.data.location import Location

Half = Literal["train", "test"]


class NoSettings(Settings):
    """The section of a format that has no settings of its own."""


SectionT = TypeVar("SectionT", bound=Settings)


@dataclass(frozen=True, slots=True)
class Source:
    """Which records are asked for, in any format.

    Attributes:
        path: the file or folder.
        half: ``train`` or ``test``, where data have two halves.
        classes: the public list of all classes, in the order that numbers them; None: not given.
    """

    path: Path
    half: Half = "train"
    classes: tuple[str, ...] | None = None


class Format(ABC, Generic[SectionT]):
    """A way to store records.

    Attributes:
        kind: its name in settings, the key of its section there, and the kind of its datasets' origin.
        title: its name in a list of all formats.
        example: the name of a file with new inputs, where users have such.
        section: the settings of its own, with a default for each.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    example: ClassVar[str | None] = None
    section: type[SectionT]

    @abstractmethod
    def recognises(self, location: Location) -> bool:
        """Whether ``location`` holds labelled records of this format, by names and first bytes."""

    @abstractmethod
    def open(self, source: Source, section: SectionT) -> Dataset:
        """The labelled records; where files grow, their ``refresh`` takes in new records.

        Raises:
            DataError: they are missing or damaged; names file, line or record.
            ConfigurationError: a setting does not go with them, or a package is missing.
        """

    def hint(self, location: Location) -> str:
        """A sentence on what to do about ``location``, which no format recognises; or nothing."""
        return ""

    def has_test_half(self, path: Path) -> bool:
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
