"""A board without an agent, whose rows a test brings up to date, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import noise, write

from agent import decoding
from agent.data_settings import DataSettings
from agent.decoding import bring_up_to_date
from agent.look_messages import LookOrder
from agent.rows import Rows, RowStore


class Board:
    """Rows of pictures, or of tables of one column."""

    def __init__(self, folder: Path, **declared: Any) -> None:
        self.root, self.state = folder / "data", folder / "state"
        for each in (self.root, self.state):
            each.mkdir(exist_ok=True)
        self.settings = DataSettings.checked(
            {"name": "mine", "path": self.root, "classes": 3, "max_records": 8} | declared
        )
        self.store = RowStore(self.state, self.settings)

    def look(self, *, at_once: bool = False) -> Rows:
        bring_up_to_date(LookOrder(self.settings, self.state, at_once))
        self.store.take_found()
        return self.newest()

    def newest(self) -> Rows:
        index = self.store.load()
        assert index is not None
        return self.store.open(index)


@contextmanager
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A look that begins here dies once it has decoded a record."""
    real = decoding.decode_apart

    def dies(*arguments: Any) -> Any:
        yield next(real(*arguments))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "decode_apart", dies)
        with pytest.raises(KeyboardInterrupt):
            yield


def pictures(folder: Path, **declared: Any) -> Board:
    section = {"size": [12, 8], "mode": "rgb", "folder": "."}
    return Board(folder, **({"kind": "images", "images": section} | declared))


def tables(folder: Path, **declared: Any) -> Board:
    return Board(folder, **({"kind": "csv", "csv": {"features": ["x"]}} | declared))


def table(board: Board, values: list[int], name: str = "1.csv") -> None:
    write(board.root / name, "".join(["x,label\n", *(f"{value},{value % 3}\n" for value in values)]).encode())


def sign_of(board: Board) -> tuple[int, int]:
    """Two numbers that change with the index."""
    known = (board.state / "records.index").stat()
    return known.st_ino, known.st_mtime_ns


def contents(rows: Rows) -> list[tuple[bytes, int]]:
    inputs, labels = rows.batch(np.arange(len(rows)))
    return sorted(zip((one.tobytes() for one in inputs), labels.tolist(), strict=True))


def rows_of(board: Board) -> list[tuple[int, int]]:
    """The number in each row, and its label."""
    rows = board.newest()
    inputs, labels = rows.batch(np.arange(len(rows)))
    return sorted(zip(inputs.ravel().astype(int).tolist(), labels.tolist(), strict=True))


def values_in(rows: Rows) -> list[int]:
    return sorted(int(value) for value in rows.batch(np.arange(len(rows)))[0].ravel())


def expected(*seeds: int) -> list[tuple[bytes, int]]:
    return sorted((noise(seed).tobytes(), seed % 3) for seed in seeds)


def named(*seeds: int) -> list[str]:
    return [f"{seed % 3}/{seed}.png" for seed in seeds]
