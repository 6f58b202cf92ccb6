"""A state directory, open or closed; a device; an agent alone with a broker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokers import Broker
from daemons import attentive_daemons
from devices import Device, open_device
from fleets import write_agent
from ledgers import charge_rounds, copied, open_state
from lone_agents import WEIGHTS
from observers import Announcer

from agent.state import AgentState
from dpagent.learning.data import stamp

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _watches_for_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look in this process waits for no time whether somebody writes to a file that looks young."""
    monkeypatch.setattr(stamp, "REST_S", 0.0)


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


@pytest.fixture
def older(path: Path) -> Path:
    """A copy of a state directory after one round; since then there were two more, and one of another job."""
    state = open_state(path)
    charge_rounds(state, 1)
    state.close()
    older = copied(path, "older")
    state = open_state(path)
    charge_rounds(state, 2, 3)
    charge_rounds(state, 1, job=b"k" * 16)
    state.close()
    return older


@pytest.fixture
def attentive() -> Iterator[None]:
    with attentive_daemons():
        yield


@pytest.fixture
def fleet() -> str:
    return f"agents-{next(_numbers)}"


@pytest.fixture
def announcer(mosquitto: Broker, fleet: str) -> Iterator[Announcer]:
    """In the coordinator's place; it has announced the model of :mod:`lone_agents`."""
    with Announcer(mosquitto, fleet) as announcer:
        announcer.announce_model(WEIGHTS)
        yield announcer


@pytest.fixture
def file(tmp_path: Path, mosquitto: Broker, announcer: Announcer, fleet: str) -> Path:
    """An ``agent.yaml`` with a budget for many jobs."""
    return write_agent(
        tmp_path / "device", mosquitto, announcer.signer.public_key, fleet=fleet,
        budget={"epsilon": 100.0, "delta": 1e-2},
    )  # fmt: skip
