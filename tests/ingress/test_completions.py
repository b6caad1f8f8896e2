"""Completions over HTTP: streaming, usage, stop strings, choices, later attempts, rejections and disconnects."""

import asyncio
import json
import logging
from typing import Any
from urllib.parse import unquote

import httpx
import msgspec
import openai
import pytest

from forebay.core.block_hashes import sequence_hashes
from forebay.core.state.reply_slot import apply
from forebay.events.base import unpack_u32
from forebay.events.codec import decode
from forebay.events.request_ids import RequestLocation, client_id_of, parse_public_id, public_id
from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.events.tokens import PrefilledBy
from forebay.events.topics import TOKENS
from forebay.ingress import admission
from forebay.ingress.access_log import LOGGER
from forebay.ingress.kafka_api.request import ReplyAddress
from forebay.ingress.kafka_api.response import PendingRequest, RecordResponse, WindowEntry
from forebay.transport.base import Draft
from tests.ingress.conftest import CHAT, HELLO, NAME, SLOT, TEXT, Scene, chat, error, events, make_scene, text
from tests.system import until

RIVER = "the river ran down the mountain"
WORDS = (" water", " stone", " river", " mountain")


def text_of(response: httpx.Response, choice: int = 0) -> str:
    """Return the text of a choice of a chat, whole or streamed."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        content: str = response.json()["choices"][choice]["message"]["content"]
        return content
    choices = [one for event in events(response)[:-1] for one in event.get("choices", ()) if one["index"] == choice]
    return "".join(one["delta"].get("content", "") for one in choices)


def last_of(response: httpx.Response) -> Any:
    """Return the object that names the worker."""
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    return next(one for one in events(response) if "forebay" in one) if is_stream else response.json()


async def started(scene: Scene, body: dict[str, Any], path: str = CHAT) -> tuple["asyncio.Task[httpx.Response]", str]:
    """Start a request, and return its response and its id once it is on the log."""
    pending = scene.start(path, body)
    return pending, (await scene.next_request()).request_id


def public(request: RequestSubmitted, offset: int = 0) -> str:
    """Return the id of the response to a request at an offset of the log."""
    return public_id(request.request_id, RequestLocation(0, offset))


async def submitted(scene: Scene, count: int) -> list[RequestSubmitted]:
    """Return the submitted requests in the order of their choices."""
    found = [await scene.next_request() for _ in range(count)]
    return sorted(found, key=lambda one: int(one.request_id.rpartition("-")[2]))


def asgi_scope(path: str) -> dict[str, Any]:
    headers = [(b"host", b"test"), (b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}


async def test_a_response_names_its_worker_and_its_cached_tokens(scene: Scene) -> None:
    pending = scene.start(CHAT, chat(seed=5, temperature=0.5, top_p=0.9, user="u", metadata={"a": "b"}))
    request = await scene.next_request()
    output = scene.reply(request.request_id, " water and stone", cached=7)
    response = await pending
    assert response.status_code == 200
    body = response.json()
    assert (body["object"], body["id"]) == ("chat.completion", public(request))
    assert body["choices"][0]["message"] == {"role": "assistant", "content": " water and stone", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": request.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": output + request.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": 7},
    }
    assert body["forebay"] == {"request_id": request.request_id, "worker": "w1", "rank": 0, "attempts": 1}
    assert response.headers["x-forebay-worker"] == "w1"
    assert response.headers["x-request-id"] == client_id_of(request.request_id)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.temperature, sampling.top_p) == (50, 5, 0.5, 0.9)
    prompt = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    assert unpack_u32(request.token_ids) == scene.model.encode(prompt)
    assert request.sequence_hashes == sequence_hashes(request.token_ids, 4)
    labels = f'{{endpoint="chat_completions",model="{NAME}",request_type="unary",status="success"}}'
    assert scene.metric(f"dynamo_frontend_requests_total{labels} 1.0")


async def test_a_stream_has_role_text_finish_reason_usage_and_done(scene: Scene) -> None:
    pending, name = await started(scene, chat(stream=True, stream_options={"include_usage": True}))
    at = scene.emit_text(name, " one two")
    at = scene.emit_text(name, " three", first=at)
    scene.end(name, reason="stop", output=at)
    response = await pending
    assert response.headers["content-type"].startswith("text/event-stream")
    first, *middle, last, usage, done = events(response)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert text_of(response) == " one two three"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in middle)
    assert (last["choices"][0]["finish_reason"], last["forebay"]["worker"]) == ("stop", "w1")
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], at, "[DONE]")


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "Hello"})])
async def test_each_chunk_of_a_stream_can_have_the_token_counts(scene: Scene, path: str, prompt: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    pending = scene.start(path, {"model": NAME, **prompt, "stream": True, "stream_options": options})
    request = await scene.next_request()
    at = scene.emit_text(request.request_id, " one two")
    at = scene.emit_text(request.request_id, " three", first=at)
    scene.end(request.request_id, reason="stop", output=at)
    *chunks, total, _ = events(await pending)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert total["usage"] == chunks[-1]["usage"]
    assert total["usage"]["completion_tokens"] == at
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {len(unpack_u32(request.token_ids))}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_across_tokens_truncates_and_cancels(scene: Scene, stream: bool) -> None:
    pending, name = await started(scene, chat(stream=stream, stop=["water and", "never"]))
    for at, token in enumerate(scene.model.encode("cold water and stone")):
        scene.emit(name, [token], first=at)
    response = await pending
    assert text_of(response) == "cold "
    last = events(response)[-2] if stream else response.json()
    assert last["choices"][0]["finish_reason"] == "stop"
    assert (await scene.cancelled()).request_id == name


async def test_a_later_attempt_never_repeats_a_token(scene: Scene) -> None:
    tokens = scene.model.encode(RIVER)
    pending, name = await started(scene, chat(stream=True))
    scene.emit(name, tokens[:3])
    scene.start_attempt(name, 2)
    scene.emit(name, [9, 9, 9], first=3)  # the lost worker, too late
    scene.end(name)  # and its end
    scene.emit(name, tokens[:5], attempt=2, worker="w2")
    scene.emit(name, tokens[5:], first=5, attempt=2, worker="w2")
    scene.end(name, attempt=2, reason="stop")
    scene.emit_text(name, " again", first=len(tokens), attempt=2)  # after the end, before the answer is written
    response = await pending
    assert text_of(response) == RIVER
    last = events(response)[-2]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["forebay"] == {"request_id": name, "worker": "w2", "rank": 0, "attempts": 2}


async def test_a_submission_has_the_offset_where_its_response_can_begin(scene: Scene) -> None:
    """A later attempt need not read earlier records of the slot."""
    for offset in (0, 2):
        pending = scene.start(CHAT, chat())
        request = await scene.next_request()
        assert request.reply_from == scene.log.next_offset("tokens", 4) == offset
        scene.reply(request.request_id, " one")
        assert (await pending).status_code == 200
        await until(lambda: scene.group.replies.position == offset + 2)  # noqa: B023 - awaited here


@pytest.mark.parametrize("stream", [True, False])
async def test_missing_tokens_are_an_error(scene: Scene, stream: bool) -> None:
    tokens = scene.model.encode(RIVER)
    pending, name = await started(scene, chat(stream=stream))
    scene.emit(name, tokens[:2])
    scene.emit(name, tokens[3:], first=3)
    scene.end(name, output=len(tokens))
    response = await pending
    found = events(response)[-1]["error"] if stream else response.json()["error"]
    message = "output tokens after the first 2 were lost; send the request again"
    assert (found["code"], found["message"]) == ("tokens_missing", message)
    assert response.status_code == (200 if stream else 502)
    assert (await scene.cancelled()).request_id == name


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "no_workers"), (503, "busy"), (503, "no_eligible_worker"), (429, "queue_full"), (404, "unknown_worker")],
)
async def test_a_rejection_is_a_real_http_status(scene: Scene, status: int, code: str, stream: bool) -> None:
    pending, name = await started(scene, chat(stream=stream))
    scene.refuse(name, status, code)
    response = await pending
    assert error(response) == (status, code)
    later = status != 404
    assert response.headers.get("retry-after") == ("1" if later else None)
    assert scene.metric(f'forebay_ingress_refused_total{{code="{code}"}} 1.0')
    labels = f'{{endpoint="chat_completions",model="{NAME}"}}'
    assert scene.metric(f"dynamo_frontend_model_rejection_total{labels} 1.0") is later


async def test_a_request_without_a_response_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.ingress.http.response.GRACE_S", 0.2)
    async with make_scene(timeout_s=0.001) as scene:
        pending = scene.start(CHAT, chat())
        request = await scene.next_request()
        assert request.timeout_us == 1_000
        assert error(await pending) == (504, "deadline_exceeded")
        assert (await scene.cancelled()).request_id == request.request_id


@pytest.mark.parametrize("second", [chat(), chat(max_tokens=3)], ids=["same body", "another body"])
async def test_clients_may_use_an_id_for_several_requests(scene: Scene, second: dict[str, Any]) -> None:
    """An id on the log begins with the id of the client, even with one like ours, and a response header repeats it."""
    pending = [scene.start(CHAT, body, **{"x-request-id": "chatcmpl-mine"}) for body in (chat(), second)]
    requests = [await scene.next_request() for _ in pending]
    assert len({request.request_id for request in requests}) == 2
    assert {client_id_of(request.request_id) for request in requests} == {"chatcmpl-mine"}
    scene.reply(requests[0].request_id, " a")
    scene.refuse(requests[1].request_id, 503, "workers_lost")
    served, refused = await pending[0], await pending[1]
    assert served.json()["id"] == public(requests[0])
    assert (served.status_code, refused.status_code) == (200, 503)
    assert [response.headers["x-request-id"] for response in (served, refused)] == ["chatcmpl-mine", "chatcmpl-mine"]


@pytest.mark.parametrize(
    "given", ["chatcmpl-1~2", "Root=1-67891233-abc", "3f2c9a5e-1#1", "no spaces", "", "a" * 129, "\xe9"]
)
async def test_an_id_that_is_not_valid_is_replaced_and_logged(
    scene: Scene, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    """Proxies set such ids. No client can choose the id of a response, which has a `~`."""
    caplog.set_level(logging.INFO, LOGGER)
    async with scene.http_client() as (client, _):
        headers = [(b"x-request-id", given.encode("latin-1"))]
        pending = asyncio.create_task(client.post(CHAT, json=chat(), headers=headers))
        request = await scene.next_request()
        scene.reply(request.request_id, " a")
        response = await pending
    assert (response.status_code, response.json()["id"]) == (200, public(request))
    assert response.headers["x-request-id"] == client_id_of(request.request_id).removeprefix(given or "-")
    (fields,) = (record.__dict__["fields"] for record in caplog.records if record.name == LOGGER)
    assert unquote(fields["x_request_id"], "latin-1") == given[:128]


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_silent_stream_has_comments_and_an_error_is_its_last_event(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, choices: int
) -> None:
    """Proxies close silent connections."""
    monkeypatch.setattr("forebay.ingress.http.response.SILENT_S", 0.01)
    body = chat(n=choices, stream=True)
    async with scene.http_client() as (client, _), client.stream("POST", CHAT, json=body) as response:
        assert (response.headers["cache-control"], response.headers["x-accel-buffering"]) == ("no-cache", "no")
        assert "x-forebay-worker" not in response.headers
        lines = response.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [": keep-alive", ""] * 2
        name = (await scene.next_request()).request_id
        scene.emit_text(name, " a")
        assert '" a"' in await anext(line async for line in lines if line.startswith("data: "))
        scene.refuse(name, 503, "workers_lost", attempt=1)
        assert '"workers_lost"' in [line async for line in lines if line.startswith("data: ")][-1]
    labels = f'{{endpoint="chat_completions",model="{NAME}",request_type="stream",status="error"}}'
    assert scene.metric(f"dynamo_frontend_requests_total{labels} 1.0")
    assert not scene.metric("dynamo_frontend_model_rejection_total")


async def test_clients_skip_the_comments_of_a_silent_stream(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.ingress.http.response.SILENT_S", 0.01)
    hello: Any = HELLO
    async with scene.openai_client() as client:
        stream = await client.chat.completions.create(model=NAME, messages=hello, stream=True)
        scene.reply((await scene.next_request()).request_id, " good")
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == " good"


async def test_undecodable_records_of_the_slot_are_counted_and_skipped(scene: Scene) -> None:
    pending, name = await started(scene, chat())
    scene.log.append_soon([Draft("tokens", 4, b"\xff")])
    scene.reply("nobody-knows", " a")
    scene.reply(name, " a")
    assert (await pending).status_code == 200
    assert scene.metric("forebay_ingress_undecodable_total 1.0")


async def test_a_failed_commit_is_a_503_for_all_requests_in_flight(scene: Scene) -> None:
    waiting, _ = await started(scene, chat())
    scene.fail_commits()
    for pending in (scene.start(CHAT, chat()), waiting):
        assert error(await pending) == (503, "log_unavailable")
    assert scene.log.failure is not None
    assert not len(scene.group.replies)


async def test_a_stalled_client_is_dropped_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.ingress.http.response.GRACE_S", 0.01)
    async with make_scene(timeout_s=0.01) as scene:
        incoming = [{"type": "http.request", "body": json.dumps(chat(stream=True)).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            return incoming.pop() if incoming else await asyncio.Future()

        async def send(_: Any) -> None:
            await asyncio.Future()

        serving = asyncio.create_task(scene.app(asgi_scope(CHAT), receive, send))
        scene.emit_text((await scene.next_request()).request_id, " one")
        await serving
        assert (await scene.cancelled()).reason == "deadline"
        assert not len(scene.group.replies)
        assert scene.metric(f'dynamo_frontend_disconnected_clients{{model="{NAME}"}} 1.0')


async def test_the_openai_client_reads_completions(scene: Scene) -> None:
    hello: Any = HELLO
    async with scene.openai_client() as client:
        assert [model.id async for model in await client.models.list()] == [NAME]
        create = client.chat.completions.create(model=NAME, messages=hello, max_completion_tokens=4, stream=True)
        pending = asyncio.create_task(create)
        request = await scene.next_request()
        assert request.sampling.max_tokens == 4
        scene.emit_text(request.request_id, " good")
        stream = await pending
        scene.emit_text(request.request_id, " day", first=1)
        scene.end(request.request_id)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == " good day"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=hello)
        choices = asyncio.create_task(client.completions.create(model=NAME, prompt=[[5, 6], [7]], n=2, max_tokens=3))
        for word, part in zip(WORDS, await submitted(scene, 4), strict=True):
            scene.reply(part.request_id, word)
        assert [one.text for one in (await choices).choices] == [*WORDS]
        with pytest.raises(openai.BadRequestError, match="n: "):
            await client.completions.create(model=NAME, prompt="a", n=1000)


@pytest.mark.parametrize("body", [text(stream=True), text(stream=False), text(prompt=["a", "b"])])
async def test_a_disconnect_cancels_the_request(scene: Scene, body: dict[str, Any]) -> None:
    async with scene.http_client() as (client, _):
        leaving = asyncio.create_task(client.post(TEXT, json=body))
        count = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
        requests = {(await scene.next_request()).request_id for _ in range(count)}
        leaving.cancel()
        await until(lambda: len(scene.requests(RequestCancelled)) == count)
        assert {one.request_id for one in scene.requests(RequestCancelled)} == requests
        assert {one.reason for one in scene.requests(RequestCancelled)} == {"client disconnected"}
        assert {one.output_tokens for one in scene.requests(RequestCancelled)} == {0}
        await until(lambda: not len(scene.group.replies))
        assert scene.metric("dynamo_frontend_disconnected_clients")


PREFILLED = PrefilledBy(worker_id="p1", rank=2, transferred_bytes=4_096, transfer_us=1_500)
PREFILL = {"worker": "p1", "rank": 2, "transferred_bytes": 4_096, "transfer_ms": 1.5}


def named_text(**changes: Any) -> dict[str, Any]:
    return text(prompt="Once", nvext={"extra_fields": ["worker_id"]}, **changes)


def worker_ids(prefill: str, prefill_rank: int, decode_worker: str) -> dict[str, Any]:
    ids = {"prefill_worker_id": prefill, "prefill_dp_rank": prefill_rank}
    return {"worker_id": {**ids, "decode_worker_id": decode_worker, "decode_dp_rank": 0}}


@pytest.mark.parametrize("stream", [True, False])
async def test_disagg_responses_name_both_workers_and_the_transfer(scene: Scene, *, stream: bool) -> None:
    pending, name = await started(scene, named_text(stream=stream), TEXT)
    at = scene.emit(name, scene.model.encode("Once upon"), prefilled=PREFILLED)
    scene.end(name, output=scene.emit_text(name, " a time", first=at))
    last = last_of(await pending)
    assert last["forebay"] == {"request_id": name, "worker": "w1", "rank": 0, "attempts": 1, "prefill": PREFILL}
    assert last["nvext"] == worker_ids("p1", 2, "w1")


@pytest.mark.parametrize("stream", [True, False])
async def test_an_aggregated_worker_is_named_for_both_stages(scene: Scene, *, stream: bool) -> None:
    pending, name = await started(scene, named_text(stream=stream), TEXT)
    scene.reply(name, "Once")
    last = last_of(await pending)
    assert last["nvext"] == worker_ids("w1", 0, "w1")
    assert "prefill" not in last["forebay"]


async def test_disagg_a_later_attempt_keeps_the_first_prefill_worker(scene: Scene) -> None:
    pending, name = await started(scene, named_text(), TEXT)
    at = scene.emit(name, scene.model.encode("Once"), prefilled=PREFILLED)
    scene.start_attempt(name, 2)
    scene.emit(name, [9], first=at, prefilled=PrefilledBy(worker_id="void"))
    at = scene.emit_text(name, " upon", first=at, attempt=2, worker="w2")
    scene.end(name, output=at, attempt=2)
    body = (await pending).json()
    assert body["nvext"] == worker_ids("p1", 2, "w2")
    assert (body["forebay"]["attempts"], body["forebay"]["prefill"]) == (2, PREFILL)


async def test_a_response_may_be_sent_back_as_a_message(scene: Scene) -> None:
    pending, name = await started(scene, chat())
    scene.reply(name, " good day")
    message = (await pending).json()["choices"][0]["message"]
    again = scene.start(CHAT, chat(messages=[*HELLO, message, *HELLO]))
    request = await scene.next_request()
    turns = [*HELLO, {"role": "assistant", "content": " good day"}, *HELLO]
    assert unpack_u32(request.token_ids) == scene.model.encode(scene.model.render(turns))
    scene.end(request.request_id)
    assert (await again).status_code == 200


# --- several choices --------------------------------------------------------------------------------------------------


async def test_each_choice_of_each_prompt_is_a_request_and_usage_is_summed(scene: Scene) -> None:
    prompts = ["one", "two words and more"]
    pending = scene.start(TEXT, text(prompt=prompts, n=2, seed=7), **{"x-request-id": "c"})
    requests = await submitted(scene, 4)
    (whole,) = {request.request_id.rpartition("-")[0] for request in requests}
    assert [request.request_id for request in requests] == [f"{whole}-{at}" for at in range(4)]
    assert client_id_of(whole) == "c"
    encoded = [scene.model.encode(prompt) for prompt in prompts]
    assert [unpack_u32(one.token_ids) for one in requests] == [tokens for tokens in encoded for _ in range(2)]
    assert [one.sampling.seed for one in requests] == [7, 8, 7, 8]
    output = sum(scene.reply(requests[at].request_id, WORDS[at], reason="stop", cached=at + 1) for at in (3, 0, 2, 1))
    body = (await pending).json()
    assert parse_public_id(body["id"])[0] == whole
    assert [(one["index"], one["text"], one["finish_reason"]) for one in body["choices"]] == [
        (at, WORDS[at], "stop") for at in range(4)
    ]
    tokens = sum(map(len, encoded))
    assert body["usage"] == {
        "prompt_tokens": tokens,
        "completion_tokens": output,
        "total_tokens": tokens + output,
        "prompt_tokens_details": {"cached_tokens": 1 + 3},
    }
    assert [one["request_id"] for one in body["forebay"]["choices"]] == [one.request_id for one in requests]
    assert not len(scene.group.replies)
    assert scene.front.admission.in_flight == 0


async def test_a_stream_interleaves_the_choices(scene: Scene) -> None:
    pending = scene.start(CHAT, chat(n=2, stream=True, stream_options={"include_usage": True}))
    first, second = await submitted(scene, 2)
    at = scene.emit_text(first.request_id, " water")
    output = scene.reply(second.request_id, " stone", reason="stop")
    at = scene.emit_text(first.request_id, " river", first=at)
    scene.end(first.request_id, output=at)
    response = await pending
    assert response.headers["x-forebay-worker"] == "w1"
    *chunks, usage, done = events(response)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [text_of(response, choice) for choice in range(2)] == [" water river", " stone"]
    assert [one["index"] for one in choices if one["delta"].get("role")] == [0, 1]
    ends = sorted((one["index"], one["finish_reason"]) for one in choices if one["finish_reason"])
    assert ends == [(0, "length"), (1, "stop")]
    assert [one["index"] for one in choices].index(1) < len(choices) - 1
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], at + output, "[DONE]")
    (response_id,) = {chunk["id"] for chunk in chunks}
    assert parse_public_id(response_id) == (first.request_id.removesuffix("-0"), (0, 0))


async def test_a_choice_that_stops_is_cancelled_and_the_others_continue(scene: Scene) -> None:
    pending = scene.start(CHAT, chat(n=2, stop="stone"))
    first, second = await submitted(scene, 2)
    scene.emit_text(first.request_id, " water stone river")
    cancelled = await scene.cancelled()
    assert (cancelled.request_id, cancelled.reason) == (first.request_id, "stop")
    assert (first.shares_prompt, second.shares_prompt) == (False, True)
    scene.reply(second.request_id, " river")
    response = (await pending).json()
    found = [(one["message"]["content"], one["finish_reason"]) for one in response["choices"]]
    assert found == [(" water ", "stop"), (" river", "length")]
    assert cancelled.output_tokens is not None
    second_tokens = response["usage"]["completion_tokens"] - cancelled.output_tokens
    assert second_tokens == len(scene.model.encode(" river"))
    assert len(scene.requests(RequestCancelled)) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_the_failure_of_a_choice_fails_the_request(scene: Scene, stream: bool) -> None:
    pending = scene.start(CHAT, chat(n=3, stream=stream), **{"x-request-id": "c"})
    requests = await submitted(scene, 3)
    scene.refuse(requests[1].request_id, 429, "queue_full")
    response = await pending
    assert error(response) == (429, "queue_full")
    assert response.headers["x-request-id"] == "c"
    await until(lambda: len(scene.requests(RequestCancelled)) == 2)
    assert {one.reason for one in scene.requests(RequestCancelled)} == {"queue_full"}
    assert scene.front.admission.in_flight == 0


@pytest.mark.parametrize("rejects", [True, False])
async def test_a_reply_may_arrive_before_the_append_is_acknowledged(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, rejects: bool
) -> None:
    acknowledged, append = asyncio.Event(), scene.log.append

    async def append_late(drafts: Any) -> list[int]:
        offsets = await append(drafts)
        await acknowledged.wait()
        return offsets

    monkeypatch.setattr(scene.log, "append", append_late)
    pending = scene.start(TEXT, text(prompt=["a", "b"]))
    for request in await submitted(scene, 2):
        if rejects:
            scene.refuse(request.request_id, 429, "pool_full")
        else:
            scene.reply(request.request_id, " water")
    await until(lambda: scene.group.replies.position == (2 if rejects else 4))
    acknowledged.set()
    response = await pending
    if rejects:
        assert error(response) == (429, "pool_full")
    else:
        assert [choice["text"] for choice in response.json()["choices"]] == [" water", " water"]


async def test_output_that_a_client_does_not_read_waits_in_the_streams(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.ingress.http.response.EVENTS_MAX", 2)
    sent: list[bytes] = []
    reads = asyncio.Event()
    body = text(prompt=["a", "b"], max_tokens=90, stream=True)
    bodies = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if message["type"] == "http.response.body":
            await reads.wait()

    async def receive() -> Any:
        return bodies.pop() if bodies else await asyncio.Event().wait()

    serving = asyncio.create_task(scene.app({**asgi_scope(TEXT), "http_version": "1.1"}, receive, send))
    requests = await submitted(scene, 2)
    for word in range(40):
        for request in requests:
            scene.emit(request.request_id, scene.model.encode(" water"), first=word)
        await until(lambda: scene.group.replies.position >= 2 * (word + 1))  # noqa: B023 - awaited in this iteration
    for request in requests:
        scene.end(request.request_id, output=40)
    reads.set()
    await serving
    lines = b"".join(sent).decode().split("\n")
    chunks = [json.loads(line.removeprefix("data: "))["choices"] for line in lines if line.startswith("data: {")]
    assert [choices[0]["index"] for choices in chunks] == [0, 1] * 41, "in the order of the reply slot"
    assert max(one.count(b"data: {") for one in sent) == 2, "tokens wait as tokens"
    for index in (0, 1):
        own = [choice["text"] for choices in chunks for choice in choices if choice["index"] == index]
        assert "".join(own) == " water" * 40


async def test_every_choice_counts_for_admission(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "IN_FLIGHT_MAX", 3)
    assert error(await scene.start(TEXT, text(n=4))) == (503, "overloaded")
    pending = scene.start(TEXT, text(n=3))
    requests = await submitted(scene, 3)
    assert (await scene.start(TEXT, text())).status_code == 503
    for request in requests:
        scene.reply(request.request_id, " water")
    assert (await pending).status_code == 200
    assert scene.front.admission.in_flight == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("as_tokens", [True, False])
async def test_echo_begins_with_the_prompt(scene: Scene, stream: bool, as_tokens: bool) -> None:
    prompt = scene.model.encode("Once upon") if as_tokens else "Once upon"
    pending, name = await started(scene, text(prompt=prompt, echo=True, stream=stream, stop="upon"), TEXT)
    scene.reply(name, " a time")
    response = await pending
    chunks = events(response)[:-1] if stream else [response.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Once upon a time"


@pytest.mark.parametrize("stop", [None, "never"])  # without stop strings several tokens become one delta
@pytest.mark.parametrize("stream", [False, True])
async def test_the_output_tokens_are_returned(scene: Scene, stream: bool, stop: str | None) -> None:
    body = text(echo=True, return_token_ids=True, stream=stream, stop=stop)
    pending, name = await started(scene, body, TEXT)
    scene.reply(name, " a time")
    response = await pending
    chunks = events(response)[:-1] if stream else [response.json()]
    found = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert found == scene.model.encode(" a time")


async def test_the_kafka_api_sends_the_object_of_http(scene: Scene) -> None:
    body = text(prompt=["a", "b"], stop="river")
    pending = scene.start(TEXT, body)
    requests = await submitted(scene, 2)
    scene.emit_text(requests[1].request_id, " stone river")
    scene.reply(requests[0].request_id, " water")
    given = (await pending).json()
    fold = scene.loaded.fold(requests[0])
    response = RecordResponse(WindowEntry(0, 0), ReplyAddress("a", ""), fold, scene.group)
    waiting = {one.request_id: PendingRequest(one.request_id, response, at, one) for at, one in enumerate(requests)}
    (whole,) = [
        piece
        for record in scene.log.records(TOKENS.name, SLOT, 0, 1000)
        for changed in apply(waiting, decode(TOKENS, record.value), NAME)
        for piece in response.step(changed)
    ]
    assert (whole.last, msgspec.json.decode(whole.value)) == (True, {**given, "id": fold.request_id})
