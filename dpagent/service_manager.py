"""What a daemon tells systemd: that it is ready, that it gets on, what it does (sd_notify(3)).

A datagram to the socket that the environment names; without one, nothing. No answer is awaited, and no error
ends the daemon.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

_ASKED_FOR: Final = 0.5
"""Part of the watchdog's time after which it is fed: systemd's own advice."""
_MICRO: Final = 1e-6


class ServiceManager:
    """The service manager that started this program, if one did.

    Args:
        environment: of the program.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # @ stands for the NUL of an abstract address.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._period_s = _watchdog_s(environment) * _ASKED_FOR
        self._fed_at = -float("inf")
        self._status = ""

    def ready(self) -> None:
        """The program serves."""
        self._send("READY=1")

    def alive(self) -> None:
        """The program gets on; call it in its loop as often as you like."""
        now = time.monotonic()
        if self._period_s and now >= self._fed_at + self._period_s:
            self._fed_at = now
            self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """What the program does, in a line for `systemctl status`. For the machine's owner alone."""
        if text != self._status:
            self._status = text
            self._send(f"STATUS={' '.join(text.split())}")

    def stopping(self) -> None:
        """The program ends, in good order."""
        self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.setblocking(False)
            link.sendto(text.encode(errors="replace"), self._address)


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """Seconds within which a sign of life is expected; 0 for none."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0  # That of another program, which started this one.
    try:
        return int(environment.get("WATCHDOG_USEC", "0")) * _MICRO
    except ValueError:
        return 0.0
