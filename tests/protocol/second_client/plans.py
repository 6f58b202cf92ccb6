"""Plans, and what follows from one."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from .cbor import Rejected, decode, encode


def read_plan(data: bytes) -> dict[str, Any]:
    """A plan. The ranges in the page's tables are not checked here."""
    plan = decode(data)
    if type(plan) is not dict:
        raise Rejected("malformed")
    return plan


def plan_digest(plan: dict[str, Any]) -> bytes:
    return hashlib.sha256(encode(plan | {"deadline": 0.0})).digest()


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


def update_unit(plan: dict[str, Any]) -> float:
    """One grid unit in the units of weights, of the mechanism ``central-gaussian``."""
    release = plan["release"]
    radius = release["clip_norm"] * math.sqrt(1 + release["count_weight"] ** 2 / 4)
    return float(radius / release["mechanism"]["parameters"]["resolution"])


def group_edges(plan: dict[str, Any]) -> list[int]:
    count, weights = plan["release"]["coordinates"], plan["model"]["parameters"]
    return [group * weights // count for group in range(count + 1)]
