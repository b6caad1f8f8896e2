"""The Kafka API without a broker: records, reply topics, folds of responses, and errors that stop no partition."""

import logging
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.state.reply_slot import ResponseState, apply
from forebay.events.base import pack_u32
from forebay.events.codec import decode
from forebay.events.request_ids import aliases_of
from forebay.events.requests import RequestCancelled, RequestSubmitted, RoutingHints
from forebay.events.tokens import Embedded, ResponseEnded, ResponseError, TokenChunk, TokenEvent, TokensEmitted, Usage
from forebay.events.topics import FIXED_TOPICS, OPENAI_RESPONSES, TOKENS
from forebay.events.trace_ids import TraceIds
from forebay.ingress.body_limits import BodyLimits
from forebay.ingress.errors import ApiError
from forebay.ingress.kafka_api.request import ReplyAddress, ReplyTopics, address, body_of, nonce_of, slot_of
from forebay.ingress.kafka_api.response import PendingRequest, RecordResponse, ResponseRecord, WindowEntry
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.openai.fields import encoded_options
from forebay.ingress.openai.requests import ChatBody, CompletionOptions, TextBody
from forebay.ingress.parsers.deltas import OutputDelta
from forebay.ingress.response_fold import ResponseFold, was_rejected
from forebay.ingress.settings import IngressSettings
from forebay.runtime.errors import ConfigError
from forebay.transport.base import Draft, Record
from tests.ingress.conftest import CHAT, NAME, RESPONSES, SLOT, Scene, begun_fold, events, make_scene
from tests.ingress.fake_kafka import BODY, NAMESPACE, FakeKafka, record
from tests.system import until

ALLOWED = ReplyTopics(NAMESPACE)
BOUNDS = BodyLimits(text_bytes_max=1_000)


@pytest.mark.parametrize(
    ("headers", "request_id", "reply_topic", "problem"),
    [
        ({}, "kafka-api-3-41", "", None),
        ({"request_id": "a.b-c_1", "reply_topic": "shop.replies.mine"}, "a.b-c_1", "shop.replies.mine", None),
        ({"reply_topic": f"{NAMESPACE}.openai-responses"}, "kafka-api-3-41", "", None),
        ({"reply_topic": ""}, "kafka-api-3-41", "", None),
        *(
            ({"request_id": given}, "kafka-api-3-41", "", "request-id")
            for given in ("", "two words", "x" * 129, "\u00e9t\u00e9", "a\n", "a~kafka")
        ),
    ],
)
def test_headers_set_the_request_id_and_the_reply_topic(
    headers: dict[str, Any], request_id: str, reply_topic: str, problem: str | None
) -> None:
    where = address(record(**headers), ALLOWED)
    assert (where.request_id, where.reply_topic) == (request_id, reply_topic)
    assert (where.problem and (where.problem.status, where.problem.param)) == (problem and (400, problem))


@pytest.mark.parametrize(
    "topic",
    [
        *(f"{NAMESPACE}.{one.name}" for one in FIXED_TOPICS if one is not OPENAI_RESPONSES),
        *("requests", f"{NAMESPACE}2.requests", f"{NAMESPACE}2.replies.a", "replies.a"),
        *(f"{NAMESPACE}.work.default", "__consumer_offsets", "no topic", "x" * 250),
    ],
)
def test_a_reply_topic_that_matches_no_pattern_is_rejected(topic: str) -> None:
    where = address(record(reply_topic=topic), ALLOWED)
    assert (where.reply_topic, where.problem and where.problem.code) == ("", "invalid_reply_topic")


def test_patterns_replace_the_default_one() -> None:
    allowed = ReplyTopics(NAMESPACE, ["team-?.results", "lab.*"])
    for topic in ("team-a.results", "lab.x", "lab.y.z"):
        assert address(record(reply_topic=topic), allowed).reply_topic == topic
    for topic in ("team-ab.results", "Lab.x", f"{NAMESPACE}.replies.a"):
        assert address(record(reply_topic=topic), allowed).problem is not None


@pytest.mark.parametrize("name", [*(topic.name for topic in FIXED_TOPICS), "work.default"])
@pytest.mark.parametrize("namespace", [NAMESPACE, "other", "a.b"])
def test_no_pattern_allows_a_topic_of_forebay_in_any_namespace(name: str, namespace: str) -> None:
    where = address(record(reply_topic=f"{namespace}.{name}"), ReplyTopics(NAMESPACE, ["*"]))
    assert where.reply_topic == ""


@pytest.mark.parametrize("pattern", ["", "a b", "[ab]", "x" * 250])
def test_a_pattern_that_matches_no_topic_is_rejected_at_the_start(pattern: str) -> None:
    with pytest.raises(ConfigError, match="--reply-topic"):
        IngressSettings(model_name="m", ingress_id="i", reply_topics=(pattern,))


def test_the_path_determines_the_type_of_the_body() -> None:
    assert isinstance(body_of(record(), BOUNDS), ChatBody)
    assert isinstance(body_of(record(path="/v1/chat/completions"), BOUNDS), ChatBody)
    text = {"model": NAME, "prompt": "once"}
    assert isinstance(body_of(record(text, path="/v1/completions"), BOUNDS), TextBody)
    assert body_of(record({"model": NAME, "input": "a"}, path=RESPONSES), BOUNDS).conversation == ""


@pytest.mark.parametrize(
    ("incoming", "status", "code"),
    [
        (record(b""), 400, "invalid_json"),
        (record(b"\xff\xfe"), 400, "invalid_json"),
        (record(b"[1]"), 400, "invalid_value"),
        (record({"model": NAME}), 400, "invalid_value"),
        (record({**BODY, "tools": [1]}), 400, "invalid_value"),
        (record(path="/v1/embeddings"), 400, "invalid_value"),
        (record(path="/v1/images"), 404, "not_found"),
        (record({"model": NAME, "input": "a", "background": True}, path=RESPONSES), 400, "unsupported_parameter"),
        (record({"model": NAME, "input": "a", "store": True}, path=RESPONSES), 400, "unsupported_parameter"),
        (record({"model": NAME, "input": [{"id": "msg_0_a"}]}, path=RESPONSES), 400, "unsupported_parameter"),
        (record(b" " * 1001), 413, "body_too_large"),
        (record({**BODY, "nvext": {"dp_rank": -1}}), 400, "invalid_value"),
        (record({**BODY, "nvext": {"annotations": ["query_instance_id"]}}), 400, "unsupported_parameter"),
    ],
)
def test_invalid_requests_get_the_errors_of_http(incoming: Record, status: int, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        body_of(incoming, BOUNDS)
    assert (caught.value.status, caught.value.code) == (status, code)


async def test_the_headers_of_a_record_are_routing_hints() -> None:
    headers = {"X-Dynamo-Worker-Instance-ID": "w1", "x-dynamo-dp-rank": "2"}
    body = body_of(msgspec.structs.replace(record(), headers=headers), BOUNDS)
    assert isinstance(body, ChatBody)
    async with make_scene(routing_hints=True) as scene:
        (prepared,) = await scene.loaded.prepare(body, headers.items())
    submission = prepared.submission("a", reply_slot=1, reply_from=2, nonce=3, at_us=4, ingress_id="i")
    assert submission.routing == RoutingHints(worker_id="w1", rank=2)


def test_the_nonce_depends_only_on_partition_and_offset() -> None:
    assert nonce_of(record(request_id="a")) == nonce_of(record(b"b"))
    assert len({nonce_of(record(BODY, (p, o))) for p in range(8) for o in range(100)}) == 800


def test_the_reply_slot_depends_only_on_the_partition() -> None:
    slots = [slot_of(partition, 16) for partition in range(64)]
    assert slots == [slot_of(partition, 16) for partition in range(64)]
    assert set(slots) <= set(range(16))
    assert len(set(slots)) > 8


class Fold:
    """A response of the Kafka API to request `a`, folded from the reply slot of a scene."""

    def __init__(self, scene: Scene, request_id: str = "a", *, stream: bool = True, **changes: Any) -> None:
        fields: dict[str, Any] = {"api": "chat_completions", "is_chat": True, "prompt_tokens": 5, **changes}
        options = encoded_options(CompletionOptions(includes_usage=stream))
        fold = begun_fold(scene.model, request_id, stream=stream, options=options, **fields)
        response = RecordResponse(WindowEntry(0, 0), ReplyAddress("a", ""), fold, scene.group)
        submission = next((one for one in scene.requests(RequestSubmitted) if one.request_id == request_id), None)
        self.scene = scene
        self.request = PendingRequest(request_id, response, submission=submission)
        self.pieces: list[ResponseRecord] = []

    async def read(self, times: int = 1) -> list[ResponseRecord]:
        """Fold every record of the slot `times` times."""
        await self.scene.log.append([Draft(TOKENS.name, SLOT + 1, b"what was sent before this is there")])
        for one in self.scene.log.records(TOKENS.name, SLOT, 0, 1000):
            for _ in range(times):
                for changed in apply({self.request.request_id: self.request}, decode(TOKENS, one.value), NAME):
                    self.pieces += changed.response.step(changed)
        return self.pieces

    def objects(self) -> list[Any]:
        return [msgspec.json.decode(piece.value) for piece in self.pieces]


async def test_a_stream_has_a_record_per_chunk(scene: Scene) -> None:
    position = scene.emit_text("a", "one")
    position = scene.emit_text("a", " two", first=position)
    scene.end("a", output=position)
    fold = Fold(scene)
    pieces = await fold.read()
    assert [(piece.index, piece.last) for piece in pieces] == [(at, at == position + 1) for at in range(position + 2)]
    first, *others, end, usage = fold.objects()
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(one["choices"][0]["delta"]["content"] for one in (first, *others)) == "one two"
    assert end["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == position
    assert {one["created"] for one in (first, *others, end)} == {7}


async def test_repeated_events_do_not_change_the_response(scene: Scene) -> None:
    position = scene.emit_text("a", "one two three")
    scene.start_attempt("a", 2)
    scene.emit_text("a", "zombie", first=position)
    position = scene.emit_text("a", " four", first=position, attempt=2)
    scene.end("a", attempt=2, output=position)
    scene.end("a", attempt=2, output=position, owner=2)
    once, often = Fold(scene), Fold(scene)
    assert await once.read() == await often.read(times=3)
    deltas = [one["choices"][0]["delta"] for one in once.objects() if one["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == "one two three four"


@pytest.mark.parametrize(
    ("status", "has_begun", "rejected"),
    [(503, False, True), (429, False, True), (400, False, False), (503, True, False), (502, True, False)],
)
async def test_an_error_is_the_last_record_and_missing_capacity_a_rejection(
    scene: Scene, status: int, *, has_begun: bool, rejected: bool
) -> None:
    if has_begun:
        scene.emit_text("a", "one")
    scene.refuse("a", status, "because", attempt=int(has_begun))
    fold = Fold(scene)
    assert not was_rejected(fold.request)
    pieces = [(piece.index, piece.status, piece.last) for piece in await fold.read()]
    assert pieces == ([(0, 200, False), (1, status, True)] if has_begun else [(0, status, True)])
    assert fold.objects()[-1]["error"]["code"] == "because"
    assert was_rejected(fold.request) is rejected


async def test_an_error_has_the_format_of_the_api(scene: Scene) -> None:
    scene.refuse("a", 503, "because")
    fold = Fold(scene, api="messages")
    await fold.read()
    (failure,) = fold.objects()
    assert (failure["type"], failure["error"]["type"]) == ("error", "overloaded_error")


@pytest.mark.parametrize("stream", [True, False])
async def test_records_contain_the_objects_of_http(scene: Scene, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    pending = scene.start(CHAT, {**BODY, **options})
    request = await scene.next_request()
    scene.reply(request.request_id, "the very same", cached=3)
    response = await pending
    fold = Fold(scene, request.request_id, stream=stream, prompt_tokens=request.prompt_tokens)
    await fold.read()
    expected = events(response)[:-1] if stream else [response.json()]
    differs = {"created": 0, "id": ""}
    assert [{**one, **differs} for one in fold.objects()] == [{**one, **differs} for one in expected]


async def test_a_record_that_raises_gets_a_500_and_the_next_is_served(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeKafka(scene, monkeypatch)
    async with fake.serving() as serving:
        with monkeypatch.context() as broken:
            broken.setattr(scene.model, "render", lambda *_: 1 // 0)
            await fake.start_request(BODY)
            await until(lambda: fake.responses or serving.done())
        (response,) = fake.responses
        assert (response.headers["status"], response.headers["last"]) == ("500", "1")
        assert msgspec.json.decode(response.value)["error"]["code"] == "internal_error"
        assert "record 0 of partition 3" in caplog.text
        await fake.start_request(BODY)
        await until(lambda: scene.requests(RequestSubmitted) or serving.done())
        assert scene.requests(RequestSubmitted)[0].request_id == "kafka-api-3-1~kafka"
        assert scene.requests(RequestSubmitted)[0].patient, "the topic holds it anyway"


async def test_an_error_of_a_parser_ends_the_response(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forebay.access")

    class Broken:
        def push(self, text: str, token_ids: list[int]) -> OutputDelta:
            raise ApiError(502, "parser_failed", "it broke")

        finish = push

    monkeypatch.setattr(scene.loaded.parsers, "parser", lambda how, request_id: Broken())
    fake = FakeKafka(scene, monkeypatch)
    async with fake.serving() as serving:
        await fake.start_request({**BODY, "stream": True})
        submitted = await scene.next_request()
        scene.emit_text(submitted.request_id, "one")
        await until(lambda: fake.responses or serving.done())
        (response,) = fake.responses
        assert (response.headers["status"], response.headers["last"]) == ("502", "1")
        assert (await scene.cancelled()).reason == "parser_failed"
        await fake.start_request({**BODY, "model": "unknown"})
        await until(lambda: len(fake.responses) == 2 or serving.done())
        failed, rejected = (one.__dict__["fields"] for one in caplog.records if one.name == "forebay.access")
        assert (failed["offset"], failed["status"], failed["error"]) == (0, 502, "parser_failed")
        assert (failed["request_id"], failed["worker"]) == (submitted.request_id, "w1")
        assert failed["trace_id"] == TraceIds.of(submitted, 0).trace
        assert (rejected["offset"], rejected["status"], rejected["error"]) == (1, 404, "model_not_found")


async def test_a_record_does_not_wait_for_adapters_that_cannot_be_listed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def names() -> tuple[str, ...]:
        raise ApiError(503, "log_unavailable", "the log did not respond")

    monkeypatch.setattr(scene.group.adapters, "names", names)
    fake = FakeKafka(scene, monkeypatch)
    async with fake.serving() as serving:
        await fake.start_request({**BODY, "model": "unknown"})
        await until(lambda: fake.responses or serving.done())
        assert fake.responses[0].headers["status"] == "503"


async def test_the_request_id_of_the_client_stands_for_all_choices(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeKafka(scene, monkeypatch)
    async with fake.serving() as serving:
        await fake.start_request({**BODY, "n": 3}, request_id="order-7")
        choices = [(await scene.next_request()).request_id for _ in range(3)]
        assert all("order-7" in aliases_of(choice) for choice in choices)
        for body in (BODY, {**BODY, "n": 3}):
            await fake.start_request(body, request_id="order-7")
        await until(lambda: len(fake.responses) == 2 or serving.done())
        assert [one.headers["status"] for one in fake.responses] == ["409", "409"]
        assert "the request id order-7 is" in msgspec.json.decode(fake.responses[0].value)["error"]["message"]
        scene.refuse(choices[1], 429, "queue_full")
        await until(lambda: len(scene.requests(RequestCancelled)) == 2 or serving.done())
        assert {one.request_id for one in scene.requests(RequestCancelled)} == {choices[0], choices[2]}
        await until(lambda: len(fake.responses) == 3 or serving.done())
        assert fake.responses[2].headers["status"] == "429"
        assert {(one.key, one.headers["request-id"]) for one in fake.responses} == {(b"order-7", "order-7")}
        await fake.start_request(BODY, request_id="order-7")
        await until(lambda: len(scene.requests(RequestSubmitted)) == 4 or serving.done())
        assert scene.requests(RequestSubmitted)[3].request_id not in choices


MODEL = Model(DEFAULT_MODEL)
ENCODED = MODEL.encode("the river ran to the sea, and the sea was full")
ENDED = ResponseEnded(
    request_id="a",
    attempt=1,
    owner_epoch=1,
    finish_reason="stop",
    usage=Usage(prompt_tokens=3, output_tokens=len(ENCODED), cached_tokens=2),
)
FAILED = ResponseEnded(
    request_id="a",
    attempt=1,
    owner_epoch=1,
    finish_reason="error",
    error=ResponseError(status=502, code="worker_lost", message="lost"),
)


def emitted(*spans: tuple[int, int]) -> TokensEmitted:
    """Return an event with the tokens of these spans, one chunk each."""
    chunks = tuple(
        TokenChunk(request_id="a", attempt=1, first_index=begin, token_ids=pack_u32(ENCODED[begin:end]))
        for begin, end in spans
    )
    return TokensEmitted(worker_id="w", worker_epoch=1, owner_epoch=1, chunks=chunks)


def fold_all(fold: ResponseFold, *records: TokenEvent) -> list[Any]:
    state, objects = ResponseState(), []
    for event in records:
        apply({"a": state}, event, "")
        objects += fold.step(state)
    return [msgspec.json.decode(one.data) for one in objects]


@given(cuts=st.sets(st.integers(1, len(ENCODED) - 1)))
def test_a_stream_and_a_whole_response_have_the_same_text(cuts: set[int]) -> None:
    bounds = [0, *sorted(cuts), len(ENCODED)]
    records = [emitted(span) for span in pairwise(bounds)]
    chunks = fold_all(begun_fold(MODEL, stream=True), *records, ENDED)
    (whole,) = fold_all(begun_fold(MODEL), *records, ENDED)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == whole["choices"][0]["text"] == MODEL.tokenizer.decode(ENCODED)
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize(
    ("records", "code"), [([emitted((0, 2), (3, 4))], "tokens_missing"), ([emitted((0, 2)), FAILED], "worker_lost")]
)
def test_output_before_an_error_is_sent(records: list[TokenEvent], code: str) -> None:
    fold = begun_fold(MODEL, stream=True)
    chunks = fold_all(fold, *records)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [MODEL.tokenizer.decode([one]) for one in ENCODED[:2]]
    assert fold.error is not None
    assert (fold.is_over, fold.error.code, fold.cancel_reason) == (True, code, code)


def test_a_completion_ignores_an_embedding() -> None:
    fold = begun_fold(MODEL, stream=True)
    embedded = Embedded(request_id="a", attempt=1, owner_epoch=1, worker_id="w", vector=b"1234")
    assert fold_all(fold, embedded) == []
    assert (fold.is_over, fold.cancel_reason) == (False, "")


def test_steps_after_the_end_return_nothing() -> None:
    fold, state = begun_fold(MODEL), ResponseState()
    for event in (emitted((0, 2)), ENDED):
        apply({"a": state}, event, "")
    assert len(fold.step(state)) == 1
    assert fold.step(state) == []
    assert (fold.cached_tokens, fold.cancel_reason) == (2, "stop")


def test_missing_tokens_fail_an_embedding() -> None:
    fold, state = begun_fold(MODEL, api="embeddings"), ResponseState()
    apply({"a": state}, emitted((3, 4)), "")
    assert fold.step(state) == []
    assert fold.error is not None
    assert (fold.error.status, fold.error.code) == (502, "tokens_missing")
