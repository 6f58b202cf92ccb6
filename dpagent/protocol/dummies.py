"""Dummies: what a device sends for a round that it sits out, so that taking part does not show.

A dummy is a fragment whose ``dummy`` is true and whose values are zeros. Sealed, it has the length of any
fragment of the round. It is made from the plan alone, and the coordinator counts it for nothing. A device
keeps dummies without their payload: a plan is free to decline, so what it makes a device write must be small.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from dpagent.protocol.codec import decode, encode
from dpagent.protocol.fragments import block_count, payload_bytes
from dpagent.protocol.messages import Fragment, Plan, WireTerms
from dpagent.protocol.task import dimension_of

MAX_DUMMIES: Final = 4_096
"""A plan that cuts an update into more fragments gets none: it would cost the device traffic, and no budget.
Coordinators cut updates into no more."""


def dummies_for(plan: Plan) -> Iterator[Fragment]:
    """A dummy for each block of an update, with a fresh random id and without payload; none if there are more
    than :data:`MAX_DUMMIES`."""
    blocks = block_count(dimension_of(plan), plan.wire.block)
    for position in range(blocks if blocks <= MAX_DUMMIES else 0):
        yield Fragment(
            version=1, kind="fragment", job=plan.job, round=plan.round, id=os.urandom(16),
            position=position.to_bytes(4, "big"), dummy=True, payload=b"",
        )  # fmt: skip


def as_sent(fragment: bytes, wire: WireTerms) -> bytes:
    """An encoded fragment as it leaves: a dummy is filled up with zeros, any other is as it was.

    Raises:
        MessageError: It is no fragment.
    """
    dummy = decode(fragment, Fragment)
    if not dummy.dummy:
        return fragment
    return encode(dummy.model_copy(update={"payload": bytes(payload_bytes(wire))}))
