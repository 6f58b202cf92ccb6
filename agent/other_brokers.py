"""Whether another broker of the board's owner is the fleet's, by whatever name and port."""

from __future__ import annotations

import socket
from ipaddress import IPv6Address, ip_address

from dpagent.transport.settings import MqttSettings


def are_one(other: MqttSettings, fleet: MqttSettings) -> bool:
    """Whether both are one broker. One on this board is known by its port, at whichever of the board's
    addresses; elsewhere, a broker mostly has several (1883, 8883), and whoever runs one on a host may run the
    other."""
    places = _addresses(other), _addresses(fleet)
    shared = places[0] & places[1]
    if not shared and _plain_name(other.host) != _plain_name(fleet.host):
        return other.port == fleet.port and all(any(map(_is_own, each)) for each in places)
    is_here = bool(shared) and all(ip_address(address).is_loopback for address in shared)
    return other.port == fleet.port or not is_here


def _addresses(broker: MqttSettings) -> set[str]:
    """What the name of a broker stands for, as far as it is known now."""
    try:
        return {
            _plain_address(str(entry[4][0]))
            for entry in socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
        }
    except OSError:
        return set()


def _plain_name(name: str) -> str:
    """A name without what makes no other name of it: case, and the dot of the root."""
    return name.lower().removesuffix(".")


def _plain_address(text: str) -> str:
    """An address, that of IPv4 where it is one in the form of IPv6."""
    address = ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def _is_own(address: str) -> bool:
    """Whether an address is one of this board's."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
