"""The fleet of the test vectors, ``porch``: its keys, its plans, the fragments of two devices, and receipts.

Keys and ids are fixed, so the vectors come out the same each time. dpagent draws an ephemeral key for each
seal, so the second client of the tests seals here, with fixed ones; it also signs what dpagent would not.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cbor2
import numpy as np

from dpagent.protocol.weights import weights_to_bytes

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "protocol"))

import second_client

from dpagent.learning.models.layers import Conv2d, Dense, Relu
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import Projection
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.protocol.chunks import content_digest
from dpagent.protocol.fragments import cut
from dpagent.protocol.messages import Plan, Receipts
from dpagent.protocol.mixing import OuterOpener, plan_digest
from dpagent.protocol.packing import payload_bytes
from dpagent.protocol.receipts import receipt_digest
from dpagent.protocol.sealing import Opener
from dpagent.protocol.signing import Signer
from dpagent.protocol.sizes import packed_bytes, update_width
from dpagent.protocol.task import RoundTask
from dpagent.protocol.topics import Topics

FLEET, TOPICS = "porch", Topics("porch")
SIGNING_SECRET, SEALING_SECRET, MIXER_SECRET = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
SIGNER, OPENER = Signer(SIGNING_SECRET, FLEET), Opener(SEALING_SECRET, FLEET)
MIXER = OuterOpener(MIXER_SECRET, FLEET)


def fixed(name: str, size: int) -> bytes:
    """Bytes that stand in for random ones."""
    return hashlib.sha256(f"dpagent test vectors: {name}".encode()).digest()[:size]


_TINY = ModelSpec("tiny", (2,), 2, (Dense(2),), input_offset=0.3, input_scale=0.37)
_PROJECTED = ModelSpec("projected", (3,), 2, (Dense(2),), front_end=(Projection(2),))
_LAYERED = ModelSpec("layered", (4, 4, 1), 2, (Conv2d(2, 3), Relu(), Dense(2)))
WEIGHTS = np.array([0.5, -0.25, 1 / 3, 1e-8, -2.0, 0.0], np.float32)
LONG_WEIGHTS = np.array([(37 * place % 101 - 50) / 2 ** (place // 10) for place in range(70)], np.float32)
ASSET = bytes(place % 251 for place in range(100_000))
UPDATES = [[3, -7, 0, 12, -1, 5], [-2, 4, 9_000, -12, 1, 0]]


def make_plan(spec: ModelSpec = _TINY, **changes: Any) -> Plan:
    """The plan of the second of three rounds, its wire form as the mechanism has it."""
    levels = [2.0, 1.5, 1.0]
    values: dict[str, Any] = {
        "fleet": FLEET, "job": bytes(range(16)), "round": 2, "state": "open",
        "method": "dp-sgd",
        "model": {
            "description": cbor2.dumps(spec.describe(), canonical=True), "parameters": spec.parameter_count,
            "architecture": spec.digest(), "precision": "float32",
            "digest": content_digest(weights_to_bytes(WEIGHTS, "float32")),
        },
        "assets": [],
        "delta": 1e-5,
        "sealing_key": OPENER.public_key, "linkability": "none", "mixer": None, "receipts": "fleet",
        "deadline": 1.8e9, "compute_slot_s": 60.0,
        "jitter_window_s": 600.0,
    }  # fmt: skip
    values |= {key: changes.pop(key) for key in ("assets", "round") if key in changes}
    release = {
        "kind": "noisy-sum",
        "mechanism": {
            "name": "discrete-gaussian", "noise_multipliers": levels,
            "parameters": dict(JobNoise.chosen("discrete-gaussian", levels).parameters),
        },
        "clipping": {"norms": [1.0], "shares": [1.0], "count_weight": 0.0, "accumulation_slack": 0.001},
        "sampling": {"rate": 0.25, "expected_lot": 10.0, "local_steps": 1, "local_learning_rate": 0.1},
        "projection": None, "augmentation": None,
        "cap": {"kind": "none", "where": "coordinator", "regularisation": 0.5, "floor": 0.01},
        "step": 1,
    } | changes  # fmt: skip
    tried = Plan.checked(values | {"release": release, "wire": {"block": 4, "bytes": 64}})
    mechanism = RoundTask.of(tried).release.mechanism
    size = payload_bytes(4, mechanism.wire_bits(release["sampling"]["expected_lot"]))
    release["step"] = mechanism.wire_step
    return Plan.checked(values | {"release": release, "wire": {"block": 4, "bytes": size}})


def laplace_plan(name: str, cap: dict[str, Any], noise: list[float], **parameters: int) -> Plan:
    """A plan for noise that a cap takes part in drawing."""
    release = PLAN.release.as_dict() | {
        "mechanism": {
            "name": name, "noise_multipliers": noise, "parameters": {"resolution": 1 << 20} | parameters,
        },
        "cap": cap, "step": 1,
    }  # fmt: skip
    return Plan.checked(PLAN.as_dict() | {"method": "incrementing", "release": release})


PLAN = make_plan()
MIXED_PLAN = PLAN.with_values({"mixer": MIXER.public_key})
PLANS = {
    "round 2 of 3: one clip norm, no assets": PLAN,
    "the same through a mixer": MIXED_PLAN,
    "the job is over": PLAN.with_values({"round": 3, "state": "finished"}),
    "a first round that asks for second moments": make_plan(
        _PROJECTED, round=1, projection={"values": 3, "record_norm": 1.5}
    ),
    "the round after it: the directions are an asset, the clip norm follows a quantile": make_plan(
        _PROJECTED,
        assets=[{"role": "projection", "digest": content_digest(fixed("directions", 24)), "size": 24}],
        projection={"values": 3, "record_norm": 1.5},
        clipping={"norms": [0.7], "shares": [1.0], "count_weight": 0.2, "accumulation_slack": 0.001},
    ),
    "a clip norm for each layer, views of records, local steps, a training graph, a cap": make_plan(
        _LAYERED,
        assets=[{"role": "training-graph", "digest": content_digest(ASSET), "size": len(ASSET)}],
        clipping={
            "norms": [0.5, 2.0], "shares": [0.25, 0.75], "count_weight": 0.0, "accumulation_slack": 0.001,
        },
        sampling={"rate": 1.0, "expected_lot": 10.5, "local_steps": 4, "local_learning_rate": 0.1},
        augmentation={"views": 2, "shift": 1, "flip": True},
        cap={"kind": "clamp", "where": "coordinator", "regularisation": 0.5, "floor": 0.01},
    ),
    "Laplace noise within a bounded cap": laplace_plan(
        "truncated-laplace",
        {
            "kind": "bounded", "regularisation": 0.5, "floor": 0.2, "epsilon": 12.0, "rounds": 3,
            "schedule": {"kind": "uniform", "step": 0.3, "ratio": 3.0, "weights": []}, "spent": 4.0,
        },
        [0.25], bound_units=1 << 22,
    ),
    "the published cap, which guarantees nothing": laplace_plan(
        "published-laplace",
        {"kind": "published", "regularisation": 0.5, "epsilon": 12.0, "step": 1.2},
        [0.36, 0.25, 0.19],
    ),
}  # fmt: skip
REPORTS_PLAN = Plan.checked(
    PLAN.as_dict()
    | {
        "method": "ldp-fl",
        "release": {
            "kind": "two-point", "noise_multipliers": [0.5, 0.5, 0.25], "coordinates": 4,
            "radii": [0.25, 0.125],
            "training": {"steps": 20, "batch": 32, "learning_rate": 0.1},
        },
        "wire": {"block": 3, "bytes": 2},
    }
)  # fmt: skip
REPORTS = [[1, 3, 0, 1], [0, 2, 1, 3]]
"""Of two devices, 2·place + bit each, of groups of 1, 2, 1 and 2 weights."""
CLIPPED_PLAN = Plan.checked(
    PLAN.as_dict()
    | {
        "method": "central",
        "release": {
            "kind": "update", "clip_norm": 0.5, "count_weight": 0.0, "largest": 1_027, "expected_devices": 4,
            "device_noise": None,
            "mechanism": {
                "name": "central-gaussian", "noise_multipliers": [4.0, 4.0, 4.0],
                "parameters": {"resolution": 1_024},
            },
            "training": {"steps": 20, "batch": 32, "learning_rate": 0.1},
        },
        "wire": {"block": 4, "bytes": 7},
    }
)  # fmt: skip
COUNTED_PLAN = CLIPPED_PLAN.with_values({"release": CLIPPED_PLAN.release.with_values({"count_weight": 0.5})})
_LARGEST = 1_027 + 8 * 4_108 + 1
NOISY_PLAN = Plan.checked(
    COUNTED_PLAN.as_dict()
    | {
        "release": COUNTED_PLAN.release.as_dict()
        | {
            "largest": _LARGEST,
            "device_noise": {
                "name": "device-gaussian", "noise_multipliers": [2.0, 2.0, 2.0],
                "parameters": {"resolution": 1_024},
            },
        },
        "wire": {"block": 4, "bytes": packed_bytes(4, update_width(_LARGEST))},
    }
)  # fmt: skip
NOISE = [[4_100, -3_000, 17, 0, 33_800, -33_900, 500], [-1, 2, -7_000, 90, 6_000, -12_000, -2_500]]
"""Of two devices, whose own each would draw: some of it is clamped."""
CHANGES = [[0.25, -0.5, 0.0, 0.125, 1.0, -0.0625], [0.01, 0.02, -0.03, 0.0, 0.0, 0.001]]
"""Of the weights of two devices: one beyond the clip norm, one within."""
INFO = second_client.info_of(FLEET, PLAN.job)
MIXED_INFO = second_client.mixer_info(FLEET, plan_digest(MIXED_PLAN))
FRAGMENTS = [
    replace(fragment, id=fixed(f"id {device} {place}", 16))
    for device, update in enumerate(UPDATES)
    for place, fragment in enumerate(cut(np.array(update), PLAN))
]
RECEIPTS = Receipts(b"".join(receipt_digest(fragment.id) for fragment in FRAGMENTS))


def signed(body: Any, kind: str = "plan", fleet: str = FLEET, secret: bytes = SIGNING_SECRET) -> bytes:
    """An envelope around a body that need not be one."""
    data = body if isinstance(body, bytes) else cbor2.dumps(body, canonical=True)
    return second_client.sign(data, kind, fleet, secret)


def sealed(
    body: bytes,
    name: str = "0",
    fleet: str = FLEET,
    job: bytes = PLAN.job,
    key: bytes = OPENER.public_key,
) -> bytes:
    """An envelope around a plaintext that need not be a fragment; ``name`` gives the ephemeral key."""
    info = second_client.info_of(fleet, job)
    return second_client.seal(body, info, key, fixed(f"ephemeral {name}", 32))


def to_mixer(
    inner: bytes, name: str = "0", fleet: str = FLEET, digest: bytes = plan_digest(MIXED_PLAN),
    key: bytes = MIXER.public_key,
) -> bytes:  # fmt: skip
    """An outer envelope around bytes that need not be a sealed fragment; ``name`` gives the ephemeral key."""
    return second_client.seal_to_mixer(inner, digest, fleet, key, fixed(f"outer ephemeral {name}", 32))
