"""The agent's training process, with lots and noise from a seed: what a simulation repeats to the bit.

The agent itself has no way to draw from a seed. This program replaces its source of entropy, for one round
and one device at a time, and has it compute matrix products in the form that every process computes.
"""

from __future__ import annotations

import os
import re
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import agent.training
import agent.worker_program
import dpagent.learning.training.engine_choice as engine_choice
from agent.look_messages import LookResult
from agent.training import NoisyUpdate, Trainer, Work
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.protocol.fragments import cut
from simulation.virtual.insecure import insecure_entropy

SEED = "TESTS_NOISE_SEED"
"""The variable that holds the seed."""


class SeededTrainer(Trainer):
    def noisy_update(self, work: Work, found: LookResult | None = None) -> NoisyUpdate:
        folder = re.search(r"device-(\d+)", str(self._settings.state_dir))
        assert folder is not None
        run = int(os.environ[SEED]), work.task.plan.round, int(folder.group(1))
        draw = insecure_entropy(*run, "update")
        # A fragment that has no room for its values rounds them at random.
        agent.training.cut = partial(cut, entropy=insecure_entropy(*run, "wire"))
        with patch.object(agent.training, "os", SimpleNamespace(urandom=draw)):
            return super().noisy_update(work, found)


def main() -> None:
    stacked: Any = partial(NumpyEngine, products="stacked")
    with (
        patch.object(agent.worker_program, "Trainer", SeededTrainer),
        patch.object(engine_choice, "NumpyEngine", stacked),
    ):
        agent.worker_program.main()


if __name__ == "__main__":
    main()
