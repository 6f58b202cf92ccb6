"""The seats of a round's blocks: which fragments count, each once, and their exact sums.

A block has as many seats as there are devices. Each fragment draws a ticket, a keyed hash of its id, and
the least tickets hold the seats. If more fragments arrive, each has the same chance, in whatever order
they came: a flood that comes first does not shut honest fragments out, and sending one again draws nothing
new. The order of the tickets also deals a block's fragments to groups. Where each fragment is paid for with a
member's token nobody can flood, and there are as many seats as fragments.

A dummy takes no seat, and nothing of it is kept. It gets a receipt where a fragment in its place would have a
seat: otherwise a flood of fragments would tell dummies by the receipts. A probe gets one always, and nothing
of it is kept either: devices go on by it, and that they send one tells nothing of them.

**Sums.** The fragments of one batch are added up for each block before they are written: a *partial sum*,
which no later batch changes, so that programs that count beside each other do not wait for each other. The
values themselves are kept beside it only where a seat can be lost, or is dealt to a group. All are integers:
the same fragments give the same bits in any order, in any batches, by any number of programs.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.database.interface import Database
from dpagent.errors import StorageError
from dpagent.protocol.packing import Units

_TICKET_BYTES: Final = 16
_DIGEST_BYTES: Final = 8
_ID_BYTES: Final = 16
_AT_ONCE: Final = 500
"""Ids in one question; SQLite takes 999 or more."""
_TYPES: Final = {"<i1": 7, "<i2": 15, "<i4": 31, "<i8": 63}
"""Of stored values, with the bits of their magnitude."""
_COLUMNS: Final = {
    "id": "BLOB", "job": "INTEGER", "round": "INTEGER", "position": "INTEGER", "ticket": "BLOB",
    "batch": "INTEGER", "digest": "BLOB", "arrived_at": "REAL",
}  # fmt: skip

Sums = dict[int, tuple[int, NDArray[np.int64]]]
"""By block position, a number of fragments and their exact integer sum."""


class OpenedFragment(NamedTuple):
    """An opened fragment, checked against the plan."""

    id: bytes
    round: int
    position: int
    values: Units
    arrived_at: float
    dummy: bool = False
    probe: bool = False
    sent: bytes | None = None
    """The payload, if it is at hand: it tells the fragment sent again from another one with its id sooner
    than the values do."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The result of counting a batch of fragments."""

    fresh: tuple[bytes, ...] = ()
    """Ids that took a seat now. One may lose it later, to a fragment with a smaller ticket."""
    repeated: tuple[bytes, ...] = ()
    """Ids that took a seat before: their receipt was lost."""
    dummies: tuple[bytes, ...] = ()
    """Ids of dummies for which there would be a seat."""
    probes: tuple[bytes, ...] = ()
    """Ids of probes, also of closed rounds."""
    unseated: int = 0
    """Fragments that found no seat, or lost theirs to another, and dummies without one."""
    spent: int = 0
    """Fragments whose id, and so whose token, another fragment has."""
    late: int = 0
    """Messages with fragments of closed rounds. Only their number is stored: anyone can seal any number
    of them, and storing them would fill the disk. They get no receipt, even if they counted in their round: a
    dummy of a closed round could not get one."""

    @property
    def receipted(self) -> list[bytes]:
        """Ids that get a receipt, in an order that does not tell dummies from others."""
        return sorted((*self.fresh, *self.repeated, *self.dummies, *self.probes))


class Seats:
    """The seats in an open database. What changes them has to run inside a transaction.

    Of all jobs, one round is open at a time, so a partial sum names no job.

    Args:
        database: Of the coordinator.
        job: The number of the job whose fragments are seated.
        counter: Of the program that counts, among those that do.
    """

    def __init__(self, database: Database, job: int, counter: int = 0) -> None:
        self._database, self._job, self._counter = database, job, counter

    def take(
        self,
        fragments: Sequence[OpenedFragment],
        open_round: int,
        seats: int | None,
        *,
        keeps_values: bool = True,
    ) -> Counted:
        """Seat the fragments of the open round, each once.

        Args:
            fragments: checked against the plan.
            open_round: the number of the open round.
            seats: of each block; None for as many as come.
            keeps_values: whether each fragment's values are kept beside their sums; with a number of seats,
                they have to be.
        """
        probes = [fragment.id for fragment in fragments if fragment.probe]
        fragments = [fragment for fragment in fragments if not fragment.probe]
        now = [fragment for fragment in fragments if fragment.round == open_round]
        # By the object: one id may come with two contents.
        digests = {id(fragment): _digest(fragment) for fragment in now if not fragment.dummy}
        first: dict[bytes, OpenedFragment] = {}
        for fragment in now:
            if not fragment.dummy:
                first.setdefault(fragment.id, fragment)
        taken = self.counts(open_round) if seats is not None else {}
        cuts = self._cuts(open_round, {each.position for each in now}, taken, seats)
        tickets = {identity: self._ticket(identity) for identity in first}
        candidates = [
            each for each in first.values() if tickets[each.id] <= cuts.get(each.position, tickets[each.id])
        ]
        batch = int.from_bytes(os.urandom(8), "big") >> 1
        added = self._database.add_absent(
            "fragments",
            _COLUMNS,
            [
                (
                    each.id, self._job, open_round, each.position, tickets[each.id], batch,
                    digests[id(each)], each.arrived_at,
                )
                for each in candidates
            ],
        )  # fmt: skip
        gained = Counter(first[identity].position for identity in added)
        lost: set[bytes] = set()
        if seats is not None:
            after = Counter(taken) + gained
            cuts |= self._cuts(open_round, set(gained), after, seats)
            lost = self._free(open_round, [at for at in gained if after[at] > seats], cuts, gained)
        self._note(open_round, gained)
        fresh = [each for each in candidates if each.id in added and each.id not in lost]
        self._add(batch, open_round, fresh, keeps_values=keeps_values)
        known = self._known([each.id for each in candidates if each.id not in added])
        known |= {each.id: (open_round, digests[id(each)]) for each in fresh}
        told = self._told(now, fresh, known, digests, cuts, lost, late=len(fragments) - len(now))
        return replace(told, probes=tuple(probes))

    def _told(
        self,
        now: Sequence[OpenedFragment],
        fresh: Sequence[OpenedFragment],
        known: Mapping[bytes, tuple[int, bytes]],
        digests: Mapping[int, bytes],
        cuts: Mapping[int, bytes],
        lost: set[bytes],
        *,
        late: int,
    ) -> Counted:
        """What became of each message of a batch that is counted."""
        waiting = {each.id for each in fresh}
        repeated: list[bytes] = []
        dummies: list[bytes] = []
        unseated, spent = len(lost), 0
        for each in now:
            if each.dummy:
                # As a fragment in its place: with a seat if fewer than all seats have a lesser ticket.
                cut = cuts.get(each.position)
                if cut is None or self._ticket(each.id) < cut:
                    dummies.append(each.id)
                else:
                    unseated += 1
            elif each.id in lost:
                lost.remove(each.id)  # It is among those that lost their seats; sent again, it counts again.
            elif each.id not in known:
                unseated += 1
            elif known[each.id] != (each.round, digests[id(each)]):
                spent += 1
            elif each.id in waiting:
                waiting.remove(each.id)
            else:
                repeated.append(each.id)
        return Counted(
            tuple(each.id for each in fresh), tuple(repeated), tuple(dummies),
            unseated=unseated, spent=spent, late=late,
        )  # fmt: skip

    def counts(self, number: int) -> dict[int, int]:
        """Taken seats of a round by position."""
        rows = self._database.execute(
            "SELECT position, CAST(sum(fragments) AS BIGINT) AS taken FROM tallies WHERE round = ? "
            "GROUP BY position",
            (number,),
        )
        return {row["position"]: int(row["taken"]) for row in rows if row["taken"]}

    def settle(self, number: int, seats: int | None) -> None:
        """Free the seats that are too many: programs that count beside each other do not see what the others
        are about to seat.

        Args:
            number: of the round; nobody counts in it any more.
            seats: of each block.
        """
        if seats is None:
            return
        counts = self.counts(number)
        full = {position for position, count in counts.items() if count > seats}
        change: Counter[int] = Counter()
        self._free(number, full, self._cuts(number, full, counts, seats), change)
        self._note(number, change)

    def keeps_values_of(self, number: int) -> bool:
        """Whether the values of all of a round's fragments are there, so that they can be dealt to groups."""
        row = self._database.execute(
            "SELECT 1 FROM partial_sums WHERE round = ? AND kept IS NULL LIMIT 1", (number,)
        ).fetchone()
        return row is None

    def sums(self, number: int, *, groups: int = 1) -> list[Sums]:
        """Counts and exact integer sums of a round's fragments, dealt to random groups.

        The groups of a block are of equal size, give or take one fragment. If it has fewer fragments than
        groups, some groups have none.

        Args:
            number: of the round.
            groups: at least 1.

        Returns:
            One for each group.

        Raises:
            StorageError: Values are needed that were not kept.
        """
        counts = self.counts(number)
        if groups > 1:
            return self._dealt(number, counts, groups)
        found: Sums = {}
        for row in self._database.stream(
            "SELECT position, fragments, units, type FROM partial_sums WHERE round = ?", (number,)
        ):
            units = np.frombuffer(row["units"], row["type"])
            count, total = found.get(row["position"], (0, np.zeros(len(units), np.int64)))
            total += units
            found[row["position"]] = (count + row["fragments"], total)
        changed = {at: counts.get(at, 0) for at, (count, _) in found.items() if count != counts.get(at, 0)}
        for position in changed:
            del found[position]
        (corrected,) = self._dealt(number, changed, 1)
        return [found | corrected]

    def _dealt(self, number: int, positions: Iterable[int], groups: int) -> list[Sums]:
        """See :meth:`sums`: of some blocks, from the values of each fragment."""
        found: list[Sums] = [{} for _ in range(groups)]
        for position in positions:
            values = dict(self._kept(number, position))
            rows = self._database.execute(
                "SELECT id FROM fragments WHERE job = ? AND round = ? AND position = ? ORDER BY ticket",
                (self._job, number, position),
            )
            for place, row in enumerate(rows):
                group = found[place % groups]
                units = values[row["id"]]
                count, total = group.get(position, (0, np.zeros(len(units), np.int64)))
                total += units
                group[position] = (count + 1, total)
        return found

    def _kept(self, number: int, position: int) -> Iterator[tuple[bytes, NDArray[np.int64]]]:
        """Ids and values of the fragments of a block."""
        for row in self._database.stream(
            "SELECT ids, kept, kept_type FROM partial_sums WHERE round = ? AND position = ?",
            (number, position),
        ):
            if row["kept"] is None:
                raise StorageError(
                    f"{self._database.name}: the fragments of round {number} were added up without their "
                    "values, so they cannot be dealt to groups."
                )
            count = len(row["ids"]) // _ID_BYTES
            values = np.frombuffer(row["kept"], row["kept_type"]).reshape(count, -1)
            for place in range(count):
                yield bytes(row["ids"][place * _ID_BYTES : (place + 1) * _ID_BYTES]), values[place]

    def clear(self, number: int) -> None:
        """Drop the values and sums of a closed round; the ids remain."""
        self._database.execute("DELETE FROM partial_sums WHERE round = ?", (number,))
        self._database.execute("DELETE FROM tallies WHERE round = ?", (number,))

    def _cuts(
        self, number: int, positions: Iterable[int], counts: Mapping[int, int], seats: int | None
    ) -> dict[int, bytes]:
        """By position the greatest ticket that holds a seat, of those blocks whose seats are all taken."""
        found: dict[int, bytes] = {}
        for position in positions:
            if seats is None or counts.get(position, 0) < seats:
                continue
            row = self._database.execute(
                "SELECT ticket FROM fragments WHERE job = ? AND round = ? AND position = ? "
                "ORDER BY ticket LIMIT 1 OFFSET ?",
                (self._job, number, position, seats - 1),
            ).fetchone()
            if row is not None:
                found[position] = bytes(row["ticket"])
        return found

    def _free(
        self, number: int, positions: Iterable[int], cuts: Mapping[int, bytes], change: Counter[int]
    ) -> set[bytes]:
        """Take their seats from the fragments beyond a block's greatest ticket, whose ids are returned."""
        lost: set[bytes] = set()
        for position in sorted(positions):
            rows = self._database.execute(
                "DELETE FROM fragments WHERE job = ? AND round = ? AND position = ? AND ticket > ? "
                "RETURNING id",
                (self._job, number, position, cuts[position]),
            ).fetchall()
            change[position] -= len(rows)
            lost.update(bytes(row["id"]) for row in rows)
        return lost

    def _note(self, number: int, change: Mapping[int, int]) -> None:
        """Note how the numbers of taken seats change."""
        self._database.execute_many(
            "INSERT INTO tallies VALUES (?, ?, ?, ?) ON CONFLICT (round, position, counter) "
            "DO UPDATE SET fragments = tallies.fragments + excluded.fragments",
            [(number, at, self._counter, count) for at, count in sorted(change.items()) if count],
        )

    def _add(
        self, batch: int, number: int, fragments: Sequence[OpenedFragment], *, keeps_values: bool
    ) -> None:
        """Write the partial sums of a batch."""
        by_position: defaultdict[int, list[OpenedFragment]] = defaultdict(list)
        for each in fragments:
            by_position[each.position].append(each)
        rows: list[tuple[object, ...]] = []
        for position, some in by_position.items():
            values: Units = np.array([each.values for each in some])
            kept = (b"".join(each.id for each in some), *_stored(values)) if keeps_values else (None,) * 3
            total = values.sum(axis=0, dtype=np.int64)
            rows.append((batch, number, position, len(some), *_stored(total), *kept))
        self._database.execute_many("INSERT INTO partial_sums VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def _known(self, ids: Sequence[bytes]) -> dict[bytes, tuple[int, bytes]]:
        """Those of the ids that have a seat, or had one in a closed round: the round, and the digest of the
        fragment."""
        found: dict[bytes, tuple[int, bytes]] = {}
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            marks = ", ".join("?" * len(some))
            for row in self._database.execute(
                f"SELECT id, job, round, digest FROM fragments WHERE id IN ({marks})", some
            ):
                number = row["round"] if row["job"] == self._job else 0
                found[bytes(row["id"])] = (number, bytes(row["digest"]))
        return found

    def _ticket(self, fragment_id: bytes) -> bytes:
        return hashlib.blake2b(fragment_id, key=self._key, digest_size=_TICKET_BYTES).digest()

    @cached_property
    def _key(self) -> bytes:
        # Nobody who chooses an id knows it, so nobody chooses a ticket.
        return bytes(self._database.execute("SELECT key FROM tickets").fetchone()["key"])


def _digest(fragment: OpenedFragment) -> bytes:
    """Tells a fragment that is sent again from another one with its id."""
    content = fragment.values.astype("<i8").tobytes() if fragment.sent is None else fragment.sent
    said = fragment.position.to_bytes(4, "big") + content
    return hashlib.blake2b(said, digest_size=_DIGEST_BYTES).digest()


def _stored(values: Units) -> tuple[bytes, str]:
    """Values in the narrowest type that holds them, mostly one byte each, and the type."""
    largest = int(np.abs(values).max(initial=0))
    kind = next(name for name, bits in _TYPES.items() if largest < 1 << bits)
    return values.astype(kind).tobytes(), kind
