"""A second client, written from ``docs/protocol.md`` and the RFCs it names. It imports nothing of dpagent.

It is how a client in another language would begin: CBOR by hand, HPKE over its primitives, a device,
a mixer and a coordinator without network, disk or training. As long as it and dpagent understand each
other, the page is sufficient.
"""

from .cbor import Rejected, decode, encode
from .envelopes import (
    info_of,
    mixer_info,
    open_mixed,
    open_sealed,
    open_signed,
    seal,
    seal_to_mixer,
    sign,
    signed_bytes,
)
from .payloads import (
    clipped_update,
    pack,
    pack_two_point,
    pack_update,
    two_point_means,
    unpack,
    unpack_two_point,
    unpack_update,
    with_noise,
)
from .plans import dimension, group_edges, plan_digest, read_plan, update_unit, wire_unit
from .sides import CHUNK_BYTES, Coordinator, Device, Mixer, receipt, receipt_topic, weights_of

__all__ = [
    "CHUNK_BYTES",
    "Coordinator",
    "Device",
    "Mixer",
    "Rejected",
    "clipped_update",
    "decode",
    "dimension",
    "encode",
    "group_edges",
    "info_of",
    "mixer_info",
    "open_mixed",
    "open_sealed",
    "open_signed",
    "pack",
    "pack_two_point",
    "pack_update",
    "plan_digest",
    "read_plan",
    "receipt",
    "receipt_topic",
    "seal",
    "seal_to_mixer",
    "sign",
    "signed_bytes",
    "two_point_means",
    "unpack",
    "unpack_two_point",
    "unpack_update",
    "update_unit",
    "weights_of",
    "wire_unit",
    "with_noise",
]
