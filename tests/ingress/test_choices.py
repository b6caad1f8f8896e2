"""Completions with several choices: `n`, lists of prompts and `echo`, over HTTP and the Kafka API."""

import asyncio
import json
from typing import Any

import httpx
import msgspec
import openai
import pytest

from forebay.core.state.reply_slot import apply
from forebay.events.base import unpack_u32
from forebay.events.codec import decode
from forebay.events.request_ids import client_id_of
from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.events.topics import TOKENS
from forebay.ingress import admission
from forebay.ingress.kafka_api.request import ReplyAddress
from forebay.ingress.kafka_api.response import PendingRequest, RecordResponse, WindowEntry
from forebay.ingress.openai.fields import parse
from forebay.ingress.openai.requests import CHOICES_MAX, TextBody
from tests.ingress.conftest import NAME, SLOT, Scene, events, make_scene
from tests.system import until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
WORDS = (" water", " stone", " river", " mountain")


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
        output += scene.reply(requests[at].request_id, WORDS[at], reason="stop", cached=at + 1)
    body = (await pending).json()
    assert body["id"] == whole
    assert [(one["index"], one["text"], one["finish_reason"]) for one in body["choices"]] == [
        (at, WORDS[at], "stop") for at in range(4)
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
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
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
        assert (response.status_code, response.json()["error"]["code"]) == (429, "pool_full")
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


async def test_a_disconnect_cancels_every_choice(scene: Scene) -> None:
    async with scene.openai_client() as client:
        leaving = asyncio.create_task(client.completions.create(model=NAME, prompt=["a", "b"], max_tokens=5))
        requests = await submitted(scene, 2)
        leaving.cancel()
        await until(lambda: len(scene.requests(RequestCancelled)) == 2)
        assert {one.request_id for one in scene.requests(RequestCancelled)} == {one.request_id for one in requests}
        assert {one.reason for one in scene.requests(RequestCancelled)} == {"client disconnected"}


async def test_every_choice_counts_for_admission(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "IN_FLIGHT_MAX", 3)
    response = await start(scene, prompt="a", n=4)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
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


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": "a", "n": 0}, "n: "),
        ({"prompt": "a", "n": 129}, "n: "),
        ({"prompt": ["a"] * 100, "n": 100}, f"limit of {CHOICES_MAX:,} choices"),
        ({"prompt": ["a"] * (CHOICES_MAX + 1)}, "prompt"),
        ({"prompt": ["a", ""]}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [5] * 90_000, "n": 100}, "9,000,000 prompt tokens"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo is not supported together with logprobs"),
    ],
)
async def test_invalid_bodies_are_rejected_by_field_name(scene: Scene, body: dict[str, Any], says: str) -> None:
    response = await scene.client.post(TEXT, content=msgspec.json.encode({"model": NAME, **body}))
    assert (response.status_code, says in response.json()["error"]["message"]) == (400, True), response.text
    assert scene.requests() == []


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
            scene.reply(request.request_id, WORDS[at])
        assert [one.text for one in (await pending).choices] == [*WORDS]
        with pytest.raises(openai.BadRequestError, match="n: "):
            await client.completions.create(model=NAME, prompt="a", n=1000)
