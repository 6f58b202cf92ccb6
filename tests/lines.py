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
        self.heard: set[str] = set()
        """Topics that are subscribed to now."""
        self.steps: list[tuple[str, str]] = []
        """What the broker sees, in order: ``hear``, ``hear no more`` or ``publish``, and the topic."""

    @property
    def has_room(self) -> bool:
        return len(self.sent) < self.room

    def hear(self, topic: str) -> None:
        if topic not in self.heard:
            self.heard.add(topic)
            self.steps.append(("hear", topic))

    def hear_no_more(self, topic: str) -> None:
        self.heard.remove(topic)
        self.steps.append(("hear no more", topic))

    def publish(self, topic: str, payload: bytes) -> int | None:
        if len(self.sent) >= self.accepts:
            return None
        self.sent.append(payload)
        self.topics.append(topic)
        self.steps.append(("publish", topic))
        return len(self.sent)
