"""Writes the test vectors in docs/protocol/vectors, and from them the examples in docs/protocol.md.

Run it after a change to the protocol: ``python docs/make_vectors.py``. A test compares.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
from numpy.typing import NDArray

from dpagent.protocol.weights import weights_from_bytes, weights_to_bytes

sys.path.insert(0, str(Path(__file__).parent))

from vector_cases import receiving
from vector_fleet import (
    ASSET,
    CHANGES,
    CLIPPED_PLAN,
    COUNTED_PLAN,
    FLEET,
    FRAGMENTS,
    INFO,
    LONG_WEIGHTS,
    MIXED_INFO,
    MIXED_PLAN,
    MIXER,
    MIXER_SECRET,
    NOISE,
    NOISY_PLAN,
    OPENER,
    PLAN,
    PLANS,
    RECEIPTS,
    REPORTS,
    REPORTS_PLAN,
    SEALING_SECRET,
    SIGNER,
    SIGNING_SECRET,
    TOPICS,
    UPDATES,
    WEIGHTS,
    fixed,
    sealed,
    to_mixer,
)
from vector_tokens import tokens

from coordinator.aggregation import fleet_mean
from dpagent.protocol.chunks import chunked, content_digest
from dpagent.protocol.codec import encode
from dpagent.protocol.fragments import cut, read_block, read_tally
from dpagent.protocol.messages import Layout, Plan
from dpagent.protocol.mixing import key_text, plan_digest
from dpagent.protocol.packing import pack
from dpagent.protocol.receipts import receipt_digest, receipt_place
from dpagent.protocol.reports import Reports
from dpagent.protocol.signing import SignedKind
from dpagent.protocol.task import RoundTask
from dpagent.protocol.terms import Message
from dpagent.protocol.updates import Updates

PAGE = Path(__file__).with_name("protocol.md")
FOLDER = Path(__file__).parent / "protocol" / "vectors"


def _plain(value: Any) -> Any:
    """``value`` for JSON: byte strings as text in diagnostic notation."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return f"h'{value.hex()}'" if isinstance(value, bytes) else value


def _vector(about: str, topic: str, message: Message | Layout, **more: Any) -> dict[str, Any]:
    fields = message.as_dict() if isinstance(message, Message) else asdict(message)  # type: ignore[call-overload]
    shown = {"message": _plain(fields), "bytes": encode(message).hex()}
    return {"description": about, "topic": topic, **shown, **more}


def _signed_vector(
    about: str, topic: str, message: Message | Layout, kind: SignedKind, **more: Any
) -> dict[str, Any]:
    envelope = SIGNER.sign(message, kind)
    return _vector(
        about, topic, message, **more, envelope=envelope.hex(),
        signed_bytes=f"dpagent v1 {kind} {FLEET}\0".encode().hex() + encode(message).hex(),
        signature=envelope[1:65].hex(),
    )  # fmt: skip


def _fleet() -> dict[str, Any]:
    return {
        "description": "The fleet of all files: keys, topics, and names that fleets may and may not have.",
        "fleet": FLEET,
        "signing_secret": SIGNING_SECRET.hex(), "signing_key": base64.b64decode(SIGNER.public_key).hex(),
        "coordinator_key": SIGNER.public_key,
        "sealing_secret": SEALING_SECRET.hex(), "sealing_key": OPENER.public_key.hex(),
        "mixer_secret": MIXER_SECRET.hex(), "mixer_key": key_text(MIXER.public_key),
        "topics": {
            "plan": TOPICS.plan, "model chunk 3": TOPICS.model_chunk(3), "receipts": TOPICS.receipts,
            "projection chunk 0": TOPICS.asset_chunk("projection", 0), "fragments": TOPICS.fragments,
            "mixer": TOPICS.mixer,
        },
        "accepted_names": ["a", "0", "A-9_z", "x" * 63],
        "refused_names": ["", "x" * 64, "-a", "_a", "a/b", "a+", "#", "a b", "a.b", "\u00e4", "a\n", "$SYS"],
    }  # fmt: skip


def _plan() -> dict[str, Any]:
    vectors = []
    for about, plan in PLANS.items():
        task = RoundTask.of(plan)
        vectors.append(
            _signed_vector(
                about, TOPICS.plan, plan, "plan",
                dimension=task.release.dimension, wire_unit=task.release.wire_unit,
                architecture_text=task.spec.canonical_text(), digest=plan_digest(plan).hex(),
            )
        )  # fmt: skip
    return {"description": "Plans, and what follows from each.", "vectors": vectors}


def _model() -> dict[str, Any]:
    (chunk,), asset = chunked(weights_to_bytes(WEIGHTS, "float32")), chunked(ASSET)
    return {
        "description": "Weights as they are and as int8, an asset in three: byte i of it is i mod 251.",
        "vectors": [_signed_vector("the weights of the first plan", TOPICS.model_chunk(0), chunk, "model")],
        "weights": [float(weight) for weight in WEIGHTS],
        "int8": {
            "data": (packed := weights_to_bytes(LONG_WEIGHTS, "int8")).hex(),
            "weights": [float(each) for each in weights_from_bytes(packed, len(LONG_WEIGHTS), "int8")],
        },
        "asset": {
            "digest": content_digest(ASSET).hex(),
            "chunks": [
                {"index": each.index, "size": len(each.data), "sha256": content_digest(encode(each)).hex()}
                for each in asset
            ],
        },
    }  # fmt: skip


def _fragment() -> dict[str, Any]:
    sums: dict[int, tuple[int, NDArray[np.int64]]] = {}
    for fragment in FRAGMENTS:
        values, _ = read_block(fragment, PLAN.wire, 2)
        count, total = sums.get(fragment.position, (0, np.zeros(values.shape, np.int64)))
        sums[fragment.position] = (count + 1, total + values)
    return {
        "description": "Payloads and their integers; fragments of two devices, and their mean.",
        "vectors": [
            _vector(
                f"device {number // 2}, block {number % 2}", TOPICS.fragments, fragment,
                info=INFO.hex(), ephemeral_secret=fixed(f"ephemeral {number}", 32).hex(),
                envelope=sealed(encode(fragment), str(number)).hex(),
            )
            for number, fragment in enumerate(FRAGMENTS)
        ],
        "packing": [
            {"size": size, "level": level, "values": values, "payload": _packed(values, level, size).hex()}
            for size, level, values in (
                (54, 0, [0, 1, -1, 2, -2, 3, -9, 12]),
                (54, 0, [127, -127, 128, -128, 70_000, -2_147_483_647, 2_147_483_647]),
                (54, 4, [16, 0, -48, 4_096, -1_600]),
                (54, 31, [1 << 31, -(1 << 31), 0]),
            )
        ],
        "updates": UPDATES,
        "mean": list(fleet_mean(RoundTask.of(PLAN).release, sums)),
    }  # fmt: skip


def _mixed() -> dict[str, Any]:
    digest = plan_digest(MIXED_PLAN)
    vectors = []
    for number, fragment in enumerate(FRAGMENTS):
        inner = sealed(encode(fragment), str(number))
        vectors.append({
            "description": f"device {number // 2}, block {number % 2}", "topic": TOPICS.mixer,
            "plan": digest.hex(), "info": MIXED_INFO.hex(),
            "ephemeral_secret": fixed(f"outer ephemeral {number}", 32).hex(),
            "sealed": inner.hex(), "envelope": to_mixer(inner, str(number)).hex(),
        })  # fmt: skip
    return {
        "description": "The fragments on their way to the mixer that the second plan names.",
        "vectors": vectors,
    }


def _packed(values: list[int], level: int, size: int) -> bytes:
    coarse = np.array(values) >> level
    return bytes([level]) + pack(coarse, size)[1:]


def _reports() -> dict[str, Any]:
    release, sums = RoundTask.of(REPORTS_PLAN).release, dict[int, NDArray[np.int64]]()
    assert isinstance(release, Reports)
    payloads = []
    for update in REPORTS:
        for fragment in cut(np.array(update), REPORTS_PLAN):
            tally = read_tally(fragment, REPORTS_PLAN, release.terms, release.blocks)
            sums[fragment.position] = sums.get(fragment.position, 0) + tally
            payloads.append({"position": fragment.position, "payload": fragment.payload.hex()})
    ones, reports = release.tally(sums)
    estimate = release.two_point.estimate(ones, reports)
    return {
        "description": "A plan that asks for two-point reports, those of two devices, and their count.",
        "vectors": [
            _signed_vector(
                "two bits of three", TOPICS.plan, REPORTS_PLAN, "plan",
                sizes=[layer.size for layer in release.two_point.layers],
            )
        ],
        "updates": REPORTS,
        "payloads": payloads,
        "ones": ones.tolist(),
        "reports": reports.tolist(),
        "means": [float(mean) if count else None for mean, count in zip(estimate.mean, reports, strict=True)],
    }  # fmt: skip


def _clipped(name: str, plan: Plan) -> dict[str, Any]:
    release, sums = RoundTask.of(plan).release, dict[int, tuple[int, NDArray[np.int64]]]()
    assert isinstance(release, Updates)
    quiet, has_noise = replace(release, own_noise=None), release.own_noise is not None
    updates, payloads = [], []
    for change, noise in zip(CHANGES, NOISE, strict=True):
        trained = np.array(change, np.float32)
        update = quiet.update_of(trained, np.zeros_like(trained))
        if has_noise:
            update = (update + noise).clip(-release.terms.largest, release.terms.largest)
        updates.append(update)
        for fragment in cut(updates[-1], plan):
            part = release.read(fragment)
            count, total = sums.get(fragment.position, (0, np.zeros_like(part)))
            sums[fragment.position] = (count + 1, total + part)
            payloads.append({"position": fragment.position, "payload": fragment.payload.hex()})
    total = release.total_of(sums)
    return {
        "description": f"A plan that asks for updates {'with' if has_noise else 'without'} noise of devices, "
        "those of two, and their mean over the four that are expected, before the coordinator's noise.",
        "vectors": [_signed_vector(name, TOPICS.plan, plan, "plan")],
        "changes": CHANGES,
        **({"noise": NOISE} if has_noise else {}),
        "updates": [update.tolist() for update in updates],
        "payloads": payloads,
        "sum": total.tolist(),
        "mean": list(release.mean_of(total)),
    }


def _receipts() -> dict[str, Any]:
    ids = [fragment.id.hex() for fragment in FRAGMENTS]
    vector = _signed_vector("all four fragments", TOPICS.receipts, RECEIPTS, "receipts", ids=ids)
    own = [
        {
            "id": fragment.id.hex(), "topic": TOPICS.receipt(receipt_place(fragment.id)),
            "message": receipt_digest(fragment.id).hex(),
        }
        for fragment in FRAGMENTS
    ]  # fmt: skip
    return {
        "description": "What the coordinator says once they are counted: to all devices, or to each its own.",
        "vectors": [vector], "own": own,
    }  # fmt: skip


def render() -> dict[str, str]:
    """The files by name."""
    files = {
        "fleet": _fleet(), "plan": _plan(), "model": _model(), "fragment": _fragment(), "mixed": _mixed(),
        "reports": _reports(), "receipts": _receipts(), "receiving": receiving(), "tokens": tokens(),
        "clipped": _clipped("clipped in L2", CLIPPED_PLAN),
        "counted": _clipped("clipped in L2, with a vote on the clip norm", COUNTED_PLAN),
        "noisy": _clipped("the same with noise of devices besides", NOISY_PLAN),
    }  # fmt: skip
    return {f"{name}.json": json.dumps(file, indent=1, sort_keys=True) + "\n" for name, file in files.items()}


# --- examples for the page ------------------------------------------------------------------------

_EXAMPLE = re.compile(
    r"(^### (\w+)\n(?:(?!#{1,3} ).*\n)*?```cbor-diag\n)(?:(?!```).*\n)*", flags=re.MULTILINE
)


def render_page(page: str) -> str:
    """The page with the first plan as its example."""
    examples = {
        "plan": encode(PLAN),
    }
    page, found = _EXAMPLE.subn(
        lambda found: f"{found[1]}{diagnostic(cbor2.loads(examples[found[2]]))}\n", page
    )
    assert found == len(examples), f"{found} sections of the page have an example"
    return page


def diagnostic(value: Any, indent: str = "") -> str:
    """CBOR diagnostic notation (RFC 8949, section 8), long byte strings cut at ``…``."""
    inner = indent + "  "
    if isinstance(value, bytes):
        return f"h'{value.hex()}'" if len(value) <= 16 else f"h'{value[:12].hex()}…' / {len(value)} bytes /"
    if isinstance(value, list):
        return _enclosed("[", [diagnostic(item, inner) for item in value], "]", indent)
    if isinstance(value, dict):
        items = []
        for key, item in value.items():
            # A description is CBOR itself.
            shown = f"<< {diagnostic(cbor2.loads(item), inner)} >>" if key == "description" else ""
            items.append(f"{json.dumps(key)}: {shown or diagnostic(item, inner)}")
        return _enclosed("{", items, "}", indent)
    return json.dumps(value)


def _enclosed(opening: str, items: list[str], closing: str, indent: str) -> str:
    line = opening + ", ".join(items) + closing
    if len(indent) + len(line) <= 90 and "\n" not in line:
        return line
    return f"{opening}\n" + ",\n".join(f"{indent}  {item}" for item in items) + f"\n{indent}{closing}"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in render().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
