"""What the owner of a device does with its ledger: begin it, raise its budget, back it up, restore it.

Nothing of this happens by itself. The agent refuses to start without a ledger, with an older one, or with a
larger budget than the ledger has, because each of these would refund what was spent. Each function here but
:func:`back_up` needs the state directory for itself: the agent has to be stopped.

**What a restore writes off.** Let B be the reservations in the chain that was put back, S those in the second
head. Reservations only grow, and the second head was durable before anything left under an entry
(:mod:`agent.heads`). So all that ever left is covered by S, for any fate of the missing entries, and writing
off S − B is enough and exact. Within a job that the chain knows, a missing charge reserved nothing: its
rounds were paid at its first charge, but each only once, and the chain does not know which have been taken.
So a write-off ends all jobs before it. Without a second head, new jobs may have taken all the rest: all of it
is written off, up to the largest budget that the chain, the second head or the configuration has. Jobs that
guarantee nothing keep to no budget: where the owner has allowed them, an infinite ε is written off.

**A second head that was put back too** covers less than what left. ``ledger.head`` shows that, if it is still
the newest: neither the chain has its entry, nor is it the entry of the second head. It holds no amounts, so
only ``write_off_all`` goes on. A power cut between the two heads is no such case: the chain has the entry.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from agent.audit import VerifiedLedger, open_ledger, verified_by
from agent.charges import Budget, WriteOff
from agent.columns import dataset_of
from agent.database import LOST, RESTORED, StateDatabase, no_ledger, no_second_head
from agent.heads import Head, LedgerFiles, SecondHead, read_head, read_second_head, require_head, save_head
from agent.ledger import Ledger
from agent.probes import Probes
from agent.replay import replay
from agent.rounds import Rounds
from agent.spool import Spool
from agent.token_store import TokenStore
from dpagent.database_file import database_errors, open_readonly, transaction
from dpagent.errors import DamagedDatabaseError, LedgerError, UsageError
from dpagent.notation import plain_bounds
from dpagent.storage import StateDirectory, disk_errors, place_of_file, real_path, replace_durably
from dpagent.wording import counted

_ROUNDED: Final = 1 + 1e-9


def begin_ledger(files: LedgerFiles, budgets: Mapping[str, Budget]) -> None:
    """Begin a ledger that has spent nothing, with a lifetime budget for each account.

    What a power cut left of such a beginning is finished.

    Raises:
        LedgerError: There is one, or its second head.
        StateInUseError, StorageError: It cannot be written.
    """
    _require_no_second_head(files)
    with _opened(files) as state:
        _require_no_second_head(files)
        reserved = [state.ledger.accounts.reserved(name) for name in state.ledger.datasets]
        if any(each != Budget(0.0, 0.0) for each in reserved):
            raise no_second_head(files)
        require_head(state.ledger.digests, read_head(files.head), files.head)
        with state.written():
            for name, budget in budgets.items():
                state.ledger.set_budget(name, budget)
        state.save_heads()


def _require_no_second_head(files: LedgerFiles) -> None:
    if read_second_head(files.second_head) is None:
        return
    advice = (
        "It is there: `dpagent budget show` has it, and `raise` makes its budget larger."
        if files.database.exists()
        else "If the state directory was deleted or lost, run `dpagent budget restored`."
    )
    raise LedgerError(
        f"{files.second_head} knows a ledger of {files.state_dir} already: a new one would spend its "
        f"budget again. {advice}"
    )


def raise_budget(files: LedgerFiles, budgets: Mapping[str, Budget]) -> dict[str, Budget | None]:
    """Set the lifetime budgets that are larger than the ledger's in ε, δ or both, or are of one more account.

    Returns:
        The budget before of each that was set; None for a new account.

    Raises:
        LedgerError: There is no ledger, it is older than one of its heads, or no budget is larger.
        StateInUseError, StorageError: It cannot be written.
    """
    if not files.database.exists():
        raise no_ledger(files, read_second_head(files.second_head))
    _required_second_head(files)
    with _opened(files) as state:
        second = _required_second_head(files)
        require_head(state.ledger.digests, read_head(files.head), files.head)
        state.require_kept(second)
        before = {
            name: known
            for name, budget in budgets.items()
            if (known := _known(state.ledger, name)) is None or _is_larger(budget, known)
        }
        if not before:
            name, budget = next(iter(budgets.items()))
            known = state.ledger.budget(name)
            raise LedgerError(
                f"The configuration sets {plain_bounds(budget.epsilon, budget.delta)} for {name!r}, and "
                f"the ledger has {plain_bounds(known.epsilon, known.delta)}: nothing to raise. The agent "
                "takes a lower budget when it starts."
            )
        with state.entry():
            for name in before:
                state.ledger.set_budget(name, budgets[name])
        return before


def _known(ledger: Ledger, name: str) -> Budget | None:
    return ledger.budget(name) if name in ledger.datasets else None


def _is_larger(budget: Budget, known: Budget) -> bool:
    return budget.epsilon > known.epsilon or budget.delta > known.delta


def back_up(state_dir: Path, file: Path) -> VerifiedLedger:
    """Copy the books of an agent, also while it runs, and the head of its ledger to ``file`` and
    ``file.head``.

    The copy is one moment's, and is checked like a ledger before it takes the place of ``file``. No fragment
    is in it: one of an update without noise is for the coordinator alone.

    Returns:
        The ledger in the copy.

    Raises:
        LedgerError: There is no ledger, or it does not verify.
        StorageError: The copy cannot be written, or ``file`` is a device, say.
        UsageError: ``file`` is in the state directory.
    """
    place = place_of_file(file)
    if place.is_relative_to(real_path(state_dir)):
        raise UsageError(
            f"{file} is in the state directory {state_dir}; expected a place that is not lost with it."
        )
    connection, _ = open_ledger(state_dir)
    new = place.with_name(f".{place.name}.new")
    head_file = _head_of(file)
    with _whole_or_gone(new):
        with closing(connection):
            _copy(connection, new)
        _empty_spool(new)
        verified = _verified(new, None)
        with disk_errors(file):
            # Without its head, a copy is still whole; with another's it would be refused.
            head_file.unlink(missing_ok=True)
            replace_durably(place, new)
    save_head(head_file, Head(len(verified.entries), verified.entries[-1].digest.hex()))
    return verified


def put_back(backup: Path, files: LedgerFiles) -> None:
    """Put a copy that :func:`back_up` made into a state directory; :func:`go_on_after_restore` has to follow.

    Raises:
        LedgerError: It is no ledger, or does not verify; or the ledger in place is the newest.
        StateInUseError, StorageError: It cannot be put there.
    """
    _verified(backup, read_head(_head_of(backup)))
    with StateDirectory(files.state_dir), database_errors(files.database):
        if _is_newest(files):
            raise LedgerError(
                f"{files.database} has every entry that its heads know, so it is not replaced by "
                f"{backup}. If you mean to lose it, remove it first."
            )
        new = files.state_dir / ".ledger.db.new"
        with _whole_or_gone(new):
            with closing(open_readonly(backup)) as connection:
                _copy(connection, new)
            for ending in ("-wal", "-shm"):  # of the database that is replaced
                Path(f"{files.database}{ending}").unlink(missing_ok=True)
            replace_durably(files.database, new)


def go_on_after_restore(
    files: LedgerFiles,
    budgets: Mapping[str, Budget],
    *,
    write_off_all: bool,
    allows_unproven: bool,
    at: datetime,
) -> tuple[WriteOff, ...]:
    """Write off what the entries that are missing from a restored ledger have reserved, or may have.

    A power cut at any point of it leaves a ledger that the agent refuses, or the finished one; call it again.

    Args:
        files: The ledger that was put back, or none, and its second head.
        budgets: Those that the device's configuration has, by account, for ``write_off_all``.
        write_off_all: The owner's word that the second head is lost, or was itself put back: nothing shows
            what was spent, so all that is left is written off.
        allows_unproven: Whether jobs that guarantee nothing may have run (``limits.allow_unproven``); for
            ``write_off_all``.
        at: The time now.

    Returns:
        The write-offs; none if no entry is missing.

    Raises:
        LedgerError: The second head is missing, of another ledger, or was put back too; or the chain does not
            verify.
        StateInUseError, StorageError: It cannot be written.
    """
    _second_head_of(files, write_off_all=write_off_all)
    with _opened(files) as state:
        second = _second_head_of(files, write_off_all=write_off_all)
        if not write_off_all and second is not None:
            _require_newest(second, files, state.ledger)
            if state.keeps(second):
                state.save_heads()
                return ()
        with state.written():
            if second is None or write_off_all:
                owed = _all_owed(state.ledger, second, budgets, allows_unproven=allows_unproven)
            else:
                owed = _owed(state.ledger, second)
            lost = tuple(
                _write_off(state.ledger, name, each, is_exact=not write_off_all, at=at)
                for name, each in owed.items()
            )
            # What the copy would run or send again has had its turn.
            state.rounds.expire_all(at.timestamp())
            state.spool.expire_all()
            state.probes.withdraw()
        state.save_heads()
    return lost


def _required_second_head(files: LedgerFiles) -> SecondHead:
    if (second := read_second_head(files.second_head)) is None:
        raise no_second_head(files)
    return second


def _second_head_of(files: LedgerFiles, *, write_off_all: bool) -> SecondHead | None:
    second = read_second_head(files.second_head)
    if second is None and not write_off_all:
        raise LedgerError(
            f"{files.second_head}, the second head of the ledger, is missing: nothing shows which entries "
            f"are. Put it there, from the disk or the board that it was on. {LOST}"
        )
    return second


def _require_newest(second: SecondHead, files: LedgerFiles, ledger: Ledger) -> None:
    """Check that the second head knows all that ``ledger.head`` knows.

    Raises:
        LedgerError: It may not, or ``ledger.head`` is not readable.
    """
    head = read_head(files.head)
    if head is None or head.is_reached_by(ledger.digests):
        return
    if (head.entries, head.hash) != (second.entries, second.hash):
        raise LedgerError(
            f"{files.head} knows a ledger of {counted(head.entries, 'entry')}, which is neither this one nor "
            f"the one that {files.second_head} knows, of {counted(second.entries, 'entry')}: the second head "
            "was put back too, and does not show what was spent since. Put the newest ledger.db or second "
            f"head in its place, and run {RESTORED} again. {LOST}"
        )


@dataclass(frozen=True, slots=True)
class _Owed:
    """What the ledger of a dataset has to show after a restore."""

    budget: Budget
    reserved: Budget


def _owed(ledger: Ledger, second: SecondHead) -> dict[str, _Owed]:
    """What the second head shows."""
    owed = {
        name: _Owed(
            Budget(totals.epsilon_budget, totals.delta_budget),
            Budget(totals.epsilon_reserved, totals.delta_reserved),
        )
        for name, totals in second.datasets.items()
    }
    for name in ledger.datasets:
        before = ledger.accounts.reserved(name)
        after = owed[name].reserved if name in owed else Budget(-1.0, -1.0)
        # A restore that a power cut ended has rounded up.
        if before.epsilon > after.epsilon * _ROUNDED or before.delta > after.delta * _ROUNDED:
            raise LedgerError(
                f"The ledger has reserved more for {name!r} than its second head knows: they are not of one "
                f"ledger. Put the right copy, or the right second head, in its place. {LOST}"
            )
    return owed


def _all_owed(
    ledger: Ledger,
    second: SecondHead | None,
    configured: Mapping[str, Budget],
    *,
    allows_unproven: bool,
) -> dict[str, _Owed]:
    """All that any budget we know of allowed, or the owner beside all budgets."""
    known = {} if second is None else second.datasets
    owed = {}
    for name in dict.fromkeys([*ledger.datasets, *known, *configured]):
        budgets = [ledger.budget(name)] if name in ledger.datasets else []
        budgets += [Budget(known[name].epsilon_budget, known[name].delta_budget)] if name in known else []
        budgets += [configured[name]] if name in configured else []
        bounds = [*budgets, ledger.accounts.reserved(name)]
        bounds += [Budget(known[name].epsilon_reserved, known[name].delta_reserved)] if name in known else []
        if allows_unproven and dataset_of(name) == name:  # Those jobs trust nobody.
            bounds.append(Budget(math.inf, 0.0))
        most = Budget(max(each.epsilon for each in bounds), max(each.delta for each in bounds))
        owed[name] = _Owed(budgets[0], most)
    return owed


def _write_off(ledger: Ledger, dataset: str, owed: _Owed, *, is_exact: bool, at: datetime) -> WriteOff:
    ledger.set_budget(dataset, owed.budget)
    before = ledger.accounts.reserved(dataset)
    epsilon, delta = _up_to(before.epsilon, owed.reserved.epsilon), _up_to(before.delta, owed.reserved.delta)
    lost = WriteOff(
        dataset, epsilon, delta, before.epsilon + epsilon, before.delta + delta, is_exact,
        at.isoformat(timespec="seconds"),
    )  # fmt: skip
    ledger.write_off(lost)
    return lost


def _up_to(before: float, after: float) -> float:
    """What brings ``before`` to ``after`` in floating point, in whatever order it is added up; rounded up."""
    return after - before + 4 * math.ulp(after) if after > before else 0.0


@contextmanager
def _opened(files: LedgerFiles) -> Iterator[StateDatabase]:
    """The state, and its second head, which no agent with a copy of the directory writes meanwhile."""
    state = StateDatabase(files, check=replay)
    try:
        with state.holding_second_head():
            yield state
    finally:
        state.close()


def _is_newest(files: LedgerFiles) -> bool:
    """Whether the ledger in place is whole, and reaches both its heads."""
    second, head = read_second_head(files.second_head), read_head(files.head)
    if second is None or not files.database.exists():
        return False
    try:
        ledger = _verified(files.database, second)
    except LedgerError:
        return False
    return head is None or head.is_reached_by([entry.digest for entry in ledger.entries])


def _verified(database: Path, head: Head | None) -> VerifiedLedger:
    """The ledger in a copy."""
    try:
        with closing(open_readonly(database)) as connection, database_errors(database):
            return verified_by(connection, head, _head_of(database))
    except DamagedDatabaseError as error:
        raise LedgerError(str(error)) from error


def _head_of(backup: Path) -> Path:
    return backup.with_name(f"{backup.name}.head")


def _empty_spool(file: Path) -> None:
    """Give up, in a copy, what waits to be sent, tokens, and what came of work on records; no byte of that
    stays, nor of what was sent."""
    with database_errors(file), closing(sqlite3.connect(file, isolation_level=None)) as copy:
        copy.execute("PRAGMA journal_mode=MEMORY")  # No other file has what is deleted.
        copy.execute("PRAGMA secure_delete=ON")
        with transaction(copy):
            Rounds(copy).expire_spooled()
            Rounds(copy).forget_work()
            Spool(copy).empty()
            Probes(copy).withdraw()
            TokenStore(copy).empty()
        copy.execute("VACUUM")  # Pages that were free already may hold settled fragments.


@contextmanager
def _whole_or_gone(new: Path) -> Iterator[None]:
    """Leave nothing of a copy that came to nothing: it may hold what waits to be sent, and fills the disk."""
    try:
        yield
    except BaseException:
        for ending in ("", "-journal", "-wal", "-shm"):
            with suppress(OSError):
                Path(f"{new}{ending}").unlink()
        raise


def _copy(source: sqlite3.Connection, file: Path) -> None:
    """Copy a database, durably, into one file that needs no other."""
    with database_errors(file):
        file.unlink(missing_ok=True)
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with closing(sqlite3.connect(file)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
