"""Which local user is at the other end of a loopback connection: the kernel's own table says so (proc(5)).

A page on a loopback address is reached by every user of the machine. Who may give orders by the command line
is who may write the coordinator's files; the page asks for no less.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import struct
from pathlib import Path
from typing import Final

_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCAL, _REMOTE, _STATE, _USER, _INODE = 1, 2, 3, 7, 9
_ESTABLISHED: Final = "01"


def peer_user(peer: tuple[str, int], own: tuple[str, int]) -> int | None:
    """The user id of the process that opened a connection to this one; None if the kernel does not say, or
    the process has closed it.

    Args:
        peer: address and port of the other end.
        own: of this end.
    """
    ends = [(plain_address(address), port) for address, port in (peer, own)]
    # A socket of IPv6 may have connected to an address of IPv4.
    mapped = [(f"::ffff:{address}" if "." in address else address, port) for address, port in ends]
    wanted = {" ".join(map(_hex, each)) for each in (ends, mapped)}
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            # A socket that its process has closed belongs to nobody, which the table writes as user 0.
            is_open = fields[_STATE] == _ESTABLISHED and fields[_INODE] != "0"
            if is_open and f"{fields[_LOCAL]} {fields[_REMOTE]}" in wanted:
                return int(fields[_USER])
    return None


def plain_address(text: str) -> str:
    """An address without its zone, and as IPv4 where it is one."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def name_of(user: int) -> str:
    """The name of a user, or its number."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def is_own(user: int) -> bool:
    """Whether a user may do here what this program may: it is the same user, or root."""
    return user in (0, os.geteuid())


def _hex(end: tuple[str, int]) -> str:
    """An end as the kernel writes it: words in the machine's order of bytes."""
    packed = ipaddress.ip_address(end[0]).packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{end[1]:04X}"
