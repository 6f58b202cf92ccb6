"""Lots and noise from a seed, **without any privacy**: for runs that have to be repeated to the bit.

Only a simulation draws so, and only if it is asked to by ``--insecure-noise-seed``. No agent and no
coordinator has such an option. Each device has a stream of its own in each round, so the bits do not depend
on which worker computes which device, in which order, or how often.

A stream is the key stream of AES-256 in counter mode (NIST SP 800-38A, 6.5), under a key that is the SHA-256
of the seed and the stream's name: the same bytes on every machine and with every version of numpy.
"""

from __future__ import annotations

import hashlib
from typing import Final

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpagent.privacy.noise.entropy import Entropy

_FIRST_BLOCK: Final = bytes(16)


def insecure_entropy(seed: int, round_number: int, device: int, purpose: str) -> Entropy:
    """A stream of bytes that follows from its arguments. **Insecure**: see the module's text.

    Args:
        seed: at least 0.
        round_number: from 1.
        device: from 1; 0 for the coordinator.
        purpose: what the bytes are drawn for.

    >>> draw = insecure_entropy(7, 1, 1, "update")
    >>> draw(4).hex(), draw(4).hex() == insecure_entropy(7, 1, 1, "update")(8)[4:].hex()
    ('558f2eb2', True)
    """
    name = f"dpagent insecure draws\0{seed}\0{round_number}\0{device}\0{purpose}"
    stream = Cipher(
        algorithms.AES256(hashlib.sha256(name.encode()).digest()), modes.CTR(_FIRST_BLOCK)
    ).encryptor()
    return lambda count: stream.update(bytes(count))
