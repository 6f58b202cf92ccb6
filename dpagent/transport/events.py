"""What a session tells its program of, and what a connection tells its session of besides."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """What a broker of MQTT 5 said when it accepted a connection; by default what the standard has."""

    maximum_packet_bytes: int = 256 << 20
    maximum_qos: int = 2
    retains: bool = True
    shares: bool = True
    """Whether several clients can share a subscription."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The broker accepted the connection; subscriptions are pending."""

    protocol: str = field(default="", compare=False)
    """The version of MQTT: 5 or 3.1.1."""
    limits: BrokerLimits = field(default=BrokerLimits(), compare=False)


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The broker took the subscriptions."""


@dataclass(frozen=True, slots=True)
class NotSubscribed:
    """The broker refused a subscription that the program can do without. For the session alone."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotPublished:
    """The broker did not take one publication, and says nothing against others. For the session alone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection was lost or failed; another attempt follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived."""

    topic: str
    payload: bytes
    delivery: tuple[object, int] | None = field(default=None, compare=False, repr=False)
    """The connection that it came by, and its id there, if it is to be acknowledged."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Messages arrived. For the session alone."""

    messages: list[Received]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The broker has taken the publication with this handle."""

    handle: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The broker refuses the client permanently. For the session alone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A connection, or an attempt to connect, has ended. For the session alone."""

    reason: str
    was_reached: bool = True
    """Whether anything answered at the address."""
    lasted_s: float | None = None
    """How long the broker had accepted the connection; None if it never did."""
    speaks_older: bool = False
    """The broker reported that it does not support this version."""
    broke_the_rules: bool = False
    """The broker sent what no broker may send."""


Event = Connected | Subscribed | Disconnected | Received | Acknowledged
"""For the program."""
ConnectionEvent = (
    Connected | Subscribed | NotSubscribed | NotPublished | Arrived | Acknowledged | Refused | Ended
)
"""For the session."""
