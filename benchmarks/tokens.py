"""One-time tokens: what issuing and checking cost a coordinator, what asking costs a board, and bytes.

Issuing is the coordinator's whole answer to 100 boards with 16 fragments each: opening a request, the
signature of its board, 16 private RSA operations of 2,048 bits (blinded, in constant time, and checked),
the entry in the registry (a transaction each, durable), and the sealed and signed answer. All in one
thread; processor time, as the machine is shared. Checking is the verification of a token of each class in
turn. Asking is what a board does for a round: blinding 16 messages, and finalizing 16 signatures.

Bits are those of ``traffic``: the packets of one board's update of mnist-cnn in a round of ``dp-sgd``, here
in 8 fragments, with PUBACKs for what comes down.

Limits: issuing is measured with keys that were made before; making one takes some tenths of a second, and
is done ahead, in the background.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benchmarks.figures import Figure
from benchmarks.members import TokenRequest, enrolled
from benchmarks.seal import RECORDS, first_task
from benchmarks.traffic import _PUBACK, _fragments, _from_coordinator
from coordinator.authority import create_authority
from coordinator.blind_signing import PrivateKey
from coordinator.devices import Devices
from coordinator.issuing import Issuer
from coordinator.registry import AnnouncedKey, Registry
from dpagent.protocol.blind_signatures import PREFIX_BYTES, blind, finalize
from dpagent.protocol.issuing import AskOpener
from dpagent.protocol.sealing import Opener, new_sealing_secret
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.tokens import RoundKey, TokenKeys
from simulation.presets import PRESETS

_BOARDS: Final = 100
_FRAGMENTS: Final = 16
_CHECKED: Final = 2_000
_FLEET, _JOB = "bench", bytes(16)


def run() -> list[Figure]:
    """Issue, check and ask; and count bits."""
    private = PrivateKey.generate(_FRAGMENTS)
    opener = AskOpener(new_sealing_secret(), _FLEET)
    keys = TokenKeys(
        job=_JOB, linkability="fragment", tokens=_FRAGMENTS, sealing_key=opener.public_key, first_round=1,
        moduli=[private.modulus.to_bytes(256, "big")],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        figures = _issuing(Path(directory), private, opener, keys)
    return [*figures, *_checking(private, keys), *_bits()]


def _seconds(work: Callable[[], object]) -> float:
    begins_at = time.process_time()
    work()
    return time.process_time() - begins_at


def _issuing(directory: Path, private: PrivateKey, opener: AskOpener, keys: TokenKeys) -> list[Figure]:
    authority = create_authority(directory, _FLEET, now=datetime.now(UTC))
    signer = Signer(new_signing_secret(), _FLEET)
    with Devices(directory) as devices:
        registry = Registry(directory)
        announced = AnnouncedKey(
            _JOB.hex(), 1, keys.linkability, keys.tokens, keys.sealing_key, keys.moduli[0]
        )
        registry.add_key(announced, private.to_bytes(), [])
        requests = [
            (identity.device_id, TokenRequest(identity, keys, 1, _FLEET).message())
            for identity in enrolled(authority, directory, _BOARDS)
        ]
        issuer = Issuer(
            _FLEET, opener=opener, devices=devices, registry=registry, device_epsilon=None, now=time.time
        )

        def issue() -> None:
            for device_id, request in requests:
                signer.sign(issuer.answer(device_id, request, keys).answer, "answer")

        issuing = _seconds(issue)
        registry.close()
    size = len(requests[0][1])
    return [
        Figure(f"issuing for {_BOARDS} boards of {_FRAGMENTS} fragments", issuing, "s of one core"),
        Figure("a board's request for a round", size, "bytes"),
    ]


def _checking(private: PrivateKey, keys: TokenKeys) -> list[Figure]:
    key = RoundKey.of(keys, 1, _FLEET)
    messages = [(place, nonce, key.message(place, nonce)) for place in range(_FRAGMENTS)
                for nonce in [os.urandom(PREFIX_BYTES)]]  # fmt: skip
    made = [blind(key.public(place), message) for place, _, message in messages]
    blinding = _seconds(lambda: [blind(key.public(place), message) for place, _, message in messages])
    signatures = [
        private.blind_sign(place, one.message) for (place, *_), one in zip(messages, made, strict=True)
    ]
    parts = list(zip(messages, signatures, made, strict=True))

    def finalized() -> list[bytes]:
        return [
            nonce + finalize(key.public(place), message, signature, one.inverse)
            for (place, nonce, message), signature, one in parts
        ]

    finalizing, tokens = _seconds(finalized), finalized()
    checking = _seconds(
        lambda: [key.is_valid(tokens[number % _FRAGMENTS], number % _FRAGMENTS) for number in range(_CHECKED)]
    )
    return [
        Figure("checking a token", 1e6 * checking / _CHECKED, "µs"),
        Figure(f"a board's blinding of {_FRAGMENTS} messages", 1000 * blinding, "ms"),
        Figure(f"a board's finalizing of {_FRAGMENTS} tokens", 1000 * finalizing, "ms"),
    ]


def _bits() -> list[Figure]:
    figures, sealing_key = [], Opener(new_sealing_secret(), "demo").public_key
    lengths = {}
    for linkability in ("none", "fragment"):
        task = first_task(
            "mnist", RECORDS["mnist"], sealing_key, fragments_per_update=8, linkability=linkability
        )
        fragments = _fragments(task)
        lengths[linkability] = fragments[0]
        down = _from_coordinator(task, PRESETS["mnist"].devices * len(fragments))
        bits = 8 * (sum(fragments) + _PUBACK * len(down)) / task.spec.parameter_count
        figures.append(
            Figure(
                f"{task.spec.name}: up in 8 fragments, linkability {linkability}", bits, "bits a parameter"
            )
        )
    added = lengths["fragment"] - lengths["none"]
    return [Figure("a token in a fragment", added, "bytes"), *figures]
