"""Dummies: what a device sends for a round that it sits out, so that taking part does not show.

A dummy is a fragment with the mark of one where others have their level, and zeros for values. Sealed, it has
the length of any fragment of the round. It is made from the plan alone, and the coordinator counts it for
nothing. A device keeps dummies without the zeros: a plan is free to decline, so what it makes a device write
must be small.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from dpagent.protocol.messages import Fragment, Plan
from dpagent.protocol.tokens import fragment_bytes, token_bytes
from dpagent.protocol.update_size import blocks_of

MAX_DUMMIES: Final = 4_096
"""A plan that cuts an update into more fragments gets none: it would cost the device traffic, and no budget.
Coordinators cut updates into no more."""


def dummies_for(plan: Plan) -> Iterator[Fragment]:
    """A dummy for each block of an update, with a fresh random id and without zeros; none if there are more
    than :data:`MAX_DUMMIES`."""
    blocks = blocks_of(plan)
    for position in range(blocks if blocks <= MAX_DUMMIES else 0):
        yield Fragment(plan.round, position, os.urandom(16), bytes(token_bytes(plan)) + Fragment.DUMMY)


def as_sent(fragment: bytes, plan: Plan) -> bytes:
    """An encoded fragment as it leaves: at full length, which a dummy lacks zeros to."""
    return fragment.ljust(fragment_bytes(plan), b"\0")
