"""What keeps an agent from starting: one that runs already, a password, a ledger, data."""

from __future__ import annotations

from pathlib import Path

import pytest
from brokers import Broker, wait_until
from daemons import agent_thread, calm_settings
from fleets import agent_values, run_agent, write_agent
from ledgers import open_state
from lone_agents import state_of
from observers import Announcer

from agent.charges import Budget
from agent.daemon import Agent
from dpagent.errors import BrokerError, ConfigurationError, DataError, ExitCode, LedgerError

pytestmark = pytest.mark.usefixtures("attentive")


def test_a_second_agent_on_the_same_state_is_refused(file: Path) -> None:
    state = open_state(state_of(file))
    with run_agent(file) as second:
        assert second.wait() == ExitCode.STATE_IN_USE
        assert "in use by process" in second.said()
    state.close()


def test_a_wrong_password_ends_the_agent_with_a_sentence(
    announcer: Announcer, tmp_path: Path, mosquitto: Broker
) -> None:
    (tmp_path / "password").write_text("wrong\n")
    file = write_agent(
        tmp_path / "device", mosquitto, announcer.signer.public_key,
        mqtt={"password_file": str(tmp_path / "password")},
    )  # fmt: skip
    with agent_thread(file) as agent:
        # When it ends does not tell what it does: a whole number of periods after the refusal.
        wait_until(lambda: agent.clock.advance(1.0) or not agent.is_running, "its end")
        error = agent.failure()
    assert isinstance(error, BrokerError)
    assert error.exit_code == ExitCode.BROKER


def test_a_damaged_ledger_keeps_the_agent_from_starting(announcer: Announcer, file: Path) -> None:
    (state_of(file) / "ledger.db").write_bytes(b"not a database" * 1_000)
    with pytest.raises(LedgerError, match=r"ledger\.db"):
        Agent(calm_settings(file))


def test_missing_data_and_a_missing_password_leave_the_state_free(
    tmp_path: Path, announcer: Announcer
) -> None:
    settings = calm_settings(write_agent(tmp_path, None, announcer.signer.public_key))
    wrong = settings.with_values({"data": settings.data.with_values({"path": tmp_path / "no.npz"})})
    with pytest.raises(DataError):
        Agent(wrong)
    missing = settings.mqtt.with_values({"username": "u", "password_file": tmp_path / "none"})
    with pytest.raises(ConfigurationError) as caught:
        Agent(settings.with_values({"mqtt": missing}))
    assert "password_file" in str(caught.value)
    # The error is still in hand, as it is for a caller who shows it and tries again.
    open_state(settings.state_dir, Budget(4.0, 1e-4)).close()


def test_values_of_the_files_are_those_the_agent_takes() -> None:
    assert agent_values(None, "key")["budget"] == {"epsilon": 4.0, "delta": 1e-4}
