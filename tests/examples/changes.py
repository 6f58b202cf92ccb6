"""Worked examples are pages with diff blocks: these are taken out and applied to a copy of the tree."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
_COPIED = (
    "dpagent", "agent", "coordinator", "simulation", "cli", "firmware_profiles", "tests", "docs",
    "pyproject.toml",
)  # fmt: skip


def copy_tree(target: Path) -> None:
    """A copy of the part of the tree that examples change and test."""
    for name in _COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)


def steps_of(page: str) -> list[str]:
    """The diff blocks of a page in their order."""
    return re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def apply(step: str, tree: Path) -> list[Path]:
    """Make the changes of one block; returns the files, relative to ``tree``.

    A hunk begins with ``@@`` and needs no line numbers: its lines stand in the file exactly once.
    """
    changed = []
    for part in re.split(r"^--- a/", step, flags=re.MULTILINE)[1:]:
        name, _, hunks = part.partition("\n")
        file = tree / name
        text = file.read_text()
        for hunk in hunks.split("@@\n")[1:]:
            lines = [line or " " for line in hunk.splitlines()]
            before, after = (
                "".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +")
            )
            assert text.count(before) == 1, f"{name} holds these lines {text.count(before)} times:\n{before}"
            text = text.replace(before, after)
        file.write_text(text)
        changed.append(Path(name))
    return changed
