"""A directory that is written like the ``/proc`` and ``/sys`` of a board, which a test changes as it goes."""

from __future__ import annotations

from pathlib import Path

from agent.sensors import Sensors

_TICKS = 100
"""Of each core, a second."""


class BoardTree:
    """A board with a thermal zone of its processor and one that always reads 100 °C, as the power supply of a
    Jetson does, and a battery on a charger; more where a test asks for it.

    Args:
        root: the directory, which a :class:`agent.sensors.Sensors` reads in place of ``/``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._total = self._busy = 0
        self.write("sys/class/thermal/thermal_zone0/type", "PMIC-Die")
        self.write("sys/class/thermal/thermal_zone0/temp", 100_000)
        self.write("sys/class/thermal/thermal_zone1/type", "cpu-thermal")
        self.heat(45.0)
        self.write("sys/class/power_supply/mouse/type", "Battery")
        self.write("sys/class/power_supply/mouse/scope", "Device")
        self.write("sys/class/power_supply/mouse/capacity", 3)
        self.write("sys/class/power_supply/mouse/status", "Discharging")
        self.write("sys/class/power_supply/usb/type", "USB")
        self.write("sys/class/power_supply/BAT0/type", "Battery")
        self.write("sys/class/power_supply/BAT0/capacity", 80)
        self.plug(True)
        self.leave_memory(500)
        self.compute(0.0, 1.0)

    def write(self, name: str, value: object) -> None:
        """What a file of the kernel says, with the newline that it has."""
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        # In one step, as the kernel answers: nobody reads half a number.
        there = file.with_name(f"{file.name}.new")
        there.write_text(f"{value}\n")
        there.replace(file)

    def remove(self, name: str) -> None:
        (self.root / name).unlink()

    def heat(self, celsius: float) -> None:
        self.write("sys/class/thermal/thermal_zone1/temp", round(1_000 * celsius))

    def plug(self, is_plugged: bool) -> None:
        self.write("sys/class/power_supply/usb/online", int(is_plugged))
        self.write("sys/class/power_supply/BAT0/status", "Charging" if is_plugged else "Discharging")

    def charge(self, percent: int) -> None:
        self.write("sys/class/power_supply/BAT0/capacity", percent)

    def leave_memory(self, mib: int) -> None:
        self.write(
            "proc/meminfo",
            f"MemTotal:  {1_024 << 10} kB\nMemFree:  1000 kB\nMemAvailable:  {mib << 10} kB",
        )

    def compute(self, share: float, seconds: float) -> None:
        """Let time pass on two cores, of which programs take a share; interrupts take a tenth."""
        passed = 2 * _TICKS * seconds
        self._total += round(passed)
        self._busy += round(share * passed)
        interrupts = self._total // 10
        idle = self._total - self._busy - interrupts
        self.write(
            "proc/stat", f"cpu  {self._busy} 0 0 {idle} 0 {interrupts} 0 0 0 0\ncpu0 1 2 3 4 5 6 7 8 9 0"
        )

    def run(self, process: int, parent: int, ticks: int, name: str = "python") -> None:
        """A process that has taken so many ticks."""
        fields = [str(number) for number in range(50)]
        fields[:2] = ["S", str(parent)]
        fields[11:15] = [str(ticks), "0", "0", "0"]
        self.write(f"proc/{process}/stat", f"{process} ({name}) {' '.join(fields)}")

    def hold(self, process: int, mib: int) -> None:
        """Let a process have so much memory of its own."""
        self.write(f"proc/{process}/smaps_rollup", f"Rss: 1 kB\nPss_Anon: {mib << 10} kB\nPss_Shmem: 0 kB")

    def leave_by(self, interface: str, **facts: object) -> None:
        """The default route, and what the kernel says of its interface."""
        head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
        self.write(
            "proc/net/route",
            f"{head}\n{interface}\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
            f"{interface}\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0",
        )
        for name, value in facts.items():
            self.write(f"sys/class/net/{interface}/{name}", value)


def stand_on(root: Path) -> None:
    """Let this process's sensors read a board's directory in place of ``/``."""
    Sensors.__init__.__defaults__ = (root,)
