"""``python -m agent.decoding PIPE``: bring the rows of a device's records up to date, in an own process.

It lists the data, decodes what is new or has changed (:mod:`agent.bounded_decoding`), and publishes an index
(:mod:`agent.rows`). Listing happens here too: nothing in the data stops the agent. It has a low priority, and
a limit on its memory.

**When new records count.** How long a look takes depends on what it decodes. If what it found counted as soon
as it is done, one record that is slow to decode would keep all that come with it out of the next round. So
while the agent runs, a look decodes at most so many new records as fit :data:`LOOK_S` if each takes all the
time that it may, in both attempts that a failing one has. By the clock, each has :data:`PATIENCE` times as
long, and then is left for the next look, alone. What a look found counts from
:data:`~agent.row_files.COUNTS_AFTER_S` after its beginning on, when it is done whatever the records were, and
whatever else the board computes; one that is cut short before that has found nothing, also if it was done.
Records beyond that number wait for the next look; there, one new record may keep one other out for a look, as
at the bound of ``max_records``.

It reads its :class:`~agent.look_messages.LookOrder` from standard input, and ends when the other end of the
pipe closes. With another exit code than 0, it writes to standard output why the rows stay as they are.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent import bounded_decoding
from agent.bounded_decoding import ATTEMPTS, Limits, Outcome, address_space, decode_apart
from agent.data_settings import DataSettings
from agent.leash import end_with_pipe
from agent.look_messages import LONGEST_SENTENCE, LookOrder
from agent.personal_scratch import forget_left
from agent.priority import end_first, give_way
from agent.row_index import DECODED, FREE, TO_ERASE, UNUSABLE, Index
from agent.rows import RowStore
from dpagent.errors import ConfigurationError, DataError, DpagentError, ExitCode, StorageError
from dpagent.learning.data.dataset import Dataset, Stamps
from dpagent.learning.data.opening import glance_declared, list_declared, require_declared, section_of
from dpagent.learning.data.stored import AbsentError, ChangedError
from dpagent.shared_blocks import take_own_blocks
from dpagent.storage import disk_errors
from dpagent.wording import counted, named

log = logging.getLogger(__name__)

LOOK_S: Final = 240.0
"""Of processor time."""
PATIENCE: Final = 3.6
"""Seconds by the clock for each of processor time that a record may take while the agent runs: as many as it
needs beside such a program, and so few that a look is done when it counts, however little of a core others
leave it."""
_PUBLISH_S: Final = 10.0
"""What is decoded at once is published at least this often, so that another attempt goes on from there."""
_LISTING_BYTES: Final = 512 << 20
_LISTING_BYTES_A_RECORD: Final = 10_240
"""Four names of pictures, of at most 2 KiB each in memory, with what belongs to them; rows of a table take
less."""
_TRIES: Final = 3
"""So often a look lists the data, if a file is written to meanwhile; where all is decoded at once, also if
something is left for later."""
_MOST_SENTENCES: Final = 100
_LONGEST_SENTENCE: Final = 300


def bring_up_to_date(order: LookOrder) -> None:
    """List the data, and decode what the rows do not have yet.

    Raises:
        ConfigurationError, DataError: the data cannot be opened, or there are more than declared.
        StorageError: there is no room for the rows, or they cannot be written.
    """
    take_own_blocks(order.state_dir)  # A copy of the owner's may share them: later there may be no room.
    forget_left(order.state_dir)
    for left in reversed(range(_TRIES)):
        try:
            if _look(order) or not order.at_once:
                return
        except ChangedError:
            if not left:
                raise


def _look(order: LookOrder) -> bool:
    """Whether nothing is left for later."""
    settings = order.settings
    store = RowStore(order.state_dir, settings)
    with store.writing():
        if order.at_once:
            store.take_found()  # All that is new counts now.
        else:
            store.drop_found()  # Of a look that was cut short.
        known = store.load()
        try:
            glance = glance_declared(settings)
            text = None if glance is None else glance.text
            if not order.at_once and known is not None and known.is_of(text):
                return True
            dataset = list_declared(settings, growing=not order.at_once, glance=glance)
            if glance is not None and not glance.was_read:
                text = None  # The next look lists it again.
        except AbsentError as error:
            if order.at_once or known is None:
                raise
            _leave_out_all(store, known, str(error))
            return True
        if known is None:
            store.remove()  # What it may hold means something else.
        if not store.take_room(dataset.record_bytes) or known is None:
            known = Index.empty(settings)
        return _Update(store, known, dataset, order, limits_of(settings)).run(text)


def _leave_out_all(store: RowStore, known: Index, why: str) -> None:
    store.erase(known, known.stale)
    now = known.emptied(why)
    if now.header != known.header or (now.table != known.table).any():
        store.publish_found(now)


def limits_of(settings: DataSettings) -> Limits:
    """The limits on decoding a record."""
    format_, memory = require_declared(settings), settings.decoding.memory_mib
    memory_bytes = format_.decoder_bytes(section_of(settings, format_)) if memory is None else memory << 20
    return Limits(memory_bytes, _seconds(settings))


def most_new(settings: DataSettings) -> int:
    """How many new records a look decodes at most, while the agent runs."""
    return max(1, int(LOOK_S / (ATTEMPTS * _seconds(settings))))


def _seconds(settings: DataSettings) -> float:
    return settings.decoding.seconds or require_declared(settings).decoder_seconds


class _Update:
    """One look at the data.

    Args:
        store: of the rows.
        known: the index of before.
        dataset: the data as they are listed now.
        order: to be carried out.
        limits: for each record.
    """

    def __init__(
        self, store: RowStore, known: Index, dataset: Dataset, order: LookOrder, limits: Limits
    ) -> None:
        self._store, self._known, self._dataset, self._limits = store, known, dataset, limits
        self._table = known.table.copy()
        key = bytes.fromhex(known.header.key)
        stamps, files = dataset.stamps(key), _digests(dataset.files, key)
        file_of = files[dataset.file_numbers] if len(files) else np.zeros(len(stamps), np.uint64)
        is_used = known.table["state"] != FREE
        if known.header.limits != repr(limits):
            is_used &= known.table["state"] != UNUSABLE  # They are tried again.
            self._table["state"][known.table["state"] == UNUSABLE] = FREE
        used = np.flatnonzero(is_used)
        gone = used[~_among(known.table["stamp"][used], stamps)]
        # Where the disk cannot tell whether a record is there, it stays as it was decoded: else one more, for
        # which a folder took a block that cannot be read, would take others along. Not what was in a file
        # that could be listed: beside what its owner has written in its place, one record would count twice.
        file = known.table["file"][gone]
        is_of_a_class = _among(known.table["label"][gone], np.array(sorted(dataset.unlisted), np.int64))
        may_be_there = is_of_a_class & ~_among(file, files) | _among(file, _digests(dataset.unread, key))
        gone = gone[~may_be_there]
        here = used[_among(known.table["stamp"][used], stamps)]  # It may have moved to another file.
        by_stamp = np.argsort(stamps)
        places = np.searchsorted(stamps, known.table["stamp"][here], sorter=by_stamp)
        self._table["file"][here] = file_of[by_stamp[places]]
        self._table["state"][gone] = FREE
        self._table["checksum"][gone] = np.maximum(self._table["checksum"][gone], TO_ERASE)
        # While the agent runs, a reader may have the index of before.
        read = Index(known.header, self._table) if order.at_once else known
        free = np.flatnonzero(read.table["state"] == FREE)
        self._stale = read.stale
        is_new = ~_among(stamps, known.table["stamp"][used])
        waits = bool(is_new[dataset.unfinished].any())
        is_new[dataset.unfinished] = False  # Left for later.
        new = np.flatnonzero(is_new)[: len(free)]
        self._order, most = order, most_new(order.settings)
        self._counts = order.at_once or not known.header.shape  # at once: nobody reads an index of before
        if not order.at_once and len(new) > most:
            new, waits = new[:most], True
        self._is_whole = not waits
        self._stamps, self._new, self._rows = stamps[new], new, free[: len(new)]
        self._file_of = file_of[new]
        self._late: list[str] = []
        self._unusable = {
            row: why
            for row, why in known.header.unusable.items()
            if self._table["state"][int(row)] == UNUSABLE
        }

    def run(self, glance: str | None) -> bool:
        """Decode what is new, and publish; whether nothing is left for later.

        Raises:
            StorageError: as of :func:`bring_up_to_date`.
        """
        if len(self._new) or len(self._stale):
            self._mark()  # Before a row is written that held another record.
            if self._goes_on_without(lambda: self._store.erase(self._known, self._stale)):
                self._table["checksum"][self._stale[~_among(self._stale, self._rows)]] = 0
        with disk_errors(self._store.rows_file):
            descriptor = os.open(self._store.rows_file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._decode_new(descriptor)
            self._goes_on_without(lambda: os.fsync(descriptor))
        finally:
            os.close(descriptor)
        is_complete = self._order.at_once or self._known.header.is_complete
        is_whole = self._is_whole and not self._late
        self._publish(glance if is_whole else None, is_complete=is_complete)
        return is_whole

    def _goes_on_without(self, write: Callable[[], None]) -> bool:
        """Whether the disk has taken what is written where one record's row is. A row that it has not is
        found by its checksum: that costs its record, and no other that came with it."""
        try:
            with disk_errors(self._store.rows_file):
                write()
        except StorageError as error:
            self._late.append(str(error))
            return False
        return True

    def _decode_new(self, descriptor: int) -> None:
        """Decode what is new. What does not stand where it was listed any more is listed again: who inserts a
        record in its place in a file moves others."""
        moved = self._decode(self._dataset, dict(enumerate(self._new.tolist())), descriptor)
        for _ in range(_TRIES - 1):
            if not moved:
                return
            try:
                dataset = list_declared(self._order.settings, growing=not self._order.at_once)
                stamps = dataset.stamps(bytes.fromhex(self._known.header.key))
            except DataError:
                break
            is_found = _among(stamps, self._stamps[list(moved)])
            is_found[dataset.unfinished] = False
            found = np.flatnonzero(is_found)
            numbers = dict(zip(stamps[found].tolist(), found.tolist(), strict=True))
            again = {
                place: numbers[stamp] for place in moved if (stamp := int(self._stamps[place])) in numbers
            }
            moved = {place: why for place, why in moved.items() if place not in again}
            moved |= self._decode(dataset, again, descriptor)
        self._late += moved.values()

    def _decode(self, dataset: Dataset, numbers: dict[int, int], descriptor: int) -> dict[int, str]:
        """Decode some of the new records.

        Args:
            dataset: where they are listed.
            numbers: the number there of each, by its place among the new ones.
            descriptor: of the rows.

        Returns:
            Why those that do not stand there any more are not decoded, by their places.
        """
        moved, published = {}, time.monotonic()
        rows = self._rows[list(numbers)].tolist()
        patience = bounded_decoding.PATIENCE if self._order.at_once else PATIENCE
        apart = decode_apart(dataset, [*numbers.values()], rows, descriptor, self._limits, patience)
        with closing(apart) as outcomes:
            for place, row, outcome in zip(numbers, rows, outcomes, strict=True):
                if outcome.has_moved:
                    moved[place] = outcome.problem
                else:
                    self._take(place, row, outcome)
                if self._order.at_once and time.monotonic() >= published + _PUBLISH_S:
                    os.fsync(descriptor)
                    self._publish(None)
                    published = time.monotonic()
        return moved

    def _mark(self) -> None:
        """Mark the rows that are written from now on, so that the next look erases them if this one is cut
        short. While the agent runs, what counts stays as it is."""
        self._table["checksum"][self._rows] = TO_ERASE
        if self._counts:
            self._publish(None)
        elif len(self._rows):
            table = self._known.table.copy()
            table["checksum"][self._rows] = TO_ERASE
            self._known = Index(self._known.header, table)
            self._store.publish(self._known)

    def _take(self, place: int, row: int, outcome: Outcome) -> None:
        if not outcome.is_final:
            self._late.append(outcome.problem)
            return
        label = self._dataset.labels[self._new[place]]
        state = UNUSABLE if outcome.problem else DECODED
        self._table[row] = (self._stamps[place], self._file_of[place], outcome.checksum, label, state)
        if outcome.problem:
            self._unusable[str(row)] = outcome.problem[:_LONGEST_SENTENCE]

    def _publish(self, glance: str | None, *, is_complete: bool = False) -> None:
        dataset, origin = self._dataset, self._dataset.origin
        header = replace(
            self._known.header, shape=dataset.shape, dtype=str(dataset.dtype), classes=dataset.classes,
            class_names=dataset.class_names, kind=origin.kind, source=origin.source,
            warnings=origin.warnings, left_out=self._left_out(), unusable=self._said_unusable(),
            limits=repr(self._limits), glance=glance, is_complete=is_complete,
        )  # fmt: skip
        index = Index(header, self._table.copy())
        if header != self._known.header or (index.table != self._known.table).any():
            (self._store.publish if self._counts else self._store.publish_found)(index)
            self._known = index

    def _left_out(self) -> tuple[str, ...]:
        sentences = _first([*self._late, *self._dataset.origin.left_out])
        if (over := len(self._dataset) - len(self._table)) > 0:
            most = named("max_records", len(self._table))
            sentences += (
                f"{counted(over, 'record')} beyond {most} are not used. Raise it, or remove records.",
            )
        return sentences

    def _said_unusable(self) -> dict[str, str]:
        """The first sentences; the others count alike."""
        return dict(list(self._unusable.items())[:_MOST_SENTENCES])


def _first(sentences: Sequence[str]) -> tuple[str, ...]:
    said = tuple(sentence[:_LONGEST_SENTENCE] for sentence in sentences[:_MOST_SENTENCES])
    more = len(sentences) - len(said)
    return (*said, f"{more:,} more; `dpagent data check` lists them.") if more > 0 else said


def listing_bytes(settings: DataSettings) -> int:
    """The most address space that a process which lists records may take."""
    assert settings.max_records is not None
    return _LISTING_BYTES + _LISTING_BYTES_A_RECORD * settings.max_records + address_space()


def require_address_space(settings: DataSettings) -> None:
    """Refuse a limit on this program's address space below what a look may take: where one ends for want of
    it, one record takes all along that are new.

    Raises:
        ConfigurationError: There is such a limit; from public values alone.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY and hard < (most := listing_bytes(settings)):
        raise ConfigurationError(
            f"The limit on address space is {hard >> 20:,} MiB (`ulimit -v`, or LimitAS of a service); with "
            f"data.max_records {settings.max_records:,}, a look at the data may take {most >> 20:,} MiB. "
            "Raise the one, or lower the other."
        )


def _limit_memory(order: LookOrder) -> None:
    """Limit what listing may take; a fork that decodes sets a limit of its own."""
    most = listing_bytes(order.settings)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    )


def main() -> None:
    """Carry out the order on standard input."""
    last_words = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What a decoder prints is none of them, and nobody reads the pipe before the end.
    end_first()
    parent = int(sys.argv[1])
    end_with_pipe(parent, os.getpgrp())  # So has the parent, unless it ended before.
    if select.select([parent], [], [], 0)[0]:
        sys.exit(ExitCode.INTERRUPTED)  # It has closed already.
    order = LookOrder.from_bytes(sys.stdin.buffer.read())
    give_way(order.niceness)
    _limit_memory(order)
    try:
        bring_up_to_date(order)
    except DpagentError as error:
        print(_sayable(str(error)), file=last_words, flush=True)
        sys.exit(error.exit_code)
    except Exception as error:
        logging.basicConfig(level=logging.ERROR)
        log.exception("the records cannot be decoded")
        sentence = _sayable(f"The records cannot be decoded ({type(error).__name__}: {error}).")
        print(sentence, file=last_words, flush=True)
        sys.exit(ExitCode.INTERNAL)


def _digests(names: Sequence[str], key: bytes) -> NDArray[np.uint64]:
    """A number for each name, ``(len(names),)``, by which nobody finds it who has not the key."""
    numbers = Stamps(key)
    for name in names:
        numbers.add(name)
    return numbers.taken()


def _among(values: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of some integers are among others, (len(values),). numpy's own ``isin`` loads its masked arrays:
    10 MiB, where no bytecode of them is at hand."""
    if not len(others):
        return np.zeros(len(values), np.bool_)
    ordered = np.sort(others)
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.asarray(ordered[places] == values)


def _sayable(text: str) -> str:
    """A text that may name a file whose name is not UTF-8, or be long."""
    said = text.encode(errors="backslashreplace")[:LONGEST_SENTENCE]
    return said.decode(errors="ignore")


if __name__ == "__main__":
    main()
