"""`forebay up --otlp`, and errors of the options of spans."""

import asyncio
import signal
from functools import partial
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from forebay.cli.common import extras
from forebay.runtime.errors import install_command
from tests.cli.in_process import error_of
from tests.cli.up import PATIENCE_S, running
from tests.harness.otlp_receiver import OtlpReceiver, attributes_of
from tests.system import until

TRACE = "0af7651916cd43dd8448eb211c80319c"
MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES = {
    "/v1/completions": {"model": "forebay-default", "prompt": "Once", "max_tokens": 2},
    "/v1/chat/completions": {"model": "forebay-default", "messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"model": "forebay-default", "input": "Hello", "max_output_tokens": 2},
    "/v1/messages": {"model": "forebay-default", "messages": MESSAGES, "max_tokens": 2},
    "/v1/embeddings": {"model": "forebay-default", "input": "Hello"},
}


def roots(receiver: OtlpReceiver) -> dict[str, Span]:
    """Return the spans of requests by the client's span."""
    spans = receiver.traces.get(TRACE, {})
    return {span.parent_span_id.hex(): span for span in spans.values() if span.parent_span_id.hex() not in spans}


def has_roots(receiver: OtlpReceiver, count: int) -> bool:
    return len(roots(receiver)) == count


@pytest.mark.timeout(180)
async def test_up_exports_each_request_once_across_restarts_as_a_child_of_its_client(tmp_path: Path) -> None:
    async with OtlpReceiver() as receiver:
        for turn in range(2):
            with running("--log", str(tmp_path / "log.db"), "--otlp", receiver.url) as up:
                async with httpx.AsyncClient(base_url=up.url, timeout=PATIENCE_S) as client:
                    for number, (path, body) in enumerate(BODIES.items()):
                        parent = f"{turn + 1:08x}{number:08x}"
                        headers = {"traceparent": f"00-{TRACE}-{parent}-01"}
                        assert (await client.post(path, json=body, headers=headers)).status_code == httpx.codes.OK
                await until(partial(has_roots, receiver, (turn + 1) * len(BODIES)))
                assert await asyncio.to_thread(up.end, signal.SIGTERM) == 0
        ids = roots(receiver)
        assert set(receiver.traces) == {TRACE}
        assert set(receiver.copies.values()) == {1}
    assert set(ids) == {f"{turn:08x}{number:08x}" for turn in (1, 2) for number in range(len(BODIES))}
    names = [attributes_of(span)["gen_ai.operation.name"] for _, span in sorted(ids.items())]
    assert names == ["text_completion", "chat", "chat", "chat", "embeddings"] * 2


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://host", "http://user:secret@host", "http://host:99999"])
def test_an_invalid_receiver_is_named(url: str) -> None:
    expected = f"--otlp {url}: expected http://host:port of a receiver, without a password"
    assert error_of("spans", "--otlp", url) == expected
    assert error_of("up", "--otlp", url) == expected


def test_a_missing_receiver_and_a_missing_package_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_of("spans").startswith("--otlp URL is missing")

    def find_spec(_: str) -> None:
        raise ModuleNotFoundError("No module named 'opentelemetry'")

    monkeypatch.setattr(extras, "find_spec", find_spec)
    text = f"requires the package opentelemetry.proto; install it with: {install_command('otlp')}"
    assert error_of("spans", "--otlp", "http://host") == f"forebay spans {text}"
    assert error_of("up", "--otlp", "http://host") == f"forebay up --otlp {text}"
