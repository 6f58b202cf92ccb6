"""What the agent and its pricing process say to each other.

Both programs know these messages, and the agent does not have to know the other's mathematics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.accounts import Books
from agent.charges import Charge, Record
from agent.data_form import DataForm
from agent.limit_settings import LimitSettings
from dpagent.privacy.ranges import AccountantName
from dpagent.protocol.messages import Plan


class JobPrice(NamedTuple):
    """What a whole job costs: which accountant prices it, on what grid, and its ε."""

    accountant: AccountantName
    loss_grid: float | None
    epsilon: float


@dataclass(frozen=True, slots=True)
class PriceQuestion:
    """Whether a round may run, and at what price.

    Attributes:
        plan: the round's, signed and well-formed.
        weights: of the global model, as they came.
        form: of the device's records.
        dataset: the ledger's name for them.
        books: what the ledger adds up to.
        limits: the device's own.
        now: Unix time.
        known: prices of jobs that earlier answers came with, by what they follow from.
        is_charged: whether the round is charged already, so that it only has to keep to the limits.
    """

    plan: Plan
    weights: bytes
    form: DataForm
    dataset: str
    books: Books
    limits: LimitSettings
    now: float
    known: Mapping[str, JobPrice]
    is_charged: bool = False


@dataclass(frozen=True, slots=True)
class ReplayQuestion:
    """Whether the records of a ledger agree with each other, and with their prices."""

    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True)
class Priced:
    """The answer to a :class:`PriceQuestion`: the round may run.

    Attributes:
        charges: to be made before a record is read, of no time yet; none where the round is charged already.
        known: as of :class:`PriceQuestion`, with the price of this job.
    """

    charges: tuple[Charge, ...]
    known: Mapping[str, JobPrice] = field(default_factory=dict)
