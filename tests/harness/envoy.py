"""Envoy with the documented configuration, in front of two servers, and the picker that selects between them."""

from collections.abc import Sequence
from pathlib import Path

import httpx

from infra.kafka.kafka import HOST, ROOT
from tests.harness.cluster import Cluster
from tests.harness.local import Missing, free_ports

ENVOY = ROOT / ".venv-gateway/bin/envoy"
CONFIG = ROOT / "infra/envoy/envoy.yaml"
DOCUMENTED_PORTS = 10_000, 9_002, 8_001, 8_002  # of Envoy, the picker and the servers
PICKER = "p1"


def envoy_binary() -> Path:
    """Return the Envoy that `make setup-gateway` installs. Raises Missing."""
    if not ENVOY.exists():
        raise Missing(f"Envoy is not installed in {ENVOY}; run `make setup-gateway`")
    return ENVOY


def config_of(gateway: int, picker: int, servers: Sequence[int]) -> str:
    """Return the documented configuration with other ports."""
    text = CONFIG.read_text()
    for documented, used in zip(DOCUMENTED_PORTS, (gateway, picker, *servers), strict=True):
        text = text.replace(f"port_value: {documented}}}", f"port_value: {used}}}")
    return text


async def start_gateway(cluster: Cluster, servers: Sequence[int]) -> tuple[str, int]:
    """Start Envoy and a picker in front of the servers at two ports; return Envoy's URL and the picker's port.

    Raises Missing or ProcessError.
    """
    binary, port = envoy_binary(), free_ports(2)
    config = cluster.processes.folder / "envoy.yaml"
    config.write_text(config_of(port, port + 1, servers))
    await start_picker(cluster, port + 1)
    options = ("--disable-hot-restart", "--concurrency", "1", "-l", "warning")
    cluster.processes.start("envoy", [str(binary), "-c", str(config), *options])
    url = f"http://{HOST}:{port}"

    async def is_open() -> bool:
        try:
            async with httpx.AsyncClient() as client:
                return (await client.get(f"{url}/v1/models")).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    await cluster.until("Envoy serves", is_open)
    return url, port + 1


async def start_picker(cluster: Cluster, port: int) -> None:
    """Start a picker, and wait until it serves. Raises ProcessError."""
    command = [*cluster.command_of("picker"), "--id", PICKER, "--port", str(port)]
    process = cluster.processes.start(PICKER, command)
    await cluster.until("the picker serves", process.output, lambda output: "serves Envoy" in output)
