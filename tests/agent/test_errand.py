"""Processes that answer one question: whatever goes wrong with one, whoever waits for the answer gets one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from brokers import PATIENCE_S, wait_until
from devices import WEIGHTS, Device, worker_of
from fleets import make_plan, write_agent
from ledgers import DATA, DATASET, LIMITS

from agent.errand import Errand, ErrandError, Refusal
from agent.errand_program import outcome
from agent.latest_model import LatestModel
from agent.opening_program import form_of
from agent.pricing import Pricing
from agent.pricing_messages import PriceQuestion
from agent.settings import load_agent_settings
from agent.state import AgentState
from agent.training_messages import Order, WorkerError
from dpagent.clock import SystemClock
from dpagent.protocol.messages import AssetTerms
from dpagent.protocol.signing import Signer

_PROGRAM = "agent.pricing_program"


def children() -> set[str]:
    """Processes that this one has started and not waited for."""
    found = set()
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if int((each / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(each.name)
        except OSError:
            continue
    return found


@pytest.mark.usefixtures("executed")
def test_a_question_that_cannot_be_put_has_an_answer_all_the_same() -> None:
    """There may be no memory to put it into words: it has the weights of a model in it."""
    before, errand = children(), Errand(_PROGRAM)
    refusal = errand.ask(threading.Lock()).result(PATIENCE_S)
    assert isinstance(refusal, Refusal)
    assert refusal.kind is ErrandError
    assert "cannot be asked" in refusal.reason
    errand.end()
    assert children() <= before


def test_a_round_whose_price_cannot_be_asked_for_is_declined_and_the_next_is_not(device: Device) -> None:
    """Before, it was decided on for ever, and with it a look at the data stood still."""
    form, unsayable = device.cycle._questions._form, threading.Lock()
    device.cycle._questions._prices = Pricing()
    device.cycle._questions._form = unsayable  # type: ignore[assignment]
    device.take_plan(make_plan())
    device.give()
    wait_until(lambda: device.cycle.advance() or device.declined(), "the end")  # type: ignore[func-returns-value]
    ((_, reason, _),) = device.declined()
    assert "cannot be asked" in reason
    assert device.cycle._at_work is None
    device.cycle._questions._form = form
    device.clock.advance(PATIENCE_S)
    device.take_plan(make_plan(round=2))
    wait_until(lambda: device.cycle.advance() or device.charged() == [2], "a charge")  # type: ignore[func-returns-value]


@pytest.fixture
def no_thread_starts() -> Iterator[None]:
    """Each wants more address space for its stack than there is."""
    threading.stack_size(1 << 46)
    yield
    threading.stack_size(0)


@pytest.mark.usefixtures("no_thread_starts", "executed")
def test_without_a_thread_to_be_had_a_round_is_declined_and_nothing_is_left(
    state: AgentState, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, the agent ended for want of one for its training process, or for a file."""
    before = children()
    asked = PriceQuestion(make_plan(), WEIGHTS, form_of(DATA), DATASET, state.ledger.books, LIMITS, 0.0, {})
    verdict = Pricing().ask(asked).result(0)
    assert isinstance(verdict.why_not, ErrandError)
    assert "cannot be asked: can't start new thread" in str(verdict.why_not)
    settings = load_agent_settings(
        write_agent(tmp_path, None, Signer(bytes(range(32)), "testers").public_key, engine="numpy")
    )
    settings.state_dir.mkdir(exist_ok=True)
    worker = worker_of(settings)
    for _ in range(2):
        with pytest.raises(WorkerError, match="cannot be started: can't start new thread"):
            worker.prepare(Order(make_plan(), WEIGHTS, {})).result(0)
    latest = LatestModel(settings, SystemClock())
    latest.take(AssetTerms(role="model", digest=bytes(32), size=1), b"m")
    assert not latest.is_writing
    assert "the latest model is not kept: can't start new thread" in caplog.text
    assert children() <= before


def test_that_there_was_no_memory_for_an_answer_is_no_answer() -> None:
    """A charged round would else be given up, of which it is not known that it leaves its limits."""

    def without_memory(_question: Any) -> None:
        raise MemoryError

    refusal = outcome(without_memory, None)
    assert isinstance(refusal, Refusal)
    assert refusal.kind is ErrandError
    assert "no memory" in refusal.reason


@pytest.mark.parametrize(
    "said", [b"", (256).to_bytes(8, sys.byteorder) + b"half of"], ids=["nothing", "a part"]
)
def test_a_process_whose_agent_ends_before_it_has_asked_ends_in_silence(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stderr=subprocess.PIPE,
        )  # fmt: skip
    with ours:
        ours.sendall(said)
    with process:
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, b"")
