"""The lines between server and process: a letter before a request says who asks."""

from __future__ import annotations

import json
from typing import Final

READS_FILES: Final = b"+"
"""Who asks may name files of this board."""
READS_NONE: Final = b"-"
GIVES_WAY: Final = "--gives-way"
"""As argument of the process: it reads its model behind all other programs of the board."""


def error_line(sentence: str) -> bytes:
    """An answer that is none, without a line break."""
    return json.dumps({"error": sentence}, ensure_ascii=False).encode(errors="replace")
