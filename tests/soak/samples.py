"""What programs and their directories take, as the kernel tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks.process_memory import tree_of

_KIB: Final = 1_024


def of_process(process: int) -> dict[str, float]:
    """Memory, descriptors and threads of a program, with the processes that it has started.

    Returns:
        ``rss`` of the program itself in bytes, and how much of it is ``anonymous``, in no file; its
        ``descriptors`` and ``threads``; and ``processes``, those below it that run now. These come and go
        with the work, and their memory with them, so that it does not count: a program that keeps more of
        them than before is found. Nothing is divided among those that share it, as in the proportional set
        size: that changes with whatever else of Python runs on the machine.
    """
    place = Path(f"/proc/{process}")
    lines = [line.split() for line in (place / "smaps_rollup").read_text().splitlines()]
    sizes = {key: int(value) * _KIB for key, value, *_ in lines if key in ("Rss:", "Anonymous:")}
    return {
        "rss": float(sizes["Rss:"]),
        "anonymous": float(sizes["Anonymous:"]),
        "descriptors": float(len([*(place / "fd").iterdir()])),
        "threads": float(len([*(place / "task").iterdir()])),
        "processes": float(len([*tree_of(process)]) - 1),
    }


def of_directory(directory: Path, suffix: str = "") -> float:
    """Bytes that the files below a directory take on the disk, or those whose names end so."""
    taken = 0
    for file in directory.rglob(f"*{suffix}"):
        try:
            status = file.stat()
        except FileNotFoundError:
            continue  # It has just been replaced.
        taken += 512 * status.st_blocks if file.is_file() else 0
    return float(taken)
