"""Images and videos as a request names them, and as they came."""

from dataclasses import dataclass

from forebay.events.media import MediaKind


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """What may be fetched.

    Attributes:
        allow_hosts: names whose addresses may be private, in lower case.
        allow_private: whether those of all names may be: for tests and labs.
    """

    allow_hosts: tuple[str, ...] = ()
    allow_private: bool = False


@dataclass(frozen=True, slots=True)
class MediaRef:
    """An image or a video that a request points at; `where` is its place in the body."""

    kind: MediaKind
    url: str
    where: str


@dataclass(frozen=True, slots=True)
class FetchedMedia:
    """What a reference led to; `digest` is the SHA-256 of its bytes, in hex."""

    kind: MediaKind
    mime: str
    content: bytes
    digest: str


PUBLIC_ONLY = MediaSettings()
