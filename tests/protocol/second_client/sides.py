"""The sides of a round: a device, a mixer and a coordinator, without network, disk or training."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

from .cbor import Rejected
from .envelopes import info_of, open_mixed, open_sealed, open_signed, opened, seal, seal_to_mixer
from .payloads import pack, unpack
from .plans import dimension, plan_digest, read_plan, wire_unit

CHUNK_BYTES = 48_000


def weights_of(data: bytes, count: int, precision: str) -> tuple[float, ...]:
    if precision == "float32":
        return struct.unpack(f"<{count}f", data)
    blocks = -(-count // 64)
    scales, steps = struct.unpack_from(f"<{blocks}e", data), struct.unpack_from(f"{count}b", data, 2 * blocks)
    return tuple(step * scales[place // 64] for place, step in enumerate(steps))


def _receipt_halves(identity: bytes) -> tuple[bytes, bytes]:
    both = hashlib.sha256(b"dpagent v1 receipt\0" + identity).digest()
    return both[:16], both[16:]


def receipt(identity: bytes) -> bytes:
    return _receipt_halves(identity)[1]


def receipt_topic(identity: bytes, fleet: str) -> str:
    return f"dpagent/v1/{fleet}/receipts/{_receipt_halves(identity)[0].hex()}"


class Device:
    """Takes plans, models and receipts, and sends fragments."""

    def __init__(self, fleet: str, public_key: bytes) -> None:
        self.fleet, self.public_key = fleet, public_key
        self.plan: dict[str, Any] | None = None
        self.chunks: dict[tuple[bytes, int], bytes] = {}
        self.pending: dict[bytes, bytes] = {}
        self.topics: dict[bytes, str] = {}
        """Of receipts on topics of their own, by what is said there."""
        self.heard: list[str] = []
        """Topics to subscribe to before messages are published, where receipts have topics of their own."""

    def receive(self, topic: str, data: bytes) -> None:
        match topic.removeprefix(f"dpagent/v1/{self.fleet}/").split("/"):
            case ["plan"]:
                self._take_plan(read_plan(open_signed(data, "plan", self.fleet, self.public_key)))
            case ["receipts"]:
                digests = open_signed(data, "receipts", self.fleet, self.public_key)
                if len(digests) % 16:
                    raise Rejected("malformed")
                for start in range(0, len(digests), 16):
                    self.pending.pop(digests[start : start + 16], None)
            case ["receipts", _]:
                # Of this topic's fragment, or none: what one topic says of others would tell whose they are.
                if self.topics.get(data) == topic:
                    self.pending.pop(data, None)
            case ["model", _] | ["asset", _, _]:
                chunk = open_signed(data, "model", self.fleet, self.public_key)
                if len(chunk) < 36:
                    raise Rejected("malformed")
                self.chunks[chunk[:32], int.from_bytes(chunk[32:36], "big")] = chunk[36:]

    def _take_plan(self, plan: dict[str, Any]) -> None:
        if plan["fleet"] != self.fleet:
            raise Rejected("wrong fleet")
        if self.plan and self.plan["job"] == plan["job"] and plan["round"] < self.plan["round"]:
            raise Rejected("replayed")
        self.plan = plan

    def assembled(self, digest: bytes, size: int) -> bytes | None:
        """The weights or the asset of that digest, once all chunks are there."""
        parts = [self.chunks.get((digest, index)) for index in range(-(-size // CHUNK_BYTES))]
        if None in parts:
            return None
        data = b"".join(part for part in parts if part is not None)
        return data if len(data) == size and hashlib.sha256(data).digest() == digest else None

    def weights(self) -> tuple[float, ...] | None:
        assert self.plan is not None
        model = self.plan["model"]
        count, precision = model["parameters"], model["precision"]
        size = 4 * count if precision == "float32" else count + 2 * -(-count // 64)
        data = self.assembled(model["digest"], size)
        return None if data is None else weights_of(data, count, precision)

    def send(self, update: Sequence[int], random_bytes: Callable[[int], bytes]) -> list[bytes]:
        """The sealed fragments of an update that is private already, in wire units; as the mixer wants them,
        if the plan names one."""
        plan = self.plan
        assert plan is not None
        block, info = plan["wire"]["block"], info_of(self.fleet, plan["job"])
        for position in range(-(-len(update) // block)):
            part = [*update[position * block : (position + 1) * block]]
            part += [0] * (block - len(part))
            identity = random_bytes(16)
            fragment = (
                struct.pack(">II", plan["round"], position) + identity + pack(part, plan["wire"]["bytes"])
            )
            message = seal(fragment, info, plan["sealing_key"], random_bytes(32))
            if plan["mixer"] is not None:
                message = seal_to_mixer(
                    message, plan_digest(plan), self.fleet, plan["mixer"], random_bytes(32)
                )
            self.pending[receipt(identity)] = message
            self.topics[receipt(identity)] = receipt_topic(identity, self.fleet)
            if plan["receipts"] == "fragment":
                self.heard.append(receipt_topic(identity, self.fleet))
        return list(self.pending.values())


class Mixer:
    """Takes the outer envelopes off, and holds what was inside by plan."""

    def __init__(self, fleet: str, secret: bytes, public_key: bytes) -> None:
        self.fleet, self.secret, self.public_key = fleet, secret, public_key
        self.sizes: dict[bytes, int] = {}
        self.held: dict[bytes, set[bytes]] = {}
        self.left: set[bytes] = set()

    def receive(self, topic: str, data: bytes) -> None:
        if topic.endswith("/plan"):
            plan = read_plan(open_signed(data, "plan", self.fleet, self.public_key))
            # Version, encapsulated key and tag; round, position and id.
            self.sizes[plan_digest(plan)] = 1 + 32 + 16 + 24 + plan["wire"]["bytes"]
            return
        if opened(data, 0)[:32] not in self.sizes:
            raise Rejected("unknown plan")
        digest, sealed = open_mixed(data, self.fleet, self.secret)
        if len(sealed) != self.sizes[digest]:
            raise Rejected("wrong size")
        if sealed not in self.left:
            self.held.setdefault(digest, set()).add(sealed)

    def leave(self, least: int) -> list[bytes]:
        """Of each kind that has so many, all, sorted: ciphertexts are random, so their order says nothing."""
        leaving = [kind for kind, messages in self.held.items() if len(messages) >= least]
        messages = [message for kind in leaving for message in sorted(self.held.pop(kind))]
        self.left |= {*messages}
        return messages


class Coordinator:
    """Opens and counts the fragments of one round."""

    def __init__(self, plan: dict[str, Any], sealing_secret: bytes) -> None:
        self.plan, self.secret = plan, sealing_secret
        self.counted: dict[bytes, tuple[int, list[int]]] = {}

    def receive(self, data: bytes) -> None:
        plan, wire = self.plan, self.plan["wire"]
        fragment = open_sealed(data, info_of(plan["fleet"], plan["job"]), self.secret)
        if len(fragment) < 24:
            raise Rejected("malformed")
        (number, position), identity, payload = (
            struct.unpack(">II", fragment[:8]),
            fragment[8:24],
            fragment[24:],
        )
        if number > plan["round"]:
            raise Rejected("wrong round")
        if number < plan["round"]:
            return  # late: neither counted nor receipted
        if position >= -(-dimension(plan) // wire["block"]):
            raise Rejected("bad position")
        if len(payload) != wire["bytes"]:
            raise Rejected("wrong size")
        if payload[0] < 254:  # No dummy, and no probe.
            self.counted.setdefault(identity, (position, unpack(payload, wire["block"])))

    def mean(self) -> list[float]:
        """The noisy mean of the fleet, a record of the expected lots."""
        block, sampling = self.plan["wire"]["block"], self.plan["release"]["sampling"]
        unit, mean = wire_unit(self.plan), []
        for place in range(dimension(self.plan)):
            position, row = divmod(place, block)
            values = [block_values[row] for at, block_values in self.counted.values() if at == position]
            share = len(values) * sampling["expected_lot"] * sampling["local_steps"]
            mean.append(sum(values) * unit / share if values else 0.0)
        return mean
