"""Writes the diagram and the map in docs/architecture.md from the imports and docstrings of the code.

Run it after a change to either: ``python docs/make_architecture.py``. A test compares.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("architecture.md")

#: From the programs down to the common base.
GROUPS = (
    "cli",
    "simulation",
    "agent",
    "coordinator",
    "mixer",
    "dpagent.transport",
    "dpagent.protocol",
    "dpagent.privacy",
    "dpagent.learning",
    "dpagent.schema",
    "dpagent",
)
_BASE = "dpagent: errors, storage, schemas, configuration, clock"
_BELOW_ALL = ("dpagent.schema", "dpagent")


def render() -> str:
    """The page, with diagram and map as the code is now."""
    page = PAGE.read_text(encoding="utf-8")
    for name, text in (("diagram", diagram()), ("map", "\n".join(map_of_files()))):
        begin, end = f"<!-- {name}: made by docs/make_architecture.py -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def diagram() -> str:
    """The direct imports between the groups, as a Mermaid graph."""
    graph = grimp.build_graph(*sorted({group.partition(".")[0] for group in GROUPS}), cache_dir=None)
    arrows = {
        (group_of(importer), group_of(imported))
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
        if group_of(importer) != group_of(imported)
    }
    # The common base would have an arrow from everywhere.
    drawn = sorted((a, b) for a, b in arrows if b not in _BELOW_ALL and not _goes_without(a, b, arrows))
    names = [f'    {_id(group)}["{group}"]' for group in GROUPS if group not in _BELOW_ALL]
    names.append(f'    dpagent["{_BASE}"]')
    lines = [f"    {_id(a)} --> {_id(b)}" for a, b in drawn]
    lines += [f"    {_id(group)} --> dpagent" for group in ("dpagent.privacy", "dpagent.learning")]
    return "\n".join(["```mermaid", "graph TD", *names, *lines, "```"])


def map_of_files() -> Iterator[str]:
    """Every file of the code with the first sentence of its docstring, a table a folder."""
    folders = sorted({file.parent for group in GROUPS for file in _files(group)})
    for folder in folders:
        name = folder.relative_to(ROOT).as_posix()
        about = _first_sentence(folder / "__init__.py")
        yield f"\n### {name}/\n\n{about}\n"
        rows = [
            f"| `{file.name}` | {sentence} |"
            for file in sorted(folder.glob("*.py"))
            if file.name not in ("__init__.py", "__main__.py") and (sentence := _first_sentence(file))
        ]
        if rows:
            yield "| file | purpose |\n|---|---|"
            yield from rows


def group_of(module: str) -> str:
    """The group that a module is in."""
    return next(group for group in GROUPS if module == group or module.startswith(f"{group}."))


def _goes_without(importer: str, imported: str, arrows: set[tuple[str, str]]) -> bool:
    """Whether an arrow follows from longer ways, so that the picture can do without it."""
    return any(
        (importer, between) in arrows and (between, imported) in arrows
        for between in GROUPS
        if between not in (importer, imported)
    )


def _files(group: str) -> list[Path]:
    folder = ROOT / group.replace(".", "/")
    files = folder.glob("*.py") if group == "dpagent" else folder.rglob("*.py")
    return [file for file in files if "__pycache__" not in file.parts]


def _first_sentence(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n", 1)[0].split()).replace("``", "`").replace("|", "\\|")
    paragraph = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", paragraph)
    end = re.search(r"(?<=[.!?])\s", paragraph)
    return paragraph if end is None else paragraph[: end.start()]


def _id(group: str) -> str:
    return group.replace(".", "_")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
