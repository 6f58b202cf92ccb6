"""What a configuration can declare of records in any format, apart from the code that reads them.

A program that only reads configurations has no need of that code, nor of numpy.
"""

from __future__ import annotations

from typing import Final, Literal

from dpagent.settings import Settings

Half = Literal["train", "test"]
DType = Literal["uint8", "float32"]

MAX_CLASSES: Final = 65_536
MAX_RECORDS: Final = 1 << 23
"""Records of a dataset, at most: the labels of so many take 64 MiB."""


class NoSettings(Settings):
    """The section of a format that has no settings of its own."""
