"""The rows of a CSV file: where each begins and ends, what it is, and text that fits in none.

A row is a line, and one with a quotation mark that is open at its end does not fit. Were a cell to go on in
the next line, one line more, with an open mark, could take the beginning of another row's cell for its end,
and that row with it.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from dpagent.errors import DataError
from dpagent.learning.data.classes import ClassTable
from dpagent.learning.data.formats.tables.header import Columns, UnfitError, columns_of
from dpagent.learning.data.formats.tables.settings import CsvSettings
from dpagent.learning.data.stored import RawFile, digest_of, reading
from dpagent.wording import counted, named

LONGEST_ROW: Final = 1 << 20
"""Bytes: a row in memory takes some forty times as much."""
_LONGEST_GROUP: Final = 256
_LINES_BEFORE_THE_FIRST: Final = 10_000
_BOM: Final = b"\xef\xbb\xbf"
_READ_BYTES: Final = 1 << 16
_BLOCK_BYTES: Final = 4_096
"""Of a file, which the system reads at least at once."""


class TableBounds(NamedTuple):
    """The most that a board reads of a table, or of all tables of a folder.

    Attributes:
        lines: the first of them, of all tables together.
        line_bytes: of a line that counts as one.
        excess_bytes: of each table, what longer lines may have more than that, all together.
    """

    lines: int
    line_bytes: int
    excess_bytes: int


class Row(NamedTuple):
    """A row that is not empty.

    Attributes:
        start, end: of its line, bytes.
        text_end: where its text ends, and what ends the line begins.
        digest: of its text, what ends the line and a byte order mark aside; none if the row does not fit.
        cells: in order.
        problem: why it does not fit, if it does not.
    """

    start: int
    end: int
    text_end: int
    digest: bytes
    cells: list[str]
    problem: str


@contextlib.contextmanager
def opened_rows(
    raw: RawFile, form: CsvSettings, *, labelled: bool = True, most: TableBounds | None = None
) -> Iterator[tuple[Lines, Columns]]:
    """The lines of a file from its first record on, and the columns that its first row tells of.

    Args:
        raw: the file, unpacked.
        form: how rows become records.
        labelled: whether there is to be a column of labels.
        most: that is read, on a board.

    Raises:
        DataError: the first row cannot be read, or lacks a column; names file, line and column.
    """
    with opened_lines(raw, most) as lines:
        first = first_row(lines, form) if form.header or form.width is None else None
        columns = columns_of(first, raw.path, form, labelled=labelled)
        if not form.header:
            lines.go_to(0, 0)
        yield lines, columns


@contextlib.contextmanager
def opened_lines(raw: RawFile, most: TableBounds | None = None) -> Iterator[Lines]:
    """The lines of a file from its beginning on.

    On a board, what the disk cannot read is null characters: in no row but those that lie there.
    """
    if most is not None:
        yield Lines(raw.path, io.BufferedReader(_PatientFile(raw), _READ_BYTES), most)
        return
    with open(raw.descriptor, "rb", closefd=False) as stream:
        stream.seek(0)
        yield Lines(raw.path, stream, most)


class _PatientFile(io.RawIOBase):
    """A file of which a part may not be read; closing this leaves it open.

    A record at the end of a table may be all that lies in a block of the disk. Were the table left out where
    that block cannot be read, this one record would take all others along.

    Args:
        raw: the file, which is told.
    """

    def __init__(self, raw: RawFile) -> None:
        self._raw, self._place = raw, 0

    def readable(self) -> bool:
        """As of any file."""
        return True

    def seekable(self) -> bool:
        """As of any file."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """As of any file, but not from its end."""
        self._place = offset + (self._place if whence == os.SEEK_CUR else 0)
        return self._place

    def readinto(self, target: Any, /) -> int:
        """As of any file; zeros for a block of the disk that cannot be read."""
        view = memoryview(target).cast("B")
        try:
            got = self._raw.read_some(view, self._place)
        except OSError:
            view = view[: _BLOCK_BYTES - self._place % _BLOCK_BYTES]
            try:
                got = self._raw.read_some(view, self._place)
            except OSError:
                self._raw.note_unread()
                got = max(0, min(len(view), os.fstat(self._raw.descriptor).st_size - self._place))
                view[:got] = bytes(got)
        self._place += got
        return got


def first_row(lines: Lines, form: CsvSettings) -> list[str] | None:
    """The cells of the first row that is not empty, if there is one in the first lines."""
    try:
        begin = itertools.islice(lines, _LINES_BEFORE_THE_FIRST)
        return next((cells for line in begin if (cells := cells_of(line, form))), None)
    except (csv.Error, UnfitError) as error:
        raise DataError(f"{lines.path}:{lines.number}: {_reason(error)}") from error


def checked_rows(
    lines: Lines, columns: Columns, form: CsvSettings, classes: ClassTable | None
) -> Iterator[Row]:
    """Rows that are not empty."""
    while True:
        start, cells = lines.place, list[str]()
        try:
            line = next(lines)
            cells = cells_of(line, form)
            if cells:
                _require_fit(cells, columns, form, classes)
        except StopIteration:
            return
        except (csv.Error, UnfitError) as error:
            why = f"{lines.path}:{lines.number}: {_reason(error)}"
            yield Row(start, lines.place, lines.place, b"", cells, why)
        else:
            if cells:
                text_end = lines.place - (len(line) - len(line.rstrip("\r\n")))
                yield Row(start, lines.place, text_end, _digest_of(line), cells, "")


def rows_in(data: bytes) -> list[tuple[bytes, str]]:
    """The rows of a record that was listed, read again: the digest of each, as of :class:`Row`, and its text.

    Of bytes that are no text any more the digests are others.
    """
    text = data.decode("utf-8", "surrogateescape")
    lines = (line.removeprefix("\ufeff") for line in text.split("\n"))
    return [(_digest_of(line), line) for line in lines if line.strip("\r")]


def content_of(digests: Sequence[bytes]) -> bytes:
    """A digest of a record, by those of its rows."""
    return digests[0] if len(digests) == 1 else digest_of(b"".join(digests))


def _digest_of(line: str) -> bytes:
    return digest_of(line.rstrip("\r\n").encode("utf-8", "surrogateescape"))


def cells_of(line: str, form: CsvSettings) -> list[str]:
    """The cells of a line.

    Raises:
        csv.Error: it has none, such as one with a quotation mark that is open at its end.
    """
    return next(csv.reader([line], delimiter=form.delimiter, strict=True))


def _reason(error: csv.Error | UnfitError) -> str:
    if isinstance(error, UnfitError):
        return str(error)
    if str(error) == "unexpected end of data":
        return "a quotation mark is open at the end of the line. Close it: a row is a line."
    return f"not valid CSV: {error}."


class Lines:
    """Lines of a file as text, with the place and number of the last one read, and whether it has an end.

    How much there is to read is settled as it is read: who writes to the file may make it longer meanwhile.

    Args:
        path: for the text of errors.
        stream: of the file.
        most: that is read of it. A line is read to its end, however long, if it is within the bound: one that
            fits no row takes no other with it.

    Attributes:
        is_cut_short: whether something follows that is not read.
    """

    def __init__(self, path: Path, stream: io.BufferedReader, most: TableBounds | None = None) -> None:
        self.path, self._stream, self._most = path, stream, most
        self.place, self.number, self.is_ended = 0, 0, True
        self.is_cut_short = False
        self._excess = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._next()
        if not line:
            raise StopIteration
        if len(line) > LONGEST_ROW:
            raise UnfitError(f"a line has more than {LONGEST_ROW:,} bytes; expected CSV in lines.")
        line = line.removeprefix(_BOM)  # In any line: what stands before it may be new.
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UnfitError(f"not UTF-8 text ({error.reason}). Save the file as UTF-8.") from error
        if "\0" in text:
            raise UnfitError("holds a null character. Expected CSV as text in UTF-8.")
        return text

    def go_to(self, place: int, number: int) -> None:
        """Go on at byte ``place``, where the line after line ``number`` begins."""
        self._stream.seek(place)
        self.place, self.number = place, number

    def _next(self) -> bytes:
        """A line, of one that is too long the beginning; nothing at the end."""
        if self.is_cut_short or self._ends_before(0):
            return b""
        with reading(self.path):
            line = self._stream.readline(LONGEST_ROW + 1)
            size, is_ended = len(line), line.endswith(b"\n")
            if size > LONGEST_ROW and not is_ended:
                size, is_ended = self._skip_rest(size)
        if size:
            self.is_ended = is_ended
        if self._most is not None:
            self._excess += max(0, size - self._most.line_bytes)
        self.place += size
        self.number += bool(line)
        return line

    def _skip_rest(self, size: int) -> tuple[int, bool]:
        """Go to the end of a line of which ``size`` bytes are read: its size, and whether it has an end."""
        while not self._ends_before(size) and (piece := self._stream.read(LONGEST_ROW)):
            if at := piece.find(b"\n") + 1:
                self._stream.seek(at - len(piece), os.SEEK_CUR)
                return size + at, True
            size += len(piece)
        return size, False

    def _ends_before(self, size: int) -> bool:
        """Whether no more is read, ``size`` bytes of a line being read."""
        most = self._most
        if most is None or (self.number < most.lines and self._excess + size <= most.excess_bytes):
            return False
        self.is_cut_short = bool(self._stream.peek(1))
        return True


def _require_fit(cells: list[str], columns: Columns, form: CsvSettings, classes: ClassTable | None) -> None:
    if len(cells) != columns.width:
        raise UnfitError(
            f"the row has {counted(len(cells), 'cell')}; expected {columns.width}, as in the first row."
            + _advice_on_width(len(cells) - columns.width, form)
        )
    columns.values(cells)
    if columns.group is not None and len(cells[columns.group]) > _LONGEST_GROUP:
        raise UnfitError(f"the group has {len(cells[columns.group])} characters; expected {_LONGEST_GROUP}.")
    if columns.label is None:
        return
    label = cells[columns.label].strip()
    if not label or (classes is not None and classes.number(label) is None):
        expected = "a label" if classes is None else classes.expected()
        raise UnfitError(
            f"the label is {label[:60]!r}; expected {expected}. Correct the row, or list the label in"
            f" {named('classes')}."
        )


def _advice_on_width(excess: int, form: CsvSettings) -> str:
    if excess == 1 and form.header and form.first_column is None:
        return (
            " Does the header leave out the name of the first column, as R writes it? Name that column:"
            f" {named('first_column', 'id')}."
        )
    if excess == -1 and form.first_column is not None:
        return f" Does the header name all columns? Then leave {named('first_column')} out."
    return ""
