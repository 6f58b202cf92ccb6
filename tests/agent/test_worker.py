"""The training process: a real one, asked, killed, and left behind."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import wait_until
from children import PATIENCE_S
from devices import KEY, WEIGHTS, values_in, worker_of
from fleets import DIGITS, make_plan, terms, write_agent
from neighbours import decode_here

from agent.sensors import processor_s_of
from agent.settings import load_agent_settings
from agent.training_messages import Order, UsedProcessError, WorkerError
from agent.worker import Worker, spent_on
from dpagent.learning.training.onnx_graph.build import build_training_graph
from dpagent.protocol.messages import Plan

PLAN = make_plan(**terms(rate=1.0))


def order(plan: Plan = PLAN, failure: str | None = None) -> Order:
    return Order(plan, WEIGHTS, {}, failure)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with_worker = made(tmp_path)
    yield with_worker
    with_worker.end()
    with_worker._looks.end()


def made(directory: Path, **changes: Any) -> Worker:
    settings = load_agent_settings(write_agent(directory, None, KEY, **({"engine": "numpy"} | changes)))
    settings.state_dir.mkdir(exist_ok=True)
    decode_here(settings.data, settings.state_dir)
    return worker_of(settings)


def pid_of(worker: Worker) -> int:
    assert worker._running is not None
    return worker._running._process.pid


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_round_is_prepared_and_trained_in_another_process(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        assert 0 < worker.prepare(order()).result(PATIENCE_S).longest_s < 60
        update = worker.update().result(PATIENCE_S)
        assert np.ptp(values_in(update, PLAN)) > 0
        assert update.failure is None
    assert pid_of(worker) != os.getpid()


def test_its_log_is_the_agents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    worker = made(tmp_path, engine="auto")
    try:
        worker.prepare(order()).result(PATIENCE_S)
    finally:
        worker.end()
    (line,) = [record for record in caplog.records if record.getMessage().startswith("engine for digits")]
    assert line.name == "agent.board_engine"


def test_a_row_that_the_disk_damaged_is_told_once_and_another_one_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, in each round, which a process of its own trains."""
    worker = made(tmp_path)
    (rows,) = (tmp_path / "state").glob("records.rows")
    try:
        for damaged in (0, 0, 4_000):
            with rows.open("r+b") as file:
                file.seek(damaged)
                file.write(b"\x77\x77\x77\x77")
            worker.prepare(order()).result(PATIENCE_S)
            worker.update().result(PATIENCE_S)
            worker.end()
    finally:
        worker.end()
    told = [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()]
    assert len(told) == len(set(told)) == 2, told


def test_a_round_that_the_board_cannot_run_is_refused_in_words(worker: Worker) -> None:
    plan = make_plan(**terms(clipping={"accumulation_slack": 1e-6}))
    with pytest.raises(WorkerError, match=r"can add .* to a record's influence"):
        worker.prepare(order(plan)).result(PATIENCE_S)
    assert worker.prepare(order()).result(PATIENCE_S).longest_s > 0, "the next is"


def test_the_start_of_the_process_counts_with_the_first_preparation(worker: Worker) -> None:
    """A round waits for it, and its slots allow for other programs that slow it down."""
    first = worker.prepare(order()).result(PATIENCE_S)
    imports_s = processor_s_of(pid_of(worker), with_children=False) - first.took_s
    assert imports_s < first.took_s / 2
    assert worker.prepare(order()).result(PATIENCE_S).took_s < first.took_s / 2


@pytest.mark.usefixtures("executed")
def test_a_preparation_says_what_it_computed_however_it_ends(tmp_path: Path) -> None:
    """The rest that follows one that leads to no charge counts in it."""
    worker = made(tmp_path, engine="auto")
    try:
        with_trial = worker.prepare(order()).result(PATIENCE_S)
        assert min(with_trial.took_s, with_trial.tried_s) > 0, "forks try engines"
        refused = worker.prepare(order(make_plan(**terms(clipping={"accumulation_slack": 1e-6}))))
        wait_until(refused.done, "the answer")
        assert spent_on(refused) > 0
        worker.end()
        killed = worker.prepare(order())  # in a new process, which imports all that it needs
        wait_until(lambda: processor_s_of(pid_of(worker), with_children=False) > 0, "some work")
        worker.end()
        assert spent_on(killed) > 0
    finally:
        worker.end()


def test_engines_are_tried_in_a_process_that_has_read_no_record(tmp_path: Path) -> None:
    """What the records leave in memory would move what a trial measures."""
    worker = made(tmp_path, engine="auto")
    other = Order(PLAN, WEIGHTS, {"training-graph": build_training_graph(DIGITS)})
    try:
        for question in (order(), other, order()):  # None has worked: it may try as often as it likes.
            worker.prepare(question).result(PATIENCE_S)
        worker.update().result(PATIENCE_S)
        pid = pid_of(worker)
        worker.prepare(order()).result(PATIENCE_S)  # The engine that it has needs no trial.
        with pytest.raises(UsedProcessError, match="in a new training process"):
            worker.prepare(other).result(PATIENCE_S)
        worker.end()
        assert worker.prepare(other).result(PATIENCE_S).longest_s > 0
        assert pid_of(worker) != pid
    finally:
        worker.end()


def test_noise_alone_is_made_for_a_reason(worker: Worker) -> None:
    assert worker.prepare(order(failure="the board is ill")).result(PATIENCE_S).longest_s == 0
    update = worker.update().result(PATIENCE_S)
    assert update.failure == "the board is ill"
    assert np.ptp(values_in(update, PLAN)) > 0


@pytest.mark.parametrize("when", ["idle", pytest.param("asked", marks=pytest.mark.slow)])
def test_one_that_was_killed_is_said_and_replaced(worker: Worker, when: str) -> None:
    worker.prepare(order()).result(PATIENCE_S)
    pid = pid_of(worker)
    if when == "asked":
        os.kill(pid, signal.SIGSTOP)
        answer = worker.update()
        os.kill(pid, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), "its end")
        answer = worker.update()
    with pytest.raises(WorkerError, match=r"signal 9; the system may have run out of memory"):
        answer.result(PATIENCE_S)
    worker.prepare(order()).result(PATIENCE_S)
    assert pid_of(worker) != pid


def test_how_one_ended_by_itself_is_said(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.worker._PROGRAM", "agent.no_such_program")
    with pytest.raises(WorkerError, match=r"the training process ended: exit code 1$"):
        worker.prepare(order()).result(PATIENCE_S)


HANGS_UP = """
import os, sys, time
os.close(int(sys.argv[1]))
time.sleep({})
sys.exit(3)
"""


@pytest.mark.parametrize(("takes_s", "how"), [(0.1, "exit code 3$"), (60.0, "signal 9; ")])
def test_one_that_hangs_up_has_a_moment_to_end_by_itself(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, takes_s: float, how: str
) -> None:
    """Else its exit code would say that it was killed; one that does not end is."""
    (tmp_path / "hangs_up.py").write_text(HANGS_UP.format(takes_s))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("agent.worker._PROGRAM", "hangs_up")
    with pytest.raises(WorkerError, match=f"the training process ended: {how}"):
        worker.prepare(order()).result(PATIENCE_S)


def test_one_that_reads_nothing_keeps_the_agent_from_nothing(worker: Worker) -> None:
    worker.prepare(order()).result(PATIENCE_S)
    os.kill(pid_of(worker), signal.SIGSTOP)
    large = Order(PLAN, bytes(16 << 20), {}, None)
    answers = [worker.prepare(large) for _ in range(2)]
    assert not any(answer.done() for answer in answers), "and this line was reached"
    worker.end()
    for answer in answers:
        with pytest.raises(WorkerError, match="signal 9"):
            answer.result(PATIENCE_S)


def test_a_question_that_cannot_be_put_is_answered(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    """Before, whoever asked waited for ever."""
    unheard = Order(PLAN, WEIGHTS, {"what cannot be sent": threading.Lock()})  # type: ignore[dict-item]
    with pytest.raises(WorkerError, match="the training process ended"):
        worker.prepare(unheard).result(PATIENCE_S)
    assert "cannot be asked" in caplog.text
    worker.prepare(order()).result(PATIENCE_S)


def test_a_question_that_training_has_no_memory_for_is_answered(worker: Worker) -> None:
    """Before, whoever asked waited for ever."""
    worker.prepare(order()).result(PATIENCE_S)
    pages = int(Path(f"/proc/{pid_of(worker)}/statm").read_text().split()[0])
    some = pages * resource.getpagesize() + (8 << 20)
    resource.prlimit(pid_of(worker), resource.RLIMIT_AS, (some, some))
    with pytest.raises(WorkerError, match="no memory"):
        worker.prepare(Order(PLAN, bytes(256 << 20), {})).result(PATIENCE_S)
    assert worker.prepare(order()).result(PATIENCE_S).longest_s > 0, "the next is heard"


def test_it_holds_nothing_once_it_is_ended(worker: Worker) -> None:
    worker.prepare(order()).result(PATIENCE_S)
    pid = pid_of(worker)
    answer = worker.update()
    worker.end()
    assert not is_alive(pid)
    if answer.exception(PATIENCE_S) is None:
        assert answer.result().failure is None  # it was quicker
    worker.end()
    worker.prepare(order()).result(PATIENCE_S)


ORPHAN = """
import sys
import threading
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_worker import made, order, pid_of
worker = made(Path(sys.argv[1]))
worker.prepare(order()).result(60)
print(pid_of(worker), flush=True)
sys.stdin.read()
"""


def test_it_ends_with_the_agent_however_that_ends(tmp_path: Path) -> None:
    here = Path(__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(tmp_path), str(here), str(here.parent)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as agent:  # fmt: skip
        assert agent.stdout is not None
        pid = int(agent.stdout.readline())
        assert is_alive(pid)
        agent.kill()
    wait_until(lambda: not is_alive(pid), "the end of a training process without an agent")


def test_data_that_are_gone_leave_noise_and_the_reason(tmp_path: Path) -> None:
    worker = made(tmp_path)
    (tmp_path / "state" / "records.rows").unlink()
    try:
        assert worker.prepare(order()).result(PATIENCE_S).longest_s > 0, "no record is looked at"
        update = worker.update().result(PATIENCE_S)
    finally:
        worker.end()
    assert "records.rows" in (update.failure or "")
    assert len(values_in(update, PLAN)) == DIGITS.parameter_count


def test_a_program_that_cannot_be_started_is_an_answer(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(WorkerError, match="cannot be started"):
        worker.prepare(order()).result(PATIENCE_S)
    monkeypatch.undo()
    worker.prepare(order()).result(PATIENCE_S)
