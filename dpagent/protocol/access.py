"""Who may read and write which topics of a fleet: the rules that a broker has to keep.

A filter is the name of a topic, with ``+`` for the number of a chunk, the role of an asset and the place of a
receipt, and :data:`OWN` for the device that a board is. Where a broker tells subscribing from receiving, its
rules can forbid a board to subscribe with wildcards: it needs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from dpagent.protocol.topics import Topics

OWN: Final = "{own}"
"""In a filter of a board: its own id, the common name of its certificate. A broker that does not know that
may let a board read and write the topics of all: requests for tokens are signed, answers are sealed."""


class Role(StrEnum):
    """What a client of the broker is to the fleet."""

    COORDINATOR = "coordinator"
    BOARD = "board"
    MIXER = "mixer"
    WORKER = "worker"
    """Counts fragments beside a coordinator: it reads them, and writes receipts on topics of their own."""
    BRIDGE = "bridge"
    """Another broker of the fleet, at which the coordinators are not: it brings its boards what they publish,
    and them the requests of its boards. Fragments and receipts of one's own stay where the boards are."""


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


def rights_of(topics: Topics, *, mixed: bool, enrolled: bool) -> list[Right]:
    """All rights in a fleet; what is not among them, nobody may.

    Args:
        topics: the fleet's.
        mixed: whether a mixer is part of the fleet.
        enrolled: whether its boards have certificates, and so may have tokens, and receipts on topics of
            their own.
    """
    announced = (topics.plan, topics.model_chunks, topics.asset_chunks, topics.receipts)
    rights = [Right(Role.COORDINATOR, "write", each) for each in announced]
    # Its own plan tells a coordinator whether its state is older than the fleet's.
    rights += [Right(Role.COORDINATOR, "read", each) for each in (topics.fragments, topics.plan)]
    rights += [Right(Role.BOARD, "read", each) for each in announced]
    rights.append(Right(Role.BOARD, "write", topics.fragments))
    rights.append(Right(Role.WORKER, "read", topics.fragments))
    rights += [Right(Role.BRIDGE, "read", each) for each in announced]
    if enrolled:
        rights += [Right(each, "write", topics.own_receipts) for each in (Role.COORDINATOR, Role.WORKER)]
        rights.append(Right(Role.BOARD, "read", topics.own_receipts))
        among_boards = (topics.witness, topics.evidence)
        rights += [Right(Role.COORDINATOR, "write", each) for each in (topics.token_keys, topics.answer("+"))]
        rights.append(Right(Role.COORDINATOR, "read", topics.asks))
        read = (topics.token_keys, topics.answer(OWN), *among_boards)
        rights += [Right(Role.BOARD, "read", each) for each in read]
        rights += [Right(Role.BOARD, "write", each) for each in (topics.ask(OWN), *among_boards)]
        answers = (topics.token_keys, topics.answer("+"), *among_boards)
        rights += [Right(Role.BRIDGE, "read", each) for each in answers]
        rights += [Right(Role.BRIDGE, "write", each) for each in (topics.asks, *among_boards)]
    if mixed:
        rights.append(Right(Role.BOARD, "write", topics.mixer))
        rights += [Right(Role.MIXER, "read", each) for each in (topics.plan, topics.mixer)]
        rights.append(Right(Role.MIXER, "write", topics.fragments))
    return rights
