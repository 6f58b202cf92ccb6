"""CSV files as a format: recognition, opening, and rows without labels."""

from __future__ import annotations

from collections.abc import Iterator

from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.format import Format, Source
from dpagent.learning.data.formats.tables.dataset import is_table, open_table
from dpagent.learning.data.formats.tables.settings import CsvSettings
from dpagent.learning.data.formats.tables.unlabelled import has_labels, unlabelled_rows
from dpagent.learning.data.inputs import Input, Say, Target
from dpagent.learning.data.location import Location


class CsvFormat(Format[CsvSettings]):
    """A CSV file, or a folder of them."""

    kind, title, example, section = "csv", "CSV files", "NEW.csv", CsvSettings

    def recognises(self, location: Location) -> bool:
        """As of :class:`Format`."""
        return any(map(is_table, location.names if location.is_folder else [location.path.name]))

    def open(self, source: Source, section: CsvSettings) -> Dataset:
        """As of :class:`Format`."""
        return open_table(source.path, section, source.classes)

    def unlabelled(
        self, source: Source, section: CsvSettings, target: Target, say: Say
    ) -> Iterator[Input] | None:
        """As of :class:`Format`: rows of files without the label column."""
        return None if has_labels(source.path, section) else unlabelled_rows(source.path, section)
