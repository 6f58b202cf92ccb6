"""``dpagent health``: whether the daemon in this container gets on.

A daemon tells its service manager that its loop turns (:mod:`dpagent.service_manager`). In a container there
is none: the image names an address where nobody listens, and this command listens there until it hears of a
turn. Nothing is written, and the daemon does no more than for systemd.

The image runs this file by itself, once a minute: it loads nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from dpagent.errors import ChildProcessError, DpagentError, UsageError

_LOOK_AGAIN_S: Final = 0.2
_TURN: Final = b"WATCHDOG=1"


def health() -> None:
    """Say whether the daemon in this container gets on. Exit code 10 if it does not.

    It waits for the daemon's next sign of life, as long as the image's WATCHDOG_USEC at most, and touches no
    record. A service of systemd is watched by systemd: `dpagent service status`.
    """
    wait_s = require_sign_of_life(os.environ)
    print(f"The daemon gets on; the next sign of life came after {wait_s:.1f} s.")


def require_sign_of_life(environment: Mapping[str, str]) -> float:
    """Wait until the daemon says that it gets on.

    Args:
        environment: that of the daemon: NOTIFY_SOCKET and WATCHDOG_USEC.

    Returns:
        Seconds that it took.

    Raises:
        UsageError: the environment names no address of a file, or no time.
        ChildProcessError: nothing came in time, or nobody can listen there.
    """
    address, period = environment.get("NOTIFY_SOCKET", ""), environment.get("WATCHDOG_USEC", "")
    if not address.startswith("/") or not period.isdecimal() or int(period) == 0:
        raise UsageError(
            f"NOTIFY_SOCKET is {address!r} and WATCHDOG_USEC {period!r}; expected the path of a socket and a "
            "time in microseconds, as the container images set them for this command and for the daemon. "
            "For a service of systemd: dpagent service status"
        )
    patience_s, began = int(period) * 1e-6, time.monotonic()
    with _listening(address, began + patience_s) as link:
        while (left_s := began + patience_s - time.monotonic()) > 0:
            link.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                if _TURN in link.recv(4_096).split(b"\n"):
                    return time.monotonic() - began
    raise ChildProcessError(
        f"The daemon has not got on for {patience_s:g} s: no sign of life on {address}. It may be starting, "
        "at work on a plan, or stuck; its log says which."
    )


@contextlib.contextmanager
def _listening(address: str, until: float) -> Iterator[socket.socket]:
    """A socket at an address, once no other check listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        try:
            while not _bound(link, address):
                if time.monotonic() >= until:
                    raise ChildProcessError(f"Another check listens on {address} already.")
                time.sleep(_LOOK_AGAIN_S)
        except OSError as error:
            raise ChildProcessError(
                f"{address}: {error.strerror or error}; nobody can listen there for the daemon. Set "
                "NOTIFY_SOCKET to a place that may be written, for daemon and check alike."
            ) from error
        try:
            yield link
        finally:
            Path(address).unlink(missing_ok=True)


def _bound(link: socket.socket, address: str) -> bool:
    """Whether the address is this check's now. A socket that a killed check left goes, for the next try."""
    try:
        link.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    else:
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe, contextlib.suppress(FileNotFoundError):
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            if Path(address).is_socket():
                Path(address).unlink(missing_ok=True)
    return False


if __name__ == "__main__":
    try:
        health()
    except DpagentError as error:
        print(f"dpagent: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
