"""The fleet's broker: a child on a port that is reserved for it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from brokers import find_mosquitto

from dpagent.errors import BrokerError, ExitCode
from simulation.programs.broker import BrokerChild, choose_broker, wait_until_ready
from simulation.programs.supervisor import Supervisor
from simulation.request import BrokerRequest


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port cannot be reserved")
@pytest.mark.parametrize("software", ["embedded", "mosquitto"])
def test_a_broker_listens_on_a_port_that_nobody_else_is_given(tmp_path: Path, software: str) -> None:
    if software == "mosquitto" and find_mosquitto() is None:
        pytest.skip("Mosquitto is not installed")
    with choose_broker(BrokerRequest(broker=software), tmp_path) as broker:
        assert isinstance(broker, BrokerChild)
        port = broker.address.settings.port
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with Supervisor(tmp_path / "logs") as supervisor:
            supervisor.start("broker", broker.command)
            wait_until_ready(broker.address)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(BrokerError, match=str(port)) as caught,
            choose_broker(BrokerRequest(broker="embedded", broker_port=port), tmp_path),
        ):
            pass
    assert caught.value.exit_code is ExitCode.BROKER
