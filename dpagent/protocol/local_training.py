"""What releases have in common that devices train for before they send anything."""

from __future__ import annotations

from dpagent.errors import PlanError
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.methods import Method


def require_local_training(mechanism: str, spec: ModelSpec, method: Method) -> None:
    """Refuse a mechanism of another method, and a model that needs a round of its own.

    Raises:
        PlanError: naming it.
    """
    if mechanism not in method.mechanisms.values():
        raise PlanError(
            f"Method {method.name} and mechanism {mechanism} do not go together; expected "
            f"{' or '.join(method.mechanisms.values())}."
        )
    if spec.projection is not None:
        raise PlanError(
            f"The model {spec.name} has a projection, for which method {method.name} has no round."
        )
