"""The worked example of a new layer: the type checker names its places, and the suites pass with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from examples.changes import apply, copy_tree, steps_of

PAGE = Path(__file__).with_name("new_layer.md").read_text()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    copy_tree(tree)
    return tree


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


@pytest.mark.slow
def test_the_steps_are_all_there_is_to_do(tree: Path) -> None:
    record, *computed, tested = steps_of(PAGE)
    apply(record, tree)
    check = run(tree, "mypy", "--cache-dir", ".mypy_cache", "-p", "dpagent.learning")
    named = set(
        re.findall(r'^(\S+):\d+: .*"assert_never" has .*"TemperedSigmoid"', check.stdout, re.MULTILINE)
    )
    changed = {str(path) for step in computed for path in apply(step, tree)}
    assert named == {name for name in changed if name.endswith(("forward.py", "network.py", "layers.py"))}
    assert len(named) == len(computed)
    check = run(tree, "mypy", "--cache-dir", ".mypy_cache", "-p", "dpagent.learning")
    assert check.returncode == 0, check.stdout

    # The tests notice that it has no test, and the documents that it has no row.
    complaints = run(
        tree, "pytest", "-q", "-p", "no:cacheprovider", "tests/learning/models/test_forward.py",
        "tests/cli/test_model_command.py", "-k", "every_kind_of_layer or page_on_models",
    )  # fmt: skip
    assert complaints.stdout.count("FAILED") == 2, complaints.stdout
    apply(tested, tree)
    suites = run(
        tree, "pytest", "-v", "-p", "no:cacheprovider", "tests/learning", "tests/cli/test_model_command.py",
        "-k", "tempered or every_kind_of_layer or page_on_models or table_of_digests",
    )  # fmt: skip
    assert suites.returncode == 0, suites.stdout
    for suite in ("test_engines", "test_numpy_engine", "test_exported_training", "test_forward"):
        assert re.search(rf"{suite}\.py::.*tempered.* PASSED", suites.stdout), suite
