"""A session in memory, for tests of what is published and when."""

from __future__ import annotations


class Line:
    """A session that takes as many messages, and has room for as many, as it is told."""

    def __init__(self) -> None:
        self.room = 10_000
        self.accepts = 10_000
        self.sent: list[bytes] = []
        self.topics: list[str] = []
        """Of what was sent."""

    @property
    def has_room(self) -> bool:
        return len(self.sent) < self.room

    def publish(self, topic: str, payload: bytes) -> int | None:
        if len(self.sent) >= self.accepts:
            return None
        self.sent.append(payload)
        self.topics.append(topic)
        return len(self.sent)
