"""The captured traffic of a fleet, read by the client that was written from ``docs/protocol.md``."""

from __future__ import annotations

import struct
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import cbor2
import numpy as np
from numpy.typing import NDArray
from protocol import second_client


class Promises:
    """Collects those that are broken, in words."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.broken.append(otherwise)


class Fragment(NamedTuple):
    """A captured fragment, or a dummy."""

    device: str
    round: int
    position: int
    message: bytes

    def values(self, plan: dict[str, Any]) -> NDArray[np.int64]:
        """What it adds to the sum of its block: of reports, by weight the ones, then all."""
        payload, block = self.message[24:], plan["wire"]["block"]
        if plan["release"]["kind"] == "noisy-sum":
            return np.array(second_client.unpack(payload, block), np.int64)
        if plan["release"]["kind"] == "update":
            values = second_client.unpack_update(payload, self.position, plan)
            return np.array(values + [0] * (block - len(values)), np.int64)
        edges = second_client.group_edges(plan)
        first = edges[self.position * block]
        tally = np.zeros((2, edges[min((self.position + 1) * block, len(edges) - 1)] - first), np.int64)
        for weight, bit in self.reports(plan):
            tally[0, weight - first] += bit
            tally[1, weight - first] += 1
        return tally.reshape(-1)

    def reports(self, plan: dict[str, Any]) -> list[tuple[int, int]]:
        return second_client.unpack_two_point(self.message[24:], self.position, plan)


class Capture:
    """All that the wiretap has written down.

    Args:
        file: of the wiretap.
        fleet: its name.
        sealing_secret: of the coordinator.
        signing_key: of the coordinator, public.
        mixer_secret: of the mixer that all fragments pass through, or None.
        promises: to be kept.
    """

    def __init__(
        self,
        file: Path,
        fleet: str,
        sealing_secret: bytes,
        signing_key: bytes,
        mixer_secret: bytes | None,
        promises: Promises,
    ) -> None:
        self._file, self._fleet, self._promises = file, fleet, promises
        self._secret, self._public, self._mixer_secret = sealing_secret, signing_key, mixer_secret
        self._read = 0
        self._seals: set[bytes] = set()
        self.jobs: set[bytes] = set()
        self.fragments: dict[bytes, Fragment] = {}
        """By id."""
        self.dummies: dict[bytes, Fragment] = {}
        """By id."""
        self.probes: dict[bytes, Fragment] = {}
        """By id."""
        self.plans: dict[int, dict[str, Any]] = {}
        self.plan_digests: dict[int, set[bytes]] = defaultdict(set)
        self.chunks: dict[tuple[bytes, int], bytes] = {}
        self.receipted: set[bytes] = set()
        self.own_receipts: set[tuple[str, bytes]] = set()
        """Topics and messages of receipts that go to one device each."""
        self.to_mixer: list[bytes] = []
        """Messages as they were sent to the mixer."""
        self._entered: set[bytes] = set()
        """Messages without their outer seal that were sent to the mixer."""
        self.left: set[bytes] = set()
        """Messages that the mixer has published."""
        self.over = False
        """Whether the end of the job was announced."""

    def blocks(self, number: int) -> int:
        """Fragments of an update in a round."""
        plan = self.plans[number]
        return -(-second_client.dimension(plan) // plan["wire"]["block"])

    def read_on(self) -> None:
        """Take what was written since."""
        with self._file.open("rb") as stream:
            stream.seek(self._read)
            data = stream.read()
        at = 0
        while len(data) >= at + 4 and len(data) >= (end := at + 4 + int.from_bytes(data[at : at + 4], "big")):
            self._take_message(**cbor2.loads(data[at + 4 : end]))
            at = end
        self._read += at

    def _take_message(self, sender: str, topic: str, payload: bytes) -> None:
        base = f"dpagent/v1/{self._fleet}/"
        kind, _, place = topic.removeprefix(base).partition("/")
        if kind == "mixer":
            self._take_mixed(sender, payload)
            return
        if kind == "fragments":
            if self._mixer_secret is None:
                self._take_fragment(sender, payload)
            else:
                self._take_departure(sender, payload)
            return
        if kind == "receipts" and place:
            counts = sender == "coordinator" or sender.startswith("worker")
            self._promises.expect(counts, f"{sender} published on {topic}")
            self.own_receipts.add((topic, payload))
            return
        self._promises.expect(sender == "coordinator", f"{sender} published on {topic}")
        name = {"plan": "plan", "model": "model", "asset": "model", "receipts": "receipts"}[kind]
        message = second_client.open_signed(payload, name, self._fleet, self._public)
        match name:
            case "plan":
                self._take_plan(second_client.read_plan(message))
            case "model":
                self.chunks[message[:32], int.from_bytes(message[32:36], "big")] = message[36:]
            case _:
                self.receipted |= {message[start : start + 16] for start in range(0, len(message), 16)}

    def _take_plan(self, plan: dict[str, Any]) -> None:
        self.jobs.add(plan["job"])
        self._promises.expect(len(self.jobs) == 1, "a second job began")
        if plan["state"] == "finished":
            self.over = True
            return
        self._promises.expect(not self.over, f"round {plan['round']} was announced after the end")
        known = self.plans.setdefault(plan["round"], plan)
        self._promises.expect(
            known | {"deadline": 0.0} == plan | {"deadline": 0.0},
            f"round {plan['round']} was announced with another plan",
        )
        digest = second_client.plan_digest(plan)
        self.plan_digests[plan["round"]].add(digest)

    def _take_mixed(self, sender: str, payload: bytes) -> None:
        self._promises.expect(payload not in self._seals, f"{sender} sent one outer ciphertext twice")
        self._seals.add(payload)
        self.to_mixer.append(payload)
        assert self._mixer_secret is not None
        digest, inner = second_client.open_mixed(payload, self._fleet, self._mixer_secret)
        self._entered.add(inner)
        fragment = self._take_fragment(sender, inner)
        self._promises.expect(
            digest in self.plan_digests[fragment.round], f"{sender} names another plan than it answers"
        )

    def _take_departure(self, sender: str, payload: bytes) -> None:
        self._promises.expect(sender == "mixer", f"{sender} published past the mixer")
        self._promises.expect(payload in self._entered, f"{sender} published what nobody sent")
        self._promises.expect(payload not in self.left, f"{sender} published a message twice")
        self.left.add(payload)

    def _take_fragment(self, sender: str, payload: bytes) -> Fragment:
        self._promises.expect(payload not in self._seals, f"{sender} sent one ciphertext twice")
        self._seals.add(payload)
        (job,) = self.jobs  # the seal is bound to it
        info = second_client.info_of(self._fleet, job)
        message = second_client.open_sealed(payload, info, self._secret)
        number, position, identity = *struct.unpack(">II", message[:8]), message[8:24]
        fragment = Fragment(sender, number, position, message)
        known_ones = {255: self.dummies, 254: self.probes}.get(message[24], self.fragments)
        known = known_ones.setdefault(identity, fragment)
        is_empty = known_ones is self.fragments or not any(message[25:])
        self._promises.expect(is_empty, f"{sender} sent a dummy that has values")
        self._promises.expect(known == fragment, f"{sender} sent two fragments with the id {identity.hex()}")
        return fragment
