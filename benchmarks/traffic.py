"""Bytes of a round on a device's connection: bits a parameter up and down, everything but TCP included.

The MQTT 3.1.1 packets of one round, with the demo's settings and fleet name, in the sizes that its code makes
them: PUBLISH with header, topic and packet id, and its PUBACK (4 bytes). Up: 16 fragments once each, all of
one length whatever the data, and the acknowledgements of all that comes down. Down: the model's chunks, the
plan, receipts for all fragments of all devices (a message for every 64), and the acknowledgements of the
fragments. Assets come once per connection, and are not counted. MQTT 5 adds two bytes a PUBLISH at most.

Interpretation: the payload is a Huffman code of noise that spans three steps, 3.64 bits a value, with room
    for a signal and for the spread of its length. The rest is the seal's key and tag (48 bytes), id, round
    and position (24), a version, and MQTT (33). How often values do not fit, and are rounded further, is
    counted over fragments of pure noise as the mechanism draws it.

Limits: resends are not counted; the number of messages that receipts come in depends on timing.
"""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np

from benchmarks.figures import Figure
from benchmarks.seal import RECORDS, first_task
from dpagent.privacy.mechanisms.wire import round_to_wire
from dpagent.protocol.chunks import chunked
from dpagent.protocol.codec import encode
from dpagent.protocol.fragments import cut
from dpagent.protocol.messages import Receipts
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.packing import pack
from dpagent.protocol.sealing import Opener, new_sealing_secret, seal
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.task import RoundTask
from dpagent.protocol.tokens import token_bytes, with_token
from dpagent.protocol.topics import Topics
from dpagent.protocol.update_size import values_of
from dpagent.protocol.weights import weights_to_bytes
from simulation.presets import PRESETS

_PUBACK: Final = 4
_RECEIPTS_IN_ONE: Final = 64
_FRAGMENTS: Final = 2_000


def _reports(coordinates: int | str) -> dict[str, Any]:
    privacy = {"epsilon": 1_000.0, "method": "ldp-fl", "two_point": {"coordinates": coordinates}}
    return {"privacy": privacy, "cap": {"kind": "none"}}


_REPORTS: Final = {"all weights": _reports("all"), "100 weights": _reports(100)}
"""What a plan asks for; the wire does not depend on ε."""


def run() -> list[Figure]:
    """Count the bytes of a round of each preset."""
    figures: list[Figure] = []
    for dataset, records in RECORDS.items():
        task = first_task(dataset, records, Opener(new_sealing_secret(), "demo").public_key)
        model, parameters = task.spec.name, task.spec.parameter_count
        fragments = _fragments(task)
        down = _from_coordinator(task, PRESETS[dataset].devices * len(fragments))
        figures += [
            Figure(f"{model}: a fragment on the wire", fragments[0], "bytes"),
            Figure(
                f"{model}: up", 8 * (sum(fragments) + _PUBACK * len(down)) / parameters, "bits a parameter"
            ),
            Figure(
                f"{model}: down", 8 * (sum(down) + _PUBACK * len(fragments)) / parameters, "bits a parameter"
            ),
            Figure(f"{model}: fragments of noise that are rounded further", 100 * _coarse(task), "%"),
        ]
        for bits, settings in _REPORTS.items():
            reports = _fragments(
                first_task(dataset, records, Opener(new_sealing_secret(), "demo").public_key, **settings)
            )
            figures.append(
                Figure(
                    f"{model}: up, ldp-fl, {bits}",
                    8 * (sum(reports) + _PUBACK * len(down)) / parameters,
                    "bits a parameter",
                )
            )
    return figures


def packet_bytes(topic: str, payload: bytes) -> int:
    """Length of a PUBLISH packet of MQTT 3.1.1 at QoS 1."""
    rest = 2 + len(topic) + 2 + len(payload)
    return 1 + max(1, -(-rest.bit_length() // 7)) + rest


def _fragments(task: RoundTask) -> list[int]:
    topic, update = Topics("demo").fragments, np.zeros(values_of(task.plan), np.int64)
    fragments = cut(update, task.plan)
    if tokens := token_bytes(task.plan):
        fragments = (with_token(each, os.urandom(tokens)) for each in fragments)
    return [packet_bytes(topic, seal(encode(each), task.plan)) for each in fragments]


def _from_coordinator(task: RoundTask, receipts: int) -> list[int]:
    signer, topics = Signer(new_signing_secret(), "demo"), Topics("demo")
    weights = weights_to_bytes(task.spec.initial_weights(0), task.plan.model.precision)
    sent = [
        packet_bytes(topics.model_chunk(chunk.index), signer.sign(chunk, "model"))
        for chunk in chunked(weights)
    ]
    sent.append(packet_bytes(topics.plan, signer.sign(task.plan, "plan")))
    for start in range(0, receipts, _RECEIPTS_IN_ONE):
        message = Receipts(os.urandom(16 * min(_RECEIPTS_IN_ONE, receipts - start)))
        sent.append(packet_bytes(topics.receipts, signer.sign(message, "receipts")))
    return sent


def _coarse(task: RoundTask) -> float:
    """Share of fragments of noise alone that do not fit at level 0."""
    wire, release = task.plan.wire, task.release
    assert isinstance(release, NoisySum)
    sampler, step = release.mechanism.sampler(), release.terms.step
    coarse = 0
    for _ in range(_FRAGMENTS):
        coarse += pack(round_to_wire(sampler.sample(wire.block), step), wire.bytes)[0] > 0
    return coarse / _FRAGMENTS
