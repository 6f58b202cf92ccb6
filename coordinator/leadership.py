"""The program that runs rounds, where several share its state in PostgreSQL: how it is chosen, and what it
does for workers.

The database chooses (:meth:`PostgresqlDatabase.lead`). Another one that starts meanwhile stands by: it is
refused with :class:`FleetLedError`, and tries again until it is its turn.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Final

from coordinator.announcer import Announcer
from coordinator.database.interface import Database
from coordinator.database.opening import open_database, open_postgresql
from coordinator.keys import sealing_secret
from coordinator.settings import CoordinatorSettings
from coordinator.shared_store import GONE_S, Receipts, Workers, claim, workers_at
from dpagent import __version__
from dpagent.errors import FleetLedError
from dpagent.structured_log import Event, about

log = logging.getLogger(__name__)

_LOOK_S: Final = 5.0
_ALONE_S: Final = 5.0
"""How long a round may be open without a worker before the operator is told."""


def lead(settings: CoordinatorSettings, signing_key: str) -> Database:
    """The database, for the one program that runs rounds.

    Args:
        settings: ``fleet.yaml``, with paths resolved.
        signing_key: of the coordinator, public.

    Raises:
        FleetLedError: Another program runs the rounds of this fleet, by the same database.
        ConfigurationError: The database is another coordinator's, or its address is wrong.
        StorageError, DatabaseAwayError: It cannot be used.
    """
    address = settings.store.address()
    if address is None:
        return open_database(settings.state_dir)
    database = open_postgresql(address, f"coordinator of {settings.fleet}")
    try:
        if not database.lead():
            raise FleetLedError(
                f"The rounds of fleet {settings.fleet} are run by another coordinator"
                f" ({database.leader() or 'which has just begun'})."
            )
        with database.errors():
            claim(
                database,
                settings.fleet,
                signing_key,
                version=__version__,
                leader=f"{socket.gethostname()}, process {os.getpid()}",
                sealing_key=sealing_secret(settings.keys_dir) if settings.store.shares_sealing_key else None,
            )
    except BaseException:
        database.close()
        raise
    return database


class WorkersDesk:
    """What the program that runs rounds does for its workers.

    Args:
        database: that it leads.
        announcer: publishes receipts.
    """

    def __init__(self, database: Database, announcer: Announcer) -> None:
        self._database, self._announcer = database, announcer
        self._receipts, self._workers = Receipts(database), Workers(database)
        self._looked_at = -float("inf")
        self._alone_since: float | None = None
        self._has_complained = False

    def tend(self, *, is_counting: bool) -> bool:
        """Publish receipts that workers have left, and look after them.

        Args:
            is_counting: whether a round is open.

        Returns:
            Whether more receipts may wait.
        """
        now = time.monotonic()
        if now >= self._looked_at + _LOOK_S:
            self._looked_at = now
            self._look(now, is_counting=is_counting)
        if not self._announcer.is_connected:
            return False
        waiting = self._receipts.waiting()
        if not waiting:
            return False
        self._announcer.publish_receipts(b"".join(digests for _, digests in waiting))
        self._receipts.forget([number for number, _ in waiting])
        return True

    def _look(self, now: float, *, is_counting: bool) -> None:
        for gone in self._workers.take_leave():
            log.warning(
                "worker %s was not seen for %g s; what it had not counted, devices send again",
                gone.name, GONE_S, extra=about(event=Event.WORKER_GONE, worker=gone.name),
            )  # fmt: skip
        if workers_at(self._database) or not is_counting:
            self._alone_since, self._has_complained = None, False
            return
        self._alone_since = now if self._alone_since is None else self._alone_since
        if now >= self._alone_since + _ALONE_S and not self._has_complained:
            self._has_complained = True
            log.warning(
                "no worker counts fragments: start `dpagent coordinator worker`, on any machine",
                extra=about(event=Event.NO_WORKER),
            )
