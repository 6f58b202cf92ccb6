"""Who may read and write which topics of a fleet: the rules that a broker has to keep.

A filter is the name of a topic, with ``+`` for the number of a chunk and the role of an asset. Nobody needs
to subscribe with wildcards: where a broker tells subscribing from receiving, its rules can forbid it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from dpagent.protocol.topics import Topics


class Role(StrEnum):
    """What a client of the broker is to the fleet."""

    COORDINATOR = "coordinator"
    BOARD = "board"
    MIXER = "mixer"


@dataclass(frozen=True, slots=True)
class Right:
    """What one role may do with topics.

    Attributes:
        role: whose right it is.
        may: to publish to them, or to subscribe to them and receive.
        topics: a filter.
    """

    role: Role
    may: Literal["read", "write"]
    topics: str


def rights_of(topics: Topics, *, mixed: bool) -> list[Right]:
    """All rights in a fleet; what is not among them, nobody may.

    Args:
        topics: the fleet's.
        mixed: whether a mixer is part of the fleet.
    """
    announced = (topics.plan, topics.model_chunks, topics.asset_chunks, topics.receipts)
    rights = [Right(Role.COORDINATOR, "write", each) for each in announced]
    # Its own plan tells a coordinator whether its state is older than the fleet's.
    rights += [Right(Role.COORDINATOR, "read", each) for each in (topics.fragments, topics.plan)]
    rights += [Right(Role.BOARD, "read", each) for each in announced]
    rights.append(Right(Role.BOARD, "write", topics.fragments))
    if mixed:
        rights.append(Right(Role.BOARD, "write", topics.mixer))
        rights += [Right(Role.MIXER, "read", each) for each in (topics.plan, topics.mixer)]
        rights.append(Right(Role.MIXER, "write", topics.fragments))
    return rights
