"""The notes that a run's directory keeps from one start to the next, beside its settings."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from dpagent.storage import write_atomically
from simulation.request import DataSelection
from simulation.settings import SETTINGS_FILE

_NOTES_FILE: Final = "notes.json"


@dataclass(frozen=True, slots=True)
class RunNotes:
    """See the module. It may name private files.

    Attributes:
        kind: of the data, as they were taken for.
        columns: the inputs of a table.
        remarks: on the data, and on ε and δ beside them.
        data: the state of the files; see :func:`look_of_data`.
        broker: which one there was at last.
        seconds: of all starts together.
        agent_peak_mib, coordinator_peak_mib: the largest of all starts.
        restarts: of all starts together.
        finished: whether the job is done, and everything after it.
    """

    kind: str = ""
    columns: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    data: str = ""
    broker: str = ""
    seconds: float = 0.0
    agent_peak_mib: float | None = None
    coordinator_peak_mib: float | None = None
    restarts: int = 0
    finished: bool = False

    def after_start(
        self,
        *,
        broker: str,
        seconds: float,
        agent_peak_mib: float | None,
        coordinator_peak_mib: float | None,
        restarts: int,
        finished: bool,
    ) -> RunNotes:
        """With the figures of one more start."""
        return replace(
            self, broker=broker, seconds=self.seconds + seconds, restarts=self.restarts + restarts,
            agent_peak_mib=_larger(self.agent_peak_mib, agent_peak_mib),
            coordinator_peak_mib=_larger(self.coordinator_peak_mib, coordinator_peak_mib), finished=finished,
        )  # fmt: skip

    def save(self, root: Path) -> None:
        """Keep them.

        Raises:
            StorageError: The directory cannot be written.
        """
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        write_atomically(root / _NOTES_FILE, f"{text}\n".encode(errors="replace"), mode=0o600)


def read_notes(root: Path) -> RunNotes:
    """The notes of the run in ``root``; none where they are missing or damaged, for no result needs them."""
    try:
        values: dict[str, Any] = json.loads((root / _NOTES_FILE).read_text())
        lists = {key: tuple(values[key]) for key in ("columns", "remarks")}
        return RunNotes(**values | lists)
    except (OSError, ValueError, TypeError, KeyError):
        return RunNotes()


def look_of_data(data: DataSelection) -> str:
    """A digest of names, sizes and times of all files of the data; empty for the digits."""
    paths = [settings.path for settings in (data.train, data.test) if settings is not None]
    if not paths:
        return ""
    digest = hashlib.sha256()
    for path in paths:
        for file in _files_of(path):
            try:
                known = file.stat()
            except OSError:
                continue
            digest.update(f"{file}\0{known.st_size}\0{known.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _files_of(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, below, names in os.walk(path):
        if SETTINGS_FILE in names:
            below.clear()  # A run that is kept among the data.
            continue
        below.sort()
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _larger(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)
