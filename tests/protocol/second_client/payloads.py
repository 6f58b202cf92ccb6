"""Payloads of fragments: values of a noisy sum, of an update and two-point reports."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from .cbor import Rejected
from .plans import dimension, group_edges, update_unit


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
