"""`forebay call`: values as JSON lines, exit codes, and the decisions on the log."""

import json
from pathlib import Path

import httpx

from tests.cli.in_process import answering, error_of
from tests.cli.up import forebay, running, verified
from tests.harness.local import free_ports

SERVICE = """
from forebay.workers.service import Refused, endpoint, service

@service(namespace="demo")
class Scores:
    @endpoint()
    async def rank(self, request):
        if request.payload == "refuse":
            raise Refused("nothing to rank")
        for at, _ in enumerate(request.payload["documents"]):
            yield {"document": at}
        if request.payload.get("fails"):
            raise ValueError("broken")
"""
RANK = "demo.scores.rank"


def test_calls_print_values_and_are_explained_and_verified(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(SERVICE)
    log = tmp_path / "run.db"
    with running("--engine", f"{tmp_path}/scores.py:Scores", "--workers", "2", "--log", str(log)) as up:
        url = "--url", up.url
        found = forebay("call", RANK, '{"documents": ["a", "b"]}', *url)
        assert (found.returncode, found.stdout) == (0, '{"document":0}\n{"document":1}\n')
        failed = forebay("call", RANK, '{"documents": ["a"], "fails": true}', *url)
        assert (failed.returncode, failed.stdout) == (1, '{"document":0}\n')
        assert failed.stderr == f"forebay: {RANK} failed: ValueError: broken\n"
        assert error_of("call", RANK, '"refuse"', *url) == "nothing to rank"
        unknown = f"unknown endpoint 'demo.other'; endpoints are: {RANK}"
        assert error_of("call", "demo.other", *url) == unknown
        assert error_of("call", RANK, "{", *url).startswith("the argument is not valid JSON")
        for payload, text in (({"token_ids": [1, 2]}, "2 prompt tokens"), ({}, "round-robin")):
            stream = httpx.post(f"{up.url}/v1/endpoints/{RANK}", json={"documents": [], **payload}).text
            request_id = json.loads(stream.rpartition("data: ")[2])["request_id"]
            explained = forebay("explain", str(log), request_id)
            assert f"submitted: call of {RANK}" in explained.stdout, explained.stderr
            assert text in explained.stdout
    assert verified(log)["decisions"]


def test_a_server_that_is_no_ingress() -> None:
    assert "start a system" in error_of("call", RANK, "--url", f"http://127.0.0.1:{free_ports(1)}")
    with answering(200, "hello") as url:
        assert error_of("call", RANK, "--url", url, code=1) == f"the stream of {RANK} ended before its last event"
    with answering(404, "hello") as url:
        assert "HTTP 404; check the URL" in error_of("call", RANK, "--url", url)
