"""Stand-in for the API server of Kubernetes on loopback: the scale subresource of Deployments and StatefulSets."""

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PATH = re.compile(r"/apis/apps/v1/namespaces/([^/]+)/(deployments|statefulsets)/([^/]+)/scale")
HANG = 0  # status of a fault: no response until the end
PATIENCE_S = 50.0


class KubernetesStub:
    """API server.

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

    def reply(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the response to a request."""
        found = PATH.fullmatch(path)
        if found is None:
            return 404, _status(404, f"the server could not find {path}")
        namespace, kind, name = found.groups()
        key = f"{kind}/{namespace}/{name}"
        self.requests.append(f"{method} {key}")
        if faults := self.faults.get(f"{method} {key}"):
            status = faults.pop(0)
            if status == HANG:
                self.ended.wait(PATIENCE_S)
            return status or 504, _status(status, f"fault {status}")
        if key not in self.replicas:
            return 404, _status(404, f'{kind}.apps "{name}" not found')
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
        return 200, json.dumps(scale).encode()

    def write_kubeconfig(self, path: Path) -> None:
        cluster = {"name": "stub", "cluster": {"server": self.url}}
        context = {"name": "stub", "context": {"cluster": "stub", "user": "stub"}}
        user = {"name": "stub", "user": {"token": "none"}}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [cluster],
            "contexts": [context],
            "users": [user],
            "current-context": "stub",
        }
        path.write_text(json.dumps(config))  # JSON is YAML


def _status(code: int, message: str) -> bytes:
    return json.dumps({"kind": "Status", "apiVersion": "v1", "message": message, "code": code}).encode()


@contextmanager
def kubernetes_stub(replicas: Mapping[str, int], port: int) -> Iterator[KubernetesStub]:
    """Serve these objects until the end of the block."""
    stub = KubernetesStub(replicas, port)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer("GET")

        def do_PATCH(self) -> None:
            stub.content_types.add(self.headers["Content-Type"])
            self._answer("PATCH")

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Print nothing."""

        def _answer(self, method: str) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = stub.reply(method, self.path.partition("?")[0], content)
            if stub.ended.is_set():
                return
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield stub
        finally:
            stub.ended.set()
            server.shutdown()
            thread.join()
