"""Answers of OpenAI-compatible servers that deviate from vLLM's: ends of responses, limits, errors, unknown fields."""

import json
from email.utils import formatdate
from typing import Any

import pytest

from forebay import runtime
from forebay.events.codec import decode as decode_event
from forebay.events.fleet import WorkerSpec
from forebay.events.progress import AttemptRejected, RequestFailed
from forebay.events.tokens import ResponseEnded, ResponseError
from forebay.events.topics import PROGRESS, TOKENS
from forebay.workers.engine import Failed
from forebay.workers.engines.attached.errors import RETRY_AFTER_S_MAX
from forebay.workers.runtime.outbox import Outbox
from forebay.workers.runtime.rank_buffer import RankBuffer
from forebay.workers.runtime.request_table import RequestTable
from tests.engines.driven import Answer, Driven
from tests.workers.attached import attached, decode
from tests.workers.conftest import work_item
from tests.workers.odd_server import CUT, HANG, OddServer, Reply, chunk

PROMPT = list(range(300, 312))
WORD = chunk(text=" word")
DONE = b"data: [DONE]\n\n"


async def ask(*streams: Any, count: int = 5, owner: str = "acme") -> tuple[Answer, Driven, OddServer]:
    """Return the response to a request whose streams have these events, of a server that returns text only."""
    async with OddServer(owner) as server:
        server.completion = chunk(text=" a", reason="length") if owner == "acme" else chunk([7])
        async with attached(server) as one:
            server.streams = list(streams)
            answer = await one.ask(PROMPT, count)
            assert one.ended is None
            return answer, one, server


def text_of(answer: Answer) -> str:
    return decode(answer.tokens)


def failure(one: Driven) -> Failed:
    (failed,) = [failed for batch in one.batches for failed in batch.failed]
    return failed


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


async def test_a_server_that_ignores_max_tokens_is_cut() -> None:
    answer, _, _ = await ask([*[WORD] * 50, HANG])
    assert answer.finished is not None
    assert (len(answer.tokens), answer.finished.output_tokens, answer.finished.reason) == (5, 5, "length")


async def test_one_event_with_more_than_max_tokens_is_cut() -> None:
    answer, _, _ = await ask([chunk(text=" word" * 50), HANG])
    assert (text_of(answer), len(answer.tokens)) == (" word" * 5, 5)


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
async def test_a_stream_is_read_as_the_standard_says(stream: Any) -> None:
    answer, _, _ = await ask(stream)
    assert (answer.error, text_of(answer)) == (None, " word word")


# Errors


@pytest.mark.parametrize(
    ("event", "status", "code"),
    [
        ({"error": {"message": "CUDA out of memory"}}, 502, "engine_error"),
        ({"error": {"message": "CUDA out of memory", "code": 529}}, 503, "engine_overloaded"),
        ({"error": {"message": "CUDA out of memory", "type": "invalid_request_error"}}, 400, "invalid_request"),
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


@pytest.mark.parametrize("status", [400, 404, 409, 413, 422])
async def test_an_error_of_the_request_is_the_clients(status: int) -> None:
    answer, one, _ = await ask(Reply(status, b'{"detail": "no"}'))
    assert answer.error is not None and (answer.error.status, answer.error.message) == (status, "no")
    assert not failure(one).is_rejection


@pytest.mark.parametrize(
    ("status", "expected"),
    [(401, 502), (402, 502), (403, 502), (429, 429), (503, 503), (529, 503), (500, 502), (502, 502), (204, 502)],
)
async def test_other_servers_may_take_what_a_server_rejects(status: int, expected: int) -> None:
    answer, one, _ = await ask(Reply(status, b'{"detail": "no"}' if status != 204 else b""))
    assert answer.error is not None and answer.error.status == expected
    assert failure(one).is_rejection


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


# Records of the worker


@pytest.mark.parametrize("has_token", [False, True])
def test_only_the_owner_is_informed_of_a_rejection_before_the_first_token(has_token: bool) -> None:
    spec = WorkerSpec(
        worker_id="w", model="m", block_size=4, kv_blocks_total=64, max_num_seqs=8, max_num_batched_tokens=64
    )
    outbox, table, item = Outbox(spec, 7, "m", 0), RequestTable(), work_item("r", [1, 2], 8)
    assert table.start(outbox.request(item), (0, 0, item.stage, item.attempt), resumes=False)
    buffer = RankBuffer(0, 64)
    if has_token:
        buffer.began(item, 0)
        buffer.add_tokens(item, 0, [5])
    error = ResponseError(status=429, code="engine_overloaded", message="not now", retry_after_s=9)
    buffer.failed(item, error, is_rejection=True)
    batch = buffer.take()
    assert batch is not None
    drafts = outbox.batch(batch, table)
    topics = {TOKENS.name: TOKENS, PROGRESS.name: PROGRESS}
    events = [decode_event(topics[draft.topic], draft.value) for draft in drafts if draft.topic in topics]
    ended = [event for event in events if isinstance(event, ResponseEnded)]
    found = [event for event in events if isinstance(event, AttemptRejected | RequestFailed)]
    if has_token:
        assert [one.error for one in ended] == [error]
        assert [type(one) for one in found] == [RequestFailed]
    else:
        assert not ended
        (rejected,) = found
        assert isinstance(rejected, AttemptRejected)
        assert (rejected.status, rejected.code, rejected.error, rejected.retry_after_s) == (
            429,
            "engine_overloaded",
            "not now",
            9,
        )
    assert not table.in_flight
