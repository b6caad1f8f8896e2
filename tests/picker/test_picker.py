"""A gateway gets the server that the owner selects, and the owner learns what became of the request."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from forebay.events.progress import (
    AttemptMoved,
    AttemptRejected,
    FirstTokenEmitted,
    OutputGrown,
    RequestFailed,
    RequestFinished,
)
from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.ingress.errors import ApiError
from forebay.picker import exchange
from forebay.picker.answer import Answer
from forebay.picker.server import build_server
from forebay.runtime.errors import ConfigError
from tests.ingress.conftest import BODY_MAX, EMBED, TEXT, chat, text
from tests.picker.conftest import SERVERS, PickerScene, make_picker
from tests.system import until

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}


def event(content: str = "", *, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": content} if content else {}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n".encode()


STREAM = [event("Good"), event("bye"), event(finish="length")]
COUNTS = f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\n".encode()
DONE = b"data: [DONE]\n\n"


async def test_a_stream_is_routed_followed_and_passed_on(picker: PickerScene) -> None:
    call = picker.call()
    await call.headers(subset=SERVERS, x_request_id="mine")
    await call.body(json.dumps(chat(stream=True, custom_field=[1])).encode())
    request = await picker.scene.next_request()
    assert (request.delivery, request.routing.endpoints, request.rendering) == ("external", SERVERS, None)
    assert (request.request_id.partition("~")[0], request.ingress_incarnation) == ("mine", "ingress")
    assert request.sequence_hashes
    picker.select(request, cached_tokens=4, fallback=SERVERS[1])
    await call.read_request()
    assert call.destination == ",".join(SERVERS)
    options = {"include_usage": True, "continuous_usage_stats": False}
    assert call.sent == chat(stream=True, custom_field=[1], stream_options=options)
    await call.begin(served=SERVERS[0])
    whole = b"".join([*STREAM, COUNTS, DONE])
    parts = [whole[at : at + 7] for at in range(0, len(whole), 7)]
    assert await call.pass_on(*parts) == b"".join([*STREAM, DONE])
    first, finished = await picker.reported(FirstTokenEmitted, RequestFinished)
    for one in (first, finished):
        assert (one.request_id, one.attempt, one.owner_epoch) == (request.request_id, 1, 3)
        assert (one.worker_id, one.worker_epoch) == ("w0", 7)
    assert (first.cached_tokens, finished.cached_tokens) == (4, 8)
    assert (finished.finish_reason, finished.output_tokens) == ("length", 4)
    await call.grpc.done_writing()
    assert (picker.count("picked"), picker.count("finished"), picker.count("cancelled")) == (1, 1, 0)


async def test_a_body_with_a_byte_order_mark_is_read_and_not_kept_during_the_answer(picker: PickerScene) -> None:
    call = picker.call()
    await call.headers()
    await call.body(b"\xef\xbb\xbf" + json.dumps(chat(content="x" * 100_000, stream=True)).encode())
    picker.select(await picker.scene.next_request())
    await call.read_request()
    assert picker.fallback.models.front.bodies.held == 0
    await call.begin()
    assert await call.pass_on(*STREAM, DONE) == b"".join([*STREAM, DONE])


async def test_a_client_that_asked_for_token_counts_gets_them(picker: PickerScene) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    call, _ = await picker.picked(body, report_every=1)
    assert call.sent == body
    await call.begin()
    whole = [*STREAM, COUNTS, DONE]
    assert await call.pass_on(*whole) == b"".join(whole)
    grown = (await picker.reported(FirstTokenEmitted, OutputGrown, OutputGrown, RequestFinished))[1:3]
    assert [one.output_tokens for one in grown] == [2, 4]


async def test_an_answer_in_one_piece_is_finished_at_its_end(picker: PickerScene) -> None:
    call = picker.call()
    await call.headers(path=f"{TEXT}?x=1")
    await call.body(json.dumps(text(prompt=["Hello", "there"], n=2)).encode())
    picker.select(await picker.scene.next_request())
    await call.read_request()
    assert call.sent == text(prompt=["Hello", "there"], n=2)
    answer = json.dumps({"choices": [{"text": "a", "finish_reason": "stop"}], "usage": USAGE}).encode()
    await call.begin(kind="application/json")
    assert await call.pass_on(answer[:9], answer[9:]) == answer
    (finished,) = await picker.reported(RequestFinished)
    assert (finished.output_tokens, finished.cached_tokens, finished.finish_reason) == (4, 8, "stop")
    assert len(picker.scene.requests(RequestSubmitted)) == 1, "its server runs all choices"


async def test_a_server_without_token_counts_is_counted_by_the_parts_of_its_answer(picker: PickerScene) -> None:
    call, _ = await picker.picked(chat(stream=True), cached_tokens=4)
    await call.begin()
    whole = [b": comment\n\n", *STREAM, b"data: {broken\n\n", DONE, b"data: the end is missing"]
    assert await call.pass_on(*whole) == b"".join(whole)
    _, finished = await picker.reported(FirstTokenEmitted, RequestFinished)
    assert (finished.output_tokens, finished.cached_tokens) == (2, 4)
    assert picker.count("finished_without_usage") == 1


async def test_an_answer_of_an_unreadable_length_is_passed_on(
    picker: PickerScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.picker.answer.FOLLOWED_MAX", 10)
    call, _ = await picker.picked(chat(stream=True))
    await call.begin()
    assert await call.pass_on(b"data: " + b"x" * 80_000, COUNTS) == b"data: " + b"x" * 80_000 + COUNTS
    await picker.reported(RequestFinished)


def test_a_long_event_in_many_parts_is_searched_once() -> None:
    answer, part = Answer(is_stream=True, hides_usage=True), b"x" * 32
    assert answer.feed(b"data: ", is_last=False) == b""
    assert not any(answer.feed(part, is_last=False) for _ in range(100_000))  # takes minutes if each searches all
    assert answer.feed(b"\r\n\r", is_last=False) == b""
    assert len(answer.feed(b"\ndata: ", is_last=False)) == 100_000 * len(part) + 10


async def test_progress_after_a_move_is_that_of_the_other_worker(picker: PickerScene) -> None:
    call, request = await picker.picked(chat(stream=True))

    async def owner() -> None:
        (moved,) = await picker.reported(AttemptMoved)
        assert (moved.worker_id, moved.attempt, moved.endpoint) == ("w0", 1, SERVERS[1])
        picker.select(request, 1)

    await asyncio.gather(owner(), call.begin(served=SERVERS[1]))
    await call.pass_on(*STREAM, DONE)
    _, first, finished = await picker.reported(AttemptMoved, FirstTokenEmitted, RequestFinished)
    for one in (first, finished):
        assert (one.worker_id, one.worker_epoch, one.attempt) == ("w1", 8, 2)
    assert picker.count("moved") == 1


async def test_a_move_that_the_owner_does_not_book_ends_the_books_and_not_the_answer(
    picker: PickerScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MOVED_S", 60.0)  # a busy machine may need longer than a gateway should wait
    call, request = await picker.picked(chat(stream=True))
    picker.scene.refuse(request.request_id, 502, "engine_error", attempt=1, owner=3)
    await call.begin(served="10.9.9.9:1")
    assert await call.pass_on(*STREAM, DONE) == b"".join([*STREAM, DONE])
    await call.grpc.done_writing()
    await picker.reported(AttemptMoved)
    await until(lambda: len(picker.scene.group.replies) == 0)
    assert picker.scene.requests(RequestCancelled) == []


@pytest.mark.parametrize("when", ["before the decision", "before the answer", "in the answer"])
async def test_a_client_that_leaves_cancels_its_request(picker: PickerScene, when: str) -> None:
    if when == "before the decision":
        call = await picker.send(chat(stream=True))
        request = await picker.scene.next_request()
    else:
        call, request = await picker.picked(chat(stream=True))
    if when == "in the answer":
        await call.begin()
        await call.pass_on(*STREAM, ends=False)
        await picker.reported(FirstTokenEmitted)
    call.grpc.cancel()
    cancelled = await picker.scene.cancelled()
    assert (cancelled.request_id, cancelled.is_complete) == (request.request_id, False)
    await until(lambda: len(picker.scene.group.replies) == 0)
    assert picker.scene.front.admission.in_flight == 0


@pytest.mark.parametrize(
    ("status", "kind"), [(429, AttemptRejected), (503, AttemptRejected), (400, RequestFailed), (401, RequestFailed)]
)
async def test_a_server_that_rejects_a_request_ends_it(picker: PickerScene, status: int, kind: type) -> None:
    call, _ = await picker.picked(chat(stream=True))
    await call.begin(status, "application/json", **{"retry-after": "3"})
    body = b'{"error": {"message": "no room"}}'
    assert await call.pass_on(body) == body
    (reported,) = await picker.reported(kind)
    assert reported.error == f"the server responded with {status}: no room"
    if isinstance(reported, AttemptRejected):
        assert (reported.status, reported.retry_after_s) == (status, 3)
    call.grpc.cancel()  # the client leaves after it
    await until(lambda: picker.scene.front.admission.in_flight == 0)
    assert picker.scene.requests(RequestCancelled) == []


@pytest.mark.parametrize(("status", "code"), [(409, "duplicate_request_id"), (429, "queue_full"), (503, "busy")])
async def test_the_owners_rejection_is_the_clients_error(picker: PickerScene, status: int, code: str) -> None:
    call = await picker.send(chat())
    picker.scene.refuse((await picker.scene.next_request()).request_id, status, code)
    assert await call.rejected() == (status, code)
    assert picker.scene.requests(RequestCancelled) == []


async def test_a_request_whose_server_is_lost_before_the_gateway_has_its_name_is_submitted_again(
    picker: PickerScene,
) -> None:
    call = await picker.send(chat())
    lost = (await picker.scene.next_request()).request_id
    picker.scene.refuse(lost, 503, "pinned_worker_lost")
    again = await picker.scene.next_request()
    assert again.request_id != lost
    picker.select(again, 1)
    await call.read_request()
    assert picker.count("picked") == 1


async def test_a_request_that_loses_two_servers_is_rejected(picker: PickerScene) -> None:
    call = await picker.send(chat())
    for _ in range(2):
        picker.scene.refuse((await picker.scene.next_request()).request_id, 503, "pinned_worker_lost")
    assert await call.rejected() == (503, "pinned_worker_lost")


async def test_requests_with_the_same_id_are_different_requests(picker: PickerScene) -> None:
    calls = [await picker.send(chat(), x_request_id="same") for _ in range(2)]
    requests = [await picker.scene.next_request() for _ in calls]
    assert [one.request_id.partition("~")[0] for one in requests] == ["same", "same"]
    for at, request in enumerate(requests):
        picker.select(request, at)
    for call in calls:
        await call.read_request()
    assert {call.destination for call in calls} == set(SERVERS)


async def test_bad_requests_get_a_clear_error(picker: PickerScene) -> None:
    bad: list[tuple[bytes, tuple[int, str]]] = [
        (b"{broken", (400, "invalid_json")),
        (b'{"model": "x", "messages": []}', (400, "invalid_value")),
        (b'{"model": "other", "messages": [{"role": "user", "content": "a"}]}', (404, "model_not_found")),
        (b'"' + b"x" * BODY_MAX + b'"', (413, "body_too_large")),
    ]
    found = [await (await picker.send(body)).rejected() for body, _ in bad]
    assert found == [error for _, error in bad]
    for more in ({"path": EMBED}, {"ends": True}):
        call = picker.call()
        await call.headers(**more)
        assert await call.rejected() == (404, "unknown_path")
    call = picker.call()
    await call.headers(mode=2)
    assert await call.rejected() == (500, "gateway_misconfigured")
    assert picker.scene.requests() == []
    assert picker.count("rejected") == len(bad) + 3


async def test_a_model_without_a_card_is_an_error_although_servers_are_ready(
    picker: PickerScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find(*_: str) -> Any:
        raise ApiError(503, "not_ready", "its workers have stored no model card")

    await picker.lease(0)
    monkeypatch.setattr(picker.scene.models, "find", find)
    assert await (await picker.send(chat())).rejected() == (503, "not_ready")
    assert picker.count("fallback_random") == 0


async def test_a_router_that_does_not_know_external_requests_gets_none(picker: PickerScene) -> None:
    owner = picker.scene.only.owner.owner
    assert owner is not None
    picker.scene.only.owner.owner = msgspec.structs.replace(owner, events_version=2)
    assert await (await picker.send(chat())).rejected() == (503, "router_too_old")
    assert picker.scene.requests() == []


async def test_without_an_owner_a_random_ready_server_gets_the_request(picker: PickerScene) -> None:
    picker.scene.only.silent_s = 1e6
    body = chat(stream=True)
    assert await (await picker.send(body)).rejected() == (503, "no_owner")
    await picker.lease(0)
    await picker.lease(1, worker_id="draining", draining=True)
    picker.leases.acquire("test-model", "other", "t", b"?", 60_000)
    await picker.fallback.poll()
    call = await picker.send(body)
    await call.read_request()
    assert (call.destination, call.sent) == (SERVERS[0], body)
    await call.begin()
    whole = [*STREAM, COUNTS, DONE]
    assert await call.pass_on(*whole) == b"".join(whole)
    call = picker.call()
    await call.headers(subset=[SERVERS[1]])
    await call.body(json.dumps(body).encode())
    assert await call.rejected() == (503, "no_owner"), "the gateway names another one"
    assert (picker.count("fallback_random"), picker.count("fallback_503"), picker.progress()) == (1, 2, [])


async def test_an_owner_that_goes_away_before_its_decision_is_not_waited_for(
    picker: PickerScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "OWNER_CHECK_S", 0.01)
    await picker.lease(1)
    call = await picker.send(chat())
    request = await picker.scene.next_request()
    picker.scene.only.silent_s = 1e6
    await call.read_request()
    assert call.destination == SERVERS[1]
    assert (await picker.scene.cancelled()).request_id == request.request_id


async def test_the_fallback_503_rejects_requests_without_an_owner() -> None:
    async with make_picker("503") as picker:
        await picker.lease(0)
        picker.scene.only.silent_s = 1e6
        assert await (await picker.send(chat())).rejected() == (503, "no_owner")
        assert picker.count("fallback_503") == 1


async def test_trailers_end_bodies(picker: PickerScene) -> None:
    call = picker.call()
    await call.headers()
    await call.write(request_body={"body": json.dumps(chat(stream=True)).encode()})
    await call.write(request_trailers={})
    picker.select(await picker.scene.next_request())
    assert [(await call.grpc.read()).ByteSize() > 0 for _ in range(2)] == [True, True]
    assert (await call.grpc.read()).HasField("request_trailers")
    await call.begin()
    await call.write(response_body={"body": b"".join(STREAM) + b"rest"})
    await call.write(response_trailers={})
    parts = [(await call.grpc.read()).response_body.response.body_mutation.streamed_response for _ in range(2)]
    assert [(one.body, one.end_of_stream) for one in parts] == [(b"".join(STREAM), False), (b"rest", False)]
    assert (await call.grpc.read()).HasField("response_trailers")
    await picker.reported(FirstTokenEmitted, RequestFinished)


async def test_a_taken_port_is_an_error(picker: PickerScene) -> None:
    server, port = build_server(picker.fallback, "127.0.0.1", 0)
    await server.start()
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        build_server(picker.fallback, "127.0.0.1", port)
    await server.stop(None)
