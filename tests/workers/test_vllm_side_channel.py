"""Side channel of vLLM's NIXL connectors: its address, and its port, which no other engine gets."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forebay.events.control import Role
from forebay.workers.engine import EngineError
from forebay.workers.engines import free_ports
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm.core import HOST, PORT, side_channel
from tests.harness import local


def reported(role: Role, **options: Any) -> EngineSettings:
    return EngineSettings(model=Path("/m"), model_name="m", role=role, **options)


@pytest.fixture
def no_channel(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (HOST, PORT, "VLLM_HOST_IP"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.usefixtures("no_channel")
def test_engines_of_a_machine_get_different_ports() -> None:
    """Although none of them listens yet. The environment of this process stays as it is."""
    before = dict(os.environ)
    roles: list[Role] = ["prefill", "decode"] * 4
    with ThreadPoolExecutor(len(roles)) as threads:
        channels = list(threads.map(lambda role: side_channel(reported(role, dp_size=2)), roles))
    ports = [int(channel[PORT]) + rank for channel in channels for rank in range(2)]
    assert len(set(ports)) == len(ports)
    assert {channel[HOST] for channel in channels} == {"127.0.0.1"}
    assert dict(os.environ) == before
    assert side_channel(reported("aggregated")) == {}
    script = (
        "from forebay.workers.engines.free_ports import reserve_ports\n"
        f"print(any(reserve_ports([port], '127.0.0.1') for port in {ports}))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout == f"{sys.platform != 'linux'}\n"


@pytest.mark.usefixtures("no_channel")
def test_an_engine_can_listen_on_its_reserved_port() -> None:
    port = int(side_channel(reported("decode"))[PORT])
    with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
        pass


def test_missing_free_port_is_reported(no_channel: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        no_channel.setattr(free_ports, "FIRST", port)
        no_channel.setattr(free_ports, "LAST", port + 2)
        with pytest.raises(EngineError, match=PORT):
            side_channel(reported("decode"))


def test_a_configured_port_serves_one_engine(no_channel: pytest.MonkeyPatch) -> None:
    port = local.free_ports(1)
    no_channel.setenv(PORT, str(port))
    assert side_channel(reported("prefill")) == {HOST: "127.0.0.1", PORT: str(port)}
    with pytest.raises(EngineError, match=f"cannot listen at 127.0.0.1:{port}: {PORT} must be the first of 1 free"):
        side_channel(reported("decode"))


@pytest.mark.parametrize("value", ["70000", "-1", "x", "65535"])
def test_an_invalid_port_is_reported(value: str, no_channel: pytest.MonkeyPatch) -> None:
    no_channel.setenv(PORT, value)
    with pytest.raises(EngineError, match=f"cannot listen at 127.0.0.1:{value}"):
        side_channel(reported("prefill", dp_size=2))


def test_configured_side_channel_is_used(no_channel: pytest.MonkeyPatch) -> None:
    no_channel.setenv("VLLM_HOST_IP", "127.0.0.2")
    assert side_channel(reported("prefill"))[HOST] == "127.0.0.2"
    no_channel.setenv(HOST, "127.0.0.3")
    assert side_channel(reported("prefill", near_host="127.0.0.5"))[HOST] == "127.0.0.3"
    given = side_channel(reported("prefill", near_host="127.0.0.5", kv_host="127.0.0.4"))
    assert given[HOST] == "127.0.0.4", "the command line overrides the environment"


@pytest.mark.usefixtures("no_channel")
def test_side_channel_listens_at_the_reachable_address() -> None:
    channel = side_channel(reported("decode", near_host="127.0.0.5"))
    assert channel[HOST] == "127.0.0.5"
    socket.create_server(("127.0.0.5", int(channel[PORT]))).close()
