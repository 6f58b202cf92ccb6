"""Proves from the databases and the captured traffic of a fleet that no crash broke a promise.

It shares no code with the programs: it reads SQLite and CBOR itself, and opens messages with the client that
was written from ``docs/protocol.md`` (``tests/protocol/second_client/``). It may look at any moment, also
while programs run. The promises:

* A published fragment was charged: before the wiretap knew its first byte, its device's ledger had the
  charges for its round, and its device's spool had this very fragment.
* A charge pays for one noisy sum: of each round, a device publishes one fragment for each position at most,
  however often it was killed, and always the same one.
* A round is charged once in each account that pays for it, and for a plan that was announced.
* The chain of a ledger is whole, and ``ledger.head`` is on it.
* The rounds of a device are in the states that its ledger and its spool say.
* A device that publishes dummies for a round publishes no fragment for it; they have no values.
* The coordinator counts captured fragments, each once, no more in a block than it has seats, and their values
  as they were sent. Whatever has a receipt is counted, or is a dummy or a probe; and a receipt on a topic of
  its own is of the fragment whose topic it is.
* With a mixer, devices publish to it alone, and it publishes what they sent, each message once, however often
  it was killed and whatever the broker delivers to it again.
* A closed round's model is that of the round before and the exact sums of the captured fragments that count,
  with the coordinator's noise where it adds some; and nothing ever shows another model of that round.

At the end of a job there are more: see :meth:`Checker.look`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from crash.capture import Capture, Fragment, Promises
from crash.databases import Device, view, view_shared
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray
from protocol import second_client

_CHARGED: Final = ("charged", "spooled", "published", "receipted", "expired")
_SPOOLED: Final = ("spooled", "published", "receipted")


@dataclass(frozen=True)
class Places:
    """Where a fleet keeps what is checked, and the public facts of it."""

    fleet: str
    devices: dict[str, Path]
    """State directories by the name of the device at the wiretap."""
    coordinator: Path
    """Its state directory."""
    keys: Path
    capture: Path
    learning_rate: float
    """Of plain gradient descent."""
    rounds: int
    tensor_sizes: tuple[int, ...]
    """Of the model's weights, in order."""
    bystanders: dict[str, Path] = field(default_factory=dict)
    """Those of devices that sit every round out."""
    mixer: Path | None = None
    """The directory of the mixer's key, if fragments pass through one."""
    postgresql: str | None = None
    """The address of the coordinator's database with the password, if it is not SQLite in its directory."""
    is_patient: bool = True
    """Whether no round ends before it has the fragments of all devices."""


class Checker:
    """Looks at one job of a fleet again and again.

    Args:
        places: of its state.
    """

    def __init__(self, places: Places) -> None:
        self._at = places
        signing = Ed25519PrivateKey.from_private_bytes((places.keys / "signing.key").read_bytes())
        self._promises = Promises()
        self.capture = Capture(
            places.capture, places.fleet, (places.keys / "sealing.key").read_bytes(),
            signing.public_key().public_bytes_raw(),
            None if places.mixer is None else (places.mixer / "mixer.key").read_bytes(), self._promises,
        )  # fmt: skip
        self._models: dict[int, NDArray[np.float32]] = {}
        """Computed here, after each closed round."""

    def look(self, *, at_the_end: bool = False) -> list[str]:
        """Check everything.

        Args:
            at_the_end: the job is over, so in addition: every round was closed, and if rounds have the time,
                every captured fragment counts, one for each device and position, and every device paid for
                every round once.

        Returns:
            The broken promises, in words.
        """
        # Each is read after what follows from it: see the promises.
        self._promises.broken = []
        self.capture.read_on()
        captured, receipted = dict(self.capture.fragments), set(self.capture.receipted)
        own_receipts = set(self.capture.own_receipts)
        dummies = dict(self.capture.dummies)
        devices = {name: self._device(name, path) for name, path in self._at.devices.items()}
        bystanders = {name: self._device(name, path) for name, path in self._at.bystanders.items()}
        for name, device in (devices | bystanders).items():
            self._check_device(name, device)
        self._check_published(captured, devices | bystanders)
        self._check_dummies(dummies, devices | bystanders)
        file = self._at.coordinator / "coordinator.db"
        with view_shared(self._at.postgresql, file, self._promises) as connection:
            if connection is None:
                self._expect(
                    not captured and not receipted and not own_receipts,
                    "there are fragments and no coordinator",
                )
            else:
                self._check_coordinator(connection, receipted, own_receipts, devices)
                if at_the_end:
                    self._check_end(connection, devices)
        return self._promises.broken

    def _expect(self, holds: bool, otherwise: str) -> None:
        self._promises.expect(holds, otherwise)

    # The devices.

    def _device(self, name: str, directory: Path) -> Device:
        device = Device()
        head_file = directory / "ledger.head"
        # The head first: it may lag behind the chain and never leads it.
        head = json.loads(head_file.read_text()) if head_file.exists() else {"entries": 0, "hash": "00" * 32}
        with view(directory / "ledger.db", self._promises) as connection:
            if connection is None:
                return device
            entries = connection.execute("SELECT * FROM entries ORDER BY number").fetchall()
            for number, state, plan in connection.execute("SELECT round, state, plan FROM rounds"):
                device.rounds[number] = state, plan
            spooled = connection.execute(
                "SELECT digest, round, state, message FROM fragments LEFT JOIN messages USING (number)"
            ).fetchall()
        self.capture.read_on()  # The wiretap knows a plan before the broker, and what has left the spool.
        probes = {second_client.receipt(identity) for identity in self.capture.probes}
        for row in spooled:
            if row[0] not in probes and (row[3] is None or row[3][24] != 254):
                device.fragments[row[0]] = row[1:]
        digest, hashes = bytes(32), [bytes(32)]
        for number, kind, body, stored in entries:
            expected = len(hashes)
            self._expect(number == expected, f"{name}: entry {number} stands where {expected} should")
            linked = digest + number.to_bytes(8, "big") + kind.encode() + b"\0" + body.encode()
            digest = hashlib.sha256(linked).digest()
            self._expect(digest == stored, f"{name}: the chain is broken at entry {number}")
            hashes.append(digest)
            if kind == "charge":
                record = json.loads(body)
                known = bytes.fromhex(record["job"]) in self.capture.jobs
                self._expect(known, f"{name}: charged for an unknown job")
                device.charges.setdefault(record["round"], []).append(record["dataset"])
                device.charged_for.setdefault(record["round"], set()).add(record["plan"])
        self._expect(
            head["entries"] < len(hashes) and hashes[head["entries"]].hex() == head["hash"],
            f"{name}: ledger.head is not on the chain",
        )
        return device

    def _check_device(self, name: str, device: Device) -> None:
        for number, accounts in device.charges.items():
            self._expect(
                accounts == self._accounts(number),
                f"{name}: round {number} was charged {len(accounts)} times, to {', '.join(accounts)}",
            )
        for number, (state, plan) in device.rounds.items():
            where = f"{name}: round {number}, {state},"
            self._expect(
                (state in _CHARGED) == (number in device.charges), f"{where} and its charge disagree"
            )
            self._expect(
                plan in self.capture.plan_digests[number], f"{where} is of a plan that nobody announced"
            )
            self._expect(
                device.charged_for.get(number, {plan.hex()}) == {plan.hex()},
                f"{where} is of another plan than its charge",
            )
            states = device.states(number)
            self._expect(
                len(states) in (0, self.capture.blocks(number)), f"{where} has {len(states)} fragments"
            )
            self._expect(state not in _SPOOLED or bool(states), f"{where} has no fragment")
            may_have = (*_SPOOLED, "expired", "sat out")
            self._expect(state in may_have or not states, f"{where} has fragments")
            self._expect(state != "published" or "waiting" not in states, f"{where} has unpublished ones")
            self._expect(state != "receipted" or {*states} == {"counted"}, f"{where} has uncounted fragments")
        for number in device.charges:
            self._expect(number in device.rounds, f"{name}: round {number} is charged and not on record")

    def _accounts(self, number: int) -> list[str]:
        """Those that a round is charged to, in order: each once, by whom its guarantees trust."""
        release = self.capture.plans[number]["release"]
        if release["kind"] != "update":
            return ["digits"]
        return [*(["digits"] if release["device_noise"] else []), "digits@coordinator"]

    def _check_published(self, captured: dict[bytes, Fragment], devices: dict[str, Device]) -> None:
        positions: Counter[tuple[str, int, int]] = Counter()
        for identity, fragment in captured.items():
            device, where = devices[fragment.device], f"{fragment.device}: round {fragment.round}"
            positions[fragment.device, fragment.round, fragment.position] += 1
            self._expect(fragment.round in device.charges, f"{where} was published and not charged")
            known = device.fragments.get(second_client.receipt(identity))
            if known is None:
                self._expect(False, f"{where} has published {identity.hex()}, which was never spooled")
                continue
            number, _, message = known
            self._expect(number == fragment.round, f"{where} is spooled as round {number}")
            self._expect(message in (None, fragment.message), f"{where} is spooled with another content")
        for (name, number, position), count in positions.items():
            self._expect(count == 1, f"{name}: round {number} has {count} noisy sums at position {position}")

    def _check_dummies(self, dummies: dict[bytes, Fragment], devices: dict[str, Device]) -> None:
        taking_part = {(each.device, each.round) for each in self.capture.fragments.values()}
        for identity, dummy in dummies.items():
            where = f"{dummy.device}: round {dummy.round}"
            self._expect((dummy.device, dummy.round) not in taking_part, f"{where} has dummies and fragments")
            device, is_past = devices[dummy.device], dummy.round < max(self.capture.plans)
            # Rows of earlier rounds are dropped when the next plan arrives.
            is_known = is_past or second_client.receipt(identity) in device.fragments
            self._expect(is_known, f"{where} has published a dummy that was never spooled")
            state, _ = device.rounds[dummy.round]
            self._expect(state == "sat out", f"{where}, {state}, has dummies")

    # The coordinator.

    def _check_coordinator(
        self,
        connection: Any,
        receipted: set[bytes],
        own_receipts: set[tuple[str, bytes]],
        devices: dict[str, Device],
    ) -> None:
        counted = {
            identity: (number, position)
            for identity, number, position in connection.execute("SELECT id, round, position FROM fragments")
        }
        partial = connection.execute(
            "SELECT round, position, fragments, units, type, ids, kept, kept_type FROM partial_sums"
        ).fetchall()
        tallies = connection.execute("SELECT round, position, fragments FROM tallies").fetchall()
        left = connection.execute("SELECT digests FROM receipts").fetchall()
        rounds = connection.execute(
            "SELECT number, closed_at, fragments FROM rounds ORDER BY number"
        ).fetchall()
        (weights,) = connection.execute("SELECT weights FROM models").fetchone() or (None,)
        self.capture.read_on()  # The wiretap knows a fragment before the broker, so all of these are there.
        for identity, (number, position) in counted.items():
            fragment = self.capture.fragments.get(identity)
            if fragment is None:
                self._expect(False, f"counted a fragment that nobody sent: {identity.hex()}")
                continue
            as_sent = (fragment.round, fragment.position)
            self._expect((number, position) == as_sent, f"counted {as_sent} as {(number, position)}")
        for (number, position), count in Counter(counted.values()).items():
            self._expect(
                count <= len(devices), f"round {number}, position {position}: {count} fragments counted"
            )
        closed = {number for number, closed_at, _ in rounds if closed_at is not None}
        self._check_sums(partial, tallies, counted, closed)
        for number, closed_at, fragments in rounds:
            if closed_at is not None:
                of_round = sum(1 for at, _ in counted.values() if at == number)
                self._expect(fragments == of_round, f"round {number}: {of_round} counted, {fragments} stated")
        empty = (*self.capture.dummies, *self.capture.probes)
        digests = {second_client.receipt(identity) for identity in (*counted, *empty)}
        receipted = receipted | {
            row[start : start + 16] for (row,) in left for start in range(0, len(row), 16)
        }
        self._expect(receipted <= digests, f"{len(receipted - digests)} receipts for what is not counted")
        own = {
            (second_client.receipt_topic(identity, self._at.fleet), second_client.receipt(identity))
            for identity in (*counted, *empty)
        }
        self._expect(
            own_receipts <= own, f"{len(own_receipts - own)} receipts of their own for what is not counted"
        )
        for name, device in devices.items():
            done = {digest for digest, (_, state, _) in device.fragments.items() if state == "counted"}
            self._expect(done <= digests, f"{name}: dropped {len(done - digests)} that are not counted")
        if weights is not None and closed:
            self._check_models(closed, counted, np.frombuffer(weights, "<f4"))

    def _check_sums(
        self,
        partial: list[tuple[int, int, int, bytes, str, bytes, bytes, str]],
        tallies: list[tuple[int, int, int]],
        counted: dict[bytes, tuple[int, int]],
        closed: set[int],
    ) -> None:
        """The open round: each counted fragment is in one partial sum, with the values that were sent."""
        summed: Counter[bytes] = Counter()
        for number, position, fragments, units, kind, ids, kept, kept_kind in partial:
            identities = [ids[start : start + 16] for start in range(0, len(ids), 16)]
            summed.update(identities)
            self._expect(fragments == len(identities), "a partial sum is of another number of fragments")
            values = np.frombuffer(kept, kept_kind).reshape(len(identities), -1)
            total = np.frombuffer(units, kind)
            self._expect(
                np.array_equal(values.astype(np.int64).sum(axis=0), total),
                "a partial sum is not that of its values",
            )
            for identity, stored in zip(identities, values, strict=True):
                self._expect(counted.get(identity) == (number, position), "a sum is of another block")
                if identity in self.capture.fragments:
                    sent = self.capture.fragments[identity].values(self.capture.plans[number])
                    self._expect(
                        np.array_equal(stored, sent[: len(stored)]), f"the values of {identity.hex()} changed"
                    )
        still_open = {identity for identity, (number, _) in counted.items() if number not in closed}
        self._expect(set(summed) == still_open, "the sums are not those of the counted fragments")
        self._expect(set(summed.values()) <= {1}, "a fragment is summed twice")
        noted: Counter[tuple[int, int]] = Counter()
        for number, position, fragments in tallies:
            noted[number, position] += fragments
        found = Counter(at for identity, at in counted.items() if identity in still_open)
        self._expect(+noted == found, "the tallies are not those of the counted fragments")

    def _check_models(
        self, closed: set[int], counted: dict[bytes, tuple[int, int]], stored: NDArray[np.float32]
    ) -> None:
        """Each closed round's model from the model before and the captured fragments that count."""
        last = max(closed)
        for number in sorted(closed - set(self._models)):
            plan = self.capture.plans[number]
            identities = [identity for identity, (at, _) in counted.items() if at == number]
            found = [self.capture.fragments[each] for each in identities if each in self.capture.fragments]
            before = self._weights(plan)
            match plan["release"]["kind"]:
                case "noisy-sum":
                    stepped = before - self._at.learning_rate * self._mean(plan, found)[: len(before)]
                case "two-point":
                    stepped = self._stepped_by_reports(plan, found, before)
                case _:
                    mean = self._mean_update(plan, found)
                    stepped = before + self._at.learning_rate * mean[: len(before)]
            self._models[number] = stepped.astype(np.float32)
        for number in closed:
            after = stored if number == last else None
            if number + 1 in self.capture.plans:
                after = self._weights(self.capture.plans[number + 1])
            if after is not None:
                self._expect(
                    self._is_model_of(number, after),
                    f"round {number}: its model is not that of the captured fragments that count",
                )

    def _is_model_of(self, number: int, after: NDArray[np.float32]) -> bool:
        """Whether it is the computed one; where the coordinator adds noise, with as much of it as it says."""
        release, computed = self.capture.plans[number]["release"], self._models[number]
        if release["kind"] != "update":
            return np.allclose(computed, after, rtol=1e-6, atol=1e-7)
        deviation = self._at.learning_rate * self._update_noise(self.capture.plans[number])
        noise = (after.astype(np.float64) - computed) / deviation
        # 9,930 normal numbers: each of these fails by chance less than once in a million.
        return bool(np.abs(noise).max() < 7.0 and 0.93 < np.mean(noise**2) < 1.07)

    def _update_noise(self, plan: dict[str, Any]) -> float:
        """Standard deviation of the coordinator's noise on a coordinate of the mean update."""
        release = plan["release"]
        radius = second_client.update_unit(plan) * release["mechanism"]["parameters"]["resolution"]
        multiplier: float = release["mechanism"]["noise_multipliers"][plan["round"] - 1]
        return multiplier * radius / release["expected_devices"]

    def _mean_update(self, plan: dict[str, Any], fragments: list[Fragment]) -> NDArray[np.float64]:
        """The mean of the updates over the public number of devices, before the coordinator's noise."""
        release, block = plan["release"], plan["wire"]["block"]
        total = np.zeros((self.capture.blocks(plan["round"]), block), np.int64)
        for fragment in fragments:
            total[fragment.position] += fragment.values(plan)
        unit = second_client.update_unit(plan) / release["expected_devices"]
        return total.reshape(-1)[: second_client.dimension(plan)] * unit

    def _stepped_by_reports(
        self, plan: dict[str, Any], fragments: list[Fragment], before: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """The weights with the mean changes of the reports."""
        reports = [report for fragment in fragments for report in fragment.reports(plan)]
        means = second_client.two_point_means(reports, plan, self._at.tensor_sizes)
        change = np.array([0.0 if mean is None else mean for mean in means])
        return np.asarray(before + self._at.learning_rate * change)

    def _mean(self, plan: dict[str, Any], fragments: list[Fragment]) -> NDArray[np.float64]:
        block, sampling = plan["wire"]["block"], plan["release"]["sampling"]
        sums = np.zeros((self.capture.blocks(plan["round"]), block), np.int64)
        counts = np.zeros(len(sums), np.int64)
        for fragment in fragments:
            sums[fragment.position] += fragment.values(plan)
            counts[fragment.position] += 1
        share = np.maximum(counts, 1) * sampling["expected_lot"] * sampling["local_steps"]
        mean = sums * second_client.wire_unit(plan) / share[:, np.newaxis]
        return np.asarray(mean.reshape(-1)[: second_client.dimension(plan)])

    def _weights(self, plan: dict[str, Any]) -> NDArray[np.float32]:
        digest, count = plan["model"]["digest"], plan["model"]["parameters"]
        chunks = -(-4 * count // second_client.CHUNK_BYTES)
        data = b"".join(self.capture.chunks.get((digest, index), b"") for index in range(chunks))
        if hashlib.sha256(data).digest() != digest:
            self._expect(False, f"round {plan['round']}: the announced model was not published")
            return np.zeros(count, np.float32)
        return np.array(struct.unpack(f"<{count}f", data), np.float32)

    # The end of the job.

    def _check_end(self, connection: Any, devices: dict[str, Device]) -> None:
        rounds = set(range(1, self._at.rounds + 1))
        closed = {
            row[0] for row in connection.execute("SELECT number FROM rounds WHERE closed_at IS NOT NULL")
        }
        self._expect(closed == rounds, f"closed rounds: {sorted(closed)}")
        (finished,) = connection.execute("SELECT state = 'finished' FROM jobs").fetchone()
        self._expect(bool(finished) and self.capture.over, "the job is not over")
        self._expect((self._at.coordinator / "jobs" / "first" / "model.onnx").exists(), "there is no model")
        if not self._at.is_patient:
            return
        counted = {row[0] for row in connection.execute("SELECT id FROM fragments")}
        self._expect(
            counted == set(self.capture.fragments),
            f"{len(set(self.capture.fragments) - counted)} do not count",
        )
        for number in rounds:
            of_round = Counter(
                each.position for each in self.capture.fragments.values() if each.round == number
            )
            self._expect(
                of_round == dict.fromkeys(range(self.capture.blocks(number)), len(devices)),
                f"round {number}: fragments by position {dict(of_round)}",
            )
        for name, device in devices.items():
            self._expect([*device.charges] == [*rounds], f"{name}: charged rounds {[*device.charges]}")
