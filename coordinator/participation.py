"""What the budget registry says: who takes part in a round, and what each device was granted."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from coordinator.database.opening import is_there
from coordinator.database.schema import Part
from coordinator.devices import Device, Devices
from coordinator.registry import Entry, RegistryReader, Spent
from coordinator.settings import CoordinatorSettings
from dpagent.notation import delta_upwards, upwards
from dpagent.protocol.issuing import Verdict, Wish
from dpagent.wording import counted

_REFUSED: Final = {
    Verdict.OVER_LIMIT: "over the fleet's limit for a device",
    Verdict.EXCLUDED: "left out by the operator",
    Verdict.ASKED_OTHERWISE: "in a place whose tokens another board has",
}


@dataclass(frozen=True, slots=True)
class Participation:
    """Who takes part in a round, in numbers of members."""

    members: int
    takes_part: int
    reasons: dict[str, int]
    """Why others do not, by their own public reason or the registry's."""
    not_seen: int
    gone: int = 0
    """Devices that have tokens of the round, and have been members no more since it opened."""

    def dead_end(self, number: int, minimum: int, least: int) -> str | None:
        """What becomes of a round that cannot close, in a line for the operator; see :func:`dead_end`.

        Args:
            number: of the round.
            minimum: devices that it needs.
            least: fragments that count in the block with the fewest.
        """
        may_send = self.members - sum(self.reasons.values())
        found = dead_end(number, self.members, may_send, minimum, gone=min(least, self.gone))
        if found is None:
            return None
        return (
            f"{found} At its deadline it is given up, and the job is paused. `dpagent budget show` on a "
            "board says why it declined"
        )

    def sentence(self) -> str:
        """In a line for the operator."""
        parts = [f"{self.takes_part} of {self.members} take part"]
        parts += [f"{count} {reason}" for reason, count in sorted(self.reasons.items())]
        if self.not_seen:
            parts.append(f"{self.not_seen} not seen")
        return ", ".join(parts)


def dead_end(number: int, members: int, may_send: int, minimum: int, *, gone: int = 0) -> str | None:
    """Why a round will not close, if so many members have declined it that too few are left: with tokens, a
    board decides on a round once. A fleet that has too few members yet waits for more.

    Args:
        number: the round's.
        members: of the fleet.
        may_send: those that have not declined it, and were not refused.
        minimum: that a round needs.
        gone: devices that are members no more, and of which fragments may count in each block. Nobody can
            tell whether they do, so they are taken to.
    """
    if may_send + gone >= minimum or members < minimum:
        return None
    besides = f", {counted(gone, 'board')} that has left the fleet may have" if gone == 1 else ""
    if gone > 1:
        besides = f", {counted(gone, 'board')} that have left the fleet may have"
    return (
        f"Round {number} cannot close: {counted(may_send, 'member')} may still send for it{besides}, and it "
        f"needs {minimum}. A board decides on a round once."
    )


def participation(
    entries: Sequence[Entry], devices: Sequence[Device], opened_at: float = math.inf
) -> Participation:
    """Who takes part in a round.

    Args:
        entries: of the round.
        devices: all that ever enrolled.
        opened_at: when the round was opened (Unix time).
    """
    members = {device.id for device in devices if device.is_member}
    left = {device.id for device in devices if device.has_left_since(opened_at)}
    reasons: Counter[str] = Counter()
    seen = takes_part = 0
    for entry in entries:
        if entry.device not in members:
            continue
        seen += 1
        if entry.is_granted:
            takes_part += 1
        elif entry.wish is not Wish.TAKES_PART:
            reasons[entry.wish.meaning] += 1
        else:
            reasons[_REFUSED[entry.verdict]] += 1
    gone = sum(entry.is_granted and entry.device in left for entry in entries)
    return Participation(len(members), takes_part, dict(reasons), len(members) - seen, gone)


def participation_of(
    settings: CoordinatorSettings, job: bytes, number: int, opened_at: float = math.inf
) -> Participation | None:
    """Who takes part in a round, where members have tokens; None if there are no members yet."""
    place = settings.members_place
    if not is_there(place, Part.REGISTRY):
        return None
    with contextlib.closing(RegistryReader(place)) as reader, Devices(place) as devices:
        return participation(reader.of_round(job, number), devices.all(), opened_at)


@dataclass(frozen=True, slots=True)
class Total:
    """What a device was granted over all jobs, in one column. Columns are never added."""

    unit: str
    adjacency: str
    trust: str
    epsilon: float
    """Infinite where a job guarantees nothing."""
    delta: float

    def sentence(self) -> str:
        """The figures and their scope."""
        scope = f"{self.unit}-level, {self.adjacency} adjacency, trusted party: {self.trust}"
        if not math.isfinite(self.epsilon):
            return f"no guarantee ({scope})"
        return f"ε = {upwards(self.epsilon)}, δ = {delta_upwards(self.delta)} ({scope})"


def totals(spent: Sequence[Spent]) -> list[Total]:
    """The sum over jobs in each column (basic composition), as each board's own ledger adds its jobs."""
    sums: dict[tuple[str, str, str], tuple[float, float]] = {}
    for each in spent:
        epsilon, delta = sums.get(each.scope, (0.0, 0.0))
        # Both are null without a guarantee.
        added = math.inf if each.statement["epsilon"] is None else each.statement["epsilon"]
        more = 1.0 if each.statement["delta"] is None else each.statement["delta"]
        sums[each.scope] = epsilon + added, min(1.0, delta + more)
    return [Total(*scope, *figures) for scope, figures in sorted(sums.items())]


def total_values(total: Total) -> dict[str, Any]:
    """For JSON; ε is null without a guarantee."""
    return {
        "unit": total.unit, "adjacency": total.adjacency, "trust": total.trust,
        "epsilon": total.epsilon if math.isfinite(total.epsilon) else None, "delta": total.delta,
    }  # fmt: skip
