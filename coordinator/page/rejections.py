"""Why messages do not count, in words for an operator, and which reasons are bounds against false updates."""

from __future__ import annotations

from typing import Any, Final

_PREFIX: Final = "rejected: "
_MEANINGS: Final = {
    "improbable norm": ("no honest board sends an update of that size", True),
    "block full": ("more came than there are boards: of all of them, as many as there are seats count", True),
    "spent": ("another fragment came with the same token", True),
    "bad token": ("no member of the fleet has such a token", True),
    "cannot open": ("sealed for another key, or damaged", False),
    "malformed": ("no message of this protocol", False),
    "oversized": ("longer than any message may be", False),
    "wrong size": ("values of another length than the round's", False),
    "wrong round": ("of a round that is not open yet", False),
    "bad position": ("of a block that the update does not have", False),
    "bad values": ("values that the round does not have", False),
    "no open round": ("it came while no round was open", False),
    "bad signature": ("not signed by the board that it names", False),
    "not a member": ("of a board that is no member of the fleet", False),
}
_OTHERS: Final = {
    "late": "fragments that came after their round had closed",
    "duplicates": "fragments that had been counted already, sent again because a receipt was lost",
    "dummies": "messages of boards that sat a round out, and hid it",
}


def rejections_of(counters: dict[str, int]) -> dict[str, Any]:
    """What a job's counters say, the commonest first.

    Args:
        counters: of :meth:`coordinator.reader.StoreReader.counters`.
    """
    rejected = sorted(
        (
            (name.removeprefix(_PREFIX), count)
            for name, count in counters.items()
            if name.startswith(_PREFIX) and count
        ),
        key=lambda each: -each[1],
    )
    rows = []
    for reason, count in rejected:
        meaning, is_bound = _MEANINGS.get(reason, ("", False))
        rows.append({"reason": reason, "count": count, "meaning": meaning, "is_bound": is_bound})
    return {
        "rejected": rows,
        "others": [
            {"reason": name, "count": counters[name], "meaning": meaning}
            for name, meaning in _OTHERS.items()
            if counters.get(name)
        ],
    }
