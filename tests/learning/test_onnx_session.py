"""What ONNX Runtime does besides: nothing is written down about a session, for whomever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SESSION = """
import sys
from dpagent.learning import onnx_session
import onnxruntime
from onnx import helper
ends = [helper.make_tensor_value_info(name, 1, [1]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
onnxruntime.InferenceSession(model.SerializeToString())
"""


def test_a_session_leaves_nothing_in_the_home_of_its_user(tmp_path: Path) -> None:
    """Neither an identifier of the machine nor a record of what ran, which builds of it keep by default."""
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    done = subprocess.run(
        [sys.executable, "-c", _SESSION], env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [str(file) for file in tmp_path.rglob("*") if file.is_file()] == []
