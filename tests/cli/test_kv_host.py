"""The address at which other workers fetch KV: `--kv-host`, its default, and rejected values."""

import socket
from typing import Any

import pytest

from forebay.cli.processes.engine_options import ADAPTERS, EngineOptions
from forebay.cli.processes.engines import EngineChoice, built, reached_at
from forebay.ingress.errors import Unusable
from forebay.ingress.model import DEFAULT_MODEL
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.mock.kv import KvSettings
from forebay.workers.kv_transfer.own_address import address_towards, interface_of, own_address
from tests.cli.adapters import FAKE
from tests.cli.up import forebay

LOCAL_KAFKA = "127.0.0.1:19092"
NOBODYS = "203.0.113.7"
NOWHERE = "kafka.invalid:9092"


@pytest.fixture(autouse=True)
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


def choose(role: str = "decode", engine: str = "mock", **options: Any) -> EngineChoice:
    return EngineOptions(
        engine=engine, model=str(DEFAULT_MODEL) if engine != "mock" else None, role=role, **options
    ).choice()


def kv_of(choice: EngineChoice) -> KvSettings:
    engine, _ = built(choice, "w", pool="")
    assert isinstance(engine, MockEngine)
    return engine.kv_settings


def test_a_host_name_is_resolved() -> None:
    assert own_address("127.0.0.1") == own_address("2130706433") == "127.0.0.1"
    assert own_address("localhost") in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("nobody.invalid", "cannot resolve the name"),
        ("", "cannot resolve the name"),
        ("a..b", "cannot resolve the name"),
        ("0.0.0.0", "0.0.0.0 is a wildcard"),
        ("::", ":: is a wildcard"),
        ("224.0.0.1", "other machines cannot connect to 224.0.0.1"),
        ("fe80::1", "other machines cannot connect to fe80::1"),
        ("127.255.255.255", "127.255.255.255 is a network address"),
        (NOBODYS, f"{NOBODYS} is not an address of this machine"),
    ],
)
def test_unreachable_addresses_are_rejected(host: str, message: str) -> None:
    with pytest.raises(Unusable) as raised:
        reached_at(choose(), host, LOCAL_KAFKA)
    assert str(raised.value).startswith(f"--kv-host {host}: {message}")


def test_an_invalid_address_is_a_usage_error() -> None:
    done = forebay("worker", "--role", "prefill", "--kv-host", "0.0.0.0", "--kafka", "127.0.0.1:1")
    assert done.returncode == 2
    assert "--kv-host 0.0.0.0: 0.0.0.0 is a wildcard" in done.stderr


def test_the_default_is_the_local_address_of_the_route_to_kafka() -> None:
    assert reached_at(choose(), None, f"{NOWHERE},{LOCAL_KAFKA}").settings.near_host == "127.0.0.1"
    with socket.create_server(("127.0.0.2", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        towards = f"127.0.0.2:{server.getsockname()[1]}"
        assert address_towards([towards]) == connection.getsockname()[0], "as a server sees who connects"
    for bad in (NOWHERE, "127.0.0.1", "127.0.0.1:kafka"):
        with pytest.raises(Unusable, match=f"--kafka {bad}: {bad}: "):
            reached_at(choose(), None, bad)
    assert reached_at(choose("aggregated"), None, NOWHERE) == choose("aggregated"), "nobody fetches from it"


def test_nixl_uses_the_interface_of_the_given_address_or_chooses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose()
    assert kv_of(reached_at(choice, None, LOCAL_KAFKA)).interface == ""
    given = reached_at(choice, "127.0.0.1", LOCAL_KAFKA)
    assert kv_of(given).interface == interface_of("127.0.0.1")
    with pytest.raises(Unusable, match=r"--kv-host: 127.0.0.3 is not the first IPv4 address of any interface"):
        kv_of(reached_at(choice, "127.0.0.3", LOCAL_KAFKA))
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert kv_of(given).interface == "", "the UCX setting of the environment applies"


@pytest.mark.parametrize(("role", "engine"), [("aggregated", "mock"), ("encode", "mock"), ("decode", "sglang")])
def test_kv_host_is_rejected_without_kv_transfer(role: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, "sglang", FAKE)
    with pytest.raises(Unusable, match="--kv-host requires --role prefill or decode and --engine mock or vllm"):
        reached_at(choose(role, engine), "127.0.0.1", LOCAL_KAFKA)


def test_a_real_engine_gets_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, "vllm", FAKE)
    engine: Any = built(reached_at(choose("prefill", "vllm"), "127.0.0.3", LOCAL_KAFKA), "w", pool="")[0]
    assert engine.settings.kv_host == "127.0.0.3"
