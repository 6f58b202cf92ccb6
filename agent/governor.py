"""The governor: whether this board may train now.

It reads the clock, the board's sensors and the answers of commands, and its settings. Never a record, nor
anything that was computed from one: its words for a round (:meth:`Governor.why_not`) have no argument that
could bring one in. What the agent's own processes take (processor time, memory) does not count: neither
training, nor a look at the data, which takes as much as new records make it take.

It says so in the log when training begins to wait or pause, and when it goes on.

**A sensor that is absent** holds nothing back: there is nothing to be obeyed. The log says so once, and
``dpagent doctor`` each time. One that has answered, and does not any more, does hold training back; so does
one whose driver, or whose mount, hangs: the agent goes on, and waits for it no more than a moment.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from agent.bounded_reads import BoundedReads
from agent.governor_settings import GovernorSettings, is_in
from agent.questions import Question
from agent.sensors import Sensors, Ticks, text_in
from dpagent.clock import Clock
from dpagent.errors import ConfigurationError
from dpagent.wording import counted

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.4
"""Sensors are read so often: with the agent's turn of 0.5 s, training pauses within a second."""
_LOAD_S: Final = 2.0
"""Over such times the load is measured,"""
_LOADS: Final = 5
"""and so many of them are averaged."""
_LOAD_TO_BEGIN: Final = 0.8
"""Of the highest load: training begins and goes on at this part of it."""
_CHARGE_TO_BEGIN: Final = 5
"""Points of charge above the least one, at which training goes on."""
_LINK_PERIOD_S: Final = 20.0
_IN_MEMORY: Final = ("tmpfs", "ramfs", "overlay")
"""File systems that take memory for what lies on them, or may: an overlay's upper layer may be any."""
_METERED: Final = {"u 1": True, "u 2": False, "u 3": True, "u 4": False}
"""NetworkManager's NMMetered as busctl prints it: yes, no, and both as a guess; 0 is unknown."""
_ASK_NETWORK_MANAGER: Final = (
    "busctl", "--system", "get-property", "org.freedesktop.NetworkManager",
    "/org/freedesktop/NetworkManager", "org.freedesktop.NetworkManager", "Metered",
)  # fmt: skip


class Governor:
    """The governor of one board.

    Args:
        settings: the section ``governor``, with the profile's.
        state_dir: on whose disk there must be room.
        sensors: of the board.
        clock: the program's.
        written_today: bytes that this program has written to the disk, or None where the kernel does not
            say; by default, all that this thread has.
        readers: the processes that this program has started, and waits for, whose ends may depend on records,
            or on how full the disk is.
        may_be_ending: whether one of them would be ending now that took all of its time. Public.
    """

    def __init__(
        self,
        settings: GovernorSettings,
        state_dir: Path,
        sensors: Sensors,
        clock: Clock,
        *,
        written_today: Callable[[], int | None] | None = None,
        readers: Callable[[], Iterable[int | None]] = tuple,
        may_be_ending: Callable[[], bool] = bool,
    ) -> None:
        self._settings, self._state_dir = settings, state_dir
        self._sensors, self._clock, self._may_be_ending = sensors, clock, may_be_ending
        self._written_today = written_today or sensors.written_bytes
        self._looked_at = -float("inf")
        self._against: list[str] = []
        self._against_begin: list[str] | None = None
        """None: that was not looked at."""
        self._held_since: float | None = None
        self._said: str | None = None
        self._has_read: set[str] = set()
        """The sensors that have answered."""
        self._is_held: set[str] = set()
        """The checks that hold training back: they let it go on at another value than they stop it at."""
        self._reads = BoundedReads("governor")
        self._command = _question(settings.command, settings.command_period_s, clock)
        self._link = _question(self._link_command(), _LINK_PERIOD_S, clock)
        asked = [each for each in (self._command, self._link) if each is not None]
        self._load = _Load(sensors, clock, asked, readers, may_be_ending)
        for absent in self.absent():
            log.warning("governor: %s", absent)

    @property
    def processor_share(self) -> float:
        """Share of the time in which training runs, in (0, 1]."""
        return self._settings.processor_share

    @property
    def held(self) -> str | None:
        """Why training waits or pauses now; None if it does not."""
        return self._said

    def why_not(self, *, begins: bool) -> str | None:
        """Why this board may not train now; None if it may.

        Args:
            begins: whether a round would begin, and not go on.
        """
        now = self._clock.monotonic()
        if now >= self._looked_at + _LOOK_S or (begins and self._against_begin is None):
            self._looked_at = now
            try:
                self._against, self._against_begin = self._reads.read(lambda: self._look(begins=begins))
            except TimeoutError:
                self._against, self._against_begin = ["the board's sensors do not answer"], []
        reasons = self._against + (self._against_begin or [] if begins else [])
        self._note("; ".join(reasons) or None, now, begins=begins)
        return self._said

    @property
    def awaits(self) -> bool:
        """Whether a load is being measured, or a command has not answered yet: soon more is known."""
        measures = self._settings.highest_load is not None and self._load.share() is None
        asked = (question for question in (self._command, self._link) if question is not None)
        return (measures and self._load.is_there) or any(question.answer() is None for question in asked)

    def settle(self) -> None:
        """There is nothing to train for any more."""
        self._held_since = self._said = None

    def due_in_s(self) -> float:
        """Seconds until the sensors are read again."""
        return max(0.0, self._looked_at + _LOOK_S - self._clock.monotonic())

    def stop(self) -> None:
        """End the commands that run."""
        for question in (self._command, self._link):
            if question is not None:
                question.stop()

    def absent(self) -> list[str]:
        """What is asked for and cannot be told on this board, a sentence each."""
        settings, sensors, found = self._settings, self._sensors, []
        power = sensors.power()
        if settings.highest_temperature_c is not None and self._temperature_c() is None:
            named = f" of {', '.join(settings.thermal_zones)}" if settings.thermal_zones else ""
            found.append(f"there is no thermal zone{named}: highest_temperature_c holds nothing back")
        if settings.mains_power and power.on_mains is None:
            found.append("the kernel names no power supply: this board is taken to be on mains power")
        if settings.least_battery_percent is not None and power.battery_percent is None:
            found.append("there is no battery: least_battery_percent holds nothing back")
        if settings.highest_load is not None and sensors.ticks() is None:
            found.append("/proc/stat cannot be read: highest_load holds nothing back")
        if settings.least_free_memory_mib is not None and sensors.available_mib() is None:
            found.append("/proc/meminfo cannot be read: least_free_memory_mib holds nothing back")
        if settings.most_written_mib_per_day is not None and self._written_today() is None:
            found.append("/proc/thread-self/io cannot be read: most_written_mib_per_day holds nothing back")
        if settings.unmetered_link and self._link is None and not sensors.link_is_mobile():
            found.append(
                "there is no NetworkManager (or no busctl), so only a modem counts as metered; `command` may"
                " say more"
            )
        return found

    def readings(self) -> Iterator[str]:
        """What the sensors say, a phrase each, of what matters here."""
        settings, sensors = self._settings, self._sensors
        if settings.hours:
            yield f"it is {_clock_face(self._minute())}"
        if settings.highest_temperature_c is not None and (celsius := self._temperature_c()) is not None:
            yield f"{celsius:.0f} °C"
        power = sensors.power()
        if settings.mains_power and power.on_mains is not None:
            yield "on mains power" if power.on_mains else "on battery"
        if settings.least_battery_percent is not None and power.battery_percent is not None:
            yield f"battery {power.battery_percent} %"
        if settings.highest_load is not None and (share := self._load.share()) is not None:
            yield f"other programs take {share:.0%} of the cores"
        if settings.least_free_memory_mib is not None and (free := self._free_memory_mib()) is not None:
            yield f"{free:,} MiB of memory free"
        if settings.least_free_disk_mib is not None:
            yield f"{self._free_disk_mib():,} MiB of disk free"

    # The checks: each yields why training waits, or nothing.

    def _look(self, *, begins: bool) -> tuple[list[str], list[str] | None]:
        return list(self._checks()), list(self._checks_to_begin()) if begins else None

    def _checks(self) -> Iterator[str]:
        """Against a round that begins, and one that goes on."""
        settings = self._settings
        minute = self._minute()
        if settings.hours and not any(is_in(window, minute) for window in settings.hours):
            yield f"it is {_clock_face(minute)}, outside of {', '.join(settings.hours)}"
        power = self._sensors.power() if settings.mains_power or settings.least_battery_percent else None
        if power is not None and settings.mains_power:
            yield from self._check(
                "mains", power.on_mains, lambda on_mains, _: not on_mains,
                lambda _: "this board is on battery", "the power supply",
            )  # fmt: skip
        if power is not None and (least := settings.least_battery_percent) is not None:
            yield from self._check(
                "battery", power.battery_percent,
                lambda charge, held: charge < min(100, least + _CHARGE_TO_BEGIN * held),
                lambda charge: f"the battery has {charge} %, less than {least} %",
                "the battery's charge",
            )  # fmt: skip
        if (highest := settings.highest_temperature_c) is not None:
            yield from self._check(
                "temperature", self._temperature_c(),
                lambda celsius, held: celsius > highest - settings.temperature_drop_c * held,
                lambda celsius: f"the processor has {celsius:.0f} °C, and is to have at most {highest:g} °C",
                "the processor's temperature",
            )  # fmt: skip
        if (most := settings.highest_load) is not None:
            yield from self._check(
                "load", self._load.share(),
                lambda share, held: share > most * (_LOAD_TO_BEGIN if held else 1),
                lambda share: f"other programs take {share:.0%} of the cores, more than {most:.0%}",
                None,
            )  # fmt: skip
        if settings.unmetered_link:
            yield from self._metered()
        yield from self._owner_says()

    def _checks_to_begin(self) -> Iterator[str]:
        """Against a round that begins."""
        settings = self._settings
        if settings.highest_load is not None and self._load.share() is None and self._load.is_there:
            yield "the load of other programs is being measured"
        if (least := settings.least_free_memory_mib) is not None:
            free = self._free_memory_mib()
            if free is not None and self._may_be_ending():
                yield "what the owner's command may have of the memory is not free yet"
            elif free is not None and free < least:
                yield f"{free:,} MiB of memory are free, less than {least:,} MiB"
        if (least := settings.least_free_disk_mib) is not None and (free := self._free_disk_mib()) < least:
            yield f"{free:,} MiB are free in {self._state_dir}, less than {least:,} MiB"
        if (most := settings.most_written_mib_per_day) is not None:
            written = self._written_today()
            if written is not None and written >> 20 >= most:
                yield f"{written >> 20:,} MiB were written to the disk on this day, of {most:,} MiB (UTC)"

    def _check(
        self,
        name: str,
        value: float | None,
        is_against: Callable[[float, bool], bool],
        words: Callable[[float], str],
        sensor: str | None,
    ) -> Iterator[str]:
        """A reading against a bound that is another one while it holds training back.

        Args:
            name: of the check.
            value: the reading, or None.
            is_against: whether a reading holds training back, given whether one did.
            words: for one that does.
            sensor: its name, where it holds training back that it does not answer any more.
        """
        if value is None:
            self._is_held.discard(name)
            if sensor is not None and name in self._has_read:
                yield f"{sensor} cannot be read any more"
            return
        self._has_read.add(name)
        if is_against(value, name in self._is_held):
            self._is_held.add(name)
            yield words(value)
        else:
            self._is_held.discard(name)

    def _owner_says(self) -> Iterator[str]:
        if self._command is None:
            return
        answer, name = self._command.answer(), Path(self._settings.command[0]).name
        if answer is None:
            yield f"{name} has not answered yet"
        elif answer.code != 0:
            yield f"{name} says no" + (f": {answer.text}" if answer.text else "")

    def _metered(self) -> Iterator[str]:
        answer = None if self._link is None else self._link.answer()
        if self._sensors.link_is_mobile() or (answer is not None and _METERED.get(answer.text, False)):
            yield "the link is metered"
        elif self._link is not None and answer is None:
            yield "NetworkManager has not answered yet"

    # What they read.

    def _minute(self) -> int:
        """Of the day, by the board's clock and time zone."""
        local = time.localtime(self._clock.unix())
        return 60 * local.tm_hour + local.tm_min

    def _temperature_c(self) -> float | None:
        return self._sensors.temperature_c(self._settings.thermal_zones)

    def _free_memory_mib(self) -> int | None:
        available = self._sensors.available_mib()
        return None if available is None else available + self._sensors.memory_below_mib(os.getpid())

    def _free_disk_mib(self) -> int:
        try:
            disk = os.statvfs(self._state_dir)
            return disk.f_bavail * disk.f_frsize >> 20
        except OSError:
            return 0

    def _link_command(self) -> tuple[str, ...]:
        asks = self._settings.unmetered_link and self._sensors.has_network_manager()
        if not asks:
            return ()
        import shutil  # with all that packs and unpacks

        return _ASK_NETWORK_MANAGER if shutil.which("busctl") else ()

    def _note(self, reason: str | None, now: float, *, begins: bool) -> None:
        """Keep, and say, since when training is held back."""
        if reason is not None and self._held_since is None:
            self._held_since = now
            log.info("training %s: %s", "waits" if begins else "pauses", reason)
        elif reason is None and self._held_since is not None:
            seconds = now - self._held_since
            log.info("training goes on, after %s", counted(round(seconds), "second"))
            self._held_since = None
        self._said = reason


class _Load:
    """What other programs take of the processor, on average over the last seconds.

    A process that nobody waits for takes its time out of the agent's with it: so do those that compute with
    the training process, when that is ended. What is measured then would be by so much too high. So a time in
    which a process ended that the agent had started does not count. Questions are waited for, and so are
    looks and the owner's command, of which records may decide when they end: their ends change nothing. But a
    command that is ended takes the time of what it has started along: so times in which it would be ending
    do not count, whether it had gone on or not.

    Args:
        sensors: of the board.
        clock: the program's.
        questions: that the governor asks.
        readers, may_be_ending: as of :class:`Governor`.
    """

    def __init__(
        self,
        sensors: Sensors,
        clock: Clock,
        questions: Sequence[Question],
        readers: Callable[[], Iterable[int | None]],
        may_be_ending: Callable[[], bool],
    ) -> None:
        self._sensors, self._clock, self._questions, self._readers = sensors, clock, questions, readers
        self._may_be_ending = may_be_ending
        self._at = -float("inf")
        self._before: tuple[Ticks, int, set[int]] | None = None
        self._shares: deque[float] = deque(maxlen=_LOADS)
        self.is_there = sensors.ticks() is not None

    def share(self) -> float | None:
        """Of all cores, in 0..1; None until it has been measured."""
        now = self._clock.monotonic()
        if now >= self._at + _LOAD_S:
            if now >= self._at + 2 * _LOAD_S:  # Nobody has asked meanwhile.
                self._before = None
                self._shares.clear()
            self._at = now
            self._measure()
        return sum(self._shares) / len(self._shares) if self._shares else None

    def _measure(self) -> None:
        ticks, (own, children) = self._sensors.ticks(), self._sensors.own_of(os.getpid())
        children -= {*self._readers(), *(question.process for question in self._questions)}
        if ticks is None:
            return
        if self._may_be_ending():
            self._before = None
            return
        if self._before is not None:
            before, own_before, children_before = self._before
            passed, busy = ticks.total - before.total, ticks.busy - before.busy
            if passed > 0 and own >= own_before and children_before <= children:
                self._shares.append(min(1.0, max(0.0, (busy - (own - own_before)) / passed)))
        self._before = ticks, own, children


def _clock_face(minute: int) -> str:
    """A minute of the day as a clock shows it."""
    return f"{minute // 60:02}:{minute % 60:02}"


def _question(command: tuple[str, ...], period_s: float, clock: Clock) -> Question | None:
    return Question(command, period_s, clock) if command else None


def require_public_room(
    settings: GovernorSettings, state_dir: Path, data: Path, *, reader: str | None = None
) -> None:
    """Refuse a limit on room that records take, on a disk or in memory: it would tell how many there are.

    Args:
        settings: with the limits.
        state_dir: of the agent.
        data: where the records lie.
        reader: what reads records besides the agent, and writes to ``state_dir`` what it makes of them.

    Raises:
        ConfigurationError: There is one.
    """
    if settings.least_free_disk_mib is not None and reader is not None:
        raise ConfigurationError(
            f"governor.least_free_disk_mib is {settings.least_free_disk_mib}, and {reader} may read records"
            f" and keep what it makes of them in state_dir ({state_dir}), as `dpagent personalise` does. How"
            " much room that takes follows from the records, and whether this board trains would tell it."
            " Leave one of the two out."
        )
    if settings.least_free_disk_mib is not None and _share_room(_existing(state_dir), _existing(data)):
        raise ConfigurationError(
            f"governor.least_free_disk_mib is {settings.least_free_disk_mib}, and the records ({data}) lie on"
            f" the disk of state_dir ({state_dir}). How full that is follows from them, and whether this"
            " board trains would tell it. Move one of the two to another disk or partition, or leave the key"
            " out."
        )
    if settings.least_free_memory_mib is None:
        return
    if (kind := _file_system_of(_existing(data))) in _IN_MEMORY:
        raise ConfigurationError(
            f"governor.least_free_memory_mib is {settings.least_free_memory_mib}, and the records ({data})"
            f" lie on a file system ({kind}) that may be in memory. How much of it is free follows from them"
            " then, and whether this board trains would tell it. Move them to a disk, or leave the key out."
        )


def _share_room(one: Path, other: Path) -> bool:
    """Whether two directories take the room of one disk: those of one file system do, and those of several
    that share it (subvolumes, an overlay and what is below it), which then have as much left."""
    try:
        if one.stat().st_dev == other.stat().st_dev:
            return True
        left = [(each.f_bavail * each.f_frsize, each.f_blocks) for each in map(os.statvfs, (one, other))]
    except OSError:
        return True
    return left[0][0] == left[1][0] and all(blocks for _, blocks in left)


def _file_system_of(directory: Path) -> str | None:
    """The kind of a directory's file system (proc_pid_mountinfo(5)), if the kernel names one."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in (text_in(Path("/proc/self/mountinfo")) or "").splitlines():
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == number:
            return rest.split()[0]
    return None


def _existing(path: Path) -> Path:
    """A path, or the nearest directory above that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
