"""Completions over HTTP: streaming, usage, stop strings, choices, later attempts, rejections and disconnects."""

import asyncio
import json
from typing import Any

import httpx
import msgspec
import openai
import pytest

from forebay.core.block_hashes import sequence_hashes
from forebay.core.state.reply_slot import apply
from forebay.events.base import unpack_u32
from forebay.events.codec import decode
from forebay.events.request_ids import client_id_of
from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.events.tokens import PrefilledBy
from forebay.events.topics import TOKENS
from forebay.ingress import admission
from forebay.ingress.http import response as response_module
from forebay.ingress.kafka_api.request import ReplyAddress
from forebay.ingress.kafka_api.response import PendingRequest, RecordResponse, WindowEntry
from forebay.ingress.openai.fields import parse
from forebay.ingress.openai.requests import REQUEST_ID, TextBody
from forebay.transport.base import Draft
from tests.ingress.conftest import (
    CHAT,
    HELLO,
    NAME,
    SLOT,
    TEXT,
    Scene,
    chat,
    error,
    events,
    make_scene,
)
from tests.system import until


def start_request(scene: Scene, body: Any, path: str = CHAT, **headers: str) -> "asyncio.Task[httpx.Response]":
    return scene.start(path, body, **headers)


def text_of(response: httpx.Response) -> str:
    chunks = [event for event in events(response) if event != "[DONE]" and event.get("choices")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def test_a_response_names_its_worker_and_its_cached_tokens(scene: Scene) -> None:
    pending = start_request(scene, chat(seed=5, temperature=0.5, top_p=0.9, user="u", metadata={"a": "b"}))
    request = await scene.next_request()
    output = scene.emit_text(request.request_id, " water and stone")
    scene.end(request.request_id, cached=7, output=output)
    response = await pending
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": " water and stone", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == output
    assert body["usage"]["prompt_tokens"] == request.prompt_tokens
    assert body["usage"]["total_tokens"] == output + request.prompt_tokens
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
    served = {"request_id": request.request_id, "worker": "w1", "rank": 0, "attempts": 1}
    assert body["forebay"] == served
    assert response.headers["x-forebay-worker"] == "w1"
    assert body["id"] == request.request_id
    assert response.headers["x-request-id"] == client_id_of(request.request_id)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.temperature, sampling.top_p) == (50, 5, 0.5, 0.9)
    prompt = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    assert unpack_u32(request.token_ids) == scene.model.encode(prompt)
    assert request.sequence_hashes == sequence_hashes(request.token_ids, 4)
    labels = f'{{endpoint="chat_completions",model="{NAME}",request_type="unary",status="success"}}'
    assert scene.metric(f"dynamo_frontend_requests_total{labels} 1.0")


async def test_a_stream_has_role_text_finish_reason_usage_and_done(scene: Scene) -> None:
    pending = start_request(scene, chat(stream=True, stream_options={"include_usage": True}))
    request = await scene.next_request()
    at = scene.emit_text(request.request_id, " one two")
    at = scene.emit_text(request.request_id, " three", first=at)
    scene.end(request.request_id, reason="stop", output=at)
    response = await pending
    assert response.headers["content-type"].startswith("text/event-stream")
    first, *middle, last, usage, done = events(response)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert text_of(response) == " one two three"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in middle)
    assert (last["choices"][0]["finish_reason"], last["forebay"]["worker"]) == ("stop", "w1")
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], at, "[DONE]")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_each_chunk_of_a_stream_can_have_the_token_counts(scene: Scene, path: str) -> None:
    prompt = {"prompt": "Hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hello"}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    pending = start_request(scene, {"model": NAME, **prompt, "stream": True, "stream_options": options}, path)
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
    pending = start_request(scene, chat(stream=stream, stop=["water and", "never"]))
    request = await scene.next_request()
    for at, token in enumerate(scene.model.encode("cold water and stone")):
        scene.emit(request.request_id, [token], first=at)
    response = await pending
    if stream:
        assert text_of(response) == "cold "
        assert events(response)[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("cold ", "stop")
    assert (await scene.cancelled()).request_id == request.request_id


async def test_text_buffered_for_a_stop_string_is_sent_at_the_end(scene: Scene) -> None:
    pending = start_request(scene, chat(stop="water and stone"))
    request = await scene.next_request()
    scene.reply(request.request_id, "cold water and")
    assert (await pending).json()["choices"][0]["message"]["content"] == "cold water and"


async def test_a_later_attempt_never_repeats_a_token(scene: Scene) -> None:
    tokens = scene.model.encode("the river ran down the mountain")
    pending = start_request(scene, chat(stream=True))
    request = await scene.next_request()
    name = request.request_id
    scene.emit(name, tokens[:3])
    scene.start_attempt(name, 2)
    scene.emit(name, [9, 9, 9], first=3)  # the lost worker, too late
    scene.end(name)  # and its end
    scene.emit(name, tokens[:5], attempt=2, worker="w2")
    scene.emit(name, tokens[5:], first=5, attempt=2, worker="w2")
    scene.end(name, attempt=2)
    response = await pending
    assert text_of(response) == "the river ran down the mountain"
    assert events(response)[-2]["forebay"] == {"request_id": name, "worker": "w2", "rank": 0, "attempts": 2}


async def test_a_submission_has_the_offset_where_its_response_can_begin(scene: Scene) -> None:
    """A later attempt need not read earlier records of the slot."""
    pending = start_request(scene, chat())
    first = await scene.next_request()
    assert first.reply_from == 0
    scene.reply(first.request_id, " one")
    await pending
    await until(lambda: scene.ingress.replies.position == 2)
    again = start_request(scene, chat())
    second = await scene.next_request()
    assert second.reply_from == scene.log.next_offset("tokens", 4) == 2
    scene.reply(second.request_id, " two")
    assert (await again).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_missing_tokens_are_an_error(scene: Scene, stream: bool) -> None:
    tokens = scene.model.encode("the river ran down the mountain")
    pending = start_request(scene, chat(stream=stream))
    name = (await scene.next_request()).request_id
    scene.emit(name, tokens[:2])
    scene.emit(name, tokens[3:], first=3)
    scene.end(name, output=len(tokens))
    response = await pending
    error = events(response)[-1]["error"] if stream else response.json()["error"]
    assert (error["code"], error["message"]) == (
        "tokens_missing",
        "output tokens after the first 2 were lost; send the request again",
    )
    assert response.status_code == (200 if stream else 502)
    assert (await scene.cancelled()).request_id == name


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "no_workers"), (503, "busy"), (503, "no_eligible_worker"), (429, "queue_full"), (404, "unknown_worker")],
)
async def test_a_rejection_is_a_real_http_status(scene: Scene, status: int, code: str, stream: bool) -> None:
    pending = start_request(scene, chat(stream=stream))
    request = await scene.next_request()
    scene.refuse(request.request_id, status, code)
    response = await pending
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    later = status != 404
    assert response.headers.get("retry-after") == ("1" if later else None)
    assert scene.metric(f'forebay_ingress_refused_total{{code="{code}"}} 1.0')
    labels = f'{{endpoint="chat_completions",model="{NAME}"}}'
    assert scene.metric(f"dynamo_frontend_model_rejection_total{labels} 1.0") is later


async def test_an_error_within_a_stream_is_its_last_event(scene: Scene) -> None:
    pending = start_request(scene, chat(stream=True))
    request = await scene.next_request()
    scene.emit_text(request.request_id, " one")
    scene.refuse(request.request_id, 503, "workers_lost", attempt=1)
    response = await pending
    assert response.status_code == 200
    assert events(response)[-1]["error"]["code"] == "workers_lost"
    assert not scene.metric("dynamo_frontend_model_rejection_total")


async def test_a_request_without_a_response_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_module, "GRACE_S", 0.2)
    async with make_scene(timeout_s=0.001) as scene:
        pending = start_request(scene, chat())
        request = await scene.next_request()
        assert request.timeout_us == 1_000
        response = await pending
        assert error(response) == (504, "deadline_exceeded")
        assert (await scene.cancelled()).request_id == request.request_id


@pytest.mark.parametrize("second", [chat(), chat(max_tokens=3)], ids=["same body", "another body"])
async def test_clients_may_use_an_id_for_several_requests(scene: Scene, second: dict[str, Any]) -> None:
    """A unique id on the log begins with the id of the client, which the response repeats as a header."""
    pending = [start_request(scene, body, **{"x-request-id": "mine-1"}) for body in (chat(), second)]
    requests = [await scene.next_request() for _ in pending]
    assert len({request.request_id for request in requests}) == 2
    assert {client_id_of(request.request_id) for request in requests} == {"mine-1"}
    scene.reply(requests[0].request_id, " a")
    scene.refuse(requests[1].request_id, 503, "workers_lost")
    served, refused = await pending[0], await pending[1]
    assert served.json()["id"] == requests[0].request_id
    assert (served.status_code, refused.status_code) == (200, 503)
    assert [response.headers["x-request-id"] for response in (served, refused)] == ["mine-1", "mine-1"]


async def test_no_client_can_choose_the_id_of_a_response(scene: Scene) -> None:
    """Otherwise `explain` would show another request instead of the one with this id on the log."""
    pending = start_request(scene, chat())
    request = await scene.next_request()
    assert REQUEST_ID.fullmatch(request.request_id) is None
    for name in (request.request_id, "no spaces, please"):
        refused = await start_request(scene, chat(), **{"x-request-id": name})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-request-id")
    scene.reply(request.request_id, " a")
    assert (await pending).json()["id"] == request.request_id
    assert scene.requests() == [request]


async def test_undecodable_records_of_the_slot_are_counted_and_skipped(scene: Scene) -> None:
    pending = start_request(scene, chat())
    request = await scene.next_request()
    scene.log.append_soon([Draft("tokens", 4, b"\xff")])
    scene.emit_text("nobody-knows", " a")
    scene.end("nobody-knows")
    scene.reply(request.request_id, " a")
    assert (await pending).status_code == 200
    assert scene.metric("forebay_ingress_undecodable_total 1.0")


async def test_a_failed_commit_is_a_503_for_all_requests_in_flight(scene: Scene) -> None:
    waiting = start_request(scene, chat())
    await scene.next_request()
    scene.fail_commits()
    for pending in (start_request(scene, chat()), waiting):
        response = await pending
        assert error(response) == (503, "log_unavailable")
    assert scene.log.failure is not None
    assert not len(scene.ingress.replies)


async def test_a_stalled_client_is_dropped_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.ingress.http.response.GRACE_S", 0.01)
    async with make_scene(timeout_s=0.01) as scene:
        body = json.dumps(chat(stream=True)).encode()

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            return await asyncio.Future()

        async def send(_: Any) -> None:
            await asyncio.Future()

        incoming = [{"type": "http.request", "body": body, "more_body": False}]
        scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": []}
        serving = asyncio.create_task(scene.app(scope, receive, send))
        scene.emit_text((await scene.next_request()).request_id, " one")
        await serving
        assert (await scene.cancelled()).reason == "deadline"
        assert not len(scene.ingress.replies)
        assert scene.metric(f'dynamo_frontend_disconnected_clients{{model="{NAME}"}} 1.0')


async def test_openai_client(scene: Scene) -> None:
    async with scene.openai_client() as client:
        assert [model.id async for model in await client.models.list()] == [NAME]
        pending = asyncio.create_task(
            client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=4, stream=True
            )
        )
        request = await scene.next_request()
        assert request.sampling.max_tokens == 4
        scene.emit_text(request.request_id, " good")
        stream = await pending
        scene.emit_text(request.request_id, " day", first=1)
        scene.end(request.request_id)
        output = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(output) == " good day"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_cancels_the_request(scene: Scene, stream: bool) -> None:
    async with scene.served() as (port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(chat(stream=stream)).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        request = await scene.next_request()
        writer.close()
        assert (await scene.cancelled()).request_id == request.request_id
        await until(lambda: not len(scene.ingress.replies))
        assert scene.metric("dynamo_frontend_disconnected_clients")


PREFILLED = PrefilledBy(worker_id="p1", rank=2, transferred_bytes=4_096, transfer_us=1_500)
PREFILL = {"worker": "p1", "rank": 2, "transferred_bytes": 4_096, "transfer_ms": 1.5}


def start_text(scene: Scene, **changes: Any) -> "asyncio.Task[httpx.Response]":
    body = {"model": NAME, "prompt": "Once", "max_tokens": 9, "nvext": {"extra_fields": ["worker_id"]}, **changes}
    return scene.start("/v1/completions", body)


def last_of(response: httpx.Response, *, stream: bool) -> Any:
    return next(one for one in events(response) if "forebay" in one) if stream else response.json()


def worker_ids(prefill: str, prefill_rank: int, decode: str) -> dict[str, Any]:
    return {
        "prefill_worker_id": prefill, "prefill_dp_rank": prefill_rank, "decode_worker_id": decode, "decode_dp_rank": 0
    }  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
async def test_disagg_responses_name_both_workers_and_the_transfer(scene: Scene, *, stream: bool) -> None:
    pending = start_text(scene, stream=stream)
    name = (await scene.next_request()).request_id
    at = scene.emit(name, scene.model.encode("Once upon"), prefilled=PREFILLED)
    scene.end(name, output=scene.emit_text(name, " a time", first=at))
    last = last_of(await pending, stream=stream)
    assert last["forebay"] == {"request_id": name, "worker": "w1", "rank": 0, "attempts": 1, "prefill": PREFILL}
    assert last["nvext"] == {"worker_id": worker_ids("p1", 2, "w1")}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_aggregated_worker_is_named_for_both_stages(scene: Scene, *, stream: bool) -> None:
    pending = start_text(scene, stream=stream)
    name = (await scene.next_request()).request_id
    scene.reply(name, "Once")
    last = last_of(await pending, stream=stream)
    assert last["nvext"] == {"worker_id": worker_ids("w1", 0, "w1")}
    assert "prefill" not in last["forebay"]


async def test_disagg_responses_ended_by_a_stop_string_name_both_workers(scene: Scene) -> None:
    pending = start_text(scene, stop=["upon"])
    name = (await scene.next_request()).request_id
    scene.emit(name, scene.model.encode("Once upon a time"), prefilled=PREFILLED)
    body = (await pending).json()
    assert body["nvext"] == {"worker_id": worker_ids("p1", 2, "w1")}


async def test_disagg_a_later_attempt_keeps_the_first_prefill_worker(scene: Scene) -> None:
    pending = start_text(scene)
    name = (await scene.next_request()).request_id
    at = scene.emit(name, scene.model.encode("Once"), prefilled=PREFILLED)
    scene.start_attempt(name, 2)
    scene.emit(name, [9], first=at, prefilled=PrefilledBy(worker_id="void"))
    at = scene.emit_text(name, " upon", first=at, attempt=2, worker="w2")
    scene.end(name, output=at, attempt=2)
    body = (await pending).json()
    assert body["nvext"] == {"worker_id": worker_ids("p1", 2, "w2")}
    assert (body["forebay"]["attempts"], body["forebay"]["prefill"]) == (2, PREFILL)


async def test_disagg_an_attempt_without_output_does_not_name_its_prefill_worker(scene: Scene) -> None:
    pending = start_text(scene)
    name = (await scene.next_request()).request_id
    scene.start_attempt(name, 2)
    scene.emit(name, scene.model.encode("Never"), prefilled=PrefilledBy(worker_id="p0"))
    at = scene.emit(name, scene.model.encode("Once"), attempt=2, prefilled=PREFILLED)
    scene.end(name, output=at, attempt=2)
    assert (await pending).json()["forebay"]["prefill"] == PREFILL


CHOICES = (" water", " stone", " river", " mountain")


def start(scene: Scene, path: str = TEXT, **changes: Any) -> "asyncio.Task[httpx.Response]":
    body: dict[str, Any] = {"model": NAME, "max_tokens": 4, **changes}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "Hello"}]
    return asyncio.create_task(scene.client.post(path, json=body, headers={"x-request-id": "c"}))


async def submitted(scene: Scene, count: int) -> list[RequestSubmitted]:
    """Return the submitted requests in the order of their choices."""
    found = [await scene.next_request() for _ in range(count)]
    return sorted(found, key=lambda one: int(one.request_id.rpartition("-")[2]))


async def test_each_choice_of_each_prompt_is_a_request_and_usage_is_summed(scene: Scene) -> None:
    prompts = ["one", "two words and more"]
    pending = start(scene, prompt=prompts, n=2, seed=7)
    requests = await submitted(scene, 4)
    (whole,) = {request.request_id.rpartition("-")[0] for request in requests}
    assert [request.request_id for request in requests] == [f"{whole}-{at}" for at in range(4)]
    assert client_id_of(whole) == "c"
    assert [unpack_u32(one.token_ids) for one in requests] == [
        scene.model.encode(prompt) for prompt in prompts for _ in range(2)
    ]
    assert [one.sampling.seed for one in requests] == [7, 8, 7, 8]
    output = 0
    for at in (3, 0, 2, 1):
        output += scene.reply(requests[at].request_id, CHOICES[at], reason="stop", cached=at + 1)
    body = (await pending).json()
    assert body["id"] == whole
    assert [(one["index"], one["text"], one["finish_reason"]) for one in body["choices"]] == [
        (at, CHOICES[at], "stop") for at in range(4)
    ]
    tokens = sum(len(scene.model.encode(prompt)) for prompt in prompts)
    assert body["usage"] == {
        "prompt_tokens": tokens,
        "completion_tokens": output,
        "total_tokens": tokens + output,
        "prompt_tokens_details": {"cached_tokens": 1 + 3},
    }
    assert [one["request_id"] for one in body["forebay"]["choices"]] == [one.request_id for one in requests]
    assert not len(scene.ingress.replies)
    assert scene.ingress.admission.in_flight == 0


async def test_a_stream_interleaves_the_choices(scene: Scene) -> None:
    pending = start(scene, CHAT, n=2, stream=True, stream_options={"include_usage": True})
    first, second = await submitted(scene, 2)
    at = scene.emit_text(first.request_id, " water")
    output = scene.reply(second.request_id, " stone", reason="stop")
    at = scene.emit_text(first.request_id, " river", first=at)
    scene.end(first.request_id, output=at)
    response = await pending
    assert response.headers["x-forebay-worker"] == "w1"
    *chunks, usage, done = events(response)
    choices = [chunk["choices"][0] for chunk in chunks]
    content = ["", ""]
    for choice in choices:
        content[choice["index"]] += choice["delta"].get("content", "")
    assert content == [" water river", " stone"]
    assert [one["index"] for one in choices if one["delta"].get("role")] == [0, 1]
    assert sorted((one["index"], one["finish_reason"]) for one in choices if one["finish_reason"]) == [
        (0, "length"), (1, "stop"),
    ]  # fmt: skip
    assert [one["index"] for one in choices].index(1) < len(choices) - 1
    assert (usage["choices"], usage["usage"]["completion_tokens"], done) == ([], at + output, "[DONE]")
    assert {chunk["id"] for chunk in chunks} == {first.request_id.removesuffix("-0")}


async def test_a_choice_that_stops_is_cancelled_and_the_others_continue(scene: Scene) -> None:
    pending = start(scene, CHAT, n=2, stop="stone")
    first, second = await submitted(scene, 2)
    scene.emit_text(first.request_id, " water stone river")
    cancelled = await scene.cancelled()
    assert (cancelled.request_id, cancelled.reason) == (first.request_id, "stop")
    scene.reply(second.request_id, " river", reason="length")
    choices = (await pending).json()["choices"]
    assert [(one["message"]["content"], one["finish_reason"]) for one in choices] == [
        (" water ", "stop"),
        (" river", "length"),
    ]
    assert len(scene.requests(RequestCancelled)) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_the_failure_of_a_choice_fails_the_request(scene: Scene, stream: bool) -> None:
    pending = start(scene, CHAT, n=3, stream=stream)
    requests = await submitted(scene, 3)
    scene.refuse(requests[1].request_id, 429, "queue_full")
    response = await pending
    assert error(response) == (429, "queue_full")
    assert response.headers["x-request-id"] == "c"
    await until(lambda: len(scene.requests(RequestCancelled)) == 2)
    assert {one.reason for one in scene.requests(RequestCancelled)} == {"queue_full"}
    assert scene.ingress.admission.in_flight == 0


async def test_a_failure_in_a_stream_is_its_last_event(scene: Scene) -> None:
    pending = start(scene, CHAT, n=2, stream=True)
    first, second = await submitted(scene, 2)
    scene.emit_text(first.request_id, " water")
    await until(lambda: scene.metric(f'dynamo_frontend_time_to_first_token_seconds_count{{model="{NAME}"}} 1.0'))
    scene.refuse(second.request_id, 502, "worker_lost")
    *_, last = events(await pending)
    assert last["error"]["code"] == "worker_lost"


class LateAcknowledgement:
    """A log that acknowledges an append only after `event` is set."""

    def __init__(self, log: Any, event: asyncio.Event) -> None:
        self._log = log
        self._event = event

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append(self, drafts: Any) -> list[int]:
        offsets: list[int] = await self._log.append(drafts)
        await self._event.wait()
        return offsets


@pytest.mark.parametrize("rejects", [True, False])
async def test_a_reply_may_arrive_before_the_append_is_acknowledged(rejects: bool) -> None:
    acknowledged = asyncio.Event()
    async with make_scene(wrap=lambda log: LateAcknowledgement(log, acknowledged)) as scene:
        pending = start(scene, prompt=["a", "b"])
        requests = await submitted(scene, 2)
        for request in requests:
            if rejects:
                scene.refuse(request.request_id, 429, "pool_full")
            else:
                scene.reply(request.request_id, " water")
        await until(lambda: scene.ingress.replies.position == (2 if rejects else 4))
        acknowledged.set()
        response = await pending
    if rejects:
        assert error(response) == (429, "pool_full")
    else:
        assert [choice["text"] for choice in response.json()["choices"]] == [" water", " water"]


async def test_output_that_a_client_does_not_read_waits_in_the_streams(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.ingress.http.response.OBJECTS_MAX", 2)
    sent: list[bytes] = []
    reads = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if message["type"] == "http.response.body":
            await reads.wait()

    async def receive() -> Any:
        return bodies.pop() if bodies else await asyncio.Event().wait()

    body = {"model": NAME, "prompt": ["a", "b"], "max_tokens": 90, "stream": True}
    bodies = [{"type": "http.request", "body": json.dumps(body).encode()}]
    scope = {"type": "http", "method": "POST", "path": TEXT, "query_string": b"", "http_version": "1.1"}
    headers = [(b"host", b"test"), (b"content-type", b"application/json")]
    serving = asyncio.create_task(scene.app({**scope, "headers": headers}, receive, send))
    requests = await submitted(scene, 2)
    for word in range(40):
        for request in requests:
            scene.emit(request.request_id, scene.model.encode(" water"), first=word)
        await until(lambda: scene.ingress.replies.position >= 2 * (word + 1))  # noqa: B023 - awaited in this iteration
    for request in requests:
        scene.end(request.request_id, output=40)
    reads.set()
    await serving
    lines = b"".join(sent).decode().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: "))["choices"] for line in lines if line.startswith("data: {")]
    assert len(chunks) < 20, "tokens that waited are sent together"
    for index in (0, 1):
        own = [choice["text"] for choices in chunks for choice in choices if choice["index"] == index]
        assert "".join(own) == " water" * 40


async def test_every_choice_counts_for_admission(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "IN_FLIGHT_MAX", 3)
    response = await start(scene, prompt="a", n=4)
    assert error(response) == (503, "overloaded")
    pending = start(scene, prompt="a", n=3)
    requests = await submitted(scene, 3)
    assert (await start(scene, prompt="a")).status_code == 503
    for request in requests:
        scene.reply(request.request_id, " water")
    assert (await pending).status_code == 200
    assert scene.ingress.admission.in_flight == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("as_tokens", [True, False])
async def test_echo_begins_with_the_prompt(scene: Scene, stream: bool, as_tokens: bool) -> None:
    prompt = scene.model.encode("Once upon") if as_tokens else "Once upon"
    pending = start(scene, prompt=prompt, echo=True, stream=stream, stop="upon")
    request = await scene.next_request()
    scene.reply(request.request_id, " a time")
    response = await pending
    chunks = [one for one in events(response) if one != "[DONE]"] if stream else [response.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Once upon a time"


async def test_the_kafka_api_sends_the_object_of_http(scene: Scene) -> None:
    body = {"model": NAME, "prompt": ["a", "b"], "max_tokens": 4, "stop": "river"}
    pending = scene.start(TEXT, body)
    requests = await submitted(scene, 2)
    scene.emit_text(requests[1].request_id, " stone river")
    scene.reply(requests[0].request_id, " water")
    given = (await pending).json()
    parsed, same = parse(TextBody, msgspec.json.encode(body)), given["id"]
    prepared = await scene.ingress.prepare(parsed, ())
    fold = scene.ingress.fold(same, parsed, prepared, created_s=given["created"])
    response = RecordResponse(WindowEntry(0, 0), ReplyAddress(same, ""), fold, scene.ingress)
    waiting = {one.request_id: PendingRequest(one.request_id, response, at, one) for at, one in enumerate(requests)}
    pieces = [
        piece
        for record in scene.log.records(TOKENS.name, SLOT, 0, 1000)
        for changed in apply(waiting, decode(TOKENS, record.value), NAME)
        for piece in response.step(changed)
    ]
    (whole,) = pieces
    assert (whole.last, msgspec.json.decode(whole.value)) == (True, given)


async def test_unmodified_clients_get_every_choice(scene: Scene) -> None:
    async with scene.openai_client() as client:
        pending = asyncio.create_task(client.completions.create(model=NAME, prompt=[[5, 6], [7]], n=2, max_tokens=3))
        for at, request in enumerate(await submitted(scene, 4)):
            scene.reply(request.request_id, CHOICES[at])
        assert [one.text for one in (await pending).choices] == [*CHOICES]
        with pytest.raises(openai.BadRequestError, match="n: "):
            await client.completions.create(model=NAME, prompt="a", n=1000)


async def test_a_response_may_be_sent_back_as_a_message(scene: Scene) -> None:
    pending = scene.start(CHAT, chat())
    request = await scene.next_request()
    scene.reply(request.request_id, " good day")
    message = (await pending).json()["choices"][0]["message"]
    again = scene.start(CHAT, chat(messages=[*HELLO, message, *HELLO]))
    request = await scene.next_request()
    turns = [*HELLO, {"role": "assistant", "content": " good day"}, *HELLO]
    assert unpack_u32(request.token_ids) == scene.model.encode(scene.model.render(turns))
    scene.end(request.request_id)
    assert (await again).status_code == 200
