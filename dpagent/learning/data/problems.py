"""What is left out of data, for their owner: the first sentences, and how many more there are."""

from __future__ import annotations

from typing import Final

from dpagent.wording import counted

MOST_SAID: Final = 100
"""Of very many odd entries or rows, a sentence each would take more memory than the records."""


class Problems:
    """Gathers sentences, of which it keeps the first."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._more = 0

    def add(self, sentence: str) -> None:
        """Take a sentence."""
        if len(self._kept) < MOST_SAID:
            self._kept.append(sentence)
        else:
            self._more += 1

    def sentences(self) -> tuple[str, ...]:
        """The first of them, and how many there are besides."""
        more = [f"{counted(self._more, 'more problem')} of this kind."] if self._more else []
        return (*self._kept, *more)
