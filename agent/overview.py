"""A board at a glance, for ``dpagent status``: what its agent does, what is spent, what its sensors read.

It is read beside a running agent: its status file, its database for reading, the ledger's second head. No
lock is taken that the agent holds, nothing is written, no program is run, and the broker is not asked.

Nothing of it depends on a record, except through heat and the memory that is free, as anybody on the board
can read them. What a round's owner alone may know (why no record counts in it) is left out.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from agent.audit import open_ledger
from agent.columns import dataset_of
from agent.governor_settings import GovernorSettings, is_in, next_change
from agent.heads import read_second_head
from agent.rounds import RoundState
from agent.sensors import Sensors, text_in
from agent.settings import AgentSettings
from agent.status import Doing, Link, OtherStatus, RoundStatus, Status, presence_of, read_status
from dpagent.database_file import database_errors
from dpagent.errors import DpagentError, LedgerError, StorageError
from dpagent.status_file import Presence

_LEFT_TO_DO: Final = (RoundState.OFFERED, RoundState.CHARGED, RoundState.SITTING_OUT)
_TELLS_WHY: Final = (RoundState.DECLINED, RoundState.SITTING_OUT, RoundState.SAT_OUT)
"""What led to these was decided before a record was read."""


@dataclass(frozen=True, slots=True)
class KnownRound:
    """The round that the device heard of last, as its database has it.

    Attributes:
        job: its id, in hexadecimal.
        round: its number.
        state: see :class:`~agent.rounds.RoundState`.
        reason: why it is declined or sat out.
        changed_at: Unix time of the state.
        fragments: how many of them are waiting, sent, counted and expired.
    """

    job: str
    round: int
    state: str
    reason: str | None
    changed_at: float
    fragments: dict[str, int]


@dataclass(frozen=True, slots=True)
class Account:
    """A lifetime budget, and what is left of it.

    Attributes:
        name: in the ledger; see :mod:`agent.columns`.
        epsilon_spent: by the rounds so far; infinite after rounds without a guarantee.
        epsilon_reserved, delta_reserved: by all jobs so far.
        epsilon_budget, delta_budget: for the device's life.
    """

    name: str
    epsilon_spent: float
    epsilon_reserved: float
    epsilon_budget: float
    delta_reserved: float
    delta_budget: float

    @property
    def epsilon_left(self) -> float:
        """For other jobs."""
        return max(0.0, self.epsilon_budget - self.epsilon_reserved)

    @property
    def delta_left(self) -> float:
        """For other jobs."""
        return max(0.0, self.delta_budget - self.delta_reserved)


@dataclass(frozen=True, slots=True)
class Readings:
    """What the kernel says of the board now; None where it does not.

    Attributes:
        temperature_c: of the processor.
        available_mib: memory that programs could have.
        agent_mib: resident memory of the agent itself, without training.
    """

    temperature_c: float | None
    available_mib: int | None
    agent_mib: int | None


@dataclass(frozen=True, slots=True)
class Window:
    """The hours in which the board may train.

    Attributes:
        is_open: whether it may now.
        changes_in_s: seconds until that changes; None if it never does.
    """

    is_open: bool
    changes_in_s: int | None


@dataclass(frozen=True, slots=True)
class Overview:
    """A board at a glance.

    Attributes:
        presence: of the agent; None if none has run here.
        status: its last one; None if it is not understood.
        is_other: whether the agent is of another version, whose status this program does not understand.
        round: the last one on record.
        accounts: of the ledger.
        problem: why the ledger cannot be read; None if it can.
        last_receipt_at: Unix time, as far as it is known.
        has_governor: whether anything is set that may hold training back.
        highest_temperature_c: that the governor allows.
        window: of the governor's hours; None where it has none.
        readings: of the sensors.
        model: the file of the last finished job's model, and
        model_at: when it was written (Unix time); None: there is none yet.
    """

    presence: Presence | None
    status: Status | None
    is_other: bool
    round: KnownRound | None
    accounts: tuple[Account, ...]
    problem: str | None
    last_receipt_at: float | None
    has_governor: bool
    highest_temperature_c: float | None
    window: Window | None
    readings: Readings
    model: str
    model_at: float | None

    @property
    def runs(self) -> bool:
        """Whether an agent runs, as far as that can be seen."""
        return self.presence in (Presence.RUNS, Presence.ELSEWHERE)


def overview_of(settings: AgentSettings, sensors: Sensors) -> Overview:
    """A board at a glance.

    Args:
        settings: ``agent.yaml``, with the profile's (:func:`agent.settings.on_board`).
        sensors: of the board.

    Raises:
        StorageError: the state directory is another user's.
    """
    _require_readable(settings.state_dir)
    found = read_status(settings.state_dir)
    status = None if isinstance(found, OtherStatus) else found
    announced = None if status is None else status.round
    known: KnownRound | None = None
    accounts: tuple[Account, ...] = ()
    problem: str | None = None
    receipted_at: float | None = None
    try:
        accounts = _accounts(settings)
        with closing(open_ledger(settings.state_dir)[0]) as connection, database_errors(settings.state_dir):
            known, receipted_at = _round(connection, announced), _receipted_at(connection)
    except DpagentError as error:
        problem = str(error)
    status = _settled(status, known)
    governor = settings.governor
    seen_at = None if status is None else status.last_receipt_at
    presence = None if found is None else presence_of(found)
    agent = found.program.pid if presence is Presence.RUNS and found and found.program else None
    return Overview(
        presence, status, isinstance(found, OtherStatus), known, accounts, problem,
        max((at for at in (seen_at, receipted_at) if at is not None), default=None),
        bool(governor.as_dict(only_changed=True)),
        governor.highest_temperature_c,
        _window(governor, time.time()),
        Readings(
            sensors.temperature_c(governor.thermal_zones),
            sensors.available_mib(),
            None if agent is None else _resident_mib(sensors.root, agent),
        ),
        str(settings.model_file),
        _written_at(settings.model_file),
    )  # fmt: skip


def _settled(status: Status | None, known: KnownRound | None) -> Status | None:
    """A status after which the round has gone on: the database is written first, and more often."""
    if status is None or (announced := status.round) is None or announced.doing is Doing.FINISHED:
        return status
    if known is None or known.state in _LEFT_TO_DO:
        return status
    return replace(status, round=replace(announced, doing=Doing.SETTLED, until=None))


def awaited(overview: Overview) -> str:
    """What the agent waits for, in words."""
    status = overview.status
    if not overview.runs:
        return "nothing: no agent runs"
    if status is None:
        return "what an agent of another version waits for is not known"
    if status.link is Link.STARTING:
        return "its records, which are being read"
    if status.link is Link.DISCONNECTED:
        return f"the broker, {status.broker}"
    if (announced := status.round) is None:
        return f"a plan on {status.topic}"
    if status.held is not None and announced.doing is not Doing.SETTLED:
        return f"the governor: {status.held}"
    match announced.doing:
        case Doing.MODEL:
            return "the model of the round, in chunks"
        case Doing.DECIDE:
            return "the time at which it decides on the round"
        case Doing.PREPARE:
            return "the training process, which tries the round without a record"
        case Doing.TRAIN:
            return "the end of the time that training has"
        case Doing.FINISHED:
            return "the next job"
        case Doing.SETTLED:
            return _awaited_of_settled(overview)


def _awaited_of_settled(overview: Overview) -> str:
    known, announced = overview.round, None if overview.status is None else overview.status.round
    if known is None or announced is None or (known.job, known.round) != (announced.job, announced.round):
        return "the next round"
    if left := known.fragments.get("waiting", 0):
        return f"the times at which {left:,} of its fragments leave"
    if left := known.fragments.get("sent", 0):
        return f"receipts for {left:,} of its fragments"
    return "the next round"


def _require_readable(state_dir: Path) -> None:
    """See that this user may look into a directory, if it is there.

    Raises:
        StorageError: it may not.
    """
    place = state_dir
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if place.is_dir() and not os.access(place, os.R_OK | os.X_OK, effective_ids=True):
        raise StorageError(
            f"{place} belongs to user {place.stat().st_uid}, and this command runs as user {os.geteuid()}, "
            "who may not look into it. Run it with sudo, or as that user."
        )


def _accounts(settings: AgentSettings) -> tuple[Account, ...]:
    """The budgets, without pricing every charge again: that is the auditor's, and takes a board a while."""
    files = settings.ledger_files
    with closing(open_ledger(files.state_dir)[0]) as connection, database_errors(files.database):
        spent = {
            name: _spent(connection, name)
            for (name,) in connection.execute(
                "SELECT DISTINCT json_extract(body, '$.dataset') FROM entries ORDER BY number"
            )
        }
    if not spent:
        raise LedgerError(f"{files.state_dir} holds no ledger that has begun: `dpagent budget init`.")
    if (head := read_second_head(files.second_head)) is None:
        raise LedgerError(
            f"{files.second_head}, the second head of the ledger, is missing. What to do: `dpagent doctor`."
        )
    # Rounds without a guarantee leave no figure of their records a bound, in whichever account.
    exposed = {name for name, total in head.datasets.items() if math.isinf(total.epsilon_reserved)}
    return tuple(
        Account(
            name,
            math.inf if dataset_of(name) in exposed else spent.get(name, 0.0),
            math.inf if dataset_of(name) in exposed else total.epsilon_reserved,
            total.epsilon_budget, total.delta_reserved, total.delta_budget,
        )
        for name, total in head.datasets.items()
    )  # fmt: skip


def _spent(connection: sqlite3.Connection, account: str) -> float:
    """Cumulative ε as the last charge or write-off of an account states it."""
    row = connection.execute(
        "SELECT body FROM entries WHERE kind != 'budget' AND json_extract(body, '$.dataset') = ?"
        " ORDER BY number DESC LIMIT 1",
        (account,),
    ).fetchone()
    if row is None:
        return 0.0
    stated = json.loads(row[0])["cumulative_epsilon"]
    return math.inf if stated is None else float(stated)


def _round(connection: sqlite3.Connection, announced: RoundStatus | None) -> KnownRound | None:
    """The announced round, or the one that was offered last."""
    columns = "SELECT job, round, state, reason, changed_at FROM rounds"
    if announced is None:
        found = connection.execute(f"{columns} ORDER BY number DESC LIMIT 1")
    else:
        this = (announced.job, announced.round)
        found = connection.execute(f"{columns} WHERE job = ? AND round = ?", this)
    row = found.fetchone()
    if row is None:
        return None
    fragments = connection.execute(
        "SELECT state, count(*) FROM fragments WHERE job = ? AND round = ? GROUP BY state", row[:2]
    ).fetchall()
    why = row["reason"] if row["state"] in _TELLS_WHY else None
    return KnownRound(
        row["job"], row["round"], row["state"], why, row["changed_at"], dict(map(tuple, fragments))
    )


def _receipted_at(connection: sqlite3.Connection) -> float | None:
    row = connection.execute("SELECT max(changed_at) FROM rounds WHERE state = 'receipted'").fetchone()
    return None if row[0] is None else float(row[0])


def _window(governor: GovernorSettings, now: float) -> Window | None:
    if not governor.hours:
        return None
    local = time.localtime(now)
    minute = 60 * local.tm_hour + local.tm_min
    change = next_change(governor.hours, minute)
    return Window(
        any(is_in(window, minute) for window in governor.hours),
        None if change is None else 60 * change - local.tm_sec,
    )


def _resident_mib(root: Path, process: int) -> int | None:
    for line in (text_in(root / f"proc/{process}/status") or "").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) >> 10
    return None


def _written_at(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except OSError:
        return None
