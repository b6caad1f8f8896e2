"""Addresses beyond loopback need an API key, a certificate its private key, and TLS handshakes a free connection."""

import asyncio
import contextlib
import ssl
from pathlib import Path

import httpx
import openai
import pytest
import trustme
import uvloop
from cryptography.hazmat.primitives import serialization

from forebay.ingress.errors import Unusable
from forebay.ingress.http import server as tls
from forebay.ingress.http.endpoint import Endpoint, TlsFiles
from tests.ingress.conftest import NAME, make_scene
from tests.system import PATIENCE_S, until


@pytest.mark.parametrize(
    ("address", "has_key", "allowed", "is_open"),
    [
        ("127.0.0.1", False, False, False),
        ("::1", False, False, False),
        ("::ffff:127.0.0.1", False, False, False),
        ("0.0.0.0", True, False, False),
        ("0.0.0.0", True, True, False),
        ("192.168.1.2", False, True, True),
        ("::", False, True, True),
    ],
)
def test_other_machines_need_a_key_or_permission(address: str, has_key: bool, allowed: bool, is_open: bool) -> None:
    endpoint = Endpoint(address, 8000, allow_anonymous=allowed)
    assert endpoint.is_open(address, has_key=has_key) is is_open


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.2"])
def test_an_open_address_is_rejected(address: str) -> None:
    with pytest.raises(Unusable, match=f"--host {address} is not a loopback address.*--api-key.*--allow-anonymous"):
        Endpoint(address, 8000).is_open(address, has_key=False)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


def write(authority: trustme.CA, folder: Path) -> TlsFiles:
    """Write a new certificate for 127.0.0.1 and its private key."""
    folder.mkdir()
    issued = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    return TlsFiles(folder / "cert.pem", folder / "key.pem")


def test_connections_that_never_finish_their_handshake_count_towards_the_limit(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "REFUSED_MAX", 0)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the event loop of every service
        runner.run(_silent_connections(write(authority, tmp_path / "a"), trusted))


async def _silent_connections(files: TlsFiles, trusted: ssl.SSLContext) -> None:
    async def closed(reader: asyncio.StreamReader) -> bool:
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        return True

    async with make_scene() as scene, scene.served(files, connections_max=3) as (port, _):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        ends = [asyncio.create_task(closed(reader)) for reader, _ in silent]
        await until(lambda: sum(end.done() for end in ends) == 2)
        assert scene.metric('forebay_ingress_refused_total{code="connections_exhausted"} 2.0')
        for _, writer in silent:
            writer.close()
        async with httpx.AsyncClient(verify=trusted) as client, asyncio.timeout(PATIENCE_S):
            response: httpx.Response | None = None
            while response is None:
                with contextlib.suppress(httpx.TransportError):  # until the server notices that they are closed
                    response = await client.get(f"https://127.0.0.1:{port}/live")
        assert response.status_code == httpx.codes.OK
        await asyncio.gather(*ends)


@pytest.mark.parametrize("joined", [False, True])
async def test_the_openai_client_uses_https(authority: trustme.CA, tmp_path: Path, joined: bool) -> None:
    files = write(authority, tmp_path / "a")
    if joined:
        both = tmp_path / "both.pem"
        both.write_bytes((tmp_path / "a/key.pem").read_bytes() + (tmp_path / "a/cert.pem").read_bytes())
        files = TlsFiles(both)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    async with make_scene(api_keys=("key",)) as scene, scene.served(files) as (port, _):
        http_client = openai.DefaultAsyncHttpxClient(verify=trusted)
        base_url = f"https://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="key", http_client=http_client) as client:
            pending = asyncio.create_task(client.completions.create(model=NAME, prompt="a"))
            request = await scene.next_request()
            scene.reply(request.request_id, " b")
            assert (await pending).choices[0].text == " b"
            page = {"origin": f"https://127.0.0.1:{port}", "sec-fetch-site": "same-origin"}
            assert [one.id async for one in client.models.list(extra_headers=page)] == [NAME]


def test_unusable_files_are_rejected(authority: trustme.CA, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(authority, tmp_path / name)
    cert, key, foreign, missing = (tmp_path / name for name in ("a/cert.pem", "a/key.pem", "b/key.pem", "none"))
    encrypted = tmp_path / "encrypted.pem"
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    encrypted.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    for pair, text in (
        ((missing, key), f"cannot read {missing}: No such file or directory"),
        ((cert, missing), f"cannot read {missing}: No such file or directory"),
        ((cert, foreign), "the private key does not belong to the certificate"),
        ((cert, None), "expected a certificate and its private key in PEM format"),
        ((key, cert), "expected a certificate and its private key in PEM format"),
        ((cert, encrypted), "the private key is encrypted"),
    ):
        with pytest.raises(Unusable) as caught:
            TlsFiles(*pair)
        assert text in str(caught.value)
        assert f"--ssl-certfile {pair[0]}" in str(caught.value)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("localhost", "http://localhost:8000"),
        ("10.0.0.5", "http://10.0.0.5:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
    ],
)
def test_url_for_processes_of_this_machine(host: str, url: str) -> None:
    assert Endpoint(host, 8000).own_url == url
