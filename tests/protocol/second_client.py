"""A second client, written from ``docs/protocol.md`` and the RFCs it names. It imports nothing of dpagent.

It is how a client in another language would begin: CBOR by hand, HPKE over its primitives, a device,
a mixer and a coordinator without network, disk or training. As long as it and dpagent understand each
other, the page is sufficient.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

CHUNK_BYTES = 48_000


class Rejected(Exception):
    """A message is rejected; its text is the page's name for the reason."""


# --- CBOR (RFC 8949) ------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """In the core deterministic encoding (section 4.2.1)."""
    match value:
        case None:
            return b"\xf6"
        case bool():
            return b"\xf5" if value else b"\xf4"
        case int():
            return _head(0, value) if value >= 0 else _head(1, -1 - value)
        case float():
            return next(filter(None, (_as_float(value, *form) for form in _FLOATS)))
        case bytes():
            return _head(2, len(value)) + value
        case str():
            return _head(3, len(value.encode())) + value.encode()
        case list():
            return _head(4, len(value)) + b"".join(map(encode, value))
        case dict():
            items = sorted(encode(key) + encode(item) for key, item in value.items())
            return _head(5, len(value)) + b"".join(items)
    raise TypeError(f"{value!r} is not part of the protocol")


_FLOATS = ((b"\xf9", ">e"), (b"\xfa", ">f"), (b"\xfb", ">d"))
_WIDTHS = {24: 1, 25: 2, 26: 4, 27: 8}


def _head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes([major << 5 | argument])
    code, width = next((code, width) for code, width in _WIDTHS.items() if argument < 1 << 8 * width)
    return bytes([major << 5 | code]) + argument.to_bytes(width, "big")


def _as_float(value: float, mark: bytes, form: str) -> bytes | None:
    try:
        packed = struct.pack(form, value)
    except OverflowError:
        return None
    return mark + packed if struct.unpack(form, packed)[0] == value else None


def decode(data: bytes) -> Any:
    """Any encoding but tags, indefinite lengths, duplicate keys and more than 8 levels."""
    value, end = _item(data, 0, 1)
    if end != len(data):
        raise Rejected("malformed")
    return value


def _item(data: bytes, at: int, level: int) -> tuple[Any, int]:
    """The item that begins at ``at``, and where it ends."""
    major, low = divmod(_take(data, at, 1)[0], 32)
    width = _WIDTHS.get(low, 0)
    raw = _take(data, at + 1, width)
    at += 1 + width
    argument = int.from_bytes(raw, "big") if width else low
    match major:
        case _ if low > 27:
            raise Rejected("malformed")  # indefinite or reserved
        case 0:
            return argument, at
        case 1:
            return -1 - argument, at
        case 2:
            return _take(data, at, argument), at + argument
        case 3:
            try:
                return _take(data, at, argument).decode(), at + argument
            except UnicodeDecodeError:
                raise Rejected("malformed") from None
        case 4 | 5 if level <= 8:
            items = []
            for _ in range(argument * (major - 3)):
                item, at = _item(data, at, level + 1)
                items.append(item)
            return (items if major == 4 else _map(items)), at
        case 7 if width >= 2:
            return struct.unpack({2: ">e", 4: ">f", 8: ">d"}[width], raw)[0], at
        case 7 if low in (20, 21, 22):
            return {20: False, 21: True, 22: None}[low], at
    raise Rejected("malformed")


def _take(data: bytes, at: int, count: int) -> bytes:
    if at + count > len(data):
        raise Rejected("malformed")
    return data[at : at + count]


def _map(items: list[Any]) -> dict[str, Any]:
    keys = items[::2]
    if not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise Rejected("malformed")
    return dict(zip(keys, items[1::2], strict=True))


def read_plan(data: bytes) -> dict[str, Any]:
    """A plan. The ranges in the page's tables are not checked here."""
    plan = decode(data)
    if type(plan) is not dict:
        raise Rejected("malformed")
    return plan


# --- envelopes ------------------------------------------------------------------------------------


def opened(data: bytes, header: int) -> bytes:
    """An envelope without its version."""
    if len(data) > 60_000:
        raise Rejected("oversized")
    if data and data[0] != 1:
        raise Rejected("unsupported version")
    if len(data) < 1 + header:
        raise Rejected("malformed")
    return data[1:]


def sign(body: bytes, kind: str, fleet: str, secret: bytes) -> bytes:
    """A signed envelope."""
    return b"\1" + Ed25519PrivateKey.from_private_bytes(secret).sign(signed_bytes(body, kind, fleet)) + body


def signed_bytes(body: bytes, kind: str, fleet: str) -> bytes:
    return b"dpagent v1 " + kind.encode() + b" " + fleet.encode() + b"\0" + body


def open_signed(data: bytes, kind: str, fleet: str, public_key: bytes) -> bytes:
    envelope = opened(data, 64)
    signature, body = envelope[:64], envelope[64:]
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, signed_bytes(body, kind, fleet))
    except InvalidSignature:
        raise Rejected("bad signature") from None
    return body


def seal(plaintext: bytes, info: bytes, sealing_key: bytes, ephemeral: bytes) -> bytes:
    """A sealed envelope. ``ephemeral``: 32 bytes, fresh for every seal except in test vectors."""
    return b"\1" + _encrypt(plaintext, info, sealing_key, ephemeral)


def open_sealed(data: bytes, info: bytes, secret: bytes) -> bytes:
    return _decrypt(opened(data, 0), info, secret)


def info_of(fleet: str, job: bytes) -> bytes:
    return b"dpagent v1 fragment " + fleet.encode() + b"\0" + job


def plan_digest(plan: dict[str, Any]) -> bytes:
    return hashlib.sha256(encode(plan | {"deadline": 0.0})).digest()


def mixer_info(fleet: str, digest: bytes) -> bytes:
    return b"dpagent v1 mixer " + fleet.encode() + b"\0" + digest


def seal_to_mixer(sealed: bytes, digest: bytes, fleet: str, mixer: bytes, ephemeral: bytes) -> bytes:
    """The outer envelope around a sealed one."""
    return b"\1" + digest + _encrypt(sealed, mixer_info(fleet, digest), mixer, ephemeral)


def open_mixed(data: bytes, fleet: str, secret: bytes) -> tuple[bytes, bytes]:
    """The plan's digest, and the sealed envelope inside."""
    envelope = opened(data, 0)
    digest, ciphertext = envelope[:32], envelope[32:]
    return digest, _decrypt(ciphertext, mixer_info(fleet, digest), secret)


def _encrypt(plaintext: bytes, info: bytes, public_key: bytes, ephemeral: bytes) -> bytes:
    sender = X25519PrivateKey.from_private_bytes(ephemeral)
    shared = sender.exchange(X25519PublicKey.from_public_bytes(public_key))
    encapsulated = sender.public_key().public_bytes_raw()
    key, nonce = _schedule(shared, encapsulated + public_key, info)
    return encapsulated + ChaCha20Poly1305(key).encrypt(nonce, plaintext, b"")


def _decrypt(ciphertext: bytes, info: bytes, secret: bytes) -> bytes:
    recipient = X25519PrivateKey.from_private_bytes(secret)
    encapsulated = ciphertext[:32]
    try:
        shared = recipient.exchange(X25519PublicKey.from_public_bytes(encapsulated))
        key, nonce = _schedule(shared, encapsulated + recipient.public_key().public_bytes_raw(), info)
        return ChaCha20Poly1305(key).decrypt(nonce, ciphertext[32:], b"")
    except (ValueError, InvalidTag):  # no such point, too short, altered
        raise Rejected("cannot open") from None


_KEM = b"KEM" + bytes.fromhex("0020")
_HPKE = b"HPKE" + bytes.fromhex("0020 0001 0003")


def _schedule(shared: bytes, kem_context: bytes, info: bytes) -> tuple[bytes, bytes]:
    """Key and nonce of the one message (RFC 9180, sections 4.1 and 5.1, base mode)."""
    shared = _expand(_KEM, _extract(_KEM, b"", b"eae_prk", shared), b"shared_secret", kem_context, 32)
    context = b"\0" + _extract(_HPKE, b"", b"psk_id_hash", b"") + _extract(_HPKE, b"", b"info_hash", info)
    secret = _extract(_HPKE, shared, b"secret", b"")
    return _expand(_HPKE, secret, b"key", context, 32), _expand(_HPKE, secret, b"base_nonce", context, 12)


def _extract(suite: bytes, salt: bytes, label: bytes, material: bytes) -> bytes:
    return hmac.digest(salt or bytes(32), b"HPKE-v1" + suite + label + material, "sha256")


def _expand(suite: bytes, key: bytes, label: bytes, info: bytes, length: int) -> bytes:
    labelled = length.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info
    return hmac.digest(key, labelled + b"\1", "sha256")[:length]  # one block of HKDF is enough


# --- values ---------------------------------------------------------------------------------------


def pack(values: Sequence[int], size: int) -> bytes:
    """A payload of values that fit at level 0."""
    plain = bytes(
        255 if abs(value) > 127 else 2 * value if value >= 0 else -2 * value - 1 for value in values
    )
    plain += b"".join(struct.pack("<i", value) for value in values if abs(value) > 127)
    deflater = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY, wbits=-15)
    payload = b"\0" + deflater.compress(plain) + deflater.flush()
    assert len(payload) <= size, "this client does not round"
    return payload.ljust(size, b"\0")


def unpack(payload: bytes, count: int) -> list[int]:
    inflater = zlib.decompressobj(wbits=-15)
    try:
        plain = inflater.decompress(payload[1:], 5 * count + 1)
    except zlib.error:
        raise Rejected("bad values") from None
    if payload[0] > 32 or not inflater.eof or any(inflater.unused_data) or len(plain) < count:
        raise Rejected("bad values")
    if len(plain) != count + 4 * plain[:count].count(255):
        raise Rejected("bad values")
    large = iter(struct.unpack(f"<{(len(plain) - count) // 4}i", plain[count:]))
    values = [next(large) if byte == 255 else (-1) ** byte * (byte + 1 >> 1) for byte in plain[:count]]
    if payload[0] and max(map(abs, values)) << payload[0] > 1 << 33:
        raise Rejected("bad values")
    return [value << payload[0] for value in values]


def dimension(plan: dict[str, Any]) -> int:
    """Coordinates of an update."""
    release = plan["release"]
    if release["kind"] == "two-point":
        return int(release["coordinates"])
    if release["kind"] == "update":
        return int(plan["model"]["parameters"]) + (release["count_weight"] > 0)
    if release["projection"] is not None and plan["round"] == 1:
        return release["projection"]["values"] * (release["projection"]["values"] + 1) // 2
    return plan["model"]["parameters"] + (release["clipping"]["count_weight"] > 0)


def wire_unit(plan: dict[str, Any]) -> float:
    """What one unit of a coordinate of a noisy sum stands for."""
    release = plan["release"]
    clipping = release["clipping"]
    bound = math.hypot(*clipping["norms"]) * math.hypot(1, clipping["count_weight"] / 2)
    bound *= math.sqrt(sum(clipping["shares"]))
    if release["projection"] is not None and plan["round"] == 1:
        bound = release["projection"]["record_norm"] ** 2
    if release["mechanism"]["name"] != "discrete-gaussian":  # clipped in L1, with one norm
        bound = clipping["norms"][0]
    return bound / release["mechanism"]["parameters"]["resolution"] * release["step"]


def group_edges(plan: dict[str, Any]) -> list[int]:
    count, weights = plan["release"]["coordinates"], plan["model"]["parameters"]
    return [group * weights // count for group in range(count + 1)]


def pack_two_point(reports: Sequence[int], plan: dict[str, Any]) -> list[bytes]:
    """The payloads of an update of two-point reports, 2·place + bit each, in order."""
    release, block = plan["release"], plan["wire"]["block"]
    width = math.ceil(math.log2(-(-plan["model"]["parameters"] // release["coordinates"]))) + 1
    payloads = []
    for start in range(0, len(reports), block):
        bits = "".join(f"{report:0{width}b}" for report in reports[start : start + block])
        size = plan["wire"]["bytes"] - 1
        payloads.append(b"\0" + int(bits.ljust(8 * size, "0"), 2).to_bytes(size, "big"))
    return payloads


def clipped_update(change: Sequence[float], plan: dict[str, Any]) -> list[int]:
    """The change of a device's weights as whole numbers, of the mechanism ``central-gaussian``."""
    bound, weight = plan["release"]["clip_norm"], plan["release"]["count_weight"]
    size = math.hypot(*change)
    values = [value * min(1.0, bound / size) if size else 0.0 for value in change]
    if weight:
        values.append(weight * bound / 2 * (0 if size == 0 else 1 if size <= bound else -1))
    scale = 1 / update_unit(plan)
    return [round(value * scale) for value in values]


def with_noise(update: Sequence[int], noise: Sequence[int], plan: dict[str, Any]) -> list[int]:
    """An update with noise of its device, if the plan asks for that."""
    if not plan["release"]["device_noise"]:
        return list(update)
    largest = plan["release"]["largest"]
    return [max(-largest, min(largest, x + n)) for x, n in zip(update, noise, strict=True)]


def update_unit(plan: dict[str, Any]) -> float:
    """One grid unit in the units of weights, of the mechanism ``central-gaussian``."""
    release = plan["release"]
    radius = release["clip_norm"] * math.sqrt(1 + release["count_weight"] ** 2 / 4)
    return float(radius / release["mechanism"]["parameters"]["resolution"])


def pack_update(update: Sequence[int], plan: dict[str, Any]) -> list[bytes]:
    """The payloads of an update, in order."""
    largest, block = plan["release"]["largest"], plan["wire"]["block"]
    width, size = (2 * largest).bit_length(), plan["wire"]["bytes"] - 1
    payloads = []
    for start in range(0, len(update), block):
        values = [*update[start : start + block], *[0] * block][:block]
        bits = "".join(f"{value + largest:0{width}b}" for value in values)
        payloads.append(b"\0" + int(bits.ljust(8 * size, "0"), 2).to_bytes(size, "big"))
    return payloads


def unpack_update(payload: bytes, position: int, plan: dict[str, Any]) -> list[int]:
    """The values of a payload of an update, clipped in L2."""
    largest, block = plan["release"]["largest"], plan["wire"]["block"]
    width = (2 * largest).bit_length()
    bits = f"{int.from_bytes(payload[1:], 'big'):0{8 * (len(payload) - 1)}b}"
    values = [int(bits[at * width : (at + 1) * width], 2) - largest for at in range(block)]
    weight = plan["release"]["count_weight"]
    inside = max(0, dimension(plan) - position * block)
    if payload[0] or "1" in bits[block * width :] or any(values[inside:]):
        raise Rejected("bad values")
    if any(abs(value) > largest for value in values):
        raise Rejected("bad values")
    if plan["release"]["device_noise"]:
        return values[:inside]
    if sum(value * value for value in values) > largest**2:
        raise Rejected("bad values")
    vote = weight * plan["release"]["clip_norm"] / 2 * (1 + 2**-20) / update_unit(plan)
    if weight and 0 < inside <= block and abs(values[inside - 1]) > math.ceil(vote):
        raise Rejected("bad values")
    return values[:inside]


def unpack_two_point(payload: bytes, position: int, plan: dict[str, Any]) -> list[tuple[int, int]]:
    """The weight and the bit of each report in a payload."""
    release, block, edges = plan["release"], plan["wire"]["block"], group_edges(plan)
    width = math.ceil(math.log2(-(-plan["model"]["parameters"] // release["coordinates"]))) + 1
    groups = range(position * block, min((position + 1) * block, release["coordinates"]))
    bits = f"{int.from_bytes(payload[1:], 'big'):0{8 * (len(payload) - 1)}b}"
    found = []
    for at, group in enumerate(groups):
        report = int(bits[at * width : (at + 1) * width], 2)
        found.append((edges[group] + (report >> 1), report & 1))
        if found[-1][0] >= edges[group + 1]:
            raise Rejected("bad values")
    if payload[0] or "1" in bits[len(groups) * width :]:
        raise Rejected("bad values")
    return found


def two_point_means(
    reports: Iterable[tuple[int, int]], plan: dict[str, Any], sizes: Sequence[int]
) -> list[float | None]:
    """The mean change of each weight over the devices that reported it.

    Args:
        reports: weight and bit each, of all devices.
        plan: of the round.
        sizes: of the tensors.
    """
    amplitude = 1 / math.tanh(0.5 / plan["release"]["noise_multipliers"][plan["round"] - 1])
    radii = [r for size, r in zip(sizes, plan["release"]["radii"], strict=True) for _ in range(size)]
    bits: list[list[int]] = [[] for _ in radii]
    for weight, bit in reports:
        bits[weight].append(bit)
    return [
        r * amplitude * (2 * sum(own) / len(own) - 1) if own else None
        for r, own in zip(radii, bits, strict=True)
    ]


def weights_of(data: bytes, count: int, precision: str) -> tuple[float, ...]:
    if precision == "float32":
        return struct.unpack(f"<{count}f", data)
    blocks = -(-count // 64)
    scales, steps = struct.unpack_from(f"<{blocks}e", data), struct.unpack_from(f"{count}b", data, 2 * blocks)
    return tuple(step * scales[place // 64] for place, step in enumerate(steps))


def receipt(identity: bytes) -> bytes:
    return hashlib.sha256(identity).digest()[:16]


# --- the two sides of a round ---------------------------------------------------------------------


class Device:
    """Takes plans, models and receipts, and sends fragments."""

    def __init__(self, fleet: str, public_key: bytes) -> None:
        self.fleet, self.public_key = fleet, public_key
        self.plan: dict[str, Any] | None = None
        self.chunks: dict[tuple[bytes, int], bytes] = {}
        self.pending: dict[bytes, bytes] = {}

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
        return list(self.pending.values())


class Mixer:
    """Takes the outer envelopes off, and holds what was inside by plan and length."""

    def __init__(self, fleet: str, secret: bytes) -> None:
        self.fleet, self.secret = fleet, secret
        self.held: dict[tuple[bytes, int], set[bytes]] = {}
        self.left: set[bytes] = set()

    def receive(self, data: bytes) -> None:
        digest, sealed = open_mixed(data, self.fleet, self.secret)
        if sealed not in self.left:
            self.held.setdefault((digest, len(sealed)), set()).add(sealed)

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
        if payload[0] != 255:
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
