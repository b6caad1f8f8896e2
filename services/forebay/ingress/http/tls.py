"""TLS of the HTTP server, with the limit of its connections.

`BoundedProtocol` counts a connection once its TLS handshake has ended. Until then, for up to 60 s in uvloop, only the
context of the server knows the connection.
"""

import ssl
import weakref
from typing import Any, Self

from forebay.ingress.http.endpoint import TlsFiles
from forebay.ingress.http.protocol import REFUSED_MAX, ConnectionLimits


class BoundedTls(ssl.SSLContext):
    """TLS context of a server. A connection above the limit is closed before its handshake.

    Connections in their handshake and established ones count together, up to the number at which `BoundedProtocol`
    closes connections, too.
    """

    _limits: ConnectionLimits
    _open: "weakref.WeakSet[ssl.SSLObject]"

    def __new__(cls, limits: ConnectionLimits) -> Self:
        """Return a context without a certificate."""
        context = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        context._limits, context._open = limits, weakref.WeakSet()
        return context

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Begin a connection. Raises ConnectionAbortedError above the limit; uvloop then closes the connection."""
        if len(self._open) >= self._limits.connections_max + REFUSED_MAX:
            self._limits.on_rejected("connections_exhausted")
            raise ConnectionAbortedError("too many connections")
        connection = super().wrap_bio(*args, **kwargs)
        self._open.add(connection)
        return connection


def tls_context(files: TlsFiles, limits: ConnectionLimits) -> ssl.SSLContext:
    context = BoundedTls(limits)
    context.load_cert_chain(files.certfile, files.keyfile)
    return context
