"""Stand-ins on loopback for the Hugging Face Hub and for the API server of Kubernetes."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MAIN = "main"
RESTRICTED = "org/restricted"
SCALE = re.compile(r"/apis/apps/v1/namespaces/([^/]+)/(deployments|statefulsets)/([^/]+)/scale")
HANG = 0  # status of a fault: no response until the end
PATIENCE_S = 50.0
JSON = {"Content-Type": "application/json"}
Reply = tuple[int, dict[str, str], bytes] | None


class Stub(Protocol):
    def reply(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Return status, headers and body of the response to a request; None for no response."""


@contextmanager
def _serving(stub: Stub, port: int, ended: threading.Event | None = None) -> Iterator[None]:
    """Serve a stub until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            reply = stub.reply(self.command, self.path.partition("?")[0], dict(self.headers), content)
            if reply is None:
                return
            status, headers, body = reply
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET = do_PATCH = _answer  # noqa: N815 - the names that the base class calls

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            if ended is not None:
                ended.set()
            server.shutdown()
            thread.join()


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

    def reply(self, method: str, path: str, _headers: Mapping[str, str], _body: bytes) -> Reply:
        self.requests += 1
        if path.startswith(f"/api/models/{RESTRICTED}/"):
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if path in (f"/api/models/{self.model}/revision/{name}" for name in (MAIN, COMMIT)):
            info = {"id": self.model, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
            return 200, JSON, json.dumps(info).encode()
        if path in (f"/api/models/{self.model}/tree/{name}" for name in (MAIN, COMMIT)):  # huggingface_hub 2 reads it
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in self.files.items()]
            return 200, JSON, json.dumps(tree).encode()
        if path.startswith(f"/api/models/{self.model}/"):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        name = path.removeprefix(f"/{self.model}/resolve/{COMMIT}/").removeprefix(f"/{self.model}/resolve/{MAIN}/")
        content = self.files.get(name)
        if content is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if method == "GET":
            self.read.add(name)
        return 200, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, content


@contextmanager
def hub_stub(model: str, files: Mapping[str, bytes], port: int) -> Iterator[HubStub]:
    """Serve one model to `huggingface_hub` until the end of the block."""
    hub = HubStub(model, files, port)
    with _serving(hub, port):
        yield hub


class KubernetesStub:
    """API server with the scale subresource of Deployments and StatefulSets.

    Attributes:
        replicas: replicas by `deployments/NAMESPACE/NAME` or `statefulsets/NAMESPACE/NAME`.
        faults: statuses of the next responses by method and object, such as `PATCH deployments/a/b`.
        replicas_max: highest number of replicas that the server accepts. It reduces higher ones.
    """

    def __init__(self, replicas: Mapping[str, int], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.replicas = dict(replicas)
        self.faults: dict[str, list[int]] = {}
        self.replicas_max = 1_000
        self.requests: list[str] = []
        self.content_types: set[str] = set()
        self.ended = threading.Event()

    def reply(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        if method == "PATCH":
            self.content_types.add(headers["Content-Type"])
        found = SCALE.fullmatch(path)
        if found is None:
            return _status(404, f"the server could not find {path}")
        namespace, kind, name = found.groups()
        key = f"{kind}/{namespace}/{name}"
        self.requests.append(f"{method} {key}")
        if faults := self.faults.get(f"{method} {key}"):
            status = faults.pop(0)
            if status == HANG:
                return None if self.ended.wait(PATIENCE_S) else _status(504, "fault 0")
            return _status(status, f"fault {status}")
        if key not in self.replicas:
            return _status(404, f'{kind}.apps "{name}" not found')
        if method == "PATCH":
            self.replicas[key] = min(json.loads(body)["spec"]["replicas"], self.replicas_max)
        replicas = self.replicas[key]
        scale = {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"replicas": replicas} if replicas else {},  # the API server omits a zero
            "status": {"replicas": replicas},
        }
        return 200, JSON, json.dumps(scale).encode()

    def write_kubeconfig(self, path: Path) -> None:
        cluster = {"name": "stub", "cluster": {"server": self.url}}
        context = {"name": "stub", "context": {"cluster": "stub", "user": "stub"}}
        user = {"name": "stub", "user": {"token": "none"}}
        lists = {"clusters": [cluster], "contexts": [context], "users": [user]}
        config = {"apiVersion": "v1", "kind": "Config", **lists, "current-context": "stub"}
        path.write_text(json.dumps(config))  # JSON is YAML


def _status(code: int, message: str) -> Reply:
    body = {"kind": "Status", "apiVersion": "v1", "message": message, "code": code}
    return code, JSON, json.dumps(body).encode()


@contextmanager
def kubernetes_stub(replicas: Mapping[str, int], port: int) -> Iterator[KubernetesStub]:
    """Serve these objects until the end of the block."""
    stub = KubernetesStub(replicas, port)
    with _serving(stub, port, stub.ended):
        yield stub
