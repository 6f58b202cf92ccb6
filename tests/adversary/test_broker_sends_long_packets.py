"""A broker sends packets of 256 MB, so that the board's memory runs out and the agent is killed.

Claim: whatever a broker sends over either version of MQTT, an agent holds a window of messages and one
    packet. A longer message takes less than 16 MiB more: it is dropped as it comes, acknowledged, and the
    agent goes on.
Attack: after a subscription, PUBLISH with the longest payload that MQTT knows, all of whose bytes follow.
    Real agent, in a process of its own; the broker is the test's.

Power: there is no randomness. On the code of before the library keeps the whole message, so the test fails
    each time; by chance it fails never.

Outcome: before, 767 and 779 MiB; now 0. What no broker may send ends the connection, and the next
    attempt comes after a pause that doubles: ``transport/test_bounds.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from devices import KEY
from fleets import run_agent, write_agent
from floods import resident_kib
from hostile_brokers import LONGEST, HostileBroker, publication

from dpagent.protocol.topics import Topics

MOST_MIB = 16


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("protocol", "version"), [pytest.param("3.1.1", 4, marks=pytest.mark.slow), ("5", 5)]
)
def test_the_longest_packet_takes_no_memory(tmp_path: Path, protocol: str, version: int) -> None:
    topic = Topics("testers").receipts
    with HostileBroker() as broker:
        file = write_agent(tmp_path, None, KEY, mqtt={"url": broker.url, "protocol": protocol})
        with run_agent(file) as agent, broker.link() as link:
            link.greet()
            assert link.version == version
            link.take_subscription()
            for number in range(1, 301):  # more than a window, so that its memory is there
                link.send(publication(topic, bytes(60_000), number, version=version))
            while int.from_bytes(link.packet()[1][:2], "big") != 300:
                pass
            before = resident_kib(agent)
            head = publication(topic, b"", 301, version=version)
            room = LONGEST - (len(head) - 2)
            link.send(publication(topic, b"", 301, version=version, size=room))
            part = bytes(1 << 20)
            for start in range(0, room, len(part)):
                link.send(part[: room - start])
            link.send(publication(topic, b"short", 302, version=version))
            assert [link.packet()[1][:2] for _ in range(2)] == [b"\1\x2d", b"\1\x2e"], "both acknowledged"
            grown_mib = (resident_kib(agent) - before) / 1024
            print(f"MQTT {protocol}: {grown_mib:.1f} MiB")
            assert grown_mib < MOST_MIB
            assert agent.process.poll() is None
