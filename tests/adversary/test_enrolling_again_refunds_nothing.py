"""Who runs the enrolment endpoint, or the network to it, waits until a board has lost its ledger.

A board whose state is gone, second head and all (a partition that was formatted), enrols again with a new
code. If the endpoint refuses the first attempt, or the network fails, the owner runs the same command once
more, as its help says.

**Claim.** No ledger begins by that: what the records have spent is not refunded without a word of the owner.
**Before**, the key of the attempt that had failed was taken for a sign that this board had never been
enrolled, and a new ledger began with the whole budget.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import dpagent
from enrolments import EnrolmentFleet, enrol

from agent.audit import audit
from agent.identity import read_certificate
from agent.settings import AgentSettings, load_agent_settings
from dpagent.errors import ExitCode

NOWHERE = "mqtts://127.0.0.1:1"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[EnrolmentFleet]:
    fleet = EnrolmentFleet(tmp_path / "fleet", NOWHERE).start()
    yield fleet
    fleet.stop()


def has_ledger(settings: AgentSettings) -> bool:
    return settings.ledger_files.database.exists() or settings.ledger_files.second_head.exists()


def test_a_board_that_lost_its_ledger_gets_no_new_one_by_an_enrolment_that_failed_first(
    fleet: EnrolmentFleet, tmp_path: Path
) -> None:
    board = tmp_path / "board"
    (code,) = fleet.invite()
    assert enrol(code, board, "--no-connect").returncode == ExitCode.OK
    settings = load_agent_settings(board / "agent.yaml")
    assert len(audit(settings.state_dir).entries) == 1
    assert settings.mqtt.cert_file is not None
    device = _device(fleet, settings.mqtt.cert_file)
    shutil.rmtree(settings.state_dir)
    settings.ledger_files.second_head.unlink()
    (code,) = fleet.run("devices", "replace", device).stdout.split()
    assert fleet.endpoint is not None
    fleet.endpoint.stop()
    assert enrol(code, board, "--no-connect").returncode == ExitCode.BROKER
    fleet.start()
    again = enrol(code, board, "--no-connect")
    assert again.returncode == ExitCode.OK
    assert not has_ledger(settings)
    assert "dpagent budget" in again.stdout
    refused = dpagent("run", "--config", board / "agent.yaml")
    assert refused.returncode == ExitCode.LEDGER


def _device(fleet: EnrolmentFleet, certificate: Path) -> str:
    with fleet.devices() as devices:
        known = devices.holder(read_certificate(certificate))
    assert known is not None
    return known.id
