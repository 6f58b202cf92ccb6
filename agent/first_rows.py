"""The device's records when its agent starts: opened as they are declared, and decoded if they never were.

Nothing is inferred on a board: ``agent.yaml`` declares what the records are, so that one record changes the
meaning of no other, and whether the board starts depends on no record. With more records than declared the
agent does not start: that is settled here, before any plan.

**A restart costs the same for any record.** An agent that has rows starts with them and looks for what is new
after a round, like one that never stopped: how long its start takes, and whether it starts, shows nothing of
what came meanwhile. Its owner can have all of that decoded before (``dpagent data decode``).
"""

from __future__ import annotations

import logging
from pathlib import Path

from agent.data_settings import DataSettings
from agent.decoding import limits_of, require_address_space
from agent.look_messages import LookOrder
from agent.looks import Look
from agent.records import Records
from agent.row_files import CACHED_BYTES
from agent.rows import RowStore
from dpagent.errors import DataError
from dpagent.learning.data.checking import count_non_finite
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.stored import require_readable
from dpagent.learning.front_end.features import forget_features
from dpagent.wording import counted

log = logging.getLogger(__name__)


def open_records(settings: DataSettings, state_dir: Path) -> Records:
    """The records that ``settings`` describe; the log tells their owner what was found.

    Args:
        settings: of the data.
        state_dir: where decoded records are kept.

    Raises:
        ConfigurationError: Something is not declared.
        DataError: The records cannot be opened, or there are too many.
        StorageError: The disk has no room for decoded records.
    """
    require_address_space(settings)
    store = RowStore(state_dir, settings)
    if store.is_complete(repr(limits_of(settings))):
        try:
            require_readable(settings.path)
        except DataError as error:  # A file may have gone with its last record.
            log.warning(
                "data %s: %s What was decoded counts until a look finds it gone", settings.name, error
            )
        store.drop_found()  # Of a look that was cut short.
    else:
        log.info("data %s: decoding the records, which takes a while this once", settings.name)
        decode_at_once(settings, state_dir)
    records = Records(settings, state_dir, is_told=False)
    if not len(records.dataset):
        log.warning("data %s: there are no records; none counts in what this board sends", settings.name)
    for warning in records.dataset.origin.warnings:
        log.warning("data %s: %s", settings.name, warning)
    assert settings.max_records is not None
    # However many there are. Of more, `dpagent data check` does that.
    if settings.max_records * records.dataset.record_bytes <= CACHED_BYTES:
        records.attempt(_count_unusable)
    return records


def decode_at_once(settings: DataSettings, state_dir: Path) -> None:
    """Decode all that is new into rows that count from now on, however long it takes.

    The agent must not run.

    Raises:
        ConfigurationError: Something is not declared.
        DataError: The records cannot be opened, or there are too many.
        StorageError: The disk has no room for decoded records.
    """
    # Whatever comes of it: how many features are missing afterwards depends on the records.
    forget_features(state_dir, all_of_them=True)
    Look(LookOrder(settings, state_dir, at_once=True)).wait()


def _count_unusable(dataset: Dataset) -> None:
    if unusable := count_non_finite(dataset):
        total = counted(len(dataset), "record")
        log.warning("%d of %s contain NaN or infinity and do not count", unusable, total)
