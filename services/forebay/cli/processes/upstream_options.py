"""Options of `forebay worker` for servers that already run. They are separate from the client, which --help skips."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar
from urllib.parse import urlsplit

from forebay.cli.common.credentials import FILE_BYTES_MAX, read_text
from forebay.cli.common.options import Option
from forebay.runtime.errors import ConfigError

if TYPE_CHECKING:
    from forebay.processes.worker import Upstream

UPSTREAMS_MAX = 64  # each has a worker in this process


@dataclass(frozen=True, slots=True)
class UpstreamOptions:
    PANEL: ClassVar = "Servers that already run"

    upstream: Annotated[
        list[str] | None,
        Option(
            metavar="URL",
            help="Server that already runs, as http://host:port, instead of an engine in this process. Repeatable.",
        ),
    ] = None
    upstream_kv_events: Annotated[
        list[str] | None,
        Option(
            metavar="ZMQ",
            help="KV events of a server as tcp://host:port, or tcp://host:port,tcp://host:port with its replay socket."
            " One per --upstream, in the same order; - for none. Repeatable.",
        ),
    ] = None
    upstream_api_key_file: Annotated[Path | None, Option(help="File with the API key of the servers.")] = None
    allow_shared_cache: Annotated[
        bool,
        Option(
            "--allow-shared-cache",
            help="Send requests with a cache salt also to servers that cannot separate their cache.",
        ),
    ] = False

    def upstreams(self) -> "tuple[Upstream, ...]":
        """Return the servers; empty without --upstream. Raises ConfigError if an option is invalid."""
        urls, events = self.upstream or [], self.upstream_kv_events or []
        if not urls:
            for flag, value in (
                ("--upstream-kv-events", events),
                ("--upstream-api-key-file", self.upstream_api_key_file),
                ("--allow-shared-cache", self.allow_shared_cache),
            ):
                if value:
                    raise ConfigError(f"{flag} requires --upstream URL")
            return ()
        # Imported here, because --help does not wait for the client.
        from forebay.processes.worker import Upstream  # noqa: PLC0415

        if len(urls) > UPSTREAMS_MAX:
            raise ConfigError(f"--upstream: got {len(urls)} servers, the maximum of one process is {UPSTREAMS_MAX}")
        if events and len(events) != len(urls):
            raise ConfigError(
                f"--upstream-kv-events: got {len(events)} values for {len(urls)} servers; give one per --upstream, and"
                " - for none"
            )
        for url in urls:
            _require_url(url)
        return tuple(
            Upstream(url.rstrip("/"), *_sockets(text))
            for url, text in zip(urls, events or ["-"] * len(urls), strict=True)
        )

    def api_key(self) -> str:
        """Return the API key of the servers; empty if there is none. Raises ConfigError if the file cannot be read."""
        file = self.upstream_api_key_file
        if file is None:
            return ""
        key = read_text(f"--upstream-api-key-file {file}", file, FILE_BYTES_MAX).strip()
        if not key or not all("!" <= character <= "~" for character in key):
            raise ConfigError(f"--upstream-api-key-file {file}: expected one key of visible ASCII characters")
        return key


def _require_url(url: str) -> None:
    """Raise ConfigError if `url` is not the base address of an HTTP server."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.isprintable()
    except ValueError:
        valid = False
    if valid and parts.username is not None:
        raise ConfigError("--upstream: the address has a user name or password; use --upstream-api-key-file instead")
    if not valid or parts.query or parts.fragment or parts.path.strip("/"):
        hint = "; leave out /v1" if valid and parts.path.strip("/") == "v1" else ""
        raise ConfigError(f"--upstream {url}: expected http://host:port{hint}")


def _sockets(text: str) -> tuple[str, str]:
    """Return the addresses of KV events and replays, or empty texts. Raises ConfigError if one is invalid."""
    if text == "-":
        return "", ""
    events, comma, replay = text.partition(",")
    for address in (events, replay) if comma else (events,):
        if not address.startswith(("tcp://", "ipc://")):
            raise ConfigError(
                f"--upstream-kv-events {text}: expected tcp://host:port of the KV events, or that and"
                " after a comma tcp://host:port of their replay"
            )
    return events, replay
