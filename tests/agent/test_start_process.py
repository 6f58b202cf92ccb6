"""The process of an agent's start: one replays the ledger and opens the records, and ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from brokers import wait_until
from devices import KEY
from fleets import make_plan, run_agent, write_agent
from ledgers import DATA, charge_and_spool, charge_for, fragments

from agent.charges import Charge, Record
from agent.data_settings import DataSettings
from agent.errand import ErrandError
from agent.ledger import read_entries
from agent.opening import Opening
from agent.state import AgentState
from dpagent.errors import ExitCode, LedgerError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.formats.npz import save_npz

SHAPE = (8, 8, 1)


@pytest.fixture
def data(tmp_path: Path) -> DataSettings:
    save_npz(
        tmp_path / "mine.npz", ArrayDataset(np.zeros((3, *SHAPE), np.float32), np.zeros(3, np.int64), 10)
    )
    values = {"name": "mine", "path": tmp_path / "mine.npz", "kind": "npz", "classes": 10, "max_records": 5}
    return DataSettings.checked(values | {"shape": [*SHAPE], "dtype": "float32"})


@pytest.fixture
def opening() -> Iterator[Opening]:
    opening = Opening()
    yield opening
    opening.end()


@pytest.fixture
def records(state: AgentState) -> list[Record]:
    charge_and_spool(state, charge_for(make_plan(), DATA, state.ledger), fragments(1))
    return [entry.record for entry in read_entries(state.connection)]


def test_one_process_replays_the_ledger_and_opens_the_records(
    opening: Opening, data: DataSettings, records: list[Record], tmp_path: Path
) -> None:
    process = opening._errand._process
    opening.replay(records)
    assert process.poll() is None
    form = opening.form(data, tmp_path)
    assert (form.shape, form.dtype, form.classes) == (SHAPE, "float32", 10)
    assert process.poll() is not None, "it ends with that"


@pytest.mark.usefixtures("executed")
def test_the_process_of_a_start_gives_way_as_the_agent_does(tmp_path: Path) -> None:
    """It decodes, for hours where nothing was ever decoded. It begins before the agent knows its profile."""
    (tmp_path / "board.yaml").write_text("extends: generic-x86-64\nniceness: 19\n")
    file = write_agent(tmp_path, None, KEY, profile=str(tmp_path / "board.yaml"))
    with run_agent(file) as agent:
        children = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children")

        def opening() -> int | None:
            for each in children.read_text().split():
                if b"agent.opening_program" in Path(f"/proc/{each}/cmdline").read_bytes():
                    return int(each)
            return None

        wait_until(lambda: opening() is not None, "the process of the start")
        process = opening()
        assert process is not None
        os.kill(process, signal.SIGSTOP)  # So that the agent waits for it.
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, process) == 19, "one that gives way")


def test_a_ledger_that_is_wrong_is_named(opening: Opening, records: list[Record]) -> None:
    assert isinstance(records[-1], Charge)
    wrong = replace(records[-1], cumulative_epsilon=records[-1].cumulative_epsilon / 2)
    with pytest.raises(LedgerError, match=r"^Entry 2 states a cumulative ε"):
        opening.replay([*records[:-1], wrong])


def test_a_process_that_ends_is_no_wrong_ledger_and_no_wrong_data(
    opening: Opening, data: DataSettings, tmp_path: Path
) -> None:
    opening.replay([])
    os.kill(opening._errand._process.pid, signal.SIGKILL)
    wait_until(lambda: opening._errand._process.poll() is not None, "its end")
    with pytest.raises(ErrandError, match=r"The records cannot be opened: the process .* ended: signal 9"):
        opening.form(data, tmp_path)
    again = Opening()
    os.kill(again._errand._process.pid, signal.SIGKILL)
    with pytest.raises(
        ErrandError, match=r"The ledger cannot be checked: .*start the agent again\."
    ) as caught:
        again.replay([])
    assert caught.value.exit_code is ExitCode.CHILD, "the service starts it again"
    again.end()
