"""A coordinator announces a model that is as large as a plan may say, and sends it.

Claim: the agent holds no more of a model than ``limits.maximum_model_mib``, besides what it holds of chunks
    that no plan names; it declines a larger one without waiting for it.
Parameters: 50 million parameters and three assets, 800 MB in all, of which 480 MB come; a limit of 128 MiB.

Before, everything that a plan names was kept, up to 800 MB, before the device decided on anything: 1.2 GiB in
the agent, and as much again on the way to the training process. So one retained plan ended the agent of a
board of 512 MiB, at each start.

Power: no randomness. On the code of before the agent holds all that came.
"""

from __future__ import annotations

from pathlib import Path

from devices import open_device
from fleets import make_plan

from dpagent.protocol.chunks import Assembler
from dpagent.protocol.messages import MAX_WHOLE_BYTES, MODEL_CHUNK_BYTES, ModelChunk

CHUNKS = 2_500
"""Of each of four digests."""
ROLES = ("training-graph", "frozen-network", "projection")


def test_a_model_beyond_the_limit_is_declined_and_not_kept(tmp_path: Path) -> None:
    digests = [bytes([number]) * 32 for number in range(1 + len(ROLES))]
    plan = make_plan(
        model={"parameters": MAX_WHOLE_BYTES // 4, "digest": digests[0]},
        assets=[
            {"role": role, "digest": digest, "size": MAX_WHOLE_BYTES}
            for role, digest in zip(ROLES, digests[1:], strict=True)
        ],
    )
    data = bytes(MODEL_CHUNK_BYTES)
    with open_device(tmp_path) as device:
        device.take_plan(plan)
        device.clock.advance(1.0)
        device.cycle.advance()
        ((_, reason, _),) = device.declined()
        assert "limits.maximum_model_mib" in reason
        for digest in digests:
            for index in range(CHUNKS):
                chunk = ModelChunk(digest=digest, index=index, data=data)
                device.announcements.take_chunk(chunk)
        held = sum(
            len(part) for parts in device.announcements._assembler._chunks.values() for part in parts.values()
        )
    assert held <= Assembler.FOREIGN_BYTES < len(digests) * CHUNKS * len(data)
