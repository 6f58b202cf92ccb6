"""Receipts of fragments: what they say, and where they go.

A receipt names its fragment by a digest of the id, which nobody knows but its device and whoever opened the
seal. Where a plan says so (:data:`~dpagent.protocol.messages.ReceiptTopics`), each goes to a topic of its
own, named by another digest of the same id. Nobody signs it: who does not know the id cannot make it. Topics
of one device have nothing in common, so that a coordinator cannot tell them by their names.

Both digests are halves of one SHA-256, so neither tells the other, or the id.
"""

from __future__ import annotations

import hashlib
from typing import Final

from dpagent.protocol.messages import RECEIPT_DIGEST_BYTES

_PREFIX: Final = b"dpagent v1 receipt\0"


def receipt_place(fragment_id: bytes) -> str:
    """The last level of the topic of a fragment's own receipt: 32 lower-case hexadecimal characters."""
    return _halves(fragment_id)[:RECEIPT_DIGEST_BYTES].hex()


def receipt_digest(fragment_id: bytes) -> bytes:
    """What a receipt says of a fragment: 16 bytes."""
    return _halves(fragment_id)[RECEIPT_DIGEST_BYTES:]


def _halves(fragment_id: bytes) -> bytes:
    return hashlib.sha256(_PREFIX + fragment_id).digest()
