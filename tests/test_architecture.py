"""What is in the tree and no program uses yet says so, and nothing else does."""

from __future__ import annotations

import ast
import tomllib
from importlib.util import find_spec
from pathlib import Path

import grimp
import pytest
from typer.main import get_command

from cli.commands import CommandsByName
from cli.main import app

ROOT = Path(__file__).parents[1]
PROGRAMS = ("cli", "simulation", "agent", "coordinator", "mixer")
MARK = "Not wired: no program imports this yet."


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("dpagent", *PROGRAMS, exclude_type_checking_imports=True, cache_dir=None)


def source_of(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def entry_points(graph: grimp.ImportGraph) -> set[str]:
    """The installed commands, and what runs by ``python -m``."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    commands = {target.partition(":")[0] for target in scripts.values()}
    root = get_command(app)
    assert isinstance(root, CommandsByName)
    commands |= {place.partition(":")[0] for place in root.places.values()}
    return commands | {
        module
        for module in graph.modules
        if module.endswith(".__main__") or 'if __name__ == "__main__":' in source_of(module)
    }


def reached(graph: grimp.ImportGraph, modules: set[str]) -> set[str]:
    """What is loaded with ``modules``: what they import, at once or later, and the packages around it."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += graph.find_modules_directly_imported_by(module)
            if "." in module:
                waiting.append(module.rpartition(".")[0])
    return found


def test_exactly_the_modules_that_no_program_imports_say_so(graph: grimp.ImportGraph) -> None:
    library = {module for module in graph.modules if module.partition(".")[0] == "dpagent"}
    unused = library - reached(graph, entry_points(graph))
    marked = set()
    for module in library:
        text = source_of(module)
        if MARK in text:
            lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
            assert MARK in lines, f"{module} has the mark outside its docstring, or not on a line of its own"
            marked.add(module)
    assert marked == unused


def test_commands_read_a_configuration_with_all_its_layers() -> None:
    """By `cli.configurations`, which knows the default places, variables and options. A service has no more
    than its file."""
    loaders = {"load_agent_settings", "load_fleet_settings", "load_mixer_settings"}
    allowed = {ROOT / "cli/configurations.py", ROOT / "cli/service/command.py"}
    for file in set((ROOT / "cli").rglob("*.py")) - allowed:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in imports for alias in node.names}
        assert not names & loaders, f"{file}: take agent_settings(config) and its like"


def test_every_module_of_the_programs_is_reached(graph: grimp.ImportGraph) -> None:
    programs = {module for module in graph.modules if module.partition(".")[0] in PROGRAMS}
    assert programs - reached(graph, entry_points(graph)) == set()
