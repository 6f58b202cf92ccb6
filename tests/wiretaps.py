"""The wiretap of ``crash/wiretap.py`` between programs and a broker, and what it has written down."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import cbor2
from brokers import Broker, wait_until
from children import Child

_PROGRAM = Path(__file__).parent / "crash" / "wiretap.py"


class Written(NamedTuple):
    """A publication: by whom, to which topic."""

    sender: str
    topic: str
    payload: bytes


class Wiretap:
    """A process that listens for each client on a port of its own.

    Args:
        directory: of the record, ``capture``, and of the log.
        broker: behind it.
        names: of the clients.
        over_tls: those of them that it is to speak to over TLS.
        pair: its certificate and key, for them.
    """

    def __init__(
        self,
        directory: Path,
        broker: Broker,
        names: Sequence[str],
        *,
        over_tls: Sequence[str] = (),
        pair: tuple[Path, Path] | None = None,
    ) -> None:
        self._over_tls = over_tls
        self.capture, log = directory / "capture", directory / "wiretap.log"
        self.capture.touch()
        # -I: not from the tests' folders, some of which are called like the packages.
        listed = [f"{name}+tls" if name in over_tls else name for name in names]
        tls = "" if pair is None else f"{pair[0]}:{pair[1]}"
        command = [sys.executable, "-I", _PROGRAM, str(broker.port), self.capture, tls, *listed]
        self._child = Child(command, log)
        self._ports = json.loads(wait_until(lambda: log.read_text().strip(), "the wiretap's ports"))

    def url(self, name: str) -> str:
        """The broker's address for a client."""
        return f"mqtt{'s' if name in self._over_tls else ''}://127.0.0.1:{self._ports[name]}"

    def written(self) -> Iterator[Written]:
        """All publications so far, in the order in which the broker was given them."""
        data, at = self.capture.read_bytes(), 0
        while len(data) >= at + 4 and len(data) >= (end := at + 4 + int.from_bytes(data[at : at + 4], "big")):
            yield Written(**cbor2.loads(data[at + 4 : end]))
            at = end

    def stop(self) -> None:
        self._child.stop()

    def __enter__(self) -> Wiretap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
