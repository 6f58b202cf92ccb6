"""What a running agent has imported: not what its other processes are for."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from brokers import PATIENCE_S, wait_until
from devices import KEY, WEIGHTS
from fleets import make_plan, published_plan, report_plan, terms, update_plan, write_agent
from lone_agents import BLOCKS, charges, ids, plan_for
from neighbours import decode_here
from observers import Announcer

from agent.profile import load_profile
from agent.settings import load_agent_settings
from agent.worker import training_settings
from dpagent.learning.front_end.features import reserve
from dpagent.protocol.messages import Plan

PROGRAM = """
import atexit, json, runpy, sys
from pathlib import Path
listed = Path(sys.argv.pop(1))
loaded = lambda: sorted(name for name, each in sys.modules.items() if type(each).__name__ != "_PutOff")
atexit.register(lambda: listed.write_text(json.dumps(loaded())))
runpy.run_module("cli.agent_program", run_name="__main__")
"""
HEAVY = {"numpy", "onnxruntime", "onnx", "scipy", "typer", "pydantic", "rich"}
HEAVY |= {"multiprocessing", "email", "http", "tempfile", "shutil", "zipfile", "locale", "uuid"}
if sys.version_info < (3, 12):
    HEAVY |= {"inspect", "ast", "dis"}  # put off; later on, dataclasses with slots use it
TRAINS = """
import json, sys
import agent.worker_program
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
engine = NumpyEngine(built_in("digits"), microbatch=4)
assert engine.is_batch_invariant()
print(json.dumps(sorted(sys.modules)))
"""
UPDATES = """
import json, pickle, sys
from agent.look_messages import LookResult
from agent.worker_program import RoundTask, Trainer
settings, plan, weights = pickle.load(sys.stdin.buffer)
task, trainer = RoundTask.of(plan), Trainer(settings)
work = trainer.prepare(task, {}, task.weights_from(weights), adopts=True)
before = set(sys.modules)
update = trainer.noisy_update(work, LookResult())
update.as_sent(plan)
print(json.dumps([update.failure, *(set(sys.modules) - before)]))
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


@pytest.mark.parametrize(
    "plan",
    [make_plan(**terms(rate=0.5)), report_plan(), update_plan(), published_plan()],
    ids=lambda p: p.method,
)
def test_what_an_update_needs_is_loaded_before_the_charge(tmp_path: Path, plan: Plan) -> None:
    """Before, memory that nothing had tried: numpy's generators, for methods that train locally."""
    settings = load_agent_settings(write_agent(tmp_path, None, KEY, engine="numpy"))
    settings.state_dir.mkdir(exist_ok=True)
    decode_here(settings.data, settings.state_dir)
    reserve(settings.state_dir, 1 << 20, 60)  # As an agent's start does.
    order = (training_settings(settings, load_profile("generic-x86-64")), plan, WEIGHTS)
    said = subprocess.run(
        [sys.executable, "-c", UPDATES], input=pickle.dumps(order), stdout=subprocess.PIPE, check=True
    )
    assert json.loads(said.stdout) == [None]
