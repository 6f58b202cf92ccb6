"""What a device says of the keys of tokens that it has seen: digests, which the others compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dpagent.protocol.messages import Layout
from dpagent.protocol.tokens import MAX_ROUNDS_AHEAD, TokenKeys, key_digest

_HEADER_BYTES: Final = 20
_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Witness(Layout):
    """Digests of the keys of some rounds: job (16 bytes), first round (4 bytes, big-endian), digests (32
    bytes each). Nobody signs it: two signed lists are evidence, a digest is a question."""

    job: bytes
    first_round: int
    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, keys: TokenKeys, fleet: str) -> Witness:
        """What there is to say of a list."""
        digests = tuple(key_digest(keys, number, fleet) for number in keys.rounds)
        return cls(keys.job, keys.first_round, digests)

    @property
    def by_round(self) -> Mapping[int, bytes]:
        """The digests by round."""
        return dict(enumerate(self.digests, self.first_round))

    def to_bytes(self) -> bytes:
        """See :class:`Layout`."""
        return self.job + self.first_round.to_bytes(4, "big") + b"".join(self.digests)

    @classmethod
    def from_bytes(cls, data: bytes) -> Witness:
        """See :class:`Layout`."""
        number, rest = divmod(len(data) - _HEADER_BYTES, _DIGEST_BYTES)
        if rest or not 1 <= number <= MAX_ROUNDS_AHEAD:
            raise ValueError(f"{len(data)} bytes are no digests of 1 to {MAX_ROUNDS_AHEAD} keys")
        digests = tuple(
            data[at : at + _DIGEST_BYTES] for at in range(_HEADER_BYTES, len(data), _DIGEST_BYTES)
        )
        return cls(data[:16], int.from_bytes(data[16:20], "big"), digests)
