"""The form of records: the settings of a format that say what a record is, whatever file it stands in.

A board declares it, a model's file carries it, and an application that asks the model must keep to it. The
other settings (a delimiter, the column of the label) are of the file that is read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, NamedTuple, Self

from dpagent.settings import Settings


class Difference(NamedTuple):
    """A setting in which two forms differ."""

    key: str
    """Of the format's section: ``scale``."""
    expected: Any
    """Of the form that was asked."""
    given: Any
    """Of the other."""


class RecordForm(Settings):
    """The form of records in one format. A format's settings derive from its form. All of it is public.

    Attributes:
        compared: the settings that make a record what it is.
    """

    compared: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def record_shape(self) -> tuple[int, ...] | None:
        """The shape of a record as the format reads it; None: the form does not settle it."""

    def differences(self, given: Self, keys: Collection[str]) -> list[Difference]:
        """The settings among ``keys`` by which a record would be another one in ``given`` than it is here."""
        return [
            Difference(key, getattr(self, key), getattr(given, key))
            for key in self.compared
            if key in keys and self._meaning(key, self) != self._meaning(key, given)
        ]

    def _meaning(self, key: str, form: Self) -> Any:
        """A value of ``form`` that is the same where two ways to write it mean the same."""
        return getattr(form, key)

    @classmethod
    def of(cls, section: RecordForm) -> Self:
        """The form in a format's settings, which derive from it."""
        return cls.checked({key: getattr(section, key) for key in cls.names})
