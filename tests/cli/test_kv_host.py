"""The address at which other workers fetch KV: what is told, what is found where nothing is, and what cannot be."""

import socket
from typing import Any

import pytest

from forebay.cli.processes import engines
from forebay.cli.processes.engines import EngineChoice, built, engine_choice, reached_at
from forebay.ingress.errors import Unusable
from forebay.ingress.model import DEFAULT_MODEL
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.mock.kv import KvSettings
from forebay.workers.kv_transfer.own_address import address_towards, interface_of, own_address
from forebay.workers.kv_transfer.transport import open_transport
from tests.cli.test_engines import FAKE
from tests.cli.up import forebay

LOCAL_KAFKA = "127.0.0.1:19092"
NOBODYS = "203.0.113.7"
NOWHERE = "kafka.invalid:9092"


@pytest.fixture(autouse=True)
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


def chosen(role: str = "decode", engine: str = "mock", **options: Any) -> EngineChoice:
    return engine_choice(engine=engine, model=DEFAULT_MODEL if engine != "mock" else None, role=role, **options)


def kv_of(choice: EngineChoice) -> KvSettings:
    engine, _ = built(choice, "w", pool="")
    assert isinstance(engine, MockEngine)
    return engine._kv_settings


def test_a_name_is_a_number_to_others() -> None:
    assert own_address("127.0.0.1") == own_address("2130706433") == "127.0.0.1"
    assert own_address("localhost") in ("127.0.0.1", "::1")


@pytest.mark.parametrize(
    ("host", "says"),
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
def test_what_others_cannot_reach_is_refused(host: str, says: str) -> None:
    with pytest.raises(Unusable) as refused:
        reached_at(chosen(), host, LOCAL_KAFKA)
    assert str(refused.value).startswith(f"--kv-host {host}: {says}")


def test_it_is_an_error_of_usage() -> None:
    done = forebay("worker", "--role", "prefill", "--kv-host", "0.0.0.0", "--kafka", "127.0.0.1:1")
    assert done.returncode == 2
    assert "--kv-host 0.0.0.0: 0.0.0.0 is a wildcard" in done.stderr


def test_where_nothing_is_told_it_is_the_address_on_the_way_to_kafka() -> None:
    assert reached_at(chosen(), None, f"{NOWHERE},{LOCAL_KAFKA}").settings.near_host == "127.0.0.1"
    with socket.create_server(("127.0.0.2", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        towards = f"127.0.0.2:{server.getsockname()[1]}"
        assert address_towards([towards]) == connection.getsockname()[0], "as a server sees who connects"
    for bad in (NOWHERE, "127.0.0.1", "127.0.0.1:kafka"):
        with pytest.raises(Unusable, match=f"--kafka {bad}: {bad}: "):
            reached_at(chosen(), None, bad)
    assert reached_at(chosen("aggregated"), None, NOWHERE) == chosen("aggregated"), "nobody fetches from it"


def test_plain_sockets_are_where_is_told_or_found() -> None:
    choice = chosen(kv_transport="tcp")
    assert kv_of(choice).at == "127.0.0.1"
    assert kv_of(reached_at(choice, "127.0.0.3", LOCAL_KAFKA)).at == "127.0.0.3"


def test_nixl_is_on_the_interface_of_what_is_told_and_chooses_where_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen()
    assert kv_of(reached_at(choice, None, LOCAL_KAFKA)).at == ""
    told = reached_at(choice, "127.0.0.1", LOCAL_KAFKA)
    assert kv_of(told).at == interface_of("127.0.0.1")
    with pytest.raises(Unusable, match=r"--kv-host: 127.0.0.3 is not the first IPv4 address of any interface"):
        kv_of(reached_at(choice, "127.0.0.3", LOCAL_KAFKA))
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert kv_of(told).at == "", "UCX was told by its own name for it"


@pytest.mark.parametrize(("role", "engine"), [("aggregated", "mock"), ("encode", "mock"), ("decode", "sglang")])
def test_where_nothing_is_fetched_it_is_refused(role: str, engine: str) -> None:
    with pytest.raises(Unusable, match="--kv-host requires --role prefill or decode and --engine mock or vllm"):
        reached_at(chosen(role, engine), "127.0.0.1", LOCAL_KAFKA)


def test_a_real_engine_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.ADAPTERS, "vllm", FAKE)
    engine: Any = built(reached_at(chosen("prefill", "vllm"), "127.0.0.3", LOCAL_KAFKA), "w", pool="")[0]
    assert engine.settings.kv_host == "127.0.0.3"


async def test_what_is_offered_by_plain_sockets_names_the_address() -> None:
    pytest.importorskip("numpy", reason="numpy is not installed")
    options: Any = {"name": "p@1", "blocks": 1, "block_bytes": 16, "on_free": lambda *_: None}
    for at, host in (("", b"127.0.0.1"), ("127.0.0.3", b"127.0.0.3")):
        transport = await open_transport("tcp", at=at, **options)
        try:
            assert host + b":" in transport.offer("a", [0]).descriptor
        finally:
            await transport.close()
