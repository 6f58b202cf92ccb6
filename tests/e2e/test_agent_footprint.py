"""The agent stays light: what it imports, and what it weighs while it waits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from brokers import USER, Broker

LIMIT_KIB = 52 * 1024

IDLE = """
import sys, time
import agent.daemon
from dpagent.transport.events import Connected
from dpagent.transport.session import MqttSession, Subscription
from dpagent.transport.settings import MqttSettings

url, user, password_file = sys.argv[1:]
settings = MqttSettings(url=url, username=user, password_file=password_file, protocol="3.1.1")
session = MqttSession(settings, client_id="idle", subscriptions=[Subscription("idle/#")], persistent=False)
with session:
    until = time.monotonic() + 20
    while time.monotonic() < until and not isinstance(session.next_event(0.5), Connected):
        pass
    assert session.connected
    session.next_event(1)
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(status["VmRSS"].split()[0])
"""


def run(code: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_agent_pulls_in_nothing_heavy() -> None:
    modules = set(run("import agent.daemon, sys; print('\\n'.join(sys.modules))").split())
    for heavy in (
        "numpy",
        "scipy",
        "onnx",
        "onnxruntime",
        "sklearn",
        "matplotlib",
        "coordinator",
        "typer",
        "rich",
        "cli",
    ):
        assert not {name for name in modules if name == heavy or name.startswith(f"{heavy}.")}, heavy


@pytest.mark.parametrize("program", ["agent.worker_program", "agent.decoding"])
def test_training_and_decoding_have_what_they_need_alone(program: str) -> None:
    """Each module of theirs is in memory beside the agent's."""
    modules = set(run(f"import {program}, sys; print('\\n'.join(sys.modules))").split())
    assert "numpy" in modules
    for others in (
        "agent.ledger",
        "agent.settings",
        "cryptography",
        "dpagent.transport",
        "numpy.ma",
        "onnxruntime",
        "paho",
        "ssl",
        "yaml",
    ):
        assert not {name for name in modules if name == others or name.startswith(f"{others}.")}, others


def test_import_and_an_idle_connection_stay_under_52_mib(amqtt: Broker) -> None:
    run("import agent.daemon, dpagent.transport.session")  # compiles them: a first import weighs more
    # How many pages of its libraries the kernel maps ahead of need differs by a megabyte.
    resident_kib = [int(run(IDLE, amqtt.url, USER, str(amqtt.password_file))) for _ in range(3)]
    assert min(resident_kib) < LIMIT_KIB, resident_kib
