"""What is left out of data, for their owner: the first sentences, and how many more there are."""

from __future__ import annotations

from typing import Final

from dpagent.wording import counted

MOST_SAID: Final = 100
"""Of very many odd entries or rows, a sentence each would take more memory than the records."""


class Problems:
    """Gathers sentences, of which it keeps the first; with ``most`` None, all."""

    def __init__(self, most: int | None = MOST_SAID) -> None:
        self._most, self._kept, self._more = most, list[str](), 0

    def add(self, sentence: str) -> None:
        """Take a sentence."""
        if self._most is None or len(self._kept) < self._most:
            self._kept.append(sentence)
        else:
            self._more += 1

    def sentences(self) -> tuple[str, ...]:
        """The first of them, and how many there are besides."""
        more = [f"{counted(self._more, 'more problem')} of this kind."] if self._more else []
        return (*self._kept, *more)
