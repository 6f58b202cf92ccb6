"""A device in the tests' process, on a clock that stands still: real state, real records, no broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clocks import MovableClock
from fleets import DIGITS, write_agent
from ledgers import DATASET, open_state
from lines import Line

from agent.background import at_once
from agent.cycle import Cycle
from agent.profile import load_profile
from agent.publisher import Publisher
from agent.settings import load_agent_settings
from agent.state import AgentState
from agent.training import Trainer
from dpagent.protocol.fragments import chunked, weights_to_bytes
from dpagent.protocol.signing import Signer, new_signing_secret

KEY = Signer(new_signing_secret(), "testers").public_key
WEIGHTS = weights_to_bytes(DIGITS.initial_weights(0))
PERIOD_S = 0.05
"""Of the device's grid."""


@dataclass
class Device:
    cycle: Cycle
    state: AgentState
    clock: MovableClock
    trainer: Trainer
    asked_at: list[float] = field(default_factory=list)

    def give(self, weights: bytes = WEIGHTS) -> None:
        for chunk in chunked(weights):
            self.cycle.take_chunk(chunk)

    def advance(self) -> None:
        """Let the device do all that it can at the next point of its grid."""
        while self.is_ready:
            self.clock.advance(max(self.cycle.due_in_s(), 1e-6))
            self.cycle.advance()

    @property
    def is_ready(self) -> bool:
        """Whether a round waits for nothing but the next point of the grid."""
        return self.cycle.due_in_s() <= PERIOD_S

    def charged(self) -> list[int]:
        rows = self.state.connection.execute("SELECT body ->> 'round' FROM entries WHERE kind = 'charge'")
        return sorted(row[0] for row in rows)

    def declined(self) -> list[tuple[Any, ...]]:
        rows = self.state.connection.execute(
            "SELECT round, reason, changed_at FROM rounds WHERE state = 'declined'"
        )
        return [tuple(row) for row in rows]

    def pending(self) -> dict[int, list[bytes]]:
        """Digests by round."""
        rows = self.state.connection.execute(
            "SELECT round, digest FROM fragments WHERE message IS NOT NULL ORDER BY digest"
        )
        rounds: dict[int, list[bytes]] = {}
        for number, digest in rows:
            rounds.setdefault(number, []).append(digest)
        return rounds


@contextmanager
def open_device(directory: Path, **changes: Any) -> Iterator[Device]:
    """A device with 50 digits.

    Args:
        directory: for its configuration, data and state; what is there of an earlier one goes on.
        changes: of its ``agent.yaml``.
    """
    settings = load_agent_settings(write_agent(directory, None, KEY, **({"engine": "numpy"} | changes)))
    clock = MovableClock(unix=5_000.0)
    state = open_state(directory / "state")
    line: Any = Line()
    asked_at: list[float] = []
    trainer = Trainer(settings, load_profile("generic-linux"))
    cycle = Cycle(
        DATASET, "testers", settings.limits,
        state=state,
        trainer=trainer,
        publisher=Publisher(
            state, line, "fragments", messages_per_second=100.0, period_s=PERIOD_S, clock=clock
        ),
        ask_again=lambda: asked_at.append(clock.monotonic()),
        clock=clock,
        start=at_once,
    )  # fmt: skip
    try:
        yield Device(cycle, state, clock, trainer, asked_at)
    finally:
        state.close()
