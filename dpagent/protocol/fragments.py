"""An update cut into fragments of one size.

An update is ``dimension`` integers. Block *p* holds coordinates ``p·block … (p+1)·block − 1``; the last one
is filled up with zeros. :mod:`dpagent.protocol.packing` makes a block the payload of a fragment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dpagent.privacy.noise.entropy import Entropy
from dpagent.protocol.bit_packing import pack_bits
from dpagent.protocol.codec import MessageError
from dpagent.protocol.messages import (
    Fragment,
    Plan,
    WireTerms,
)
from dpagent.protocol.packing import Units, pack, unpack
from dpagent.protocol.report_packing import read_reports
from dpagent.protocol.sizes import block_count, report_width
from dpagent.protocol.terms import NoisySumTerms, ReportTerms, UpdateTerms
from dpagent.protocol.update_packing import pack_update


def cut(update: NDArray[np.int64], plan: Plan, *, entropy: Entropy = os.urandom) -> Iterator[Fragment]:
    """The fragments of ``update`` (values,), each with a fresh random id: wire units of a noisy sum,
    reports, or grid units of an update without noise.

    Args:
        update: of a device.
        plan: of the round.
        entropy: of ids and of rounding; to be replaced in tests and simulations only.
    """
    wire = plan.wire
    for position in range(block_count(len(update), wire.block)):
        block = np.zeros(wire.block, np.int64)
        part = update[position * wire.block : (position + 1) * wire.block]
        block[: len(part)] = part
        match plan.release:
            case NoisySumTerms():
                payload = pack(block, wire.bytes, entropy=entropy)
            case ReportTerms(coordinates=coordinates):
                payload = pack_bits(block, report_width(plan.model.parameters, coordinates))
            case UpdateTerms(largest=largest):
                payload = pack_update(block, largest)
        yield Fragment(plan.round, position, entropy(16), payload)


def read_block(fragment: Fragment, wire: WireTerms, blocks: int) -> tuple[Units, int]:
    """The ``wire.block`` integers of a noisy sum's fragment, which is no dummy, and their level.

    Raises:
        MessageError: The position is none of the ``blocks``, or the payload is not one of such integers.
    """
    require_place(fragment, wire, blocks)
    try:
        return unpack(fragment.payload, wire.block, wire.bytes)
    except ValueError as error:
        raise MessageError("bad values", str(error)) from error


def read_tally(fragment: Fragment, plan: Plan, terms: ReportTerms, blocks: int) -> NDArray[np.int64]:
    """What a fragment of reports, which is no dummy, adds to the tally of its block; see
    :func:`~dpagent.protocol.report_packing.read_reports`.

    Raises:
        MessageError: The position is none of the ``blocks``, or the payload is not one of such reports.
    """
    require_place(fragment, plan.wire, blocks)
    try:
        return read_reports(
            fragment.payload, fragment.position, plan.wire.block,
            dimension=plan.model.parameters, coordinates=terms.coordinates,
        )  # fmt: skip
    except ValueError as error:
        raise MessageError("bad values", str(error)) from error


def require_place(fragment: Fragment, wire: WireTerms, blocks: int) -> None:
    """Refuse a fragment, or a dummy, without a place in the update or of another length.

    Raises:
        MessageError: It is one.
    """
    if fragment.position >= blocks:
        raise MessageError("bad position", f"block {fragment.position} of {blocks}")
    if len(fragment.payload) != wire.bytes:
        raise MessageError("wrong size", f"payload of {len(fragment.payload)} bytes; expected {wire.bytes}")
