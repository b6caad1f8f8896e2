"""Fetching media: private addresses, redirects, sizes, timeouts and names."""

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.events.media import MEDIA_BYTES_MAX
from forebay.ingress.errors import ApiError
from forebay.ingress.media import fetch as media
from forebay.ingress.media.fetch import MediaFetcher, is_public
from forebay.ingress.media.tokens import FetchedMedia, MediaRef, MediaSettings
from tests.system import until

MP4 = b"\x00\x00\x00\x18ftypmp42" + bytes(20)
OPEN = MediaSettings(allow_private=True)
Answer = Callable[[str, dict[str, str], asyncio.StreamWriter], Awaitable[None]]


def response(status: str, content: bytes = b"", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


class Site:
    """A small HTTP server that records path and host of each request."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str]] = []
        self.headers: dict[str, str] = {}
        self.port = 0
        self.held: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        path = head[0].split()[1]
        self.received.append((path, self.headers["host"]))
        if path == "/never":
            self.held.append(writer)
            return
        if path == "/endless":
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + MP4)
            while not writer.is_closing():
                writer.write(bytes(1 << 20))
                await writer.drain()
        elif path.startswith("/to/"):
            writer.write(response("302 Found", location=path.removeprefix("/to/")))
        elif path == "/torn":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + MP4)
        elif path == "/nonsense":
            writer.write(b"what?\r\n\r\n")
        elif path == "/video":
            writer.write(response("200 OK", MP4, content_type="image/png", set_cookie="who=you"))
        else:
            writer.write(response("404 Not Found", b"no"))
        await writer.drain()
        writer.close()


@asynccontextmanager
async def site(tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    made = Site()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await made.serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for writer in made.held:
            writer.close()


@asynccontextmanager
async def fetcher(settings: MediaSettings = OPEN) -> AsyncIterator[Callable[..., Awaitable[list[FetchedMedia]]]]:
    one = MediaFetcher(settings)

    async def fetch(*urls: str) -> list[FetchedMedia]:
        return await one.fetch([MediaRef("video", url, f"part[{at}]") for at, url in enumerate(urls)])

    yield fetch
    await one.close()


async def test_the_resolved_name_is_the_name_in_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own codec uses the older IDNA standard, in which this name is fass.test, another host."""
    fass = "xn--fa-hia.test"
    names = Names(monkeypatch, **{fass: [["127.0.0.1"]]})
    async with site() as there, fetcher() as fetch:
        await fetch(f"http://fa\u00df.test:{there.port}/video")
        assert there.received == [("/video", f"{fass}:{there.port}")]
    assert names.received == [fass]


async def test_slow_name_servers_do_not_delay_other_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    received = []

    def getaddrinfo(host: str, *_: Any, **__: Any) -> Any:
        received.append(host)
        released.wait(60)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with fetcher() as fetch:
        fetching = [asyncio.ensure_future(fetch(*[f"http://slow{n}.test/{at}" for at in range(16)])) for n in range(4)]
        try:
            await until(lambda: len(received) >= media.FETCHES_MAX)
            async with asyncio.timeout(30):
                assert await asyncio.to_thread(lambda: "leases are looked at, say") is not None
        finally:
            released.set()
            await asyncio.gather(*fetching, return_exceptions=True)


async def test_media_are_returned_in_order() -> None:
    async with site() as there, fetcher() as fetch:
        url = f"http://127.0.0.1:{there.port}/video"
        found = await fetch(url, f"http://127.0.0.1:{there.port}/to//to//to//video", url)
        assert [(one.mime, one.content) for one in found] == [("video/mp4", MP4)] * 3
        assert there.headers["accept-encoding"] == "identity"
        assert "cookie" not in there.headers


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/nothing", "responded with status 404"),
        ("/torn", "cannot be read"),
        ("/nonsense", "cannot be read"),
        ("/to/ftp://x/y", "the scheme is 'ftp'; it must be http, https or data"),
        ("/to//to//to//to//video", "it redirects more than 3 times"),
        ("/to/http://no-such-host.invalid/", "no-such-host.invalid is unknown"),
        ("/to/http://xn--a/", "cannot be read (InvalidCodepoint)"),
    ],
)
async def test_errors_name_the_reference(path: str, text: str) -> None:
    async with site() as there, fetcher() as fetch:
        with pytest.raises(ApiError) as refused:
            await fetch(f"http://127.0.0.1:{there.port}/video", f"http://127.0.0.1:{there.port}{path}")
        assert refused.value.status == 400
        assert text in refused.value.message
        assert refused.value.message.startswith("part[1]: ")


async def test_content_above_the_limit_is_not_read_completely() -> None:
    async with site() as there, fetcher() as fetch:
        with pytest.raises(ApiError, match="exceed 8 MiB together") as refused:
            await fetch(f"http://127.0.0.1:{there.port}/endless")
        assert refused.value.status == 413
    assert MEDIA_BYTES_MAX == 8 << 20


async def test_a_timeout_names_the_slow_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as there, fetcher() as fetch:
        await fetch(f"http://127.0.0.1:{there.port}/video")  # the next one has a connection and is fast
        monkeypatch.setattr(media, "TIMEOUT_S", 1.5)
        with pytest.raises(ApiError, match=r"part\[1\]: it did not arrive within 1.5 s"):
            await fetch(f"http://127.0.0.1:{there.port}/video", f"http://127.0.0.1:{there.port}/never")


async def test_a_refused_connection_is_an_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with fetcher() as fetch:
            with pytest.raises(ApiError, match=r"127.0.0.1 cannot be read \(ConnectError\)"):
                await fetch(f"http://127.0.0.1:{unused.getsockname()[1]}/")


class Names:
    """Replace name resolution: each lookup of a name returns its next addresses; the last ones repeat."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **responses: list[list[str]]) -> None:
        self.received: list[str] = []
        self._answers = {name.replace("_", "."): list(given) for name, given in responses.items()}
        own = socket.getaddrinfo

        def getaddrinfo(host: str, port: int, *args: Any, **more: Any) -> Any:
            known = self._answers.get(host)
            if known is None:
                return own(host, port, *args, **more)
            self.received.append(host)
            addresses = known.pop(0) if len(known) > 1 else known[0]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


async def test_the_connection_uses_the_checked_address(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, pictures_test=[["127.0.0.1"], ["203.0.113.9"]])
    async with site() as there, fetcher(MediaSettings(allow_hosts=("pictures.test",))) as fetch:
        assert await fetch(f"http://Pictures.Test:{there.port}/video")
        assert there.received == [("/video", f"pictures.test:{there.port}")]
        assert names.received == ["pictures.test"]


async def test_every_address_of_a_name_must_be_public(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, mixed_test=[["8.8.8.8", "10.0.0.7"]])
    async with fetcher(MediaSettings(allow_hosts=("other.test",))) as fetch:
        with pytest.raises(ApiError, match=r"mixed\.test is not a public address") as refused:
            await fetch("http://mixed.test/x")
        assert "10.0.0.7" not in refused.value.message, "nor is it told what is inside"


async def test_a_redirect_to_a_private_address_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, pictures_test=[["127.0.0.1"]])
    async with site() as there, fetcher(MediaSettings(allow_hosts=("pictures.test",))) as fetch:
        with pytest.raises(ApiError, match=r"127\.0\.0\.1 is not a public address"):
            await fetch(f"http://pictures.test:{there.port}/to/http://127.0.0.1:{there.port}/video")
        assert [path for path, _ in there.received] == [f"/to/http://127.0.0.1:{there.port}/video"]


async def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with site() as there, fetcher() as fetch:
        assert await fetch(f"http://127.0.0.1:{there.port}/video")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
async def test_certificates_are_checked_against_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ("-subj", "/CN=pictures.test", "-addext", "subjectAltName=DNS:pictures.test")
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject)
    made = [*command, "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, made, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    monkeypatch.setattr("certifi.where", lambda: str(certificate))
    Names(monkeypatch, pictures_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]])
    async with site(tls) as there, fetcher() as fetch:
        assert await fetch(f"https://pictures.test:{there.port}/video")
        with pytest.raises(ApiError, match=r"other\.test cannot be read"):
            await fetch(f"https://other.test:{there.port}/video")
        with pytest.raises(ApiError, match=r"127\.0\.0\.1 cannot be read"):
            await fetch(f"https://127.0.0.1:{there.port}/video")


PUBLIC = ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1")


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.9.9.9", "169.254.169.254", "172.16.0.1"),
        *("192.0.0.1", "192.0.2.1", "192.168.1.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1"),
        *("239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1"),
        *("fec0::1", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::10.0.0.1"),
        *("64:ff9b::7f00:1", "2002:7f00:1::1", "2002:a00:1::1", "2001:0:4136:e378:8000:63bf:f5ff:fffe", "", "host"),
    ],
)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)
    assert all(map(is_public, PUBLIC))


@pytest.mark.parametrize(
    "url", ["http://xn--a/x", "https://xn--/", "http://[::1/", "http://a:b/", "http://\u2460.test/"]
)
async def test_an_invalid_url_is_rejected(url: str) -> None:
    async with fetcher() as fetch:
        with pytest.raises(ApiError, match=r"^part\[0\]: not a valid URL"):
            await fetch(url)
