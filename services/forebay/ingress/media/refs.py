"""References to images and videos, and the fetched media."""

from dataclasses import dataclass

from forebay.events.media import MediaKind


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Hosts from which images and videos may be fetched. Hosts with public addresses are always allowed.

    Attributes:
        allow_hosts: lower-case host names whose addresses may be private.
        allow_private: whether the addresses of all hosts may be private, for tests and labs.
    """

    allow_hosts: tuple[str, ...] = ()
    allow_private: bool = False


@dataclass(frozen=True, slots=True)
class MediaRef:
    """Reference to an image or a video in the body of a request.

    Attributes:
        kind: `image` or `video`.
        url: http, https or data URL.
        where: path of the URL in the body, for error messages.
    """

    kind: MediaKind
    url: str
    where: str


@dataclass(frozen=True, slots=True)
class FetchedMedia:
    """A fetched image or video.

    Attributes:
        kind: `image` or `video`.
        mime: MIME type, detected from the bytes.
        content: the bytes.
        digest: SHA-256 of the bytes, in hex.
    """

    kind: MediaKind
    mime: str
    content: bytes
    digest: str


PUBLIC_ONLY = MediaSettings()
