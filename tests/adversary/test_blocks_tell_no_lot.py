"""A coordinator asks for a round whose time tells whether one block of records was computed, or two.

Claim: how often a round calls the engine, how many blocks the engine computes in each call, and what it does
    between calls, is the same for every lot, and is what the trial before the charge ran.
Parameters: a board that may have 20 records and has 0, 1, 19 or 20, all in the lot, or has 20 and none in it;
    blocks of 20 or more. A round of two-point reports with a batch of one record on a board with and without
    records.

Before, the records of a lot were computed, and then as many made-up ones as it lacked. An engine computes
records in blocks, a half empty one in the time of a full one: so lots of 20 and of none took one block, and
all others two. With `mnist-cnn`, training took 1.06 times its trial with 20 records and 2.0 times with 19;
half as much again is allowed for. Where two threads share blocks, the same happened with 64 and 63 records.
And a step of plain training moved weights only where there were records: with three million weights, training
took 1.7 times its trial with one record or more, and as long as its trial with none. A coordinator that chose
the number of steps such that the trial just fitted its slots saw from the slot of the answer on which side of
these the device was, whatever ε it had charged.

Power: no randomness; blocks, calls and draws are counted. On the code of before they differ between lots.
Outcome: the same counts for every number of records.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import KEY, started_trainer
from fleets import DIGITS, digits, make_task, report_plan, terms, write_agent

from agent import noisy_sums
from agent.settings import load_agent_settings
from agent.training import Trainer
from dpagent.learning.training import lots
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.numpy_engine.network import Network
from dpagent.protocol.task import RoundTask

MOST = 20
WEIGHTS = DIGITS.initial_weights(0)


def board(directory: Path, records: int) -> Trainer:
    file = write_agent(directory, None, KEY, engine="numpy", data={"max_records": MOST})
    some = digits(0, MOST)
    np.savez(directory / "data.npz", inputs=some.inputs[:records], labels=some.labels[:records])
    return started_trainer(load_agent_settings(file))


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What was done, and how often."""
    done: Counter[str] = Counter()

    def count(owner: Any, name: str, what: str) -> None:
        before = getattr(owner, name)

        def counting(*given: Any, **named: Any) -> Any:
            done[what] += 1
            return before(*given, **named)

        monkeypatch.setattr(owner, name, counting)

    count(Network, "forward", "blocks")
    count(NumpyEngine, "clipped_sum", "calls")
    count(lots, "sum_over_lot", "steps")
    draw = noisy_sums.poisson_lot

    def drawn(records: int, *given: Any, **named: Any) -> Any:
        done["records drawn among"] += records
        return draw(records, *given, **named)

    monkeypatch.setattr(noisy_sums, "poisson_lot", drawn)
    return done


@pytest.mark.parametrize(("records", "rate"), [(0, 1.0), (1, 1.0), (19, 1.0), (20, 1.0), (20, 1e-9)])
def test_every_lot_takes_the_blocks_of_the_largest(
    tmp_path: Path, work: Counter[str], records: int, rate: float
) -> None:
    trainer, task = board(tmp_path, records), make_task(**terms(rate=rate, local_steps=3))
    prepared = trainer.prepare(task, {}, WEIGHTS)
    work.clear()
    assert trainer.noisy_update(prepared).failure is None
    assert (work["blocks"], work["calls"], work["records drawn among"]) == (3, 3, 3 * MOST)


@pytest.mark.parametrize("records", [0, 1, 20])
def test_a_step_of_plain_training_is_the_same_without_records(
    tmp_path: Path, work: Counter[str], records: int
) -> None:
    plan = report_plan()
    of_one = plan.release.training.with_values({"batch": 1, "steps": 7})
    task = RoundTask.of(plan.with_values({"release": plan.release.with_values({"training": of_one})}))
    trainer = board(tmp_path, records)
    prepared = trainer.prepare(task, {}, WEIGHTS)
    work.clear()
    assert trainer.noisy_update(prepared).failure is None
    assert (work["steps"], work["calls"], work["blocks"]) == (7, 7, 7)
