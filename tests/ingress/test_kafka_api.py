"""The Kafka API without a broker: parsing of records, reply topics, and records of responses."""

import asyncio
from typing import Any

import msgspec
import pytest

from forebay.core.state.reply_slot import apply
from forebay.events.codec import decode
from forebay.events.requests import RequestSubmitted, RoutingHints
from forebay.events.topics import FIXED_TOPICS, OPENAI_RESPONSES, TOKENS
from forebay.ingress.errors import ApiError, Unusable
from forebay.ingress.http.body import BodyLimits
from forebay.ingress.kafka_api.request import ReplyAddress, ReplyTopics, address, body_of, nonce_of, slot_of
from forebay.ingress.kafka_api.response import PendingRequest, RecordResponse, ResponseRecord, WindowEntry
from forebay.ingress.openai.requests import ChatBody, TextBody
from forebay.ingress.parsers.composer import Composer, TextAssembler
from forebay.ingress.response_fold import CompletionFold, was_rejected
from forebay.ingress.settings import IngressSettings
from forebay.transport.base import Draft, Record
from tests.ingress.conftest import NAME, SLOT, Scene, make_scene

CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
NAMESPACE = "shop"
ALLOWED = ReplyTopics(NAMESPACE)
BOUNDS = BodyLimits(text_bytes_max=1_000)


def record(body: Any = CHAT, partition: int = 3, offset: int = 41, **headers: str) -> Record:
    value = body if isinstance(body, bytes) else msgspec.json.encode(body)
    fields = {name.replace("_", "-"): text for name, text in headers.items()}
    return Record("openai-requests", partition, offset, 1_700_000_000_000_000, value, None, fields or None)


def refused(incoming: Record) -> ApiError:
    with pytest.raises(ApiError) as caught:
        body_of(incoming, BOUNDS)
    return caught.value


def test_a_record_without_headers_gets_an_id_of_partition_and_offset() -> None:
    where = address(record(), ALLOWED)
    assert (where.request_id, where.reply_topic, where.problem) == ("kafka-api-3-41", "", None)


def test_headers_set_the_request_id_and_the_reply_topic() -> None:
    where = address(record(request_id="a.b-c_1", reply_topic="shop.replies.mine"), ALLOWED)
    assert (where.request_id, where.reply_topic, where.problem) == ("a.b-c_1", "shop.replies.mine", None)


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "\u00e9t\u00e9", "a\n", "a~kafka"])
def test_an_invalid_request_id_is_reported_under_the_derived_id(given: str) -> None:
    where = address(record(request_id=given), ALLOWED)
    assert where.request_id == "kafka-api-3-41"
    assert where.problem is not None
    assert (where.problem.status, where.problem.param) == (400, "request-id")


@pytest.mark.parametrize("topic", [f"{NAMESPACE}.openai-responses", ""])
def test_the_default_reply_topic_may_be_named(topic: str) -> None:
    where = address(record(reply_topic=topic), ALLOWED)
    assert (where.reply_topic, where.problem) == ("", None)


@pytest.mark.parametrize(
    "topic",
    [
        *(f"{NAMESPACE}.{one.name}" for one in FIXED_TOPICS if one is not OPENAI_RESPONSES),
        *("requests", f"{NAMESPACE}.answers", f"{NAMESPACE}2.requests", f"{NAMESPACE}2.replies.a", "replies.a"),
        *(f"{NAMESPACE}.work.default", "__consumer_offsets", "no topic", "x" * 250),
    ],
)
def test_a_reply_topic_that_matches_no_pattern_is_rejected(topic: str) -> None:
    where = address(record(reply_topic=topic), ALLOWED)
    assert (where.reply_topic, where.problem and where.problem.code) == ("", "invalid_reply_topic")


def test_patterns_replace_the_default_one() -> None:
    allowed = ReplyTopics(NAMESPACE, ["team-?.answers", "lab.*"])
    for topic in ("team-a.answers", "lab.x", "lab.y.z"):
        assert address(record(reply_topic=topic), allowed).reply_topic == topic
    for topic in ("team-ab.answers", "Lab.x", f"{NAMESPACE}.replies.a"):
        assert address(record(reply_topic=topic), allowed).problem is not None


@pytest.mark.parametrize("name", [*(topic.name for topic in FIXED_TOPICS), "work.default"])
@pytest.mark.parametrize("namespace", [NAMESPACE, "other", "a.b"])
def test_no_pattern_allows_a_topic_of_forebay_in_any_namespace(name: str, namespace: str) -> None:
    where = address(record(reply_topic=f"{namespace}.{name}"), ReplyTopics(NAMESPACE, ["*"]))
    assert where.reply_topic == ""


@pytest.mark.parametrize("pattern", ["", "a b", "[ab]", "x" * 250])
def test_a_pattern_that_matches_no_topic_is_rejected_at_the_start(pattern: str) -> None:
    with pytest.raises(Unusable, match="--reply-topic"):
        IngressSettings(model_name="m", ingress_id="i", reply_topics=(pattern,))


def test_the_path_determines_the_type_of_the_body() -> None:
    assert isinstance(body_of(record(), BOUNDS), ChatBody)
    assert isinstance(body_of(record(path="/v1/chat/completions"), BOUNDS), ChatBody)
    text = {"model": NAME, "prompt": "once"}
    assert isinstance(body_of(record(text, path="/v1/completions"), BOUNDS), TextBody)


@pytest.mark.parametrize(
    ("incoming", "status", "code"),
    [
        (record(b""), 400, "invalid_json"),
        (record(b"\xff\xfe"), 400, "invalid_json"),
        (record(b"[1]"), 400, "invalid_value"),
        (record({"model": NAME}), 400, "invalid_value"),
        (record({**CHAT, "tools": [1]}), 400, "invalid_value"),
        (record(path="/v1/embeddings"), 400, "invalid_value"),
        (record(path="/v1/images"), 404, "not_found"),
        (record(b" " * 1001), 413, "body_too_large"),
        (record({**CHAT, "nvext": {"dp_rank": -1}}), 400, "invalid_value"),
        (record({**CHAT, "nvext": {"annotations": ["query_instance_id"]}}), 400, "unsupported_parameter"),
    ],
)
def test_invalid_requests_get_the_errors_of_http(incoming: Record, status: int, code: str) -> None:
    error = refused(incoming)
    assert (error.status, error.code) == (status, code)


def chat_of(body: dict[str, Any]) -> ChatBody:
    found = body_of(record(body), BOUNDS)
    assert isinstance(found, ChatBody)
    return found


async def test_the_headers_of_a_record_are_routing_hints() -> None:
    async with make_scene(routing_hints=True) as scene:
        headers = {"X-Dynamo-Worker-Instance-ID": "w1", "x-dynamo-dp-rank": "2"}
        incoming = msgspec.structs.replace(record(), headers=headers)
        body = body_of(incoming, BOUNDS)
        assert isinstance(body, ChatBody)
        (prepared,) = await scene.ingress.prepare(body, headers.items())
        submission = prepared.submission("a", reply_slot=1, reply_from=2, nonce=3, at_us=4, ingress_id="i")
        assert submission.routing == RoutingHints(worker_id="w1", rank=2)


def test_the_nonce_depends_only_on_partition_and_offset() -> None:
    assert nonce_of(record(request_id="a")) == nonce_of(record(b"b"))
    assert len({nonce_of(record(partition=p, offset=o)) for p in range(8) for o in range(100)}) == 800


def test_the_reply_slot_depends_only_on_the_partition() -> None:
    slots = [slot_of(partition, 16) for partition in range(64)]
    assert slots == [slot_of(partition, 16) for partition in range(64)]
    assert set(slots) <= set(range(16))
    assert len(set(slots)) > 8


class Fold:
    """A response of the Kafka API, folded from the reply slot of a scene."""

    def __init__(
        self,
        scene: Scene,
        request_id: str,
        *,
        stream: bool,
        usage: bool = False,
        stop: str = "",
        prompt_tokens: int = 5,
    ) -> None:
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": usage}} if stream else {}
        composer = Composer(TextAssembler(scene.model.decoder(), [stop] if stop else []))
        fold = CompletionFold(request_id, chat_of({**CHAT, **options}), prompt_tokens, [composer], created_s=7)
        self.scene = scene
        self.request = PendingRequest(
            request_id,
            RecordResponse(WindowEntry(0, 0), ReplyAddress("a", ""), fold, scene.ingress),
            submission=next((one for one in scene.requests(RequestSubmitted) if one.request_id == request_id), None),
        )
        self.pieces: list[ResponseRecord] = []

    async def read(self, times: int = 1) -> list[ResponseRecord]:
        """Fold every record of the slot `times` times."""
        await self.scene.log.append([Draft(TOKENS.name, SLOT + 1, b"what was sent before this is there")])
        for one in self.scene.log.records(TOKENS.name, SLOT, 0, 1000):
            for _ in range(times):
                for changed in apply({self.request.request_id: self.request}, decode(TOKENS, one.value), NAME):
                    self.pieces += changed.response.step(changed)
        return self.pieces

    def text(self) -> str:
        chunks = [msgspec.json.decode(piece.value)["choices"] for piece in self.pieces]
        return "".join(choices[0]["delta"].get("content", "") for choices in chunks if choices)


async def test_a_stream_has_a_record_per_chunk(scene: Scene) -> None:
    position = scene.emit_text("a", "one")
    position = scene.emit_text("a", " two", first=position)
    scene.end("a", output=position)
    pieces = await Fold(scene, "a", stream=True).read()
    assert [piece.last for piece in pieces] == [False, False, True]
    assert [piece.index for piece in pieces] == [0, 1, 2]
    first, second, last = (msgspec.json.decode(piece.value) for piece in pieces)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "one"}
    assert second["choices"][0]["delta"] == {"content": " two"}
    assert last["choices"][0]["finish_reason"] == "length"
    assert {one["created"] for one in (first, second, last)} == {7}


async def test_repeated_events_do_not_change_the_response(scene: Scene) -> None:
    position = scene.emit_text("a", "one two three")
    scene.start_attempt("a", 2)
    scene.emit_text("a", "zombie", first=position)
    position = scene.emit_text("a", " four", first=position, attempt=2)
    scene.end("a", attempt=2, output=position)
    scene.end("a", attempt=2, output=position, owner=2)
    once, often = Fold(scene, "a", stream=True), Fold(scene, "a", stream=True)
    assert await once.read() == await often.read(times=3)
    assert once.text() == "one two three four"


async def test_a_rejection_is_one_record_with_its_status(scene: Scene) -> None:
    scene.refuse("a", 503, "no_workers")
    (piece,) = await Fold(scene, "a", stream=True).read()
    assert (piece.status, piece.last) == (503, True)
    assert msgspec.json.decode(piece.value)["error"]["code"] == "no_workers"


@pytest.mark.parametrize(("status", "rejected"), [(503, True), (429, True), (400, False)])
async def test_only_missing_capacity_counts_as_rejection(scene: Scene, status: int, rejected: bool) -> None:
    scene.refuse("a", status, "because")
    fold = Fold(scene, "a", stream=True)
    assert not was_rejected(fold.request)
    await fold.read()
    assert was_rejected(fold.request) is rejected


async def test_an_error_after_the_first_token_is_not_a_rejection(scene: Scene) -> None:
    scene.emit_text("a", "one")
    scene.refuse("a", 503, "workers_lost", attempt=1)
    fold = Fold(scene, "a", stream=True)
    await fold.read()
    assert not was_rejected(fold.request)


async def test_an_error_is_the_last_record_of_a_started_stream(scene: Scene) -> None:
    scene.emit_text("a", "one")
    scene.refuse("a", 502, "worker_lost", attempt=1)
    pieces = await Fold(scene, "a", stream=True).read()
    assert [(piece.index, piece.status, piece.last) for piece in pieces] == [(0, 200, False), (1, 502, True)]


@pytest.mark.parametrize("stream", [True, False])
async def test_records_contain_the_objects_of_http(scene: Scene, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    post = scene.client.post("/v1/chat/completions", json={**CHAT, **options})
    pending = asyncio.ensure_future(post)
    request = await scene.next_request()
    same = request.request_id
    scene.reply(same, "the very same", cached=3)
    body = (await pending).content
    fold = Fold(scene, same, stream=stream, usage=stream, prompt_tokens=request.prompt_tokens)
    given = [msgspec.json.decode(piece.value) for piece in await fold.read()]
    events = [line.removeprefix(b"data: ") for line in body.splitlines() if line]
    expected = [msgspec.json.decode(event) for event in events if event != b"[DONE]"]
    for one in (*given, *expected):
        one["created"] = 0
    assert given == expected
