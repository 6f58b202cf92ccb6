"""What a board tells its owner's other programs of itself: its metrics, and Home Assistant.

It is read beside the running agent, as ``dpagent status`` reads. It holds what the broker sees, what
`agent.yaml` and the plans say, and what the ledger has reserved and spent. Left out, as from a file for
support, is what may tell of records or of the time that training takes: temperature, load, memory, room on
the disk, and when a model was kept, which needs room that records may take. Where ``limits.dummy_traffic``
hides whether the board takes part in a round, so does this: what is reserved, spent and receipted is left
out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from agent.overview import Overview
from agent.settings import AgentSettings
from agent.status import Doing, Link


@dataclass(frozen=True, slots=True)
class DisclosedAccount:
    """A lifetime budget.

    Attributes:
        name: in the ledger; see :mod:`agent.columns`.
        budget: ε for the device's life.
        reserved: ε that jobs have reserved, and
        spent: that rounds have spent; infinite after rounds without a guarantee, None where it is hidden.
    """

    name: str
    budget: float
    reserved: float | None
    spent: float | None


@dataclass(frozen=True, slots=True)
class Disclosed:
    """What may be told of a board. Times are Unix times; None: not known, or hidden.

    Attributes:
        runs: whether its agent does.
        is_connected: to its broker; not known of an agent of another version.
        is_ledger_readable: whether the ledger can be read.
        round: that the plan announces, and
        rounds: of how many.
        is_job_over: whether the announced job is.
        accounts: of the ledger.
        last_receipt_at: when a fragment was last confirmed.
        certificate_ends_at: when the board's certificate ends.
    """

    runs: bool
    is_connected: bool | None
    is_ledger_readable: bool
    round: int | None
    rounds: int | None
    is_job_over: bool | None
    accounts: tuple[DisclosedAccount, ...]
    last_receipt_at: float | None
    certificate_ends_at: float | None


Look = Callable[[], Overview]
"""At the board (:func:`agent.overview.overview_of`)."""


def disclosed(settings: AgentSettings, overview: Overview) -> Disclosed:
    """What may be told of a board.

    Args:
        settings: ``agent.yaml``, with the profile's.
        overview: of the board.
    """
    status, hides = overview.status, settings.limits.dummy_traffic
    announced = None if status is None else status.round
    is_connected = overview.runs and status is not None and status.link is Link.CONNECTED
    return Disclosed(
        runs=overview.runs,
        is_connected=None if overview.runs and overview.is_other else is_connected,
        is_ledger_readable=overview.problem is None,
        round=None if announced is None else announced.round,
        rounds=None if announced is None else announced.rounds,
        is_job_over=None if announced is None else announced.doing is Doing.FINISHED,
        accounts=tuple(
            DisclosedAccount(
                each.name,
                each.epsilon_budget,
                None if hides else each.epsilon_reserved,
                None if hides else each.epsilon_spent,
            )
            for each in overview.accounts
        ),
        last_receipt_at=None if hides else overview.last_receipt_at,
        certificate_ends_at=_end_of(settings.mqtt.cert_file),
    )


def _end_of(file: Path | None) -> float | None:
    try:
        data = None if file is None else file.read_bytes()
        return None if data is None else x509.load_pem_x509_certificate(data).not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return None
