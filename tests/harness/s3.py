"""An S3 server (moto) on the loopback address that can be stopped, and that can deny access, as a bucket that fails.

The server runs in threads of this process. Its objects survive a stop.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.server import MotoRequestHandler
from werkzeug.serving import BaseWSGIServer, make_server

from infra.kafka.kafka import HOST
from tests.harness.local import free_ports
from tests.harness.s3_process import CREDENTIALS, s3_client

DENIED = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'
)


class QuietHandler(MotoRequestHandler):  # type: ignore[misc]  # moto has no types
    """Request handler that prints no access log."""

    def log(self, *_: object) -> None: ...


class FaultyS3:
    """An S3 server with one bucket.

    Attributes:
        state: whether the server serves, denies every request, or is stopped.
    """

    def __init__(self, bucket: str) -> None:
        self._port = free_ports(1)
        self._server: BaseWSGIServer | None = None
        self._thread: threading.Thread | None = None
        self._app = DomainDispatcherApplication(create_backend_app)
        self.url = f"http://{HOST}:{self._port}"
        self.bucket = bucket
        self.state: Literal["serves", "denies", "stopped"] = "stopped"
        self.denied = 0
        self.start()
        self.client.create_bucket(Bucket=bucket)

    @property
    def client(self) -> Any:
        return s3_client(self.url)

    def keys(self, suffix: str = "") -> list[str]:
        """Return the keys of all objects that end with `suffix`."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        return [one["Key"] for page in pages for one in page.get("Contents", ()) if one["Key"].endswith(suffix)]

    def start(self) -> None:
        """Serve requests, also after `deny` or `stop`."""
        if self._server is None:
            self._server = make_server(HOST, self._port, self._answer, threaded=True, request_handler=QuietHandler)
            self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
            self._thread.start()
        self.state = "serves"

    def deny(self) -> None:
        self.state = "denies"

    def stop(self) -> None:
        """Close the port. Connections of clients end."""
        self.state = "stopped"
        server, self._server = self._server, None
        if server is not None:
            assert self._thread is not None
            server.shutdown()
            server.server_close()
            self._thread.join()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if self.state == "serves":
            answer: Iterable[bytes] = self._app(environ, start_response)
            return answer
        self.denied += 1
        start_response("403 Forbidden", [("content-type", "application/xml"), ("content-length", str(len(DENIED)))])
        return [DENIED]


@contextlib.contextmanager
def faulty_s3(bucket: str) -> Iterator[FaultyS3]:
    """Run a server that the body may stop and start. Set the credentials of its clients in the environment."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in CREDENTIALS.items():
            patched.setenv(name, value)
        server = FaultyS3(bucket)
        try:
            yield server
        finally:
            server.stop()
