"""``python -m dpagent.learning.training.onnx_graph``: write ``digests.yaml`` anew, after a change of the
graphs.

Update the devices of a fleet first: a device refuses graphs that it does not know.
"""

from __future__ import annotations

from pathlib import Path

from dpagent.learning.models.built_ins import BUILT_IN
from dpagent.learning.training.onnx_graph.build import build_training_graph
from dpagent.learning.training.onnx_graph.signature import graph_digest

_HEAD = """\
# SHA-256 of the training graphs of the built-in models, with one view of each record: the graphs that
# a device runs without being told to. Written by `python -m dpagent.learning.training.onnx_graph`.
"""


def digest_table() -> str:
    """The contents of ``digests.yaml``."""
    lines = []
    for name, spec in sorted(BUILT_IN.items()):
        lines += [f"{name}:", f"  model: {spec.head.digest().hex()}", "  graphs:"]
        for clipping, per_layer in (("whole", False), ("per_layer", True)):
            lines.append(f"    {clipping}: {graph_digest(build_training_graph(spec, per_layer=per_layer))}")
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("digests.yaml").write_text(digest_table(), encoding="utf-8")
