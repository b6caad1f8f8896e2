"""Fetch and validate the images and videos of a request, with bounded memory and time.

Theory of operation. A client could use a URL to reach hosts that only this machine can reach, so URLs may lead to
public addresses only. The name of a host is resolved once. All of its addresses are checked, and the connection uses
one of them, so a later change of the DNS record has no effect. Every redirect is checked like the first URL. Headers of
the response are not trusted: sizes are counted while reading, and types are detected from the bytes.
"""

import asyncio
import base64
import binascii
import contextlib
import io
import re
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
from forebay.ingress.media.tokens import FetchedMedia, MediaRef, MediaSettings, MediaTokens
from forebay.ingress.media.video import sampled_size
from forebay.runtime.errors import install_command

IMAGE_FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
MULTI_PICTURE = "MPO"  # as Pillow names a JPEG with further pictures, which many phones take; the first one counts
BASE64 = re.compile(r";\s*base64\s*$", re.IGNORECASE)
STANDARD_BASE64 = bytes.maketrans(b"-_", b"+/")
WHITE_SPACE = b" \t\r\n\f\v"
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)  # in EXIF; with these values, height and width are exchanged
IMAGE_PIXELS_MAX = 40_000_000  # an 8K frame has 33 million; decoded, 40 million take 120 MB
DECODING_THREADS = 2  # each decodes one image at a time
COUNT_MAX = 16  # per request
TIMEOUT_S = 15.0  # for all media of a request together
REDIRECTS_MAX = 3
FETCHES_MAX = 32  # concurrent fetches of one ingress
URL_CHARS_MAX = 8_192  # does not apply to data URLs
REDIRECTS = frozenset({301, 302, 303, 307, 308})
SHOWN_CHARS = 80
# IPv6 addresses that DNS64 derives from IPv4 addresses.
NAT64 = IPv6Network("64:ff9b::/96")


class MediaFetcher:
    """Fetches images and videos. It resolves names and decodes images in own threads, to delay no other request."""

    def __init__(self, settings: MediaSettings) -> None:
        self._settings = settings
        self._resolving = runtime.executor(FETCHES_MAX, "resolve")
        self._decoding = runtime.executor(DECODING_THREADS, "decode")
        self._free = asyncio.Semaphore(FETCHES_MAX)
        self._client: httpx.AsyncClient | None = None

    async def fetch(self, refs: Sequence[MediaRef], tokens: MediaTokens) -> list[FetchedMedia]:
        """Return the images and videos of one request, in the order of `refs`.

        Raises ApiError if one cannot be fetched, is invalid or of a size that the model does not support, or if they
        exceed a limit of number, size or time.
        """
        if not refs:
            return []
        if len(refs) > COUNT_MAX:
            text = f"{refs[COUNT_MAX].where}: a request may have at most {COUNT_MAX} images and videos"
            raise invalid(text, refs[COUNT_MAX].where, "too_many_media")
        budget = _Budget(MEDIA_BYTES_MAX)
        tasks = [asyncio.create_task(self._one(ref, budget, tokens)) for ref in refs]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return list(await asyncio.gather(*tasks))
        except TimeoutError:
            unfinished = (ref for ref, task in zip(refs, tasks, strict=True) if task.cancelled() or not task.done())
            slow = next(unfinished, refs[-1])  # all of them may have finished at the last moment
            raise _unavailable(slow, f"it did not arrive within {TIMEOUT_S:g} s") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        for threads in (self._resolving, self._decoding):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            await self._client.aclose()

    async def _one(self, ref: MediaRef, budget: "_Budget", tokens: MediaTokens) -> FetchedMedia:
        if ref.url[:5].lower() == "data:":
            content = _data(ref, budget)
        else:
            async with self._free:
                content = await self._download(ref, budget)
        check = partial(_image if ref.kind == "image" else _video, ref, content, tokens)
        mime, size = await asyncio.get_running_loop().run_in_executor(self._decoding, check)
        return FetchedMedia(ref.kind, mime, content, sha256(content).hexdigest(), size)

    async def _download(self, ref: MediaRef, budget: "_Budget") -> bytes:
        url = _url_of(ref, ref.url)
        for _ in range(REDIRECTS_MAX + 1):
            found = await self._get(ref, url, budget)
            if isinstance(found, bytes):
                return found
            url = found
        raise _unavailable(ref, f"it redirects more than {REDIRECTS_MAX} times")

    async def _get(self, ref: MediaRef, url: httpx.URL, budget: "_Budget") -> bytes | httpx.URL:
        address = await self._address(ref, url)
        if self._client is None:
            # Connections are not reused, because the pool distinguishes them by address and several names share one.
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
                    raise _unavailable(ref, f"{url.host} responded with status {response.status_code}")
                content = bytearray()
                async for piece in response.aiter_raw():
                    budget.take(ref, len(piece))
                    content += piece
                return bytes(content)
            finally:
                await response.aclose()
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, UnicodeError) as error:
            raise _unavailable(ref, f"{url.host} cannot be read ({type(error).__name__})") from error

    async def _address(self, ref: MediaRef, url: httpx.URL) -> str:
        """Return an address of a host. Raises ApiError if one of its addresses is not allowed."""
        host = _name_of(url)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            find = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            found = await asyncio.get_running_loop().run_in_executor(self._resolving, find)
        except (OSError, UnicodeError) as error:
            raise _unavailable(ref, f"the host {host[:SHOWN_CHARS]} is unknown") from error
        addresses = [str(sockaddr[0]) for *_, sockaddr in found]
        allowed = self._settings.allow_hosts
        free = self._settings.allow_private or host in allowed or url.host.lower() in allowed
        if not free and not all(map(is_public, addresses)):
            text = f"{ref.where}: {host[:SHOWN_CHARS]} is not a public address"
            raise invalid(text, ref.where, "private_media_url")
        return addresses[0]


def is_public(text: str) -> bool:
    """Return whether an IP address is public. It is not if it is private, local, reserved or multicast.

    An IPv6 address that contains such an IPv4 address is not public either.
    """
    try:
        address = ip_address(text)  # an address with a zone is not public
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
    special = (
        address.is_private,
        address.is_loopback,
        address.is_link_local,
        address.is_multicast,
        address.is_reserved and not (isinstance(address, IPv6Address) and address in NAT64),
        address.is_unspecified,
        isinstance(address, IPv6Address) and address.is_site_local,
    )
    return not any(special) and (address.is_global or (isinstance(address, IPv6Address) and address in NAT64))


def _inner(address: IPv6Address) -> IPv4Address | None:
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    return IPv4Address(int(address) & 0xFFFF_FFFF) if address in NAT64 else None


class _Budget:
    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def take(self, ref: MediaRef, size: int) -> None:
        self._left -= size
        if self._left < 0:
            text = f"{ref.where}: the images and videos of the request exceed {self._limit >> 20} MiB together"
            raise ApiError(413, "media_too_large", text, ref.where)


def _url_of(ref: MediaRef, text: str, base: httpx.URL | None = None) -> httpx.URL:
    try:
        url = httpx.URL(text[: URL_CHARS_MAX + 1])
        url = url if base is None else base.join(url)
        nameless = not url.host  # raises for an invalid encoded name
    except (httpx.InvalidURL, UnicodeError) as error:
        raise invalid(f"{ref.where}: not a valid URL ({error})", ref.where, "invalid_media_url") from error
    problem = None
    if len(text) > URL_CHARS_MAX:
        problem = f"the URL is longer than {URL_CHARS_MAX} characters"
    elif url.scheme not in ("http", "https"):
        problem = f"the scheme is {url.scheme[:SHOWN_CHARS]!r}; it must be http, https or data"
    elif nameless:
        problem = "the URL has no host"
    elif url.userinfo:
        problem = "the URL has a user name, which is not supported"
    if problem is not None:
        raise invalid(f"{ref.where}: {problem}", ref.where, "invalid_media_url")
    return url


def _name_of(url: httpx.URL) -> str:
    """Return the host in ASCII (IDNA), as name servers and certificates use it."""
    return url.raw_host.decode("ascii")


def _no_cookies() -> CookieJar:
    """Return a cookie jar that accepts no cookies: hosts that share an address would get cookies of each other."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=()))


def _data(ref: MediaRef, budget: _Budget) -> bytes:
    """Return the content of a data URL (RFC 2397).

    Encoders fold base64 after 76 characters, leave out the padding, or use the alphabet for URLs.
    """
    head, comma, body = ref.url[5:].partition(",")
    if not comma:
        raise invalid(f"{ref.where}: the data URL has no comma", ref.where, "invalid_media_url")
    raw, encoded = body.encode(), BASE64.search(head) is not None
    if encoded:
        raw = unquote_to_bytes(raw).translate(STANDARD_BASE64, WHITE_SPACE).rstrip(b"=")
    least = len(raw) * 3 // 4 if encoded else len(raw) // 3
    budget.take(ref, least)
    try:
        content = base64.b64decode(raw + b"=" * (-len(raw) % 4), validate=True) if encoded else unquote_to_bytes(raw)
    except (binascii.Error, ValueError) as error:
        raise invalid(f"{ref.where}: not valid base64 ({error})", ref.where, "invalid_media_url") from error
    budget.take(ref, len(content) - least)
    if not content:
        raise invalid(f"{ref.where}: the content is empty", ref.where, "invalid_media_url")
    return content


def _image(ref: MediaRef, content: bytes, tokens: MediaTokens) -> tuple[str, tuple[int, ...]]:
    """Return the MIME type of an image, and its height and width in the orientation of its EXIF data."""
    try:
        from PIL import Image, ImageOps  # noqa: PLC0415 - an extra
    except ImportError as error:
        text = f"{ref.where}: this ingress needs Pillow to decode images: {install_command('media')}"
        raise ApiError(501, "media_not_installed", text, ref.where) from error
    try:
        with Image.open(io.BytesIO(content), formats=tuple(IMAGE_FORMATS)) as image:
            if image.width * image.height > IMAGE_PIXELS_MAX:
                raise _too_large(ref, f"{image.width} x {image.height} pixels")
            tokens.require_size(ref, image.height, image.width)  # before it is decoded
            image.load()
            turned: Image.Image = image
            # Only this call knows whether Pillow accepts all of the EXIF data, as in the engine; otherwise it copies.
            with contextlib.suppress(Exception):
                if image.getexif().get(ORIENTATION, 1) in SIDEWAYS:
                    turned = ImageOps.exif_transpose(image)
            mime = IMAGE_FORMATS["JPEG" if image.format == MULTI_PICTURE else image.format or ""]
            return mime, (turned.height, turned.width)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(ref, "too many pixels") from error
    except (OSError, ValueError, SyntaxError, EOFError, KeyError) as error:
        kinds = ", ".join(IMAGE_FORMATS)
        raise invalid(
            f"{ref.where}: not a valid image; supported formats are {kinds}", ref.where, "not_an_image"
        ) from error


def _too_large(ref: MediaRef, size: str) -> ApiError:
    text = f"{ref.where}: the image has {size}; the limit is {IMAGE_PIXELS_MAX:,} pixels"
    return ApiError(413, "media_too_large", text, ref.where)


def _video(ref: MediaRef, content: bytes, tokens: MediaTokens) -> tuple[str, tuple[int, ...]]:
    """Return the MIME type by the first bytes of the container, and the size if the model samples frames."""
    if content[4:8] == b"ftyp":
        container, mime = "mov", "video/quicktime" if content[8:10] == b"qt" else "video/mp4"
    elif content[:4] == b"\x1aE\xdf\xa3":
        container, mime = "matroska", "video/webm" if b"webm" in content[:64] else "video/x-matroska"
    elif content[:4] == b"RIFF" and content[8:12] == b"AVI ":
        container, mime = "avi", "video/x-msvideo"
    else:
        text = f"{ref.where}: not a valid video; supported formats are MP4, QuickTime, WebM, Matroska, AVI"
        raise invalid(text, ref.where, "not_a_video")
    if not tokens.samples_frames:
        return mime, ()  # the encoder validates the frames
    size = sampled_size(ref, content, container)
    tokens.require_size(ref, *size)
    return mime, size


def _unavailable(ref: MediaRef, why: str) -> ApiError:
    return invalid(f"{ref.where}: {why}", ref.where, "media_unavailable")
