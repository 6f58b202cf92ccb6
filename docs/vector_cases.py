"""Messages that receivers accept although they are unusual, and that they reject, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cbor2
import numpy as np
from vector_fleet import FRAGMENTS, PLAN, RECEIPTS, SEALING_SECRET, SIGNER, TOPICS, fixed, sealed, signed

from dpagent.protocol.codec import encode
from dpagent.protocol.fragments import chunked, pack

Case = tuple[str, str, bytes]
"""The reason to reject it, or "" for what is accepted; a description; the message.

``table``: it is malformed, and only the page's tables say so.
"""


def _plans() -> Iterator[Case]:
    plan, envelope = PLAN.model_dump(), SIGNER.sign(PLAN, "plan")
    items, outer = envelope[1:], cbor2.loads(envelope)
    version = cbor2.dumps("version")

    def changed(section: str, **changes: Any) -> bytes:
        return signed(plan | {section: plan[section] | changes})

    yield "", "the plan again", envelope
    yield "", "other order, floats in 64 bits", signed(cbor2.dumps(dict(reversed(plan.items()))))
    yield "", "integers for floats", signed(plan | {"deadline": 1_800_000_000, "compute_slot_s": 60})
    longer = encode(PLAN).replace(version + b"\1", version + b"\x1b" + bytes(7) + b"\1")
    yield "", "an integer longer than it need be", signed(longer)
    yield "malformed", "nothing", b""
    yield "malformed", "cut short", envelope[:-1]
    yield "malformed", "a byte too many", envelope + b"\1"
    yield "malformed", "no map", cbor2.dumps([1])
    yield "malformed", "a map of indefinite length", b"\xbf" + items + b"\xff"
    yield "malformed", "a key twice", b"\xa5" + items + cbor2.dumps("version") + b"\1"
    yield "malformed", "an integer as a key", b"\xa5" + items + b"\1\1"
    yield "malformed", "a byte string of indefinite length", b"\xa5" + items + b"\x61x\x5f\x40\xff"
    yield "malformed", "nine levels", b"\xa5" + items + b"\x61x" + b"\x81" * 8 + b"\1"
    yield "malformed", "a tag", b"\xd9\xd9\xf7" + envelope
    yield "malformed", "text that is not UTF-8", envelope.replace(b"signed", b"signe\xff")
    yield "malformed", "another kind of message", cbor2.dumps(outer | {"kind": "sealed"})
    yield "malformed", "a bignum", signed(plan | {"round": 1 << 64})
    yield "table", "an unknown key", cbor2.dumps(outer | {"x": 1})
    yield "table", "a missing key", signed({key: plan[key] for key in plan if key != "cap"})
    yield "table", "text for bytes", signed(plan | {"job": "j" * 16})
    yield "table", "15 bytes for 16", signed(plan | {"job": bytes(15)})
    yield "table", "an integer out of range", signed(plan | {"round": 0})
    yield "table", "a float out of range", signed(plan | {"delta": 1.0})
    yield "table", "a float for an integer", signed(plan | {"round": 2.0})
    yield "table", "a boolean for an integer", changed("sampling", local_steps=True)
    yield "table", "not a number", signed(plan | {"deadline": float("nan")})
    yield "table", "an infinite number", signed(plan | {"deadline": float("inf")})
    yield "table", "an unknown key in a section", changed("wire", x=1)
    yield "table", "an unknown state", signed(plan | {"state": "closed"})
    yield "table", "no fleet's name", signed(plan | {"fleet": "a/b"})
    yield "table", "a round beyond the noise levels", signed(plan | {"round": 4})
    yield "table", "fragments of 59,489 bytes", changed("wire", block=59_489, width=8)
    yield "table", "two norms and one share", changed("clipping", norms=[1.0, 1.0])
    halves = {"norms": [1.0, 1.0], "shares": [0.5, 0.5]}
    yield "table", "two norms and a count", changed("clipping", **halves, count_weight=0.2)
    yield "oversized", "60,001 bytes", envelope + bytes(60_001 - len(envelope))
    yield "unsupported version", "an envelope of version 2", cbor2.dumps(outer | {"version": 2})
    yield "unsupported version", "a version that is a float", cbor2.dumps(outer | {"version": 1.0})
    yield "unsupported version", "no version", cbor2.dumps({"kind": "signed"})
    yield "unsupported version", "a plan of version 2", signed(plan | {"version": 2})
    yield "bad signature", "another body", envelope.replace(b"porch", b"pordh")
    yield "bad signature", "another key", signed(plan, secret=SEALING_SECRET)
    yield "bad signature", "signed for another fleet", signed(plan, fleet="garden")
    yield "bad signature", "signed as receipts", signed(plan, "receipts")
    yield "wrong fleet", "a plan of another fleet, signed for this one", signed(plan | {"fleet": "garden"})
    yield "replayed", "an earlier round of the job", signed(plan | {"round": 1})


def _other_chunks() -> Iterator[Case]:
    chunk = chunked(b"of an earlier job")[0].model_dump()
    yield "", "weights that no plan names", signed(chunk, "model")
    yield "table", "a chunk beyond the largest model", signed(chunk | {"index": 4_167}, "model")


def _other_receipts() -> Iterator[Case]:
    receipts = RECEIPTS.model_dump()
    yield "", "of another job", signed(receipts | {"job": bytes(16)}, "receipts")
    yield "malformed", "half a digest", signed(receipts | {"digests": bytes(24)}, "receipts")


def _other_fragments() -> Iterator[Case]:
    fragment = FRAGMENTS[1].model_dump()
    envelope = sealed(fragment)
    ciphertext = cbor2.loads(envelope)["ciphertext"]

    def changed(**changes: Any) -> bytes:
        return sealed(fragment | changes)

    def enveloped(ciphertext: bytes) -> bytes:
        return cbor2.dumps({"version": 1, "kind": "sealed", "ciphertext": ciphertext}, canonical=True)

    yield "", "a fragment", envelope
    yield "", "the same, sealed anew", sealed(fragment, "anew")
    yield "", "of the round before: late", changed(round=1)
    yield "", "a dummy, which does not count", changed(dummy=True)
    filled = pack(np.array([1, 0, -7, 7]), PLAN.wire.width)
    yield "", "values beyond the update's end, which nobody reads", changed(payload=filled)
    yield "malformed", "an envelope of the coordinator", SIGNER.sign(PLAN, "plan")
    yield "malformed", "receipts under the seal", sealed(encode(RECEIPTS))
    yield "table", "a position of three bytes", changed(position=bytes(3))
    yield "oversized", "60,001 bytes", envelope + bytes(60_001 - len(envelope))
    yield "unsupported version", "a fragment of version 2", changed(version=2)
    yield "cannot open", "another key", sealed(fragment, key=fixed("another key", 32))
    yield "cannot open", "sealed for another fleet", sealed(fragment, fleet="garden")
    yield "cannot open", "one bit changed", enveloped(ciphertext[:-1] + bytes([ciphertext[-1] ^ 1]))
    yield "cannot open", "shorter than an encapsulated key", enveloped(ciphertext[:31])
    yield "cannot open", "an encapsulated key of low order", enveloped(bytes(32) + ciphertext[32:])
    yield "wrong job", "another job", changed(job=bytes(16))
    yield "wrong round", "a round that is not open yet", changed(round=3)
    yield "bad position", "the block after the last", changed(position=b"\0\0\0\2")
    yield "bad position", "little-endian", changed(position=b"\1\0\0\0")
    yield "wrong size", "a payload with a byte more", changed(payload=fragment["payload"] + b"\0")
    yield "wrong size", "no payload", changed(payload=b"")


def receiving() -> dict[str, Any]:
    """What ``receiving.json`` holds."""
    found: dict[str, list[dict[str, Any]]] = {"accepted": [], "rejected": [], "outside_the_tables": []}
    for topic, cases in (
        (TOPICS.plan, _plans()),
        (TOPICS.model_chunk(0), _other_chunks()),
        (TOPICS.receipts, _other_receipts()),
        (TOPICS.fragments, _other_fragments()),
    ):
        for reason, about, data in cases:
            case: dict[str, Any] = {"description": about, "topic": topic, "message": data.hex()}
            if reason == "oversized":
                written = data.rstrip(b"\0")
                case |= {"message": written.hex(), "then_zeros": len(data) - len(written)}
            if reason:
                case["reason"] = "malformed" if reason == "table" else reason
            found[{"": "accepted", "table": "outside_the_tables"}.get(reason, "rejected")].append(case)
    about = (
        "For receivers that have taken the first plan: the coordinator on its topic, a device on the others."
    )
    return {"description": about, **found}
