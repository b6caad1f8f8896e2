"""Answers of OpenAI-compatible servers that deviate from vLLM's, and what servers publish about themselves."""

import json
from email.utils import formatdate
from typing import Any

import pytest

from forebay import runtime
from forebay.workers.engine import EngineError, Failed
from forebay.workers.engines.attached.errors import RETRY_AFTER_S_MAX
from tests.engines.driven import Answer, Driven
from tests.harness.openai_server import OpenAiServer
from tests.workers.attached import CUT, HANG, OddServer, Reply, attached, chunk, decode, described

PROMPT = list(range(300, 312))
WORD = chunk(text=" word")
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens_details": {"cached_tokens": 8}}
IDLE = b"vllm:num_requests_running{} 0\n"


async def ask(*streams: Any, count: int = 5, owner: str = "acme", **sampling: Any) -> tuple[Answer, Driven, OddServer]:
    """Return the response to a request whose streams have these events, by default of a server of text only."""
    async with OddServer(owner) as server:
        server.completion = chunk(text=" a", reason="length") if owner == "acme" else chunk([7])
        async with attached(server) as one:
            server.streams = list(streams)
            answer = await one.ask(PROMPT, count, **sampling)
            assert one.ended is None
            return answer, one, server


def text_of(answer: Answer) -> str:
    return decode(answer.tokens)


def failure(one: Driven) -> Failed:
    (failed,) = [failed for batch in one.batches for failed in batch.failed]
    return failed


async def test_a_server_gets_the_trace_context_of_a_request() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with OddServer("acme") as server:
        async with attached(server) as one:
            server.streams = [[WORD, DONE]] * 2
            await one.ask(PROMPT, 5, traceparent=trace)
            await one.ask(PROMPT, 5)
        assert server.trace_contexts[-2:] == [trace, ""]


# Ends of responses


@pytest.mark.parametrize(
    "end",
    [
        [],
        [chunk(text=None)],  # type: ignore[arg-type]
        [chunk(text=None, reason="stop")],  # type: ignore[arg-type]
        [{"id": "c", "choices": None, "usage": {"prompt_tokens": 3}}],
        [{"id": "c", "choices": []}, b": keep-alive\n\n", {"type": "ping"}],
        [chunk(reason="eos")],
        [chunk(reason="EOS_TOKEN")],
        [chunk(reason="end_turn"), CUT],
        [chunk(reason="stop", logprobs={"content": [{"token": "x"}]})],
        [{"choices": [{"index": 1, "text": " other", "finish_reason": "length"}]}],
        [b"data: [DONE]", CUT],
    ],
)
async def test_a_complete_text_is_a_response(end: list[Any]) -> None:
    answer, _, server = await ask([WORD, WORD, *end])
    assert answer.error is None and answer.finished is not None
    assert (text_of(answer), answer.finished.reason) == (" word word", "stop")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reason", "expected", "filtered"),
    [
        ("length", "length", False),
        ("max_tokens", "length", False),
        ("MODEL_LENGTH", "length", False),
        ("content_filter", "stop", True),
        ("anything", "stop", False),
    ],
)
@pytest.mark.parametrize("owner", ["acme", "vllm"])
async def test_finish_reasons_of_other_servers(reason: str, expected: str, filtered: bool, owner: str) -> None:
    first = WORD if owner == "acme" else chunk([1])
    answer, _, _ = await ask([first, chunk(None if owner == "acme" else [], reason=reason)], owner=owner)
    assert answer.finished is not None
    assert (answer.finished.reason, answer.finished.filtered) == (expected, filtered)


@pytest.mark.parametrize("stream", [[*[WORD] * 50, HANG], [chunk(text=" word" * 50), HANG]])
async def test_a_server_that_ignores_max_tokens_is_cut(stream: Any) -> None:
    answer, _, _ = await ask(stream)
    assert answer.finished is not None
    assert (text_of(answer), answer.finished.output_tokens, answer.finished.reason) == (" word" * 5, 5, "length")


@pytest.mark.parametrize(
    "stream",
    [
        [b"\xef\xbb\xbf", WORD, WORD],
        [b"data: {\ndata: " + json.dumps(WORD).encode()[1:] + b"\n\n", WORD],
        [b"data:" + json.dumps(WORD).encode() + b"\r\r", WORD],
        [b"\r\n: hello\r\nevent: message\r\nid: 1\r\nretry: 5\r\ndata: ", json.dumps(WORD).encode(), b"\r\n\r\n", WORD],
        [b"data: " + json.dumps(WORD).encode() + b"\n\n" + b"data: " + json.dumps(WORD).encode() + b"\n\n"],
        Reply(200, json.dumps(chunk(text=" word word", reason="stop")).encode()),
    ],
)  # fmt: skip
async def test_streams_of_every_standard_form_are_read(stream: Any) -> None:
    answer, _, _ = await ask(stream)
    assert (answer.error, text_of(answer)) == (None, " word word")


# Errors


@pytest.mark.parametrize(
    ("event", "status", "code"),
    [
        ({"error": {"message": "CUDA out of memory"}}, 502, "engine_error"),
        ({"error": {"message": "CUDA out of memory", "code": 529}}, 503, "engine_overloaded"),
        ({"error": {"message": "CUDA out of memory", "type": "invalid_request_error"}}, 400, "invalid_request"),
        ({"error": {"message": "CUDA out of memory", "code": 400}}, 400, "invalid_request"),
        ({"error": {"message": "CUDA out of memory", "code": "x"}}, 502, "engine_error"),
        ({"error": "CUDA out of memory"}, 502, "engine_error"),
        ({"object": "error", "message": "CUDA out of memory", "code": 50002}, 502, "engine_error"),
        ({"text": "CUDA out of memory", "error_code": 50002}, 502, "engine_error"),
        ({"text": "CUDA out of memory", "error_code": 40303}, 400, "invalid_request"),
        ({"text": "CUDA out of memory", "error_code": "42901"}, 429, "engine_overloaded"),
        ({"detail": "CUDA out of memory"}, 502, "engine_error"),
        ({"message": "CUDA out of memory", "status": 500}, 502, "engine_error"),
        (b'event: error\ndata: {"message": "CUDA out of memory"}\n\n', 502, "engine_error"),
        (b"event: error\ndata: CUDA out of memory\n\n", 502, "engine_error"),
        (b'data: {"error":\ndata: "CUDA out of memory"}\n\n', 502, "engine_error"),
    ],
)
@pytest.mark.parametrize("tokens", [0, 2])
async def test_the_message_of_an_error_reaches_the_client(event: Any, status: int, code: str, tokens: int) -> None:
    answer, one, _ = await ask([*[WORD] * tokens, event])
    assert answer.error is not None and "CUDA out of memory" in answer.error.message
    assert (answer.error.status, answer.error.code) == (status, code)
    assert failure(one).is_rejection == (status != 400)


async def test_an_error_as_a_document_with_status_200_is_an_error() -> None:
    answer, _, _ = await ask(Reply(200, b'{"error": {"message": "CUDA out of memory"}}'))
    assert answer.error is not None and answer.error.message == "CUDA out of memory"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        *((status, status) for status in (400, 404, 409, 413, 422)),  # the client is at fault
        *((401, 502), (402, 502), (403, 502), (429, 429), (503, 503), (529, 503), (500, 502), (502, 502), (204, 502)),
    ],
)
async def test_other_servers_may_take_what_a_server_rejects(status: int, expected: int) -> None:
    answer, one, _ = await ask(Reply(status, b'{"detail": "no"}' if status != 204 else b""))
    assert answer.error is not None and answer.error.status == expected
    assert "no" in answer.error.message
    assert failure(one).is_rejection == (expected >= 429)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7), ("99999999999", RETRY_AFTER_S_MAX), ("soon", 0), ("-3", 0), ("\u0663", 0), ("", 0), ("1.5", 0)],
)
async def test_the_pause_that_a_server_asks_for(header: str, seconds: int) -> None:
    answer, _, _ = await ask(Reply(503, b"no", {"retry-after": header} if header.isascii() else {}))
    assert answer.error is not None and answer.error.retry_after_s == seconds


async def test_a_pause_may_be_a_date() -> None:
    later, before = (formatdate(runtime.wall_us() / 1e6 + add, usegmt=True) for add in (600, -600))
    for date, least, most in ((later, 300, 600), (before, 0, 0)):
        answer, _, _ = await ask(Reply(429, b"no", {"retry-after": date}))
        assert answer.error is not None and least <= answer.error.retry_after_s <= most


async def test_a_stream_that_is_cut_again_and_again_before_its_first_token_may_go_elsewhere() -> None:
    answer, one, _ = await ask(*[[CUT]] * 4)
    assert answer.error is not None and failure(one).is_rejection


# Servers that refuse fields


@pytest.mark.parametrize(
    "refused",
    [
        {"return_token_ids"},
        {"return_token_ids", "return_tokens_as_token_ids"},
        {"stream_options"},
        {"stream_options", "return_token_ids", "return_tokens_as_token_ids", "add_special_tokens"},
    ],
)
@pytest.mark.parametrize("owner", ["acme", "forebay"])
async def test_a_server_that_refuses_a_field_gets_it_no_more(refused: set[str], owner: str) -> None:
    async with OddServer(owner) as server:
        server.completion, server.refuses = chunk(text=" a", reason="length"), frozenset(refused)
        async with attached(server) as one:
            for _ in range(2):
                server.streams = [[WORD, WORD]]
                answer = await one.ask(PROMPT, 5)
                assert (answer.error, text_of(answer)) == (None, " word word")
            assert not any(body.keys() & refused for body in server.requests)


# Servers that return token ids


async def ask_odd(*streams: Any, count: int = 4, **sampling: Any) -> tuple[Any, OddServer]:
    answer, _, server = await ask(*streams, count=count, owner="vllm", **sampling)
    return answer, server


@pytest.mark.parametrize(
    ("stream", "tokens", "reason"),
    [
        ([chunk([1, 2]), chunk([3], reason="stop"), CUT], [1, 2, 3], "stop"),
        ([chunk([1, 2]), chunk([3], reason="length"), CUT], [1, 2, 3], "length"),
        ([chunk([1, 2, 3, 4]), CUT], [1, 2, 3, 4], "length"),
        ([chunk([1, 2, 3]), chunk([4, 5, 6]), HANG], [1, 2, 3, 4], "length"),
    ],
)
async def test_a_stream_that_ends_after_its_last_token_is_complete(
    stream: list[Any], tokens: list[int], reason: str
) -> None:
    answer, server = await ask_odd(stream)
    assert (answer.tokens, answer.finished.reason, len(server.requests)) == (tokens, reason, 1)


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
async def test_sizes_of_an_sglang_server_are_read(body: bytes, sizes: tuple[int | None, int | None]) -> None:
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
