"""What the kernel says of the board now: heat, power, load, memory, and the link; no record.

Everything is read below a root, so that a directory which is written like a board's ``/proc`` and ``/sys``
can stand in for them. A sensor that is absent, or does not answer, reads as None.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

_PROCESSORS: Final = ("cpu", "soc", "core", "cluster", "pkg", "package")
"""Parts of the names that thermal zones of processors have. Others (a battery, a radio, the power supply of a
Jetson, which always reads 50 or 100 °C) tell nothing of them."""
_DEFAULT_ROUTE: Final = "00000000"
_ROUTE_IS_UP: Final = 1
_PPP: Final = 512
"""ARPHRD_PPP of if_arp.h: a modem that is dialled."""


@dataclass(frozen=True, slots=True)
class Power:
    """The board's supply.

    Attributes:
        on_mains: whether it has one besides its battery; None if the kernel knows of no supply at all.
        battery_percent: charge of the emptiest battery; None without one.
    """

    on_mains: bool | None
    battery_percent: int | None


class Ticks(NamedTuple):
    """Processor time so far, of all cores, in the kernel's ticks.

    Attributes:
        total: that has passed.
        busy: in which programs, or the kernel for them, computed; without interrupts.
    """

    total: int
    busy: int


class _Relative(NamedTuple):
    """A process.

    Attributes:
        process: its id.
        parent: that of its parent.
        ticks: processor time, of itself and of its children that have been waited for.
    """

    process: int
    parent: int
    ticks: int


class Sensors:
    """The board's sensors.

    Args:
        root: of the file system that has ``proc`` and ``sys``.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def temperature_c(self, zones: Iterable[str] = ()) -> float | None:
        """Of the hottest thermal zone, in °C.

        Args:
            zones: types of the zones that count; by default those of processors, or all if there is none.
        """
        found: dict[str, float] = {}
        for zone in sorted((self.root / "sys/class/thermal").glob("thermal_zone*")):
            kind, value = text_in(zone / "type"), number_in(zone / "temp")
            if kind is not None and value is not None:
                found[kind] = max(value / 1_000, found.get(kind, value / 1_000))
        if wanted := set(zones):
            return max((value for kind, value in found.items() if kind in wanted), default=None)
        of_processors = [
            value for kind, value in found.items() if any(p in kind.lower() for p in _PROCESSORS)
        ]
        return max(of_processors or found.values(), default=None)

    def power(self) -> Power:
        """The supplies of the board itself; a mouse's battery is none."""
        mains: list[bool] = []
        is_discharging: list[bool] = []
        charges: list[int] = []
        for supply in sorted((self.root / "sys/class/power_supply").glob("*")):
            kind = text_in(supply / "type")
            if text_in(supply / "scope") == "Device" or text_in(supply / "present") == "0":
                continue
            if kind in ("Battery", "UPS"):
                is_discharging.append(text_in(supply / "status") == "Discharging")
                if (charge := number_in(supply / "capacity")) is not None:
                    charges.append(charge)
            elif (online := number_in(supply / "online")) is not None:
                mains.append(online > 0)
        on_mains: bool | None = None
        if mains:
            on_mains = any(mains)
        elif is_discharging:
            on_mains = not any(is_discharging)
        return Power(on_mains, min(charges, default=None))

    def ticks(self) -> Ticks | None:
        """Of the whole board (proc_stat(5))."""
        line = (text_in(self.root / "proc/stat") or "").partition("\n")[0].split()
        if len(line) < 9 or line[0] != "cpu":
            return None
        user, nice, system, *rest = map(int, line[1:9])
        return Ticks(user + nice + system + sum(rest), user + nice + system)

    def own_of(self, process: int) -> tuple[int, set[int]]:
        """Processor time so far of a process and all that descend from it, whether they have ended or not, as
        far as somebody has waited for them; and which of those are there that it has started itself."""
        family = list(self._family(process))
        return sum(each.ticks for each in family), {each.process for each in family if each.parent == process}

    def available_mib(self) -> int | None:
        """Memory that a program could have without swapping, in MiB."""
        for line in (text_in(self.root / "proc/meminfo") or "").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) >> 10
        return None

    def memory_below_mib(self, process: int) -> int:
        """Memory that would be available if all that descend from a process ended, in MiB."""
        kib = 0
        for child in self._family(process):
            if child.process != process:
                smaps = text_in(self.root / f"proc/{child.process}/smaps_rollup")
                for line in (smaps or "").splitlines():
                    if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                        kib += int(line.split()[1])
        return kib >> 10

    def written_bytes(self) -> int | None:
        """What this thread has had written to the disk since it began; nobody else's counts."""
        lines = (text_in(self.root / "proc/thread-self/io") or "").splitlines()
        found = [line.partition(":")[2].strip() for line in lines if line.startswith("write_bytes:")]
        return int(found[0]) if found and found[0].isdecimal() else None

    def link(self) -> str | None:
        """Name of the interface that the default route leaves by, of IPv4 if there is one, or None."""
        best: tuple[int, str] | None = None
        for line in (text_in(self.root / "proc/net/route") or "").splitlines()[1:]:
            name, destination, _, flags, _, _, metric, mask, *_ = line.split()
            if destination == mask == _DEFAULT_ROUTE and int(flags, 16) & _ROUTE_IS_UP:
                best = min(best or (int(metric), name), (int(metric), name))
        if best is not None:
            return best[1]
        for line in (text_in(self.root / "proc/net/ipv6_route") or "").splitlines():
            destination, length, _, _, _, weight, _, _, flags, name = line.split()
            is_default = not int(destination, 16) and not int(length, 16) and int(flags, 16) & _ROUTE_IS_UP
            if is_default and name != "lo":  # There the kernel refuses what has no route.
                best = min(best or (int(weight, 16), name), (int(weight, 16), name))
        return None if best is None else best[1]

    def link_is_mobile(self) -> bool:
        """Whether the default route leaves by a modem of a telephone network."""
        if (name := self.link()) is None:
            return False
        interface = self.root / "sys/class/net" / name
        described = (text_in(interface / "uevent") or "").splitlines()
        return "DEVTYPE=wwan" in described or number_in(interface / "type") == _PPP

    def has_network_manager(self) -> bool:
        """Whether NetworkManager runs."""
        return (self.root / "run/NetworkManager").is_dir()

    def _family(self, ancestor: int) -> Iterator[_Relative]:
        """A process and all that descend from it."""
        parents: dict[int, int] = {}
        ticks: dict[int, int] = {}
        try:
            numbers = [int(name) for name in os.listdir(self.root / "proc") if name.isdigit()]  # noqa: PTH208
        except OSError:
            return
        for number in numbers:
            fields = _stat_of(self.root / "proc", number)
            if len(fields) > 14:
                parents[number] = int(fields[1])
                ticks[number] = sum(map(int, fields[11:15]))
        for number in ticks:
            place: int | None = number
            for _ in range(len(parents)):  # Two looks at a tree that changes may find a circle.
                if place == ancestor or place is None:
                    break
                place = parents.get(place)
            if place == ancestor:
                yield _Relative(number, parents[number], ticks[number])


def processor_s_of(process: int, *, with_children: bool) -> float:
    """Processor time so far of a process, in seconds; also of one that has ended and is not waited for yet.

    Args:
        process: its id.
        with_children: whether that of children which it has waited for counts, too.
    """
    fields = _stat_of(Path("/proc"), process)
    ticks = sum(map(int, fields[11 : 15 if with_children else 13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def group_lives(group: int) -> bool:
    """Whether a program of a process group has not ended. One that has stays in it until somebody waits for
    it, which the first process of many containers does for nobody.

    Args:
        group: its id.
    """
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    for number in numbers:
        fields = _stat_of(Path("/proc"), number)
        # The first thread of a program may have ended alone.
        if fields[2:3] == [str(group)] and (fields[0] != "Z" or int(fields[17]) > 1):
            return True
    return False


def _stat_of(proc: Path, process: int) -> list[str]:
    """The fields of proc_pid_stat(5) from the third on; none if there is no such process."""
    # The name, in brackets, may hold anything.
    return (text_in(proc / f"{process}/stat") or "").rpartition(")")[2].split()


def text_in(file: Path) -> str | None:
    """What a file of the kernel says, or None."""
    try:
        return file.read_text("utf-8", errors="replace").strip("\n\0 ")
    except OSError:
        return None


def number_in(file: Path) -> int | None:
    """The whole number that a file of the kernel holds, or None."""
    try:
        return int(text_in(file) or "")
    except ValueError:
        return None
