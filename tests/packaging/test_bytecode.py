"""A package has the bytecode of what a board loads, and starts by it."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNCHECKED = (1).to_bytes(4, "little")
"""The flags of PEP 552: no file is looked at for whether it has changed."""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """With a package of which one module is loaded, one is not, and one needs ONNX Runtime."""
    place = tmp_path / "environment"
    venv.create(place, symlinks=True)
    (packages,) = place.glob("lib/python3*/site-packages")
    package = packages / "board"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "used.py").write_text("import board.below\nFROM = 'source'\n")
    (package / "below.py").write_text("")
    (package / "unused.py").write_text("")
    (package / "graphs.py").write_text("import onnxruntime\n")
    return place


def compiled(environment: Path, *modules: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "packaging" / "compile"), str(environment), *modules]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=environment)


def test_what_is_loaded_has_bytecode_that_counts_at_any_time_and_the_rest_has_none(environment: Path) -> None:
    result = compiled(environment, "board.used", "board.graphs")
    assert (result.returncode, result.stderr) == (0, "")
    files = {file.name.split(".")[0]: file for file in environment.rglob("*.pyc")}
    assert set(files) == {"__init__", "used", "below"}
    assert all(file.read_bytes()[4:8] == UNCHECKED for file in files.values())
    (source,) = environment.glob("lib/python3*/site-packages/board/used.py")
    source.write_text("FROM = 'another source'\n")
    command = [environment / "bin" / "python", "-I", "-c", "import board.used; print(board.used.FROM)"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=environment)
    assert shown.stdout.split() == ["source"]


def test_a_module_that_is_missing_ends_the_build(environment: Path) -> None:
    result = compiled(environment, "board.absent")
    assert result.returncode != 0
    assert "No module named 'board.absent'" in result.stderr


def test_all_that_is_compiled_by_default_is_there() -> None:
    """On the environment of the tests, in which nothing is written."""
    script = (ROOT / "packaging" / "compile").read_text()
    default = script.partition("set -- ")[2].partition("\nexec")[0].replace("\\\n", " ").split()
    programs = {"agent.pricing_program", "agent.opening_program", "agent.model_keeping"}
    programs |= {"cli.agent_program", "agent.daemon", "agent.worker_program", "agent.decoding"}
    assert programs <= set(default)
    command = [sys.executable, "-c", f"import {', '.join(default)}"]
    subprocess.run(command, check=True, cwd=ROOT)
