"""Failures of requests by kind, so that thousands of failures with the same cause are one line, and advice."""

from dataclasses import dataclass, field

import msgspec

from forebay.transport.certificates import certificate_remedy

TEXT_CHARS_MAX = 200


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one request failed. `kind` is the same for all requests with the same cause."""

    kind: str
    text: str


@dataclass(slots=True)
class FailureCounts:
    """Number of failed requests, and the first example, of each kind."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, failure: Failure) -> None:
        self.counts[failure.kind] = self.counts.get(failure.kind, 0) + 1
        self.examples.setdefault(failure.kind, failure.text)


class _ErrorFields(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields


_decode = msgspec.json.Decoder(_ErrorBody).decode


def status_failure(status: int, content: bytes) -> Failure:
    code, text = _code_and_text(content)
    return Failure(f"HTTP {status} {code}".rstrip(), text)


def event_failure(data: bytes) -> Failure:
    code, text = _code_and_text(data)
    return Failure(f"error in the stream {code}".rstrip(), text)


def _code_and_text(content: bytes) -> tuple[str, str]:
    """Return code and message of an error in OpenAI's format. Without this format, the code is empty."""
    try:
        error = _decode(content).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "", content[:TEXT_CHARS_MAX].decode(errors="replace")
    return "" if error.code is None else str(error.code), error.message[:TEXT_CHARS_MAX]


def advice(error: Exception) -> str:
    """Return what the user can do about a connection that failed with this error."""
    import httpx  # noqa: PLC0415 - takes 200 ms, which --help does not wait for

    if found := certificate_remedy(str(error), "the system", "SSL_CERT_FILE"):
        return found
    if isinstance(error, httpx.RemoteProtocolError):
        return "check the URL; a system with a certificate serves only https"
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return "expected a URL such as http://127.0.0.1:8000"
    return "start a system with `forebay up`"
