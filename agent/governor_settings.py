"""The section ``governor`` of ``agent.yaml`` and of a board's profile: when the board may train."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Final

from dpagent.schema.limits import After, Limits
from dpagent.settings import Settings

_HOURS: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)", re.ASCII)
_MINUTES: Final = 60
_DAY: Final = 24 * _MINUTES


def _is_window(text: str) -> str:
    if (found := _HOURS.fullmatch(text)) is None or found[1] + found[2] == found[3] + found[4]:
        raise ValueError(f"got {text!r}; expected two different times of a day, such as 22:00-06:00")
    return text


Hours = Annotated[str, After(_is_window)]
"""A daily window of local time, such as ``22:00-06:00``: from the first minute up to the last, which is not
part of it. One whose end is before its beginning goes on past midnight."""


def is_in(window: str, minute: int) -> bool:
    """Whether a minute of a day is in a window.

    Args:
        window: as :data:`Hours`.
        minute: since midnight, in ``0..1439``.

    >>> [is_in("22:00-06:00", 60 * hour) for hour in (5, 6, 21, 22)]
    [True, False, False, True]
    """
    found = _HOURS.fullmatch(window)
    assert found is not None
    begin, end = (_MINUTES * int(found[group]) + int(found[group + 1]) for group in (1, 3))
    return (minute - begin) % _DAY < (end - begin) % _DAY


def next_change(windows: Sequence[str], minute: int) -> int | None:
    """Minutes until the next one of a day's windows begins, or until all that are open have ended.

    Args:
        windows: as :data:`Hours`.
        minute: since midnight, in ``0..1439``.

    Returns:
        In ``1..1439``; None where that never comes.

    >>> next_change(["22:00-06:00"], 60 * 21), next_change(["22:00-06:00", "05:00-07:30"], 60 * 23)
    (60, 510)
    """
    is_open = any(is_in(window, minute) for window in windows)
    later = range(1, _DAY) if windows else ()
    return next(
        (step for step in later if any(is_in(each, (minute + step) % _DAY) for each in windows) != is_open),
        None,
    )


class GovernorSettings(Settings):
    """When this board may train. What is not set does not matter. While one of these is against it, no round
    begins, and the training of one that is charged pauses."""

    hours: tuple[Hours, ...] = ()
    """Daily windows in which it may train, by the board's clock and time zone: ``["22:00-06:00"]``."""
    mains_power: bool = False
    """Whether it trains on mains power alone. A board without a battery is taken to be on it."""
    least_battery_percent: Annotated[int, Limits(ge=1, le=100)] | None = None
    """Charge of the battery below which it does not train; it goes on 5 points above that. On mains power,
    too: without ``mains_power``, a battery that charges slowly may be emptied."""
    highest_load: Annotated[float, Limits(gt=0, le=1)] | None = None
    """Share of all cores that other programs may take, as an average of ten seconds, for training to go on.
    It begins at four fifths of that. What the agent itself takes does not count."""
    highest_temperature_c: Annotated[float, Limits(ge=20, le=120)] | None = None
    """Temperature of the processor, in °C, above which it does not train."""
    temperature_drop_c: Annotated[float, Limits(ge=1, le=40)] = 5.0
    """By how much the processor has to cool down below ``highest_temperature_c`` for training to go on."""
    thermal_zones: tuple[Annotated[str, Limits(min_length=1)], ...] = ()
    """Types of the thermal zones whose hottest counts, as ``/sys/class/thermal/thermal_zone*/type`` has them;
    by default those of processors, or all where none is named like one."""
    unmetered_link: bool = False
    """Whether it does not train while NetworkManager, or the kind of the link, says that traffic is
    metered."""
    least_free_memory_mib: Annotated[int, Limits(ge=1)] | None = None
    """Memory that other programs must leave for a round to begin, in MiB; what training has by then counts
    as left. A swap adds none, and one in memory (zram) has taken what it holds, compressed. A round that has
    begun goes on: it has its memory. The records must not lie on a file system in
    memory (``/dev/shm``, a RAM disk, an overlay root): how much is left would tell of them."""
    least_free_disk_mib: Annotated[int, Limits(ge=1)] | None = None
    """Room on the disk of ``state_dir`` for a round to begin, in MiB. The records must lie on another one
    (subvolumes and overlays of one disk are none): how full theirs is tells of them. So there must be no
    ``model.command``, which may write what it makes of them, and ``dpagent personalise`` does not run."""
    most_written_mib_per_day: Annotated[int, Limits(ge=1)] | None = None
    """MiB that the agent may have written to the disk on a day (of UTC) for another round to begin: ledger
    and spool, as the kernel counts them. A round goes beyond it at most once. What training and
    decoding write does not count: it tells of the records."""
    command: tuple[str, ...] = ()
    """Program and arguments that say whether the board may train: yes by exit code 0, no by any other, within
    ten seconds. The last line that it prints goes into the log. It must not look at records."""
    command_period_s: Annotated[float, Limits(ge=1, le=86_400)] = 30.0
    """Seconds after which ``command`` is run again, while there is a round to train for."""
    processor_share: Annotated[float, Limits(ge=0.1, le=1)] = 1.0
    """Share of the time in which training runs, on all the cores that it has; in the rest it stands still, in
    turns of a tenth of a second. Rounds take so much longer."""
