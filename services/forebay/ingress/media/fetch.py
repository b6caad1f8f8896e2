"""Images and videos that requests point at: fetched, bounded, and looked at before anything goes on the log.

Theory of operation. A URL is a way to have this machine ask others for something, so it may lead to public addresses
only. A name is resolved once, all of its addresses are checked, and one of those is connected to: a name server that
answers otherwise a moment later changes nothing. Every redirect is a new URL. Nothing is believed of what the other
side says: sizes are counted while reading, types are told by the bytes.
"""

import asyncio
import base64
import binascii
import io
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import unquote_to_bytes

import httpx

from forebay import runtime
from forebay.events.media import MEDIA_BYTES_MAX
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.media.refs import FetchedMedia, MediaRef, MediaSettings

IMAGE_FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
IMAGE_PIXELS_MAX = 40_000_000  # an 8K frame has 33 million; unpacked this is 120 MB
LOOKING_THREADS = 2  # each unpacks an image
COUNT_MAX = 16  # of one request; more is a video
TIMEOUT_S = 15.0  # of a request, for all of its media together
REDIRECTS_MAX = 3
FETCHES_MAX = 32  # at once, of one ingress
URL_CHARS_MAX = 8_192  # of one that is fetched
REDIRECTS = frozenset({301, 302, 303, 307, 308})
SHOWN_CHARS = 80
# IPv6 addresses that stand for an IPv4 one; the last is what DNS64 makes up.
NAT64 = IPv6Network("64:ff9b::/96")


class MediaFetcher:
    """Fetches for one ingress, with threads of its own: slow name servers and large images hold up nobody else."""

    def __init__(self, settings: MediaSettings) -> None:
        self._settings = settings
        self._resolving = runtime.executor(FETCHES_MAX, "resolve")
        self._looking = runtime.executor(LOOKING_THREADS, "look")
        self._free = asyncio.Semaphore(FETCHES_MAX)
        self._client: httpx.AsyncClient | None = None

    async def fetch(self, refs: Sequence[MediaRef]) -> list[FetchedMedia]:
        """What references lead to, in their order. Raises ApiError naming the first that cannot be had."""
        if len(refs) > COUNT_MAX:
            text = f"{refs[COUNT_MAX].where}: a request takes up to {COUNT_MAX} images and videos"
            raise invalid(text, refs[COUNT_MAX].where, "too_many_media")
        budget = _Budget(MEDIA_BYTES_MAX)
        tasks = [asyncio.create_task(self._one(ref, budget)) for ref in refs]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return list(await asyncio.gather(*tasks))
        except TimeoutError:
            unfinished = (ref for ref, task in zip(refs, tasks, strict=True) if task.cancelled() or not task.done())
            slow = next(unfinished, refs[-1])  # all of them may have come at the last moment
            raise _unavailable(slow, f"it did not come within {TIMEOUT_S:g} s") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Nothing more is fetched."""
        for threads in (self._resolving, self._looking):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            await self._client.aclose()

    async def _one(self, ref: MediaRef, budget: "_Budget") -> FetchedMedia:
        if ref.url[:5].lower() == "data:":
            content = _data(ref, budget)
        else:
            async with self._free:
                content = await self._download(ref, budget)
        look = asyncio.get_running_loop().run_in_executor(self._looking, _mime_of, ref, content)
        return FetchedMedia(ref.kind, await look, content, sha256(content).hexdigest())

    async def _download(self, ref: MediaRef, budget: "_Budget") -> bytes:
        url = _url_of(ref, ref.url)
        for _ in range(REDIRECTS_MAX + 1):
            found = await self._get(ref, url, budget)
            if isinstance(found, bytes):
                return found
            url = found
        raise _unavailable(ref, f"it redirects more than {REDIRECTS_MAX} times")

    async def _get(self, ref: MediaRef, url: httpx.URL, budget: "_Budget") -> bytes | httpx.URL:
        """The bytes at a URL, or the URL that it redirects to."""
        address = await self._address(ref, url)
        if self._client is None:
            # Kept connections are told apart by address alone, and several names share one.
            limits = httpx.Limits(max_connections=FETCHES_MAX, max_keepalive_connections=0)
            self._client = httpx.AsyncClient(
                trust_env=False, follow_redirects=False, limits=limits, timeout=TIMEOUT_S, cookies=_no_cookies()
            )
        request = self._client.build_request(
            "GET",
            url.copy_with(host=address),
            headers={"host": url.netloc.decode("ascii"), "accept-encoding": "identity", "user-agent": "forebay"},
            extensions={"sni_hostname": _name_of(url)},
        )
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code in REDIRECTS and "location" in response.headers:
                    return _url_of(ref, response.headers["location"], url)
                if response.status_code != httpx.codes.OK:
                    raise _unavailable(ref, f"{url.host} answers with status {response.status_code}")
                kept = bytearray()
                async for piece in response.aiter_raw():
                    budget.take(ref, len(piece))
                    kept += piece
                return bytes(kept)
            finally:
                await response.aclose()
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, UnicodeError) as error:
            raise _unavailable(ref, f"{url.host} cannot be read ({type(error).__name__})") from error

    async def _address(self, ref: MediaRef, url: httpx.URL) -> str:
        """One of the addresses of a host, all of which are allowed."""
        host = _name_of(url)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            find = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            found = await asyncio.get_running_loop().run_in_executor(self._resolving, find)
        except (OSError, UnicodeError) as error:
            raise _unavailable(ref, f"the host {host[:SHOWN_CHARS]} is not known") from error
        addresses = [str(sockaddr[0]) for *_, sockaddr in found]
        allowed = self._settings.allow_hosts
        free = self._settings.allow_private or host in allowed or url.host.lower() in allowed
        if not free and not all(map(is_public, addresses)):
            text = f"{ref.where}: {host[:SHOWN_CHARS]} is no public address"
            raise invalid(text, ref.where, "private_media_url")
        return addresses[0]


def is_public(text: str) -> bool:
    """Whether an address may be anybody's: not private, local, reserved or of a group, nor standing for such."""
    try:
        address = ip_address(text)  # one with a zone is no public one
    except ValueError:
        return False
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            return False
        inner = _inner(address)
        if inner is not None and not is_public(str(inner)):
            return False
        if inner is not None and address.ipv4_mapped is not None:
            return True
    refused = (
        address.is_private,
        address.is_loopback,
        address.is_link_local,
        address.is_multicast,
        address.is_reserved and not (isinstance(address, IPv6Address) and address in NAT64),
        address.is_unspecified,
        isinstance(address, IPv6Address) and address.is_site_local,
    )
    return not any(refused) and (address.is_global or (isinstance(address, IPv6Address) and address in NAT64))


def _inner(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that one stands for."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    return IPv4Address(int(address) & 0xFFFF_FFFF) if address in NAT64 else None


class _Budget:
    """The bytes that a request may still take in."""

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def take(self, ref: MediaRef, size: int) -> None:
        self._left -= size
        if self._left < 0:
            text = f"{ref.where}: the images and videos of a request take up to {self._limit >> 20} MiB together"
            raise ApiError(413, "media_too_large", text, ref.where)


def _url_of(ref: MediaRef, text: str, base: httpx.URL | None = None) -> httpx.URL:
    try:
        url = httpx.URL(text[: URL_CHARS_MAX + 1])
        url = url if base is None else base.join(url)
        nameless = not url.host  # which fails for a name that says it is encoded and is not
    except (httpx.InvalidURL, UnicodeError) as error:
        raise invalid(f"{ref.where}: is no URL ({error})", ref.where, "invalid_media_url") from error
    problem = None
    if len(text) > URL_CHARS_MAX:
        problem = f"is longer than {URL_CHARS_MAX} characters"
    elif url.scheme not in ("http", "https"):
        problem = f"is no http, https or data URL but {url.scheme[:SHOWN_CHARS] or 'none'}"
    elif nameless:
        problem = "names no host"
    elif url.userinfo:
        problem = "holds a user name, which is sent to nobody"
    if problem is not None:
        raise invalid(f"{ref.where}: {problem}", ref.where, "invalid_media_url")
    return url


def _name_of(url: httpx.URL) -> str:
    """The host as name servers and certificates have it: of letters beyond ASCII there are two encodings."""
    return url.raw_host.decode("ascii")


def _no_cookies() -> CookieJar:
    """Keeps none: hosts that share an address would be sent each other's."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=()))


def _data(ref: MediaRef, budget: _Budget) -> bytes:
    """The bytes of a data URL (RFC 2397)."""
    head, comma, body = ref.url[5:].partition(",")
    if not comma:
        raise invalid(f"{ref.where}: is no data URL: there is no comma", ref.where, "invalid_media_url")
    encoded = head.lower().endswith(";base64")
    least = max(0, len(body) * 3 // 4 - 2 if encoded else len(body) // 3)
    budget.take(ref, least)
    try:
        content = base64.b64decode(body, validate=True) if encoded else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise invalid(f"{ref.where}: is no base64 ({error})", ref.where, "invalid_media_url") from error
    budget.take(ref, len(content) - least)
    if not content:
        raise invalid(f"{ref.where}: is empty", ref.where, "invalid_media_url")
    return content


def _mime_of(ref: MediaRef, content: bytes) -> str:
    """What the bytes are. Raises ApiError when that is no image, or no video, that is taken."""
    return _image(ref, content) if ref.kind == "image" else _video(ref, content)


def _image(ref: MediaRef, content: bytes) -> str:
    try:
        from PIL import Image  # noqa: PLC0415 - an extra
    except ImportError as error:
        text = f"{ref.where}: this ingress takes no images: pip install 'forebay[media]'"
        raise ApiError(501, "media_not_installed", text, ref.where) from error
    try:
        with Image.open(io.BytesIO(content), formats=tuple(IMAGE_FORMATS)) as image:
            if image.width * image.height > IMAGE_PIXELS_MAX:
                raise _too_large(ref, f"{image.width} x {image.height} pixels")
            image.load()
            return IMAGE_FORMATS[image.format or ""]
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(ref, "many more pixels") from error
    except (OSError, ValueError, SyntaxError, EOFError, KeyError) as error:
        kinds = ", ".join(IMAGE_FORMATS)
        raise invalid(
            f"{ref.where}: is no image that can be read; taken are {kinds}", ref.where, "not_an_image"
        ) from error


def _too_large(ref: MediaRef, size: str) -> ApiError:
    text = f"{ref.where}: an image has up to {IMAGE_PIXELS_MAX:,} pixels, this one has {size}"
    return ApiError(413, "media_too_large", text, ref.where)


def _video(ref: MediaRef, content: bytes) -> str:
    """By the container's first bytes: its frames are the engine's business."""
    if content[4:8] == b"ftyp":
        return "video/quicktime" if content[8:10] == b"qt" else "video/mp4"
    if content[:4] == b"\x1aE\xdf\xa3":
        return "video/webm" if b"webm" in content[:64] else "video/x-matroska"
    if content[:4] == b"RIFF" and content[8:12] == b"AVI ":
        return "video/x-msvideo"
    text = f"{ref.where}: is no video that can be read; taken are MP4, QuickTime, WebM, Matroska, AVI"
    raise invalid(text, ref.where, "not_a_video")


def _unavailable(ref: MediaRef, why: str) -> ApiError:
    return invalid(f"{ref.where}: {why}", ref.where, "media_unavailable")
