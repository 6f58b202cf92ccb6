"""Numbers below 1e-38 count as zero where training says so: in threads, forks, and behind ONNX Runtime."""

from __future__ import annotations

import os
import subprocess
import sys

from dpagent.learning.subnormals import are_flushed

IN_A_PROCESS = """
import os, threading
from dpagent.learning.subnormals import are_flushed, flush_subnormals

assert not are_flushed()
assert flush_subnormals()
assert flush_subnormals(), "once more"
found = []
thread = threading.Thread(target=lambda: found.append(are_flushed()))
thread.start()
thread.join()
assert found == [True]
if not (child := os.fork()):
    os._exit(not are_flushed())
assert os.waitpid(child, 0)[1] == 0
"""

BEHIND_ONNX_RUNTIME = """
import numpy as np
from frozen_networks import VALUES, network, node
from dpagent.learning.onnx_session import quiet_session
from dpagent.learning.subnormals import are_flushed, flush_subnormals

assert flush_subnormals()
for _ in range(2):
    session = quiet_session(network([node("Mul", "x x", "y")]))
    assert are_flushed(), "the first session of a process switches it off"
    (found,) = session.run(None, {"x": np.full((1, VALUES), 1e-20, np.float32)})
    assert not found.any()
"""

FOR_A_WHILE = """
from dpagent.learning.subnormals import are_flushed, flush_subnormals, flushed_subnormals

for before in (False, True):
    assert are_flushed() is before
    with flushed_subnormals():
        assert are_flushed()
    assert are_flushed() is before
    flush_subnormals()
"""

WHERE_A_MODEL_ANSWERS = """
import os
from pathlib import Path
from agent.serving import program
from dpagent.learning.inference.prediction import exported_model
from dpagent.learning.subnormals import are_flushed

class Stop(Exception):
    pass

def model(path):
    assert are_flushed()
    raise Stop

exported_model.ExportedModel = model
for gives_way in (False, True):
    try:
        program.main(Path("model.onnx"), gives_way=gives_way)
    except Stop:
        os.write(2, b"asked ")
raise SystemExit(7)
"""

IN_TRAINING = """
from agent import worker_program
from dpagent.learning.subnormals import are_flushed

class Stop(Exception):
    pass

def questions(channel):
    assert are_flushed()
    raise Stop

class Channel:
    def receive(self):
        from types import SimpleNamespace
        return SimpleNamespace(settings=SimpleNamespace(niceness=0), log_level=0)

worker_program._Questions = questions
try:
    worker_program.serve(Channel())
except Stop:
    print("asked")
"""


def run(program: str) -> str:
    """What a program prints, in a process of its own: this one's arithmetic stays as it is."""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_threads_and_forks_take_it_over() -> None:
    run(IN_A_PROCESS)
    assert not are_flushed(), "this process has not said so"


def test_a_session_of_onnx_runtime_leaves_it_so() -> None:
    run(BEHIND_ONNX_RUNTIME)


def test_it_can_be_so_for_a_while() -> None:
    """Where `dpagent personalise` trains, in whoever's process that is."""
    run(FOR_A_WHILE)


def test_the_process_that_answers_by_a_model_says_so_before_it_loads_that() -> None:
    """Its weights decide which inputs have such numbers, and they may take a hundred times as long."""
    found = subprocess.run(
        [sys.executable, "-c", WHERE_A_MODEL_ANSWERS], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))},
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (7, "asked asked ")


def test_the_training_process_says_so_before_it_is_asked_for_anything() -> None:
    """Before, one record of 20 whose activations a coordinator's weights made subnormal took the sum of a
    round from 32 to 55 ms; half as much again as its trial was allowed for."""
    assert run(IN_TRAINING) == "asked\n"
