"""The agent stays light: what it imports, and what it weighs while it waits."""

from __future__ import annotations

import subprocess
import sys

_IDLE_AGENT = """
import sys, threading, os
from pathlib import Path
os.environ["OPENBLAS_NUM_THREADS"] = "1"
from agent.daemon import Agent
from agent.settings import load_agent_settings

agent = Agent(load_agent_settings(Path(sys.argv[1])))
stop = threading.Event()
timer = threading.Timer(4.0, stop.set)
timer.start()
agent.run(stop)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(status["VmHWM"].split()[0], agent._session.bytes_down)
"""


def test_importing_the_agent_pulls_in_nothing_heavy() -> None:
    code = "import agent.daemon, sys; print('\\n'.join(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    modules = set(result.stdout.split())
    assert "numpy" in modules
    for heavy in (
        "scipy",
        "onnx",
        "onnxruntime",
        "sklearn",
        "matplotlib",
        "coordinator",
        "typer",
        "rich",
        "cli",
    ):
        assert not {name for name in modules if name == heavy or name.startswith(f"{heavy}.")}, heavy
