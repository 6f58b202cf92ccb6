"""How the page writes bounds: as :mod:`dpagent.notation` does."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import coordinator.page
from dpagent.notation import downwards, upwards

STATIC = Path(coordinator.page.__file__).parent / "static"
VALUES = [0.0, 0.05, 0.9155133733569178, 1.0, 1.9999190963726172, 2.0, 2.0 + 5e-10, 0.1 + 0.2, 49.9996, 50.0]
SCRIPT = """
import { upwards, downwards } from %s;
console.log(JSON.stringify(%s.map((value) => [upwards(value), downwards(value)])));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, to run what browsers run")
def test_a_bound_is_rounded_up_and_what_is_left_of_one_down(tmp_path: Path) -> None:
    notation = tmp_path / "notation.mjs"
    shutil.copy(STATIC / "notation.js", notation)
    script = tmp_path / "script.mjs"
    script.write_text(SCRIPT % (json.dumps(notation.as_uri()), json.dumps(VALUES)), encoding="utf-8")
    said = subprocess.run(["node", script], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(said.stdout) == [[upwards(value), downwards(value)] for value in VALUES]


def test_no_page_rounds_what_is_left_up() -> None:
    """Before, a job with ε = 0.0001 left was said to have 0.001."""
    text = (STATIC / "page.js").read_text(encoding="utf-8")
    assert text.count("downwards(own.left)") == text.count("downwards(each.left)") == 1
    assert "upwards(own.left)" not in text
    assert "upwards(each.left)" not in text
