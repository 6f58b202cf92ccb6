"""The index of a device's rows: which of them hold a record, and what was found and is in none.

It is a line of JSON, the header, and a table with an entry of fixed size for each row (:mod:`agent.rows`).
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.data_settings import DataSettings
from dpagent.schema.json_values import json_values

FREE: Final = 0
DECODED: Final = 1
UNUSABLE: Final = 2
"""Its record cannot be decoded, and is not tried again until its stamp changes, or the limits do."""

TO_ERASE: Final = 1
"""The least checksum of a free row that holds a record, or a part of one; that of an erased row is 0."""

ROW: Final = np.dtype(
    [("stamp", "<u8"), ("file", "<u8"), ("checksum", "<u4"), ("label", "<i4"), ("state", "u1")]
)
_VERSION: Final = 4
"""Of stamps and rows: those of another are decoded anew."""
_KEY_BYTES: Final = 16
_PRIVATE_BYTES: Final = 64 << 10
"""Of a header, for what it says of the records."""


@dataclass(frozen=True)
class Header:
    """What an index says of all rows.

    Attributes:
        of: the digest of the settings that the rows were made for.
        key: in hexadecimal digits, of the stamps.
        shape, dtype, classes, class_names: as of the dataset.
        kind, source, warnings: as of its origin.
        left_out: data that are in no row, a sentence each. Private.
        unusable: why a row holds no record, by its number. Private.
        limits: under which the unusable ones were tried.
        glance: as of :meth:`~dpagent.learning.data.format.Format.glance` when the rows were brought up to
            date.
        is_complete: whether all that was there at some time has been decoded. Without that, no agent starts.
        body: the digest of the table of rows.
    """

    of: str
    key: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    classes: int = 0
    class_names: tuple[str, ...] = ()
    kind: str = ""
    source: str = ""
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    unusable: dict[str, str] = field(default_factory=dict)
    limits: str = ""
    glance: str | None = None
    is_complete: bool = False
    body: str = ""


@dataclass(frozen=True)
class Index:
    """Which rows hold which records.

    Attributes:
        header: of all.
        table: ``(max_records,)`` of :data:`ROW`.
    """

    header: Header
    table: NDArray[Any]

    @classmethod
    def empty(cls, settings: DataSettings) -> Index:
        """Of no record."""
        assert settings.max_records is not None
        header = Header(of=_digest_of(settings), key=secrets.token_hex(_KEY_BYTES))
        return cls(header, np.zeros(settings.max_records, ROW))

    @classmethod
    def parsed(cls, data: bytes, settings: DataSettings) -> Index | None:
        """What :meth:`as_bytes` wrote; None if it is damaged, or for other settings."""
        head, _, body = data.partition(b"\n")
        try:
            header = _parsed(head)
        except (ValueError, TypeError, RecursionError):
            return None
        is_whole = header.body == _checksum(body) and len(body) == ROW.itemsize * (settings.max_records or 0)
        if not is_whole or header.of != _digest_of(settings):
            return None
        return cls(header, np.frombuffer(body, ROW))

    def as_bytes(self) -> bytes:
        """For a file, of a size that follows from the settings."""
        body = self.table.tobytes()
        return _of_one_size(replace(self.header, body=_checksum(body))) + b"\n" + body

    def emptied(self, why: str) -> Index:
        """Of no record any more, when the rows in :attr:`stale` have been erased."""
        table = self.table.copy()
        used = self.table["state"] != FREE
        table[self.stale] = 0
        table["checksum"][used] = np.maximum(table["checksum"][used], TO_ERASE)
        table["state"] = FREE
        return Index(replace(self.header, left_out=(why,), unusable={}, glance=None), table)

    def is_of(self, glance: str | None) -> bool:
        """Whether a look can find nothing new, and nothing is left to be done."""
        return glance is not None and glance == self.header.glance and not len(self.stale)

    @property
    def stale(self) -> NDArray[np.intp]:
        """The rows that still hold a record which is gone."""
        return np.flatnonzero((self.table["state"] == FREE) & (self.table["checksum"] != 0))

    def sentences(self) -> tuple[str, ...]:
        """What was found and is not used, for the owner."""
        said = self.header.unusable
        more = int(np.count_nonzero(self.table["state"] == UNUSABLE)) - len(said)
        rest = [f"{more:,} more that cannot be decoded."] if more > 0 else []
        return (*self.header.left_out, *said.values(), *rest)


def _of_one_size(header: Header) -> bytes:
    """A header as text, with as many of its sentences as there is room for.

    It has a size that follows from the settings: on a disk that is nearly full, a sentence about one record
    would decide whether those of a look count.
    """
    public = _text(replace(header, left_out=(), unusable={}, warnings=(), glance=None, source=""))
    size = len(public) + _PRIVATE_BYTES
    while len(text := _text(header)) > size:
        if header.unusable:
            header = replace(header, unusable=dict(list(header.unusable.items())[:-1]))
        elif header.left_out:
            header = replace(header, left_out=header.left_out[:-1])
        elif header.warnings:
            header = replace(header, warnings=header.warnings[:-1])
        else:
            header = replace(header, glance=None, source="")
    return text.ljust(size)


def _text(header: Header) -> bytes:
    return json.dumps(asdict(header)).encode()


def _parsed(head: bytes) -> Header:
    values = json.loads(head)
    for key in ("shape", "class_names", "warnings", "left_out"):
        values[key] = tuple(values[key])
    return Header(**values)


def _digest_of(settings: DataSettings) -> str:
    """Of all that gives a row its meaning."""
    values = json_values(settings)
    for key in ("name", "decoding", "features_mib"):
        del values[key]
    return hashlib.sha256(json.dumps([_VERSION, values], sort_keys=True).encode()).hexdigest()


def _checksum(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
