"""Many messages at once, and a process under them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import paho.mqtt.client as paho
from brokers import USER, Broker
from children import Child
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

PATIENCE_S = 120.0


def publish_all(broker: Broker, topic: str, messages: Sequence[bytes]) -> None:
    """Publish all, until the broker has acknowledged them."""
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
    client.username_pw_set(USER, broker.password_file.read_text().strip())
    client.connect("127.0.0.1", broker.port)
    client.loop_start()
    try:
        sent = [client.publish(topic, message, qos=1) for message in messages]
        for info in sent:
            info.wait_for_publish(PATIENCE_S)
    finally:
        client.disconnect()
        client.loop_stop()


def resident_kib(child: Child) -> int:
    """Resident memory of a process, the highest so far."""
    status = Path(f"/proc/{child.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


@contextlib.contextmanager
def stopped(child: Child) -> Iterator[None]:
    """The process does nothing at all meanwhile."""
    os.kill(child.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(child.process.pid, signal.SIGCONT)
