"""A board with a certificate, and the desk at which it gets its tokens, without a broker between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from devices import PERIOD_S, SIGNER, Device, open_device
from fleets import make_plan
from token_desks import Desk

from agent.identity import Identity
from dpagent.protocol.codec import decode
from dpagent.protocol.messages import Fragment, Plan

BLOCKS = 4
WAITS = 12.0
"""Seconds after which a round goes on that was asked for on the spot."""
SITS_OUT: dict[str, Any] = {"maximum_job_epsilon": 1e-6}


def plan(**changes: Any) -> Plan:
    return make_plan(**{"linkability": "fragment", "wire": {"block": 2_500}} | changes)


class Served:
    """A device and a desk, which hear of each other by hand."""

    def __init__(self, device: Device, desk: Desk, identity: Identity) -> None:
        self.device, self.desk, self.identity = device, desk, identity
        self.handled = 0

    def asks(self) -> list[bytes]:
        """The requests that have left since the last look."""
        line, start = self.device.line, self.handled
        self.handled = len(line.sent)
        sent = zip(line.topics[start:], line.sent[start:], strict=True)
        return [payload for topic, payload in sent if topic.endswith(f"/{self.identity.device_id}/ask")]

    def pass_time(self, seconds: float) -> None:
        step_s = max(PERIOD_S, seconds / 60)
        for _ in range(round(seconds / step_s) + 1):
            self.device.clock.advance(step_s)
            self.device.tokens.tend()
            self.device.cycle.advance()

    def answer(self, asks: list[bytes]) -> None:
        for ask in asks:
            self.device.tokens.take_answer(self.desk.answer(self.identity.device_id, ask))

    def run(self, *plans: Plan) -> None:
        """Announce plans one after the other, and let all happen."""
        for each in plans:
            self.device.take_plan(each)
            for _ in range(6):
                self.pass_time(5 * PERIOD_S)
                self.answer(self.asks())
            self.pass_time(WAITS)
            self.device.advance()

    def spooled(self) -> list[Fragment]:
        rows = self.device.state.connection.execute("SELECT message FROM messages")
        return [decode(row["message"], Fragment) for row in rows]


@contextmanager
def served(directory: Path, **changes: Any) -> Iterator[Served]:
    """A member and its desk."""
    desk_changes = {
        key: changes.pop(key) for key in ("tokens", "linkability", "device_epsilon") if key in changes
    }
    desk = Desk(directory / "members", SIGNER, **{"tokens": BLOCKS} | desk_changes)
    identity = changes.pop("identity", None) or desk.member()
    try:
        with open_device(directory / "device", identity=identity, **changes) as device:
            device.tokens.watch.take_keys(desk.signed_keys)
            device.give()
            yield Served(device, desk, identity)
    finally:
        desk.close()
