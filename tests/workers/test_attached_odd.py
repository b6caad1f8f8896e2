"""Servers that send what they should not to a worker attached to them, and what servers publish about themselves."""

import json
from typing import Any

import pytest

from forebay.workers.engine import EngineError
from tests.harness.openai_server import OpenAiServer
from tests.workers.attached import attached, described
from tests.workers.odd_server import CUT, HANG, OddServer, chunk

PROMPT = list(range(300, 312))
USAGE = {"prompt_tokens_details": {"cached_tokens": 8}}
IDLE = b"vllm:num_requests_running{} 0\n"


async def ask_odd(*streams: Any, count: int = 4, **sampling: Any) -> tuple[Any, OddServer]:
    """Return the response to a request whose streams have these events."""
    async with OddServer() as server, attached(server) as one:
        server.streams = list(streams)
        answer = await one.ask(PROMPT, count, **sampling)
        assert one.ended is None
        return answer, server


async def test_a_stream_cut_after_its_last_token_is_complete() -> None:
    for last in (chunk([3], reason="stop"), chunk([3], reason="length")):
        answer, server = await ask_odd([chunk([1, 2]), last, CUT])
        assert (answer.tokens, answer.finished.reason) == ([1, 2, 3], last["choices"][0]["finish_reason"])
        assert len(server.requests) == 1


async def test_a_stream_cut_at_max_tokens_is_complete() -> None:
    answer, server = await ask_odd([chunk([1, 2, 3, 4]), CUT])
    assert (answer.tokens, answer.finished.reason, len(server.requests)) == ([1, 2, 3, 4], "length", 1)


async def test_more_tokens_than_requested_are_dropped() -> None:
    answer, _ = await ask_odd([chunk([1, 2, 3]), chunk([4, 5, 6]), HANG])
    assert (answer.tokens, answer.finished.reason) == ([1, 2, 3, 4], "length")


async def test_a_continued_request_asks_for_the_rest() -> None:
    answer, server = await ask_odd([chunk([1, 2]), CUT], [chunk([3, 4], reason="length")], min_tokens=3)
    assert answer.tokens == [1, 2, 3, 4]
    assert [(one["max_tokens"], one["min_tokens"], len(one["prompt"])) for one in server.requests] == [
        (4, 3, 12),
        (2, 1, 14),
    ]


@pytest.mark.parametrize(
    "event",
    [
        chunk([-1]),
        chunk([1 << 32]),
        chunk([10**30]),
        chunk(["7"]),
        chunk([1.5]),
        chunk(),
        chunk([1], reason=7),
        chunk([1], reason="x" * 1000),
        {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": -1}}},
        {"choices": {}},
        b"data: {\n\n",
        b"data: \xff\n\n",
        b"data: " + b"[" * 100_000 + b"\n\n",
        b"data: null\n\n",
    ],
)
async def test_a_malformed_event_is_a_cut_stream(event: Any) -> None:
    answer, server = await ask_odd([chunk([1, 2]), event], [chunk([3, 4], reason="length")])
    assert (answer.tokens, len(server.requests)) == ([1, 2, 3, 4], 2)


@pytest.mark.parametrize(
    ("logprobs", "is_right"),
    [
        ({"tokens": ["token_id:7"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:7": -0.5}]}, True),
        ({"tokens": ["token_id:7"], "token_logprobs": [None], "top_logprobs": None}, True),
        ({"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}]}, False),
        ({"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:" + "9" * 30: -0.5}]}, False),
        ({"tokens": [], "token_logprobs": []}, False),
        (None, False),
    ],
)
async def test_each_token_has_its_log_probability(logprobs: Any, is_right: bool) -> None:
    event = chunk([7], reason="length", logprobs=logprobs)
    answer, server = await ask_odd(*[[event]] * 4, count=1, logprobs=1)
    assert (answer.error is None, len(answer.logprobs)) == (is_right, int(is_right))
    assert len(server.requests) == (1 if is_right else 4)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        ({"message": "too long", "code": 400}, 400, "invalid_request"),
        ({"message": "it broke", "code": 500}, 502, "engine_error"),
        ({"message": "it broke", "code": "x"}, 502, "engine_error"),
        ({"message": "y" * 100_000}, 502, "engine_error"),
        ("it broke", 502, "engine_error"),
        ({}, 502, "engine_error"),
    ],
)
async def test_an_error_in_a_stream_is_the_error_of_the_request(error: Any, status: int, code: str) -> None:
    answer, _ = await ask_odd([chunk([1]), {"error": error}])
    assert (answer.error.status, answer.error.code) == (status, code)
    assert 0 < len(answer.error.message) <= 500


@pytest.mark.parametrize(("reason", "status"), [("abort", 503), ("error", 502)])
async def test_a_finish_reason_that_is_no_end_is_an_error(reason: str, status: int) -> None:
    answer, _ = await ask_odd([chunk([1]), chunk([], reason=reason)])
    assert answer.error.status == status and (reason in answer.error.message or status == 503)


async def test_an_endless_event_is_a_cut_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.workers.engines.attached.server.EVENT_BYTES_MAX", 1000)
    answer, server = await ask_odd([b"data: " + b"x" * 2000, HANG], [chunk([1], reason="stop")])
    assert (answer.tokens, len(server.requests)) == ([1], 2)


async def test_cached_tokens_are_those_of_the_prompt() -> None:
    many = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 10**6}}}
    for usage, cached in (({"choices": [], "usage": USAGE}, 8), (many, 12)):
        answer, _ = await ask_odd([chunk([1], reason="stop"), usage])
        assert answer.finished.cached_tokens == cached
    answer, _ = await ask_odd([chunk([1]), CUT], [chunk([2], reason="stop"), {"choices": [], "usage": USAGE}])
    assert answer.finished.cached_tokens == 0  # the usage of the continuation counts the first attempt's blocks


async def test_connections_are_used_again() -> None:
    async with OddServer() as server, attached(server) as one:
        server.replies["/metrics"] = (200, [IDLE])
        server.streams = [[chunk([1], reason="stop")] for _ in range(20)]
        for _ in range(20):
            assert (await one.ask(PROMPT, 4)).error is None
        assert server.connections < 6


@pytest.mark.parametrize(
    "completion", [b"<html>", b"[]", b"{}", b'{"choices": 3}', b"[" * 100_000, {"choices": []}, {"error": "no"}]
)
async def test_a_server_that_sends_no_completion_is_refused(completion: Any) -> None:
    async with OddServer() as server:
        server.completion = completion
        with pytest.raises(EngineError, match=r"no completion|rejected the first prompt"):
            async with attached(server):
                pass


async def test_a_server_that_leaves_out_the_end_token_returns_token_ids() -> None:
    async with OddServer() as server:
        server.completion = chunk([], reason="stop")
        async with attached(server) as one:
            server.streams = [[chunk([1, 2], reason="stop")]]
            assert (await one.ask(PROMPT, 4)).tokens == [1, 2]


# Discovery


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[" * 100_000,
        b"\xff",
        b"{}",
        b'{"data": {}}',
        b'{"data": []}',
        b'{"data": [{"id": 3}]}',
        b'{"data": [{"id": "m", "max_model_len": "many"}]}',
        b'{"data": [{"id": "m", "max_model_len": -1}]}',
        b'{"data": [{"id": "m", "max_model_len": 99999999999999999999}]}',
        b'{"data": [{"id": "m", "root": 3}]}',
        b'{"data": [{"id": "adapter", "parent": "m"}]}',
    ],
)
async def test_a_malformed_list_of_models_is_an_error(body: bytes) -> None:
    async with OddServer() as server:
        server.replies["/v1/models"] = (200, [body])
        with pytest.raises(EngineError):
            await described(server.url)


async def test_a_server_is_described_by_what_it_publishes() -> None:
    cards = [
        {"id": "m", "owned_by": "vllm", "root": "/models/m", "max_model_len": 4096},
        {"id": "alias", "owned_by": "vllm", "root": "/models/m", "max_model_len": 4096},
        {"id": "a", "parent": "m", "root": "/adapters/a"},
        {"id": "b", "parent": "other"},
    ]
    async with OddServer() as server:
        server.replies["/v1/models"] = (200, [json.dumps({"data": cards}).encode()])
        server.replies["/metrics"] = (200, [b'vllm:cache_config_info{block_size="16",num_gpu_blocks="101"} 1\n'])
        info = await described(server.url)
        assert (info.model, info.root, info.context_tokens, info.loras) == (
            "m",
            "/models/m",
            4096,
            {"a": "/adapters/a"},
        )
        assert (info.kind, info.block_size, info.kv_blocks) == ("vllm", 16, 100)
        assert (await described(server.url, "alias")).model == "alias"
        with pytest.raises(EngineError, match="serves m, alias, not nothing"):
            await described(server.url, "nothing")


@pytest.mark.parametrize(
    ("body", "sizes"),
    [
        (b'{"page_size": 4, "max_total_num_tokens": 400}', (4, 100)),
        (b'{"page_size": 0, "max_total_num_tokens": 400}', (None, None)),
        (b'{"page_size": -4, "max_total_num_tokens": 400}', (None, None)),
        (b'{"page_size": 4}', (4, None)),
        (b"<html>", (None, None)),
    ],
)
async def test_sizes_of_sglang(body: bytes, sizes: tuple[int | None, int | None]) -> None:
    async with OddServer("sglang") as server:
        server.replies["/server_info"] = (200, [body])
        info = await described(server.url)
        assert (info.block_size, info.kv_blocks) == sizes


async def test_a_body_that_is_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.workers.engines.attached.server.BODY_BYTES_MAX", 1000)
    async with OddServer() as server:
        server.replies["/v1/models"] = (200, [b"x" * 600, b"x" * 600])
        with pytest.raises(EngineError, match="more than 1000 bytes"):
            await described(server.url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://bad host:80", "https://127.0.0.1:1", "http://[::1]:1"])
async def test_a_server_that_cannot_be_reached_is_an_error(url: str) -> None:
    with pytest.raises(EngineError, match="cannot be reached"):
        await described(url)


async def test_access_that_is_denied_names_the_option() -> None:
    async with OddServer() as server:
        server.replies["/v1/models"] = (401, [b'{"error": "no key"}'])
        with pytest.raises(EngineError, match="401: no key"):
            await described(server.url)
    async with OpenAiServer() as standin:
        standin.faults.status = 403
        with pytest.raises(EngineError, match="--upstream-api-key-file"):
            async with attached(standin):
                pass


async def test_the_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with OddServer() as server:
        assert (await described(server.url)).model == "m"
