"""All formats by their kinds: the one place that lists them."""

from __future__ import annotations

from typing import Any, Final

from dpagent.learning.data.format import Format
from dpagent.learning.data.formats.cifar.format import CifarFormat
from dpagent.learning.data.formats.idx import IdxFormat
from dpagent.learning.data.formats.images.format import ImageFormat
from dpagent.learning.data.formats.npz import NpzFormat
from dpagent.learning.data.formats.tables.format import CsvFormat

FORMATS: Final[dict[str, Format[Any]]] = {
    each.kind: each for each in (NpzFormat(), IdxFormat(), CifarFormat(), ImageFormat(), CsvFormat())
}
