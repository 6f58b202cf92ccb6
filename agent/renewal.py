"""Renewal of the board's certificate, in time and without a restart.

When two thirds of its life are over, the certificate is renewed at the fleet's enrolment endpoint, in a
thread of its own: no round waits for that, and when it happens follows from dates alone. The new one takes
the place of the file; connections to the broker read it as they begin, and the one that is open stays. The
key stays, so that a crash leaves no certificate without its key. With the certificate comes all that the
fleet trusts: while it changes its authority, the old one and the new one. Then the endpoint is shown the new
certificate: an operator who ends a change has to know who has one. Until that has worked, a line before the
certificate says so, which is no part of it: so the agent goes on with that after a restart.

Who issues certificates chooses how long they are, and sees by name who asks for one again. So each of the two
files has one size, and the room for the next ones is taken when the agent starts: how full the disk is, on
which records may lie, does not show.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from agent.settings import AgentSettings
from dpagent.clock import Clock
from dpagent.errors import DpagentError
from dpagent.storage import disk_errors, real_path, take_room_for, write_over_spare
from dpagent.structured_log import Event, about

log = logging.getLogger(__name__)

_LONGEST_LOOK_S: Final = 3600.0
_LOOKS: Final = 50
"""In the life of a certificate that is shorter than so many hours."""
_AUTHORITIES_BYTES: Final = 17 << 10
"""Of the longest list of authorities that an answer may have, as the file has it."""
_CERTIFICATES_BYTES: Final = 2 * _AUTHORITIES_BYTES
"""Of the longest certificate, and of those between it and the root."""
_UNSEEN: Final = b"# Not shown to the fleet yet.\n"


class Renewal:
    """Keeps a board's certificate valid.

    Args:
        settings: of the board. Without ``enrolment`` there is nothing to do.
        clock: the program's.

    Raises:
        StorageError: The disk has no room for the next certificate, or a file cannot be read.
    """

    def __init__(self, settings: AgentSettings, clock: Clock) -> None:
        self._enrolment, self._mqtt, self._clock = settings.enrolment, settings.mqtt, clock
        self._looks_at = -1.0
        self._thread: threading.Thread | None = None
        if self._enrolment is not None and (certificate := self._mqtt.cert_file) is not None:
            for file, size in (
                (self._enrolment.ca_file, _AUTHORITIES_BYTES), (certificate, _CERTIFICATES_BYTES),
            ):  # fmt: skip
                # Where it may not be replaced, the log says so once that is due, whatever the disk has.
                if file.is_file() and os.access(real_path(file).parent, os.W_OK):
                    take_room_for(file, size)

    def tend(self) -> None:
        """Look at the dates now and then, and begin a renewal when it is due; return at once."""
        if self._enrolment is None or self._mqtt.cert_file is None or self._mqtt.key_file is None:
            return
        now = self._clock.monotonic()
        if now < self._looks_at or (self._thread is not None and self._thread.is_alive()):
            return
        files = (self._mqtt.cert_file, self._mqtt.key_file)
        pause_s, is_due = self._look(*files)
        work = self._renew if is_due else self._confirm if _is_unseen(files[0]) else None
        # Boards that were switched on together need not ask together. No record decides when.
        self._looks_at = now + pause_s * random.uniform(0.75, 1.25)
        if work is not None:
            arguments = (self._enrolment.url, self._enrolment.ca_file, *files)
            self._thread = threading.Thread(target=work, args=arguments, name="renewal", daemon=True)
            self._thread.start()

    def _look(self, cert_file: Path, key_file: Path) -> tuple[float, bool]:
        """Seconds until the next look, and whether the certificate is to be renewed."""
        from agent.identity import Identity  # Boards without one need no X.509.

        try:
            identity = Identity.load(cert_file, key_file)
        except DpagentError as error:
            log.warning("the certificate cannot be renewed: %s", error)
            return _LONGEST_LOOK_S, False
        begins, ends = identity.certificate.not_valid_before_utc, identity.certificate.not_valid_after_utc
        pause_s = min(_LONGEST_LOOK_S, (ends - begins).total_seconds() / _LOOKS)
        now = datetime.fromtimestamp(self._clock.unix(), UTC)
        if identity.has_expired(now):
            log.error(
                "the certificate of device %s expired on %s, and no broker accepts it. The operator makes a "
                "code for this board with `dpagent coordinator devices replace %s`",
                identity.device_id, f"{ends:%Y-%m-%d}", identity.device_id[:8],
            )  # fmt: skip
            return _LONGEST_LOOK_S, False
        return pause_s, now >= identity.renews_at

    # In a thread of its own.

    def _renew(self, url: str, ca_file: Path, cert_file: Path, key_file: Path) -> None:
        from agent.enrolling import renew

        try:
            certificate, authorities = renew(url, ca_file, cert_file, key_file)
            # First: the certificate may be of an authority that the file does not name yet.
            write_over_spare(ca_file, authorities, size=_AUTHORITIES_BYTES)
            write_over_spare(cert_file, _UNSEEN + certificate, size=_CERTIFICATES_BYTES)
        except DpagentError as error:
            log.warning("the certificate was not renewed; it will be tried again: %s", error)
        else:
            self._confirm(url, ca_file, cert_file, key_file)
            log.info("the certificate is renewed", extra=about(event=Event.CERTIFICATE_RENEWED))

    def _confirm(self, url: str, ca_file: Path, cert_file: Path, key_file: Path) -> None:
        from agent.enrolling import confirm

        try:
            confirm(url, ca_file, cert_file, key_file)
            with disk_errors(cert_file):
                seen = cert_file.read_bytes().removeprefix(_UNSEEN)
            write_over_spare(cert_file, seen, size=_CERTIFICATES_BYTES)
        except DpagentError as error:
            log.warning(
                "the fleet does not know yet that its certificate came; it will be told again: %s", error
            )


def _is_unseen(cert_file: Path) -> bool:
    """Whether the endpoint has not been shown a certificate that it has issued."""
    with contextlib.suppress(OSError), cert_file.open("rb") as stream:  # What is wrong, the look has said.
        return stream.read(len(_UNSEEN)) == _UNSEEN
    return False
