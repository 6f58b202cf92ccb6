"""What the budget registry says: who takes part in a round, and what each device was granted."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coordinator.database.opening import is_there
from coordinator.database.schema import Part
from coordinator.devices import Device, Devices
from coordinator.registry import Entry, RegistryReader, Spent
from coordinator.settings import CoordinatorSettings
from dpagent.notation import plain_bound, upwards
from dpagent.privacy.statement import Unit, implies
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
    left_out: int = 0
    """Jobs of which nothing is proven in this column, which are not in the figure: nothing bounds them
    there."""

    @property
    def scope(self) -> tuple[str, str, str]:
        """See :class:`~dpagent.privacy.statement.BudgetStatement`."""
        return self.unit, self.adjacency, self.trust

    @property
    def in_words(self) -> str:
        """The column, for a table."""
        others = f", without {counted(self.left_out, 'job')}" * bool(self.left_out)
        return f"{self.unit}, trusts {self.trust}{others}"

    def sentence(self) -> str:
        """The figures and their scope."""
        scope = f"{self.unit}-level, {self.adjacency} adjacency, trusted party: {self.trust}"
        if not math.isfinite(self.epsilon):
            return f"no guarantee ({scope})"
        others = f", without {counted(self.left_out, 'job')} that nothing bounds there" * bool(self.left_out)
        return f"ε = {upwards(self.epsilon)}, δ = {plain_bound(self.delta)} ({scope}){others}"


def totals(spent: Sequence[Spent]) -> list[Total]:
    """The sum over jobs in each column (basic composition), as each board's own ledger adds its jobs: one
    with a figure that implies one of the column counts there too (:func:`dpagent.privacy.statement.implies`).
    """
    jobs: dict[str, list[Spent]] = defaultdict(list)
    for each in spent:
        jobs[each.job].append(each)
    return [_total(scope, jobs.values()) for scope in sorted({each.scope for each in spent})]


def _total(scope: tuple[str, str, str], jobs: Iterable[Sequence[Spent]]) -> Total:
    epsilon, delta, left_out = 0.0, 0.0, 0
    for columns in jobs:
        if (figure := _figure_in(columns, scope)) is None:
            left_out += scope[0] != Unit.COORDINATE  # A figure for single numbers is for no device anyhow.
            continue
        # Both are null without a guarantee.
        epsilon += math.inf if figure["epsilon"] is None else figure["epsilon"]
        delta += 1.0 if figure["delta"] is None else figure["delta"]
    return Total(*scope, epsilon, min(1.0, delta), left_out)


def _figure_in(columns: Sequence[Spent], scope: tuple[str, str, str]) -> dict[str, Any] | None:
    """A job's own figure of a column, or one that implies it; None without any."""
    own = [each.statement for each in columns if each.scope == scope]
    implied = [each.statement for each in columns if implies(each.scope, scope)]
    return next(iter([*own, *implied]), None)


def total_values(total: Total) -> dict[str, Any]:
    """For JSON; ε is null without a guarantee."""
    return {
        "unit": total.unit, "adjacency": total.adjacency, "trust": total.trust,
        "epsilon": total.epsilon if math.isfinite(total.epsilon) else None, "delta": total.delta,
        "jobs_left_out": total.left_out,
    }  # fmt: skip
