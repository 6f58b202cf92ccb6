"""The tables, and the steps from each version of them to the next: the same for both databases.

Steps are added, never changed. Types go by SQLite's names; PostgreSQL's stand beside them.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

TYPES: Final = {"INTEGER": "BIGINT", "REAL": "DOUBLE PRECISION", "BLOB": "BYTEA", "TEXT": "TEXT"}
"""SQLite's, and what they are in PostgreSQL."""


class Schema(ABC):
    """What a step changes: a database inside a transaction."""

    @abstractmethod
    def create(self, table: str, columns: str) -> None:
        """Create a table.

        Args:
            table: its name.
            columns: as SQL, with SQLite's types and ``SERIAL`` for a key that counts up by itself.
        """

    @abstractmethod
    def add_column(self, table: str, column: str) -> None:
        """Add a column to a table.

        Args:
            table: its name.
            column: as SQL, with SQLite's types.
        """

    @abstractmethod
    def execute(self, statement: str, values: Sequence[object] = ()) -> object:
        """Run a statement that both databases understand."""


Step = Callable[[Schema], None]


def _create(schema: Schema) -> None:
    schema.create(
        "jobs",
        """number SERIAL, name TEXT NOT NULL UNIQUE, id BLOB NOT NULL UNIQUE,
            settings TEXT NOT NULL, terms TEXT NOT NULL, budget TEXT NOT NULL,
            state TEXT NOT NULL
                CHECK (state IN ('waiting', 'running', 'cancelling', 'failing', 'finished', 'cancelled',
                'failed')),
            paused INTEGER NOT NULL DEFAULT 0 CHECK (paused IN (0, 1)), trouble TEXT,
            sends_model INTEGER NOT NULL DEFAULT 0 CHECK (sends_model IN (0, 1)), deadline_s REAL,
            added_at REAL NOT NULL, begun_at REAL, ended_at REAL""",
    )
    schema.create(
        "models",
        "job INTEGER PRIMARY KEY REFERENCES jobs, weights BLOB NOT NULL, moments BLOB NOT NULL, "
        "clip_norm REAL NOT NULL, radii TEXT NOT NULL, projection BLOB",
    )
    # Nothing is counted in a round after `counted_at`; `devices`, `plan` and `token_keys` are for workers.
    schema.create(
        "rounds",
        """job INTEGER NOT NULL REFERENCES jobs, number INTEGER NOT NULL, opened_at REAL NOT NULL,
            deadline REAL NOT NULL, announced_at REAL, counted_at REAL, closed_at REAL, given_up_at REAL,
            noise_multiplier REAL, epsilon REAL, accuracy REAL, clamped INTEGER, kept REAL,
            fragments INTEGER, least_counted INTEGER, out_of_range TEXT, clip_norm REAL,
            devices INTEGER, plan BLOB, token_keys BLOB, PRIMARY KEY (job, number)""",
    )
    # Without references: a check for each fragment would cost more than all else here.
    schema.create(
        "fragments",
        """id BLOB PRIMARY KEY, job INTEGER NOT NULL, round INTEGER NOT NULL, position INTEGER NOT NULL,
            ticket BLOB NOT NULL, batch INTEGER NOT NULL, digest BLOB NOT NULL, arrived_at REAL NOT NULL""",
    )
    schema.execute("CREATE INDEX fragments_by_ticket ON fragments (job, round, position, ticket)")
    schema.create(
        "partial_sums",
        """batch INTEGER NOT NULL, round INTEGER NOT NULL, position INTEGER NOT NULL,
            fragments INTEGER NOT NULL, units BLOB NOT NULL, type TEXT NOT NULL,
            ids BLOB, kept BLOB, kept_type TEXT,
            PRIMARY KEY (round, position, batch)""",
    )
    schema.create(
        "tallies",
        """round INTEGER NOT NULL, position INTEGER NOT NULL, counter INTEGER NOT NULL,
            fragments INTEGER NOT NULL, PRIMARY KEY (round, position, counter)""",
    )
    schema.create("tickets", "key BLOB NOT NULL")
    schema.execute("INSERT INTO tickets VALUES (?)", (os.urandom(32),))
    schema.create("receipts", "number SERIAL, digests BLOB NOT NULL")
    schema.create(
        "counters",
        "job INTEGER NOT NULL REFERENCES jobs, name TEXT NOT NULL, value INTEGER NOT NULL, "
        "PRIMARY KEY (job, name)",
    )
    schema.create("passed_rounds", "job INTEGER PRIMARY KEY REFERENCES jobs, number INTEGER NOT NULL")
    # One row: whose this is, and of which version of dpagent the programs are.
    schema.create(
        "fleet",
        """one INTEGER PRIMARY KEY CHECK (one = 1), name TEXT NOT NULL, signing_key TEXT NOT NULL,
            version TEXT NOT NULL, leader TEXT NOT NULL, led_since REAL NOT NULL, sealing_key BLOB""",
    )
    schema.create(
        "workers",
        """number SERIAL, name TEXT NOT NULL, version TEXT NOT NULL, began_at REAL NOT NULL,
            seen_at REAL NOT NULL, ended_at REAL, fragments INTEGER NOT NULL DEFAULT 0""",
    )


def _create_members(schema: Schema) -> None:
    schema.create(
        "devices",
        "id TEXT PRIMARY KEY, certificate BLOB NOT NULL, enrolled_at REAL NOT NULL, state TEXT NOT NULL, "
        "replaces TEXT UNIQUE REFERENCES devices (id), note TEXT NOT NULL, revoked_at REAL, "
        "excluded_at REAL",
    )
    schema.create(
        "certificates",
        """fingerprint BLOB PRIMARY KEY, serial TEXT NOT NULL, key BLOB NOT NULL,
            device TEXT NOT NULL REFERENCES devices (id), issued_at REAL NOT NULL,
            expires_at REAL NOT NULL""",
    )
    schema.execute("CREATE INDEX certificates_by_device ON certificates (device)")
    schema.execute("CREATE INDEX certificates_by_key ON certificates (key)")
    schema.create(
        "invitations",
        """hash BLOB PRIMARY KEY, made_at REAL NOT NULL, expires_at REAL NOT NULL, uses INTEGER NOT NULL,
            used INTEGER NOT NULL, replaces TEXT, note TEXT NOT NULL""",
    )
    schema.create(
        "redemptions",
        "invitation BLOB NOT NULL, key BLOB NOT NULL, device TEXT NOT NULL, PRIMARY KEY (invitation, key)",
    )


def _create_registry(schema: Schema) -> None:
    schema.create(
        "keys",
        "job BLOB NOT NULL, round INTEGER NOT NULL, modulus BLOB NOT NULL, secret BLOB, "
        "PRIMARY KEY (job, round)",
    )
    schema.create(
        "prices",
        "job BLOB NOT NULL, round INTEGER NOT NULL, columns TEXT NOT NULL, PRIMARY KEY (job, round)",
    )
    schema.create(
        "grants",
        """device TEXT NOT NULL, job BLOB NOT NULL, round INTEGER NOT NULL, wish INTEGER NOT NULL,
            verdict INTEGER NOT NULL, at REAL NOT NULL, statement BLOB NOT NULL, signature BLOB NOT NULL,
            PRIMARY KEY (device, job, round)""",
    )
    schema.execute("CREATE INDEX grants_by_round ON grants (job, round, verdict)")
    schema.create(
        "ledgers",
        """device TEXT PRIMARY KEY, entries INTEGER NOT NULL, statement BLOB NOT NULL,
            signature BLOB NOT NULL, went_back INTEGER NOT NULL""",
    )


def _watch(schema: Schema) -> None:
    """What the fleet's page shows besides: measurements of rounds, and who ordered what."""
    schema.create(
        "measurements",
        """job INTEGER NOT NULL REFERENCES jobs, round INTEGER NOT NULL, loss REAL, by_class TEXT,
            confusion TEXT, received INTEGER NOT NULL, published INTEGER NOT NULL,
            PRIMARY KEY (job, round)""",
    )
    schema.create(
        "orders",
        """number SERIAL, at REAL NOT NULL, giver TEXT NOT NULL, kind TEXT NOT NULL, job TEXT NOT NULL,
            detail TEXT NOT NULL""",
    )


def _confirm(schema: Schema) -> None:
    """When a device has first shown a certificate to the enrolment endpoint: before, it may not have it."""
    schema.add_column("certificates", "confirmed_at REAL")


def _go_on(schema: Schema) -> None:
    """What an operator may order for a round that lacks boards: to close with fewer, or to be given up."""
    schema.add_column("jobs", "minimum_devices INTEGER")
    schema.add_column("jobs", "gives_up INTEGER")


def _announce(schema: Schema) -> None:
    """What was announced of a key besides its modulus: what boards sign is a digest of all of it."""
    schema.add_column("keys", "linkability TEXT")
    schema.add_column("keys", "tokens INTEGER")
    schema.add_column("keys", "sealing_key BLOB")


class Part(StrEnum):
    """What SQLite keeps in a file of its own, since other programs write it at other times."""

    ROUNDS = "coordinator.db"
    """The queue of jobs, and what each of them keeps."""
    MEMBERS = "members.db"
    """Devices, their certificates, and invitations."""
    REGISTRY = "registry.db"
    """What each device was granted, and the keys of tokens."""


STEPS: Final[tuple[tuple[Part, Step], ...]] = (
    (Part.ROUNDS, _create),
    (Part.MEMBERS, _create_members),
    (Part.REGISTRY, _create_registry),
    (Part.ROUNDS, _watch),
    (Part.MEMBERS, _confirm),
    (Part.ROUNDS, _go_on),
    (Part.REGISTRY, _announce),
)


def steps_of(part: Part) -> list[Step]:
    """The steps of one part, in their order."""
    return [step for each, step in STEPS if each is part]
