"""What a running agent has imported: not what its other processes are for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from brokers import PATIENCE_S, wait_until
from lone_agents import BLOCKS, charges, ids, plan_for
from observers import Announcer

PROGRAM = """
import atexit, json, sys
from pathlib import Path
from cli.agent_program import main
listed = Path(sys.argv.pop(1))
atexit.register(lambda: listed.write_text(json.dumps(sorted(sys.modules))))
main()
"""
HEAVY = {"numpy", "onnxruntime", "onnx", "scipy", "typer", "pydantic", "rich"}


@pytest.mark.usefixtures("executed")
def test_an_agent_that_has_run_a_round_never_needed_numpy_or_what_reads_options(
    announcer: Announcer, file: Path, fleet: str, tmp_path: Path
) -> None:
    """From its start to a round that has left: configuration, ledger, records, price, training, fragments."""
    listed = tmp_path / "modules.json"
    command = [sys.executable, "-c", PROGRAM, str(listed), str(file), "info", "text"]
    with subprocess.Popen(command, env=os.environ) as agent:
        try:
            announcer.announce(plan_for(fleet, compute_slot_s=0.5, jitter_window_s=0.5))
            wait_until(lambda: len(ids(announcer, fleet)) == BLOCKS, "all fragments")
            assert charges(file) == [((b"j" * 16).hex(), 1)]
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(PATIENCE_S)
    modules = set(json.loads(listed.read_text()))
    assert {"agent.daemon", "agent.pricing", "agent.worker"} <= modules
    assert not {name.partition(".")[0] for name in modules} & HEAVY
