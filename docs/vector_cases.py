"""Messages that receivers accept although they are unusual, and that they reject, with the reason."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cbor2
import numpy as np
from vector_fleet import FRAGMENTS, PLAN, SEALING_SECRET, SIGNER, TOPICS, fixed, sealed, signed, to_mixer

from dpagent.protocol.chunks import chunked
from dpagent.protocol.codec import encode
from dpagent.protocol.packing import pack

Case = tuple[str, str, bytes]
"""The reason to reject it, or "" for what is accepted; a description; the message.

``table``: it is malformed, and only the page's tables say so.
"""


_FILLED = np.array([1, 0, -7, 7])


def _plans() -> Iterator[Case]:
    plan, body, envelope = PLAN.as_dict(), encode(PLAN), SIGNER.sign(PLAN, "plan")
    count, items = body[0], body[1:]
    more = bytes([count + 1])
    round_ = cbor2.dumps("round")

    def changed(section: str, **changes: Any) -> bytes:
        return signed(plan | {section: plan[section] | changes})

    def asking(section: str, **changes: Any) -> bytes:
        return changed("release", **{section: plan["release"][section] | changes})

    yield "", "the plan again", envelope
    yield "", "other order, floats in 64 bits", signed(cbor2.dumps(dict(reversed(plan.items()))))
    yield "", "integers for floats", signed(plan | {"deadline": 1_800_000_000, "compute_slot_s": 60})
    longer = body.replace(round_ + b"\2", round_ + b"\x1b" + bytes(7) + b"\2")
    yield "", "an integer longer than it need be", signed(longer)
    yield "malformed", "nothing", b""
    yield "malformed", "half a signature", envelope[:40]
    yield "malformed", "an envelope without a plan", signed(b"")
    yield "malformed", "cut short", signed(body[:-1])
    yield "malformed", "a byte too many", signed(body + b"\1")
    yield "malformed", "no map", signed(cbor2.dumps([1]))
    yield "malformed", "a map of indefinite length", signed(b"\xbf" + items + b"\xff")
    yield "malformed", "a key twice", signed(more + items + round_ + b"\2")
    yield "malformed", "an integer as a key", signed(more + items + b"\1\1")
    yield "malformed", "a byte string of indefinite length", signed(more + items + b"\x61x\x5f\x40\xff")
    yield "malformed", "nine levels", signed(more + items + b"\x61x" + b"\x81" * 8 + b"\1")
    yield "malformed", "a tag", signed(b"\xd9\xd9\xf7" + body)
    yield "malformed", "text that is not UTF-8", signed(body.replace(b"porch", b"porc\xff"))
    yield "malformed", "a bignum", signed(plan | {"round": 1 << 64})
    yield "table", "an unknown key", signed(plan | {"x": 1})
    yield "table", "a missing key", signed({key: plan[key] for key in plan if key != "wire"})
    yield "table", "text for bytes", signed(plan | {"job": "j" * 16})
    yield "table", "15 bytes for 16", signed(plan | {"job": bytes(15)})
    yield "table", "an integer out of range", signed(plan | {"round": 0})
    yield "table", "a float out of range", signed(plan | {"delta": 1.0})
    yield "table", "a float for an integer", signed(plan | {"round": 2.0})
    yield "table", "a boolean for an integer", asking("sampling", local_steps=True)
    yield "table", "not a number", signed(plan | {"deadline": float("nan")})
    yield "table", "an infinite number", signed(plan | {"deadline": float("inf")})
    yield "table", "an unknown key in a section", changed("wire", x=1)
    yield "table", "a release of another kind", changed("release", kind="sum")
    yield "table", "an unknown state", signed(plan | {"state": "closed"})
    yield "table", "no fleet's name", signed(plan | {"fleet": "a/b"})
    yield "table", "a round beyond the noise levels", signed(plan | {"round": 4})
    yield "table", "fragments of 59,489 bytes", changed("wire", bytes=59_489)
    yield "table", "fragments too short for their values", changed("wire", bytes=50)
    yield "table", "an even step", changed("release", step=2)
    yield "table", "two norms and one share", asking("clipping", norms=[1.0, 1.0])
    halves = {"norms": [1.0, 1.0], "shares": [0.5, 0.5]}
    yield "table", "two norms and a count", asking("clipping", **halves, count_weight=0.2)
    yield "oversized", "60,001 bytes", envelope + bytes(60_001 - len(envelope))
    yield "unsupported version", "an envelope of version 2", b"\2" + envelope[1:]
    yield "unsupported version", "no version", encode(PLAN)
    yield "bad signature", "another body", envelope.replace(b"porch", b"pordh")
    yield "bad signature", "another key", signed(plan, secret=SEALING_SECRET)
    yield "bad signature", "signed for another fleet", signed(plan, fleet="garden")
    yield "bad signature", "signed as receipts", signed(plan, "receipts")
    yield "wrong fleet", "a plan of another fleet, signed for this one", signed(plan | {"fleet": "garden"})
    yield "replayed", "an earlier round of the job", signed(plan | {"round": 1})


def _other_chunks() -> Iterator[Case]:
    (chunk,) = chunked(b"of an earlier job")
    yield "", "weights that no plan names", SIGNER.sign(chunk, "model")
    yield "malformed", "a chunk without an index", signed(chunk.digest, "model")
    yield "table", "a chunk beyond the largest model", SIGNER.sign(replace(chunk, index=4_167), "model")


def _other_receipts() -> Iterator[Case]:
    yield "", "of fragments of others", signed(bytes(32), "receipts")
    yield "malformed", "half a digest", signed(bytes(24), "receipts")


def _other_fragments() -> Iterator[Case]:
    fragment = FRAGMENTS[1]
    size = PLAN.wire.bytes
    envelope = sealed(encode(fragment))

    def changed(**changes: Any) -> bytes:
        return sealed(encode(replace(fragment, **changes)))

    def carrying(level: int, plain: bytes, strategy: int = zlib.Z_HUFFMAN_ONLY) -> bytes:
        deflater = zlib.compressobj(wbits=-15, strategy=strategy)
        payload = bytes([level]) + deflater.compress(plain) + deflater.flush()
        return changed(payload=payload.ljust(size, b"\0"))

    yield "", "a fragment", envelope
    yield "", "the same, sealed anew", sealed(encode(fragment), "anew")
    yield "", "of the round before: late", changed(round=1)
    yield "", "a dummy, which does not count", changed(payload=b"\xff".ljust(size, b"\0"))
    yield "", "a probe, which does not count", changed(payload=b"\xfe".ljust(size, b"\0"))
    yield "", "values beyond the update's end, which nobody reads", changed(payload=pack(_FILLED, size))
    yield (
        "",
        "values at level 3, by a Lempel-Ziv compressor",
        carrying(3, b"\2\0\0\0", zlib.Z_DEFAULT_STRATEGY),
    )
    yield "malformed", "half a header under the seal", sealed(bytes(12))
    yield "oversized", "60,001 bytes", envelope + bytes(60_001 - len(envelope))
    yield "unsupported version", "an envelope of version 2", b"\2" + envelope[1:]
    yield "cannot open", "an envelope of the coordinator", SIGNER.sign(PLAN, "plan")
    yield "cannot open", "another key", sealed(encode(fragment), key=fixed("another key", 32))
    yield "cannot open", "sealed for another fleet", sealed(encode(fragment), fleet="garden")
    yield "cannot open", "sealed for another job", sealed(encode(fragment), job=bytes(16))
    yield "cannot open", "one bit changed", envelope[:-1] + bytes([envelope[-1] ^ 1])
    yield "cannot open", "shorter than an encapsulated key", envelope[:32]
    yield "cannot open", "an encapsulated key of low order", b"\1" + bytes(32) + envelope[33:]
    yield "wrong round", "a round that is not open yet", changed(round=3)
    yield "bad position", "the block after the last", changed(position=2)
    yield "bad position", "little-endian", changed(position=1 << 24)
    yield "wrong size", "a payload with a byte more", changed(payload=fragment.payload + b"\0")
    yield "wrong size", "no payload", changed(payload=b"")
    yield "bad values", "a level that nobody needs", carrying(33, b"\2\0\0\0")
    yield "bad values", "three values for four", carrying(0, b"\2\0\0")
    yield "bad values", "five values for four", carrying(0, b"\2\0\0\0\0")
    yield "bad values", "a large value that does not come", carrying(0, b"\2\0\xff\0")
    yield "bad values", "more than values of that level can be", carrying(3, b"\2\0\xff\0\0\0\0\x7f")
    yield "bad values", "16 kilobytes of zeros, packed", carrying(0, bytes(1 << 14), zlib.Z_DEFAULT_STRATEGY)
    yield "bad values", "a stream that does not end", changed(payload=bytes(size))
    yield (
        "bad values",
        "other bytes than zeros after the stream",
        changed(payload=fragment.payload[:-1] + b"\1"),
    )


def _other_mixed() -> Iterator[Case]:
    inner = sealed(encode(FRAGMENTS[1]))
    envelope = to_mixer(inner)
    yield "", "a fragment", envelope
    yield "", "the same again, which does not leave again", envelope
    yield "", "sealed anew in both layers", to_mixer(sealed(encode(FRAGMENTS[1]), "anew"), "anew")
    yield (
        "",
        "inside a fragment that no coordinator can open: nobody here can know",
        to_mixer(bytes(len(inner))),
    )
    yield "malformed", "nothing", b""
    yield "oversized", "60,001 bytes", envelope + bytes(60_001 - len(envelope))
    yield "unsupported version", "an envelope of version 2", b"\2" + envelope[1:]
    yield "unknown plan", "a fragment without the outer seal", inner
    yield "cannot open", "sealed to the coordinator twice", to_mixer(inner, key=PLAN.sealing_key)
    yield "cannot open", "sealed for another fleet", to_mixer(inner, fleet="garden")
    other = to_mixer(inner, digest=bytes(32))
    yield "unknown plan", "an answer to a plan that was not announced", other
    yield "cannot open", "of a plan that it was not sealed for", envelope[:33] + other[33:]
    yield "wrong size", "inside a byte less than a fragment of the plan has", to_mixer(inner[:-1])
    yield "wrong size", "inside a byte more", to_mixer(inner + b"\0")
    yield "cannot open", "one bit changed", envelope[:-1] + bytes([envelope[-1] ^ 1])
    yield "unknown plan", "half a digest", envelope[:17]
    yield "cannot open", "no more than a digest", envelope[:33]
    yield "cannot open", "an encapsulated key of low order", envelope[:33] + bytes(32) + envelope[65:]


def receiving() -> dict[str, Any]:
    """What ``receiving.json`` holds."""
    found: dict[str, list[dict[str, Any]]] = {"accepted": [], "rejected": [], "outside_the_tables": []}
    for topic, cases in (
        (TOPICS.plan, _plans()),
        (TOPICS.model_chunk(0), _other_chunks()),
        (TOPICS.receipts, _other_receipts()),
        (TOPICS.fragments, _other_fragments()),
        (TOPICS.mixer, _other_mixed()),
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
        "For receivers that have taken the first plan, a mixer the second: coordinator and mixer on their "
        "topics, a device on the others."
    )
    return {"description": about, **found}
