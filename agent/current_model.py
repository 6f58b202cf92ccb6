"""The model of a round as a file: its weights, filled into the file that the coordinator sends without them.

Both are public, and every device gets them, whether it takes part or not. ``dpagent predict`` and ``dpagent
serve`` take the file as they take a finished model. It does not say what its rounds have spent; the guarantee
in it is that of the whole job, of which they are a part.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from dpagent.errors import DataError
from dpagent.learning.inference.model_bytes import metadata_of, with_metadata, with_weights
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask

ROUND_KEY: Final = "dpagent.round"
_WEIGHTS_KEY: Final = "dpagent.weights"


def current_model(plan: Plan, export: bytes, weights: bytes) -> bytes:
    """The file of the model that a round trains.

    Args:
        plan: of the round, which is open.
        export: the file without its weights, of the digest in the plan.
        weights: as the plan sends them, of the digest in it.

    Returns:
        An ONNX file. Its metadata have the last round that made it, and SHA-256 of ``weights``.

    Raises:
        DpagentError: The file has no place for weights of that architecture, or these are not finite.
    """
    task = RoundTask.of(plan)
    values = task.weights_from(weights)
    if not np.isfinite(values).all():
        raise DataError("The model has weights that are not finite.")
    file = with_weights(export, task.spec, values)
    made_by = {ROUND_KEY: str(plan.round - 1), _WEIGHTS_KEY: plan.model.digest.hex()}
    return with_metadata(file, metadata_of(file) | made_by)


def weights_digest_of(file: bytes) -> bytes | None:
    """SHA-256 of the weights that :func:`current_model` has made a file of; None of any other file.

    Args:
        file: whoever wrote it.
    """
    try:
        return bytes.fromhex(metadata_of(file).get(_WEIGHTS_KEY, "")) or None
    except (DataError, ValueError):
        return None
