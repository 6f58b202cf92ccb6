"""Invitations: who may enrol, how often and until when. Of a code's secret, the table has a hash alone.

Tables beside those of the devices (:mod:`coordinator.devices`), so that a use and the device that came of it
are one transaction. Whoever asks again with the same key, after an answer that was lost, gets the same
device: that is no second use.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.database.interface import Database
from coordinator.database.opening import finds
from coordinator.database.schema import Part
from coordinator.database.settings import StorePlace
from dpagent.protocol.enrolment import hash_of, name_of


@dataclass(frozen=True, slots=True)
class InvitationRecord:
    """An invitation, as the fleet knows it. Times are Unix times."""

    hash: bytes
    made_at: float
    expires_at: float
    uses: int
    """How many boards may enrol with it."""
    used: int
    replaces: str | None
    """The device whose place the board takes that enrols with it."""
    note: str

    @property
    def name(self) -> str:
        """How commands call it: nothing of the secret."""
        return name_of(self.hash)


class Invitations:
    """The table of invitations.

    Args:
        database: of the members. What changes it is called in a transaction.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def open(self, *, at: float) -> list[InvitationRecord]:
        """Those that still let somebody in, oldest first."""
        rows = self._database.execute(
            "SELECT * FROM invitations WHERE used < uses AND expires_at > ? ORDER BY made_at, hash", (at,)
        )
        return [InvitationRecord(**row) for row in rows]

    def find(self, secret: bytes) -> InvitationRecord | None:
        """The invitation of a secret."""
        row = self._database.execute(
            "SELECT * FROM invitations WHERE hash = ?", (hash_of(secret),)
        ).fetchone()
        return None if row is None else InvitationRecord(**row)

    def redeemed(self, invitation: InvitationRecord, key: bytes) -> str | None:
        """The device that enrolled with an invitation and a key (its digest)."""
        row = self._database.execute(
            "SELECT device FROM redemptions WHERE invitation = ? AND key = ?", (invitation.hash, key)
        ).fetchone()
        return None if row is None else str(row["device"])

    def add(
        self,
        secret: bytes,
        *,
        made_at: float,
        expires_at: float,
        uses: int = 1,
        replaces: str | None = None,
        note: str = "",
    ) -> None:
        """Keep an invitation, without its secret."""
        self._database.execute(
            "INSERT INTO invitations VALUES (?, ?, ?, ?, 0, ?, ?)",
            (hash_of(secret), made_at, expires_at, uses, replaces, note),
        )

    def redeem(self, invitation: InvitationRecord, key: bytes, device: str) -> None:
        """Note a use. The caller has seen that the invitation is open."""
        self._database.execute("UPDATE invitations SET used = used + 1 WHERE hash = ?", (invitation.hash,))
        self._database.execute("INSERT INTO redemptions VALUES (?, ?, ?)", (invitation.hash, key, device))

    def withdraw(self, *, at: float) -> int:
        """Let no open invitation be used any more; return how many there were."""
        return self._database.execute(
            "UPDATE invitations SET expires_at = ? WHERE used < uses AND expires_at > ?", (at, at)
        ).rowcount


def has_invited(place: StorePlace) -> bool:
    """Whether boards enrol in a fleet: one has been invited.

    Args:
        place: of the members.

    Raises:
        StorageError, ConfigurationError: That cannot be told.
    """
    return finds(place, Part.MEMBERS, "SELECT 1 FROM invitations LIMIT 1")
