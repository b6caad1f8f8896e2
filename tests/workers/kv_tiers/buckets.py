"""S3 servers for tests: moto as a real HTTP server, with faults in front of it."""

import contextlib
import functools
import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

SILENT = -1
BUCKET = "kv-stores"  # not that of other tests, because all servers of a process have the same content
KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Run an S3 server with one bucket. Yield its URL."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        client(f"http://{host}:{port}").create_bucket(Bucket=BUCKET)
        yield f"http://{host}:{port}"
    finally:
        clear_bucket(f"http://{host}:{port}")
        server.stop()


def clear_bucket(endpoint: str) -> None:
    bucket = client(endpoint)
    for page in bucket.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        for one in page.get("Contents", ()):
            bucket.delete_object(Bucket=BUCKET, Key=one["Key"])


@functools.cache
def client(endpoint: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test-secret",
        region_name="us-east-1",
    )


class FaultyServer:
    """HTTP proxy of an S3 server, which fails on command.

    Attributes:
        fault: status of every response, for example 403; 0 to forward requests; `SILENT` to never respond.
        requests: method and path of each request.
        authorizations: header of each request with its credentials.
    """

    def __init__(self, upstream: str) -> None:
        self.fault = 0
        self._closing = threading.Event()
        self.requests: list[tuple[str, str]] = []
        self.authorizations: list[str] = []
        self._upstream = upstream.removeprefix("http://")
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.answer(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.requests.append((handler.command, handler.path))
        self.authorizations.append(handler.headers.get("Authorization", ""))
        if self.fault == SILENT:
            self._closing.wait()
            handler.close_connection = True
            return
        if self.fault:
            code = {403: "AccessDenied", 507: "InsufficientStorage"}.get(self.fault, "InternalError")
            content = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
            handler.send_response(self.fault)
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(content)))]
        else:
            upstream = http.client.HTTPConnection(self._upstream)
            upstream.request(handler.command, handler.path, body, dict(handler.headers))
            response = upstream.getresponse()
            content = response.read()
            handler.send_response_only(response.status)
            headers = [(key, text) for key, text in response.getheaders() if key.lower() != "transfer-encoding"]
            upstream.close()
        for key, text in headers:
            handler.send_header(key, text)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)

    def close(self) -> None:
        """Stop the server. After this, connections are refused."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
