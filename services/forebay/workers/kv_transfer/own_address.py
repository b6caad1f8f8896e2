"""The address of this machine by which other workers reach it: as named, or the one that leads to a server.

What is advertised is always a number, and bound: a name may be another machine's elsewhere, or loopback here.
"""

import fcntl
import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

_SIOCGIFADDR = 0x8915  # Linux: the first IPv4 address of an interface
_ADDRESS_AT = 20  # in the answer, behind the name, the family and a port


def own_address(host: str) -> str:
    """The address that a name or number stands for.

    Raises ValueError for one that does not resolve, that nobody can connect to, or that is no address of this machine.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"the name does not resolve: {error}") from None
    family, kind, protocol, _, where = found[0]
    address = ip_address(str(where[0]).partition("%")[0])
    if address.is_unspecified:
        raise ValueError(f"{address} is every address: name one by which other workers reach this machine")
    if address.is_multicast or (isinstance(address, IPv6Address) and address.is_link_local):
        raise ValueError(f"{address} is no address that other machines can connect to")
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.bind(where)
        except OSError as error:
            raise ValueError(f"{address} is no address of this machine: {error.strerror}") from None
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(where)  # sends nothing
        except PermissionError:
            raise ValueError(f"{address} is the address of a whole network, not of this machine") from None
    return str(address)


def address_towards(servers: Iterable[str]) -> str:
    """The address of this machine that others see when it connects to the first of `host:port` that there is a way to.

    Sends nothing. Raises ValueError where there is a way to none.
    """
    why = "none is named"
    for server in servers:
        host, _, port = server.strip().rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
            family, kind, protocol, _, where = found[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0]).partition("%")[0]
        except (OSError, UnicodeError, ValueError) as error:
            why = f"{server}: {error}"
    raise ValueError(why)


def interface_of(address: str) -> str:
    """The network interface whose first IPv4 address this is. Linux. Raises ValueError where there is none."""
    if isinstance(wanted := ip_address(address), IPv4Address):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            for _, name in socket.if_nameindex():
                try:
                    told = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                except OSError:
                    continue  # it has none
                if told[_ADDRESS_AT : _ADDRESS_AT + 4] == wanted.packed:
                    return name
    raise ValueError(f"{address} is not the first IPv4 address of an interface: name that one in UCX_NET_DEVICES")
