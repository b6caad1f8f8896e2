"""TLS contexts that follow renewed certificates, and advice for connections that fail because of a certificate."""

import contextlib
import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from forebay.runtime.errors import ConfigError

logger = logging.getLogger(__name__)


class ReloadedTls(ssl.SSLContext):
    """TLS context of asyncio that reads its files again for the next connection after they have changed.

    Each version of the files has a context of its own. If a changed file cannot be used, for example because it is
    half written, the previous version stays in use.

    Args:
        load: reads the files. Raises ConfigError if they cannot be used, also out of the constructor.
        on_unusable: called for each version that cannot be used.
    """

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)  # which trusts nobody; `wrap_bio` does not use it

    def __init__(
        self, load: Callable[[], ssl.SSLContext], files: Sequence[Path], on_unusable: Callable[[], None] = lambda: None
    ) -> None:
        self._load, self._files, self._on_unusable = load, files, on_unusable
        self._read = self._version()
        self._current = load()

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        self.refresh()
        return self._current.wrap_bio(*args, **kwargs)

    def refresh(self) -> bool:
        """Read the files if they have changed. Return whether they can be used and have changed."""
        version = self._version()
        if version == self._read:
            return False
        self._read = version
        try:
            self._current = self._load()
        except ConfigError as error:
            self._on_unusable()
            logger.warning("%s; the previous certificates stay in use", error)
            return False
        logger.info("read the certificates again: %s", ", ".join(map(str, self._files)))
        return True

    def _version(self) -> list[tuple[int, ...]]:
        """Return what identifies the files now; empty if one is missing. Renaming changes no time except `ctime`."""
        with contextlib.suppress(OSError):
            return [(one.st_ino, one.st_size, one.st_ctime_ns) for one in (file.stat() for file in self._files)]
        return []


def certificate_remedy(reason: str, service: str, option: str) -> str:
    """Return what to do about a TLS handshake that failed for this reason. Empty if no certificate is the cause.

    Args:
        service: name of the server in the advice.
        option: setting with the certificate of the authority that the client trusts.
    """
    if "CERTIFICATE_VERIFY_FAILED" not in reason:
        return ""
    if "expired" in reason:
        return f"renew the certificate of {service}"
    if "mismatch" in reason:
        return f"use an address of {service} that its certificate names"
    return f"set {option} to the certificate of the authority that signed the certificate of {service}"
