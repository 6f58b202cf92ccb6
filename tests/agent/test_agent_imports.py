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
HEAVY |= {"multiprocessing", "email", "http", "tempfile", "shutil", "zipfile"}
TRAINS = """
import json, sys
import agent.worker_program
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
engine = NumpyEngine(built_in("digits"), microbatch=4)
assert engine.is_batch_invariant()
print(json.dumps(sorted(sys.modules)))
"""
NOT_OF_TRAINING = {
    "numpy.random", "multiprocessing", "subprocess", "tempfile", "zipfile", "importlib.metadata", "email",
    "agent.decoding", "agent.looks", "dpagent.learning.data.opening", "dpagent.learning.data.registry",
    "dpagent.privacy.calibration", "dpagent.privacy.accounting.pld",
}  # fmt: skip


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
    assert {name.partition(".")[0] for name in modules} & HEAVY == set()


def test_training_never_needs_what_opens_data_prices_or_starts_programs() -> None:
    """It runs beside the agent on boards with little memory."""
    said = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True, check=True)
    modules = set(json.loads(said.stdout))
    assert "agent.training" in modules
    assert modules & NOT_OF_TRAINING == set()
