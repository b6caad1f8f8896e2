"""Two hosts on this machine, connected by a cable: Linux namespaces for tests that cross a network.

Theory of operation. A host is an `unshare`d process: network, hostname, IPC, process numbers and mounts, with a
/dev/shm and a /sys of its own, so that nothing is shared with the other host but the cable, a pair of virtual Ethernet
devices. Every process on a host ends with that process, which ends with its creator, so nothing is left behind.
"""

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.harness.local import Missing

DEVICE = "eth0"  # of each host: its end of the cable
ADDRESSES = ("203.0.113.1", "203.0.113.2")  # of a network reserved for documentation
ADDRESSES_6 = ("fd00:f0::1", "fd00:f0::2")
PRIVATE = ("198.51.100.1", "198.51.100.2")
APART = ("--net", "--uts", "--ipc", "--pid", "--mount")
INIT = (
    "mount -t tmpfs none /dev/shm && mount -t sysfs none /sys && echo {name} > /proc/sys/kernel/hostname"
    " && echo up && exec cat > /dev/null"
)
NAMESPACES = ("net", "uts", "ipc", "pid", "mnt")
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Host:
    """A host.

    Attributes:
        pid: process id of its first process.
        address: IPv4 address of its end of the cable.
        address_6: IPv6 address of its end of the cable.
    """

    name: str
    pid: int
    address: str
    address_6: str

    def command(self, *command: str) -> list[str]:
        """Return a command line that runs a command on this host, in a child process: kill the process group."""
        return ["nsenter", "--target", str(self.pid), "--all", f"--wdns={Path.cwd()}", *command]

    def run(self, *command: str) -> str:
        """Run a command on this host and return its output. Raises Missing with its error output."""
        return _output_of(*self.command(*command))

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Move the main thread, and the processes that it starts, into this host's network during the body."""
        assert threading.current_thread() is threading.main_thread()
        with Path("/proc/self/ns/net").open() as own, Path(f"/proc/{self.pid}/ns/net").open() as its:
            _enter(its.fileno())
            try:
                yield
            finally:
                _enter(own.fileno())

    def enter(self) -> None:
        """Move this process, which must have one thread, onto this host. Returns in a child process only.

        The process itself stays outside of the host's process numbers, waits for the child and ends like it.
        """
        folder = Path.cwd()
        with contextlib.ExitStack() as stack:
            entered = [stack.enter_context(Path(f"/proc/{self.pid}/ns/{name}").open()) for name in NAMESPACES]
            for namespace in entered:
                _enter(namespace.fileno(), 0)
        if child := os.fork():
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
        os.chdir(folder)

    def sent_bytes(self) -> int:
        """Return the number of bytes sent over the cable so far."""
        (device,) = json.loads(self.run("ip", "-json", "-statistics", "link", "show", "dev", DEVICE))
        return int(device["stats64"]["tx"]["bytes"])

    def cut(self) -> None:
        """Cut the cable at this end: packets are silently lost."""
        self.run("ip", "link", "set", DEVICE, "down")

    def mend(self) -> None:
        self.run("ip", "link", "set", DEVICE, "up")


@contextlib.contextmanager
def two_hosts(prefix: str = "host") -> Iterator[tuple[Host, Host]]:
    """Yield two connected hosts. Raises Missing if this machine or user cannot create them."""
    if sys.platform != "linux":
        raise Missing("hosts are Linux namespaces")
    if missing := [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]:
        raise Missing(f"no {', '.join(missing)} on PATH, to make hosts with")
    if os.geteuid():
        raise Missing("only root may make hosts")
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(_host(f"{prefix}-{end}", *addresses))
            for end, addresses in zip("ab", zip(ADDRESSES, ADDRESSES_6, strict=True), strict=True)
        ]
        _cable(DEVICE, hosts)
        for host in hosts:
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", DEVICE)
            host.run("ip", "addr", "add", f"{host.address_6}/64", "dev", DEVICE, "nodad")
        yield hosts[0], hosts[1]


def private_networks(hosts: tuple[Host, Host]) -> None:
    """Give each host a second, private network with the same addresses as the other host's."""
    for host, address in zip(hosts, PRIVATE, strict=True):
        _cable("eth1", [host, host], "eth1-end")
        host.run("ip", "addr", "add", f"{address}/24", "dev", "eth1")


def _cable(device: str, ends: list[Host], other: str = "") -> None:
    one, two = ends
    peer = ["type", "veth", "peer", "name", other or device, "netns", str(two.pid)]
    _output_of("ip", "link", "add", device, "netns", str(one.pid), *peer)
    one.run("ip", "link", "set", device, "up")
    two.run("ip", "link", "set", other or device, "up")


@contextlib.contextmanager
def _host(name: str, address: str, address_6: str) -> Iterator[Host]:
    command = ["unshare", *APART, "--fork", "--kill-child", "--mount-proc", "sh", "-c", INIT.format(name=name)]
    # The host's process ends when its stdin closes, so it ends with this process.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as keeper:
        try:
            assert keeper.stdout is not None
            assert keeper.stderr is not None
            if keeper.stdout.readline() != b"up\n":
                raise Missing(f"a host cannot be made here: {keeper.stderr.read().decode().strip()}")
            children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
            host = Host(name, int(children[0]), address, address_6)
            host.run("ip", "link", "set", "lo", "up")
            yield host
        finally:
            keeper.kill()


def _output_of(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _enter(namespace: int, kind: int = CLONE_NEWNET) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, kind):
        raise OSError(ctypes.get_errno(), "a namespace of a host cannot be entered")
