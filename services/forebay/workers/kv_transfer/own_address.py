"""Find the address at which other workers reach this machine: the configured one, or the one on the route to a server.

The advertised address is always numeric and local, because a name may resolve to another machine or to loopback.
"""

import fcntl
import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

_SIOCGIFADDR = 0x8915  # Linux ioctl: first IPv4 address of an interface
_ADDRESS_AT = 20  # offset in the result, after the name, the family and a port


def own_address(host: str) -> str:
    """Return the IP address for a configured host name or address of this machine.

    Raises ValueError if the name cannot be resolved, or the address belongs to another machine or cannot be connected
    to.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot resolve the name: {error}") from None
    family, kind, protocol, _, where = found[0]
    address = ip_address(str(where[0]).partition("%")[0])
    if address.is_unspecified:
        raise ValueError(f"{address} is a wildcard: give an address at which other workers reach this machine")
    if address.is_multicast or (isinstance(address, IPv6Address) and address.is_link_local):
        raise ValueError(f"other machines cannot connect to {address}")
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.bind(where)
        except OSError as error:
            raise ValueError(f"{address} is not an address of this machine: {error.strerror}") from None
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(where)  # sends nothing
        except PermissionError:
            raise ValueError(f"{address} is a network address, not an address of this machine") from None
    return str(address)


def address_towards(servers: Iterable[str]) -> str:
    """Return the local IP address from which this machine connects to the first server (`host:port`) with a route.

    No packet is sent. Raises ValueError if there is no route to any of the servers.
    """
    why = "no server is given"
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
    """Return the name of the network interface whose first IPv4 address is `address`, on Linux.

    Raises ValueError if there is none.
    """
    if isinstance(wanted := ip_address(address), IPv4Address):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                try:
                    reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                except OSError:
                    continue  # no IPv4 address
                if reply[_ADDRESS_AT : _ADDRESS_AT + 4] == wanted.packed:
                    return name
    raise ValueError(f"{address} is not the first IPv4 address of any interface: set UCX_NET_DEVICES to its interface")
