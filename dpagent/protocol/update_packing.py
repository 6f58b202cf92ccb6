"""A clipped update of one fragment as bytes: each whole number in as many bits as the largest can need.

A value v in [−L, L] travels as v + L, in ⌈log₂(2L + 1)⌉ bits (:mod:`dpagent.protocol.bit_packing`). Unless
devices add noise of their own, none hides these values from whoever opens the seal; nobody else learns
anything of them from a length, which is one for all values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpagent.norm import Norm
from dpagent.protocol.bit_packing import pack_bits, unpack_bits
from dpagent.protocol.sizes import update_width


def pack_update(values: NDArray[np.int64], largest: int) -> bytes:
    """The payload of ``values`` (n,), each in [−largest, largest].

    >>> read_update(pack_update(np.array([-3, 0, 4]), 5), 0, 3, dimension=3, largest=5, norm=Norm.L2)
    array([-3,  0,  4])
    """
    return pack_bits(values + largest, update_width(largest))


def read_update(
    payload: bytes,
    position: int,
    block: int,
    *,
    dimension: int,
    largest: int,
    norm: Norm | None,
    largest_vote: int | None = None,
) -> NDArray[np.int64]:
    """The values of a fragment, zeros beyond the update's end included.

    An honest update as a whole has a norm of at most ``largest``, so each of its blocks has. Blocks of one
    device cannot be linked: whoever sends one of that norm in each place sends up to as many times as much,
    in L1, as there are places, and the root of that in L2. A vote is judged on its own: with a norm of
    ``largest`` one fragment would have many. Neither bounds an update with noise of its device, whose norms
    have another law.

    Args:
        payload: of the fragment.
        position: of its block.
        block: values of a fragment.
        dimension: of the update.
        largest: bound on the norm of an honest update, or on each value if it has noise.
        norm: which; None with noise.
        largest_vote: bound on the magnitude of the update's last value, if that is a vote.

    Raises:
        ValueError: it is not a payload of such values.
    """
    values = unpack_bits(payload, block, update_width(largest)) - largest
    end = dimension - position * block
    if values[max(0, end) :].any():
        raise ValueError("there are values beyond the update's end")
    if largest_vote is not None and 0 < end <= block and abs(vote := int(values[end - 1])) > largest_vote:
        raise ValueError(f"a vote of {vote}; expected at most {largest_vote} either way")
    size = np.abs(values)
    if int(size.max(initial=0)) > largest:
        raise ValueError(f"a value of {int(size.max())}; expected at most {largest} either way")
    if norm is None:
        return values
    power = 2 if norm is Norm.L2 else 1
    # Exact: no value above the bound is raised to the power, and grids are coarse enough for 64 bits.
    if int((size**power).sum()) > largest**power:
        raise ValueError(f"a norm in {norm} above {largest}, that of an honest update")
    return values
