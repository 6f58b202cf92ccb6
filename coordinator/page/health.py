"""What an operator has to see before it stops the fleet: room on the disk, and certificates that end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509

from coordinator.settings import CoordinatorSettings
from dpagent.diagnosis import Finding, fine, problem, warning

WARN_DAYS: Final = 30.0
_DAY_S: Final = 86_400.0
_WANTED_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class CertificateEnd:
    """When a certificate that this machine holds ends.

    Attributes:
        what: whose it is.
        file: where it is.
        ends_at: Unix time.
    """

    what: str
    file: Path
    ends_at: float


def certificates(settings: CoordinatorSettings) -> list[CertificateEnd]:
    """The certificates that are there and can be read. Of a chain, the one that ends first."""
    files = {
        "authority of the broker": settings.mqtt.ca_file,
        "coordinator": settings.mqtt.cert_file,
        "authority of the fleet": settings.members_dir / "ca.crt",
        "page": settings.page.certificate,
    }
    found: list[CertificateEnd] = []
    for what, file in files.items():
        if file is None or any(each.file == file for each in found):
            continue
        try:
            chain = x509.load_pem_x509_certificates(file.read_bytes())
        except (OSError, ValueError):
            continue
        found.append(CertificateEnd(what, file, min(each.not_valid_after_utc.timestamp() for each in chain)))
    return found


def free_bytes(settings: CoordinatorSettings) -> int | None:
    """Room on the disk of the state directory; None if it cannot be told."""
    try:
        return shutil.disk_usage(settings.state_dir).free
    except OSError:
        return None


def findings(settings: CoordinatorSettings, now: float | None = None) -> Iterator[Finding]:
    """What is right and wrong. ``dpagent doctor`` looks at more, and takes longer.

    Args:
        settings: ``fleet.yaml``.
        now: Unix time.
    """
    free = free_bytes(settings)
    if free is not None:
        text = f"{free >> 20:,} MiB are free in {settings.state_dir}"
        if free < _WANTED_BYTES:
            yield warning("disk", text, "Free some space: a full disk stops the coordinator.")
        else:
            yield fine("disk", text)
    moment = time.time() if now is None else now
    for each in certificates(settings):
        days = (each.ends_at - moment) / _DAY_S
        text = f"the certificate of the {each.what} lasts for {days:,.0f} days more ({each.file})"
        if days <= 0:
            yield problem(
                "certificate", f"the certificate of the {each.what} has ended ({each.file})", "Make another."
            )
        elif days < WARN_DAYS:
            yield warning("certificate", text, "Make another in time (docs/deploy.md#certificates).")
        else:
            yield fine("certificate", text)
