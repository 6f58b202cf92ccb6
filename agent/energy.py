"""The energy that a board takes for a round, where it has a sensor for that.

A counter of energy is read before and after (Intel's RAPL, the kernel's Documentation/power/powercap; hwmon's
``energy*_input``). Of a sensor of power (hwmon's ``power*_input``, which the kernel's drivers of INA2xx have;
an INA3221's voltages and currents; a battery that discharges) the readings are added up over time, by the
trapezoidal rule. Either measures what it is wired to, the whole board or its processor, with all else that
runs there. It is for the board's owner: it goes to the log and to the state directory, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.bounded_reads import BoundedReads
from agent.sensors import number_in, text_in
from dpagent.clock import Clock

_MICRO: Final = 1e-6
_CHANNELS: Final = (1, 2, 3)
"""Of an INA3221."""


@dataclass(frozen=True, slots=True)
class Energy:
    """What was taken.

    Attributes:
        joules: so much.
        source: the sensor, as the kernel names it.
    """

    joules: float
    source: str

    def __str__(self) -> str:
        return f"{self.joules:.3g} J, as {self.source} measures it"


@dataclass(frozen=True, slots=True)
class _Counter:
    """A counter in microjoules that begins anew above ``most``; 0: it does not."""

    file: Path
    most: int


@dataclass(frozen=True, slots=True)
class _Source:
    """The sensors of one kind: counters, or one reading of power, in watts; None: it does not answer."""

    name: str
    counters: tuple[_Counter, ...] = ()
    watts: Callable[[], float | None] = lambda: None


class EnergyMeter:
    """Measures from :meth:`begin` to :meth:`end`.

    Args:
        root: of the file system that has ``sys``.
        clock: the program's.
    """

    def __init__(self, root: Path, clock: Clock) -> None:
        self._clock, self._reads = clock, BoundedReads("energy")
        self._source = next(_sources(root / "sys/class"), None)
        self._counts: list[int | None] = []
        self._power: tuple[float, float] | None = None
        """When it was read last (monotonic), and the watts."""
        self._joules = 0.0
        self._is_whole = False
        """Whether every reading since the beginning has answered."""

    @property
    def source(self) -> str | None:
        """The sensor, as the kernel names it; None if there is none."""
        return None if self._source is None else self._source.name

    def begin(self) -> None:
        """Measure from now on."""
        self._joules, self._power, self._is_whole = 0.0, None, self._source is not None
        self._counts = []
        self.sample()

    def sample(self) -> None:
        """Read the sensor; call it as often as power may change."""
        if not self._is_whole or self._source is None:
            return
        try:
            counts, watts = self._reads.read(self._read)
        except TimeoutError:
            self._is_whole = False
            return
        if self._source.counters:
            for counter, before, now in zip(
                self._source.counters, self._counts or counts, counts, strict=True
            ):
                if before is None or now is None or (now < before and not counter.most):
                    self._is_whole = False
                    return
                self._joules += _MICRO * (now - before if now >= before else now - before + counter.most)
            self._counts = counts
            return
        now_s = self._clock.monotonic()
        if watts is None:
            self._is_whole = False
            return
        if self._power is not None:
            before_s, before_watts = self._power
            self._joules += (now_s - before_s) * (before_watts + watts) / 2
        self._power = now_s, watts

    def end(self) -> Energy | None:
        """What was taken since the beginning; None if the sensor did not answer all the time, or there is
        none."""
        self.sample()
        is_whole, self._is_whole = self._is_whole, False
        return Energy(self._joules, self._source.name) if is_whole and self._source is not None else None

    def _read(self) -> tuple[list[int | None], float | None]:
        """What the counters say, or the power in watts."""
        assert self._source is not None
        return [number_in(counter.file) for counter in self._source.counters], self._source.watts()


def _sources(sys_class: Path) -> Iterator[_Source]:
    """The board's, the most exact first. What cannot be read (RAPL is root's) is none."""
    zones = [
        zone for zone in sorted((sys_class / "powercap").glob("intel-rapl:*")) if zone.name.count(":") == 1
    ]
    counters = [
        _Counter(zone / "energy_uj", number_in(zone / "max_energy_range_uj") or 0)
        for zone in zones
        if number_in(zone / "energy_uj") is not None
    ]
    if counters:
        yield _Source("intel-rapl", tuple(counters))
    for chip in sorted((sys_class / "hwmon").glob("hwmon*"), key=_order):
        name = text_in(chip / "name") or chip.name
        if number_in(chip / "energy1_input") is not None:
            yield _Source(name, (_Counter(chip / "energy1_input", 0),))
        elif number_in(chip / "power1_input") is not None:
            yield _Source(name, watts=_scaled(_MICRO, chip / "power1_input"))
        elif name == "ina3221" and (watts := _ina3221(chip)) is not None:
            yield _Source(name, watts=watts)
    for battery in sorted((sys_class / "power_supply").glob("*")):
        if text_in(battery / "type") == "Battery" and (watts := _battery(battery)) is not None:
            yield _Source(battery.name, watts=watts)


def _order(chip: Path) -> tuple[bool, str]:
    """Shunts that were soldered in to measure before whatever else says something of power."""
    return not (text_in(chip / "name") or "").startswith("ina"), chip.name


def _scaled(unit: float, *files: Path) -> Callable[[], float | None]:
    """The product of what files hold, in units."""

    def read() -> float | None:
        product = unit
        for file in files:
            value = number_in(file)
            if value is None:
                return None
            product *= value
        return product

    return read


def _ina3221(chip: Path) -> Callable[[], float | None] | None:
    """The sum of the channels: millivolts times milliamperes."""
    channels = [
        _scaled(_MICRO, chip / f"in{number}_input", chip / f"curr{number}_input")
        for number in _CHANNELS
        if number_in(chip / f"curr{number}_input") is not None
    ]

    def read() -> float | None:
        found = [channel() for channel in channels]
        watts = [each for each in found if each is not None]
        return sum(watts) if len(watts) == len(found) else None

    return read if channels else None


def _battery(battery: Path) -> Callable[[], float | None] | None:
    """What a battery gives, while it does."""
    if number_in(battery / "power_now") is not None:
        read = _scaled(_MICRO, battery / "power_now")
    elif number_in(battery / "current_now") is not None and number_in(battery / "voltage_now") is not None:
        read = _scaled(_MICRO * _MICRO, battery / "current_now", battery / "voltage_now")
    else:
        return None

    def given() -> float | None:
        watts = read() if text_in(battery / "status") == "Discharging" else None
        return None if watts is None else abs(watts)  # Some drivers count what leaves as negative.

    return given
