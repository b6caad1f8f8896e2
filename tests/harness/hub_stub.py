"""Stand-in for the Hugging Face Hub on loopback: serves one model to `huggingface_hub`, and remembers what was read."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MAIN = "main"
RESTRICTED = "org/restricted"


class HubStub:
    """Model on a stub of the Hub.

    Attributes:
        files: Its files by path.
        read: Paths of the files that were downloaded.
    """

    def __init__(self, model: str, files: Mapping[str, bytes], port: int) -> None:
        self.model = model
        self.files = files
        self.read: set[str] = set()
        self.requests = 0
        self.url = f"http://127.0.0.1:{port}"

    def reply(self, path: str, *, head: bool) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for a request."""
        self.requests += 1
        if path.startswith(f"/api/models/{RESTRICTED}/"):
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if path in (f"/api/models/{self.model}/revision/{name}" for name in (MAIN, COMMIT)):
            info = {"id": self.model, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        if path == f"/api/models/{self.model}/tree/{COMMIT}":  # huggingface_hub 2 reads it
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in self.files.items()]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        if path.startswith(f"/api/models/{self.model}/"):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        content = self.files.get(path.removeprefix(f"/{self.model}/resolve/{COMMIT}/"))
        if content is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if not head:
            self.read.add(path.removeprefix(f"/{self.model}/resolve/{COMMIT}/"))
        return 200, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, content


@contextmanager
def hub_stub(model: str, files: Mapping[str, bytes], port: int) -> Iterator[HubStub]:
    """Serve a model until the end of the block."""
    hub = HubStub(model, files, port)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(head=True)

        def do_GET(self) -> None:
            self._answer(head=False)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Print nothing."""

        def _answer(self, *, head: bool) -> None:
            status, headers, body = hub.reply(self.path.partition("?")[0], head=head)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not head:
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
