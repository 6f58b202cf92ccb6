"""A state directory, open or closed; and a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from devices import Device, open_device
from ledgers import charge_rounds, open_state

from agent.state import AgentState


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def state(path: Path) -> Iterator[AgentState]:
    state = open_state(path)
    yield state
    state.close()


@pytest.fixture
def database(path: Path) -> Path:
    """A closed ledger: one budget and three charges."""
    state = open_state(path)
    charge_rounds(state, 1, 2, 3)
    state.close()
    return path / "ledger.db"


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    with open_device(tmp_path) as device:
        yield device
