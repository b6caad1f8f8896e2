"""Responses that another connection or ingress began: resume, read, cancel, delete and repeat them."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from forebay.events.codec import encode
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.request_ids import (
    RequestLocation,
    http_request_id,
    kafka_api_request_id,
    parse_public_id,
    public_id,
)
from forebay.events.requests import RESUME_GRACE_S, RequestCancelled, RequestResumed, RequestSubmitted
from forebay.events.tokens import Embedded, RequestLocated
from forebay.events.topics import ANSWERS, REQUESTS, TOKENS
from forebay.events.versions import EVENTS_VERSION
from forebay.ingress import finder, group
from forebay.ingress.front import Front
from forebay.ingress.http.app import build_app
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.streams import VIEWS_MAX, Stream
from forebay.transport import answers
from forebay.transport.base import Draft
from tests.core.worlds import Driver
from tests.harness.only_model import OnlyModel
from tests.ingress.conftest import (
    CHAT,
    EMBED,
    HEADERS,
    NAME,
    RESPONSES,
    SLOT,
    TEXT,
    Scene,
    chat,
    client_of,
    error,
    events,
    make_scene,
    text,
)
from tests.system import until

OTHER = "other"  # incarnation of the other ingress
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
ROUTES = [("GET", ""), ("GET", "/stream"), ("POST", "/cancel"), ("DELETE", "")]
DETACHED: dict[str, Any] = {**STREAM, "forebay": {"detach": True}}


class Ingresses(Scene):
    """A scene with a second ingress on the same log, which has another reply slot."""

    other: httpx.AsyncClient
    other_front: Front

    async def begin(self, path: str = TEXT, **headers: str) -> "tuple[asyncio.Task[httpx.Response], RequestSubmitted]":
        """Begin a stream, and return its pending response, and its request once that is on the log."""
        make = chat if path == CHAT else text
        pending = self.start(path, make(**STREAM), **headers)
        return pending, await self.next_request()

    async def finished(self, path: str = TEXT, **changes: Any) -> tuple[httpx.Response, str]:
        """Return a complete response to a request with these fields, and its id."""
        make = chat if path == CHAT else text
        pending = self.start(path, make(**{**STREAM, **changes}))
        request = await self.next_request()
        self.reply(request.request_id, "the river ran down")
        response = await pending
        return response, id_of(response)

    async def cut(self, client: httpx.AsyncClient, body: dict[str, Any], output: str) -> tuple[RequestSubmitted, str]:
        """Begin a stream, and disconnect after these words. Return its request, and its first events."""

        async def begin() -> RequestSubmitted:
            request = await self.next_request()
            self.emit_text(request.request_id, output)
            return request

        beginning = asyncio.create_task(begin())
        async with client.stream("POST", TEXT, json=body) as response:
            lines = response.aiter_lines()
            received = [await anext(lines) for _ in range(3 * len(self.model.encode(output)))]
        return await beginning, "\n".join([*received, ""])

    def submissions(self) -> list[RequestSubmitted]:
        return self.requests(RequestSubmitted)


@pytest.fixture
async def both() -> AsyncIterator[Ingresses]:
    async with make_scene() as scene:
        scene.__class__ = Ingresses
        assert isinstance(scene, Ingresses)
        async with another(scene) as (scene.other_front, scene.other):
            yield scene


@asynccontextmanager
async def another(scene: Scene, **changes: Any) -> AsyncIterator[tuple[Front, httpx.AsyncClient]]:
    """Start another ingress on the log of a scene."""
    registry = CollectorRegistry()
    fields = {"ingress_id": "i2", "reply_slot": SLOT + 1, "incarnation": OTHER, **changes}
    settings = type(scene.front.settings)(
        **{name: getattr(scene.front.settings, name) for name in scene.front.settings.__slots__} | fields
    )
    front = Front(scene.log, settings, IngressMetrics(registry, NAME), 0, scene.model)
    only = OnlyModel(front, scene.model)
    for one in (only, scene.only):
        one.owner.owner = RouterHeartbeat(
            group=NAME, router_id="r", role="owner", ready_aggregated=1, events_version=EVENTS_VERSION
        )
    running = asyncio.create_task(front.run())
    try:
        async with client_of(build_app(only.models, registry), headers=HEADERS) as client:
            yield front, client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def id_of(response: httpx.Response) -> str:
    """Return the id in a response."""
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    found: str = json.loads(lines[0].removeprefix("data: ") if lines else response.text)["id"]
    return found


def events_of(response: httpx.Response) -> list[str]:
    """Return the server-sent events of a stream, without comments."""
    return [event for event in response.text.split("\n\n") if event and not event.startswith(":")]


async def resumed(client: httpx.AsyncClient, request_id: str, last: str | None = None) -> httpx.Response:
    headers = {} if last is None else {"last-event-id": last}
    return await client.get(f"/v1/requests/{request_id}/stream", headers=headers)


def event_ids(response: httpx.Response) -> list[str]:
    return event_ids_of(response.text)


def event_ids_of(events: str) -> list[str]:
    return [line[len("id: ") :] for line in events.splitlines() if line.startswith("id: ")]


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_every_ingress_sends_the_same_events_after_any_event(both: Ingresses, path: str, *, detach: bool) -> None:
    """From the records of the reply slot, or from the kept answer."""
    whole, request_id = await both.finished(path, **({"forebay": {"detach": True}} if detach else {}))
    if detach:
        await until(lambda: both.log.next_offset(ANSWERS.name, 0))
    expected = events_of(whole)
    for client in (both.client, both.other):
        assert (await resumed(client, request_id)).text == whole.text
        for at, event_id in enumerate(event_ids(whole)):
            rest = await resumed(client, request_id, event_id)
            assert events_of(rest) == expected[at + 1 :]
            assert rest.headers["content-type"] == whole.headers["content-type"]
    again = await both.other.get(f"/v1/requests/{request_id}/stream", params={"last_event_id": event_ids(whole)[0]})
    assert events_of(again) == expected[1:]


async def test_choices_keep_their_order_in_a_kept_answer(both: Ingresses) -> None:
    pending = both.start(TEXT, text(**STREAM, n=3, forebay={"detach": True}))
    names = [(await both.next_request()).request_id for _ in range(3)]
    first = dict.fromkeys(names, 0)
    for name in (names[0], names[2], names[0], names[1], names[2]):
        first[name] = both.emit_text(name, " water stone", first=first[name])
    for name in reversed(names):
        both.end(name, cached=2)
    whole = await pending
    await until(lambda: both.log.next_offset(ANSWERS.name, 0))
    slot = both.log.next_offset(TOKENS.name, SLOT)
    both.log.trim(TOKENS.name, SLOT, slot, slot)
    assert (await resumed(both.other, id_of(whole))).text == whole.text
    body = (await both.other.get(f"/v1/requests/{id_of(whole)}")).json()
    assert [choice["text"] for choice in body["choices"]] == [" water stone" * count for count in (2, 1, 2)]


async def test_a_stream_continues_at_another_ingress(both: Ingresses, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner lets the request wait for the other ingress, so the first one may cancel it after the grace time."""
    monkeypatch.setattr(group, "RESUME_GRACE_S", 0.01)
    async with both.http_client() as (client, _):
        request, received = await both.cut(client, text(**STREAM), "the river")
        request_id = json.loads(received.splitlines()[1].removeprefix("data: "))["id"]
        resuming = asyncio.create_task(resumed(both.other, request_id, event_ids_of(received)[-1]))
        await until(lambda: both.requests(RequestResumed))
        cancelled = await both.cancelled()
    count = both.emit_text(request.request_id, " ran down", first=len(both.model.encode("the river")))
    both.end(request.request_id, output=count)
    rest = await resuming
    (moved,) = both.requests(RequestResumed)
    assert received + rest.text == (await resumed(both.client, request_id)).text
    assert (moved.request_id, moved.ingress_incarnation) == (request.request_id, OTHER)
    assert (cancelled.request_id, cancelled.ingress_incarnation) == (request.request_id, "ingress")


async def test_a_reader_that_leaves_does_not_end_the_stream_of_another(
    both: Ingresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "RESUME_GRACE_S", 0.01)
    pending, request = await both.begin()
    sent = both.emit_text(request.request_id, "the river")
    reading = asyncio.create_task(resumed(both.other, request.request_id))
    await until(lambda: both.other_front.slots.is_read(NAME, request.request_id))
    reading.cancel()
    await both.cancelled()
    owner = Driver().fleet("w")
    for event in (replace(request, model="m"), *both.requests()[1:]):
        owner("requests", event)
    assert [type(event) for event in both.requests()] == [RequestSubmitted, RequestResumed, RequestCancelled]
    assert owner.active(request.request_id).submitted.ingresses == ("ingress",)
    both.end(request.request_id, output=sent)
    assert event_ids(await pending)[-1].startswith(f"0-{sent}-")


async def test_a_client_that_returns_in_time_keeps_its_request(
    both: Ingresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[Callable[[], None]] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def recorded(delay_s: float, callback: Callable[..., None], *args: Any, **options: Any) -> asyncio.TimerHandle:
        if delay_s == RESUME_GRACE_S:
            timers.append(callback)
        return call_later(delay_s, callback, *args, **options)

    monkeypatch.setattr(loop, "call_later", recorded)
    async with both.http_client() as (client, _):
        request, _ = await both.cut(client, text(**STREAM), "the river")
        await until(lambda: timers)
        async with client.stream("GET", f"/v1/requests/{request.request_id}/stream") as response:
            await anext(response.aiter_lines())
            timers.pop()()  # while it is read again
        await until(lambda: timers)
    assert not both.requests(RequestCancelled)
    timers.pop()()
    cancelled = await both.cancelled()
    assert cancelled.request_id == request.request_id
    assert cancelled.output_tokens == len(both.model.encode("the river")), "what the client got"


async def test_a_stop_string_ends_the_request_wherever_it_is_read(both: Ingresses) -> None:
    pending = both.start(TEXT, text(**STREAM, stop=" down"))
    request = await both.next_request()
    both.emit_text(request.request_id, "the river ran down the mountain")
    whole = await pending
    assert (await resumed(both.other, id_of(whole))).text == whole.text
    cancelled = both.requests(RequestCancelled)
    assert [(one.is_complete, one.ingress_incarnation) for one in cancelled] == [(True, ""), (True, "")]


async def test_an_error_of_the_log_is_an_event_for_every_client(both: Ingresses) -> None:
    pending, request = await both.begin()
    both.emit_text(request.request_id, "the river")
    both.refuse(request.request_id, 502, "engine_failed", attempt=1)
    whole = await pending
    for client in (both.client, both.other):
        assert (await resumed(client, id_of(whole))).text == whole.text
        for at, event_id in enumerate(event_ids(whole)):
            assert events_of(await resumed(client, id_of(whole), event_id)) == events_of(whole)[at + 1 :]
        assert error(await client.get(f"/v1/requests/{id_of(whole)}")) == (502, "engine_failed")


async def test_a_detached_request_is_rendered_without_its_client(both: Ingresses) -> None:
    """So its stop string ends it, and its answer is kept."""
    async with both.http_client() as (client, _):
        request, _ = await both.cut(client, text(**DETACHED, stop=" down"), "the river")
        assert request.ingress_incarnation == ""
        await until(lambda: both.front.in_background == 1)
        both.emit_text(request.request_id, " ran down the", first=len(both.model.encode("the river")))
        await until(lambda: both.log.next_offset(ANSWERS.name, 0))
    assert both.front.in_background == 0
    assert [one.is_complete for one in both.requests(RequestCancelled)] == [True]
    found = await both.other.get(f"/v1/requests/{client_id(request)}")
    assert found.json()["choices"][0]["text"] == "the river ran"


def client_id(request: RequestSubmitted) -> str:
    return request.request_id.partition("~")[0]


async def test_whoever_finds_a_finished_answer_keeps_it(both: Ingresses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit of responses without a client, and if the ingress of the request died."""
    monkeypatch.setattr("forebay.ingress.http.response.BACKGROUND_MAX", 0)
    async with both.http_client() as (client, _):
        request, _ = await both.cut(client, text(**DETACHED), "the river")
        await until(lambda: request.request_id not in both.group.replies)
    both.end(request.request_id, output=2)
    assert both.requests(RequestCancelled) == []
    found = await both.other.get(f"/v1/requests/{client_id(request)}")
    assert found.json()["choices"][0]["text"] == "the river"
    await until(lambda: both.log.next_offset(ANSWERS.name, 0))
    slot = both.log.next_offset(TOKENS.name, SLOT)
    both.log.trim(TOKENS.name, SLOT, slot, slot)
    assert (await both.client.get(f"/v1/requests/{found.json()['id']}")).text == found.text


@pytest.mark.parametrize(
    "given", ["", "0", "0-1", "-1-0-0", "0-1-0 ", "0-1-0-0", "a-1-0", "0-1-9", "0-99-0", "9-1-0", "1" * 300]
)
async def test_a_position_that_the_stream_does_not_have_is_refused(both: Ingresses, given: str) -> None:
    _, request_id = await both.finished()
    response = await both.other.get(f"/v1/requests/{request_id}/stream", params={"last_event_id": given})
    assert response.status_code == 400
    assert given[:64] in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "last_event_id"


async def test_a_position_that_a_stream_does_not_have_yet_is_refused(both: Ingresses) -> None:
    pending, request = await both.begin()
    count = both.emit_text(request.request_id, "the river ran")
    await until(lambda: both.group.replies.position == 1)
    location = f"0.{0:x}"
    request_id = f"{request.request_id}~{location}"
    for client in (both.client, both.other):
        assert error(await resumed(client, request_id, f"0-{count + 1}-0")) == (400, "unknown_event")
    both.end(request.request_id, output=count)
    assert events_of(await resumed(both.other, request_id, f"0-{count}-0")) == events_of(await pending)[count:]


async def test_requests_are_found_by_the_ids_of_clients_and_of_the_log(both: Ingresses) -> None:
    for number in range(3):
        pending, request = await both.begin(**{"x-request-id": "order-7"})
        both.reply(request.request_id, f"the {'river ' * number}")
        whole = await pending
    for given in ("order-7", request.request_id, id_of(whole)):
        assert (await resumed(both.other, given)).text == whole.text


async def test_the_newest_request_with_an_id_is_found_among_all_models(
    both: Ingresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending, request = await both.begin(**{"x-request-id": "order-7"})
    both.reply(request.request_id, "the river")
    await pending
    later = replace(request, request_id=http_request_id("order-7", 1))
    monkeypatch.setattr(both.models, "partitions", lambda: [0, 1])
    for partition, submitted in ((1, later), (0, replace(later, request_id=http_request_id("order-8", 1)))):
        await both.log.append(
            [Draft(REQUESTS.name, partition, encode(REQUESTS, submitted), submitted.request_id.encode())]
        )
    found = await finder.RequestFinder(both.models).find("order-7", "")
    assert (found.request_id, found.location) == (later.request_id, RequestLocation(1, 0))


async def test_searches_for_many_ids_share_a_pass_and_are_admitted(
    both: Ingresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first search reads the log alone, and all that wait meanwhile read it once. None needs the router's queue."""
    await both.finished()
    read, gate, reads = both.log.read, asyncio.Event(), list[str]()

    async def gated(topic: str, *place: int) -> Any:
        reads.append(topic)
        await gate.wait()
        return await read(topic, *place)

    monkeypatch.setattr(both.log, "read", gated)
    both.front.admission.full.mark("")
    wanted = [(method, f"/v1/requests/r{number}{path}") for number in range(20) for method, path in ROUTES]
    searching = [asyncio.create_task(both.client.request(*one)) for one in wanted]
    await until(lambda: both.front.admission.in_flight == len(wanted))
    gate.set()
    for response in await asyncio.gather(*searching):
        assert error(response) == (404, "request_not_found")
    assert reads == [REQUESTS.name] * 2


async def test_ids_that_name_no_request_of_http_are_unknown(both: Ingresses, monkeypatch: pytest.MonkeyPatch) -> None:
    _, request_id = await both.finished()
    log_id, _ = parse_public_id(request_id)
    forged = log_id[:-1] + ("0" if log_id[-1] != "0" else "1")
    submitted = both.submissions()[0]
    kafka = replace(submitted, request_id=kafka_api_request_id("order-1"))
    offset = both.log.next_offset(REQUESTS.name, 0)
    both.log.append_soon([Draft(REQUESTS.name, 0, encode(REQUESTS, kafka), kafka.request_id.encode())])
    unknown = [
        *("nobody", f"{forged}~0.0", f"{log_id}~0.1", f"{log_id}~0.99", f"{log_id}~7.0", f"{log_id}~0.{'f' * 16}"),
        *(kafka.request_id, "order-1", f"{kafka.request_id}~0.{offset:x}"),
    ]
    for given in unknown:
        for method, path in ROUTES:
            response = await both.other.request(method, f"/v1/requests/{given}{path}")
            assert error(response) == (404, "request_not_found"), (method, given)
    monkeypatch.setattr(finder, "SEARCHED_MAX", 1)
    response = await both.other.get(f"/v1/requests/{log_id}")
    assert error(response) == (404, "request_not_found")
    assert "among the newest 1 records" in response.text


async def test_answers_that_retention_removed_are_gone(both: Ingresses) -> None:
    _, request_id = await both.finished()
    both.log.trim(TOKENS.name, SLOT, 1, 1)
    assert error(await resumed(both.other, request_id)) == (410, "answer_expired")
    both.log.trim(REQUESTS.name, 0, 1, 1)
    assert error(await resumed(both.other, request_id)) == (410, "answer_expired")


async def test_an_answer_that_may_have_been_deleted_is_gone(both: Ingresses, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress forgets deletions of the oldest requests, whose records may still be on the log."""
    monkeypatch.setattr(answers, "KNOWN_MAX", 1)
    monkeypatch.setattr(answers, "FORGOTTEN", 1)
    _, oldest = await both.finished()
    for request_id in (oldest, (await both.finished())[1]):
        await both.client.delete(f"/v1/requests/{request_id}")
    assert error(await resumed(both.client, oldest)) == (410, "answer_expired")


async def test_a_later_renderer_is_named(both: Ingresses) -> None:
    await both.finished()
    (submitted,) = both.submissions()
    assert submitted.rendering is not None
    newer = replace(submitted, rendering=replace(submitted.rendering, version=99))
    await both.log.append([Draft(REQUESTS.name, 0, encode(REQUESTS, newer), newer.request_id.encode())])
    response = await both.other.get(f"/v1/requests/{newer.request_id}~0.1")
    assert error(response) == (501, "renderer_too_old")


async def test_a_deleted_answer_is_unknown_everywhere(both: Ingresses) -> None:
    """Also while the log still has its records."""
    for detach in (False, True):
        _, request_id = await both.finished(forebay={"detach": detach})
        assert (await both.other.delete(f"/v1/requests/{request_id}")).json() == {"id": request_id, "deleted": True}
        for client in (both.client, both.other):
            while (await client.get(f"/v1/requests/{request_id}")).status_code != 404:  # noqa: ASYNC110 - a read has no event
                await asyncio.sleep(0)
            for method, path in (("GET", "/stream"), ("POST", "/cancel"), ("DELETE", "")):
                response = await client.request(method, f"/v1/requests/{request_id}{path}")
                assert error(response) == (404, "request_not_found")
                assert "was deleted" in response.text
    async with another(both, ingress_id="i3") as (_, later):
        assert error(await later.get(f"/v1/requests/{request_id}")) == (404, "request_not_found")


async def test_a_request_in_flight_is_cancelled_and_deleted(both: Ingresses) -> None:
    pending, request = await both.begin()
    both.emit_text(request.request_id, "the river")
    request_id = f"{request.request_id}~0.0"
    assert (await both.other.post(f"/v1/requests/{request_id}/cancel")).json() == {"id": request_id, "cancelled": True}
    cancelled = await both.cancelled()
    assert (cancelled.request_id, cancelled.ingress_incarnation) == (request.request_id, "")
    assert (await both.other.delete(f"/v1/requests/{request_id}")).status_code == 200
    both.refuse(request.request_id, 499, "cancelled", attempt=1)
    assert json.loads(events_of(await pending)[-1].partition("data: ")[2])["error"]["code"] == "cancelled"
    assert error(await both.other.get(f"/v1/requests/{request_id}")) == (404, "request_not_found")


async def test_embeddings_can_be_read_again_but_not_streamed(both: Ingresses) -> None:
    pending = both.start(EMBED, {"model": NAME, "input": ["a", "b"]})
    names = [(await both.next_request()).request_id for _ in range(2)]
    for name in names:
        vector = array("f", [0.5, 0.25]).tobytes()
        both.send(Embedded(request_id=name, attempt=1, owner_epoch=1, worker_id="w1", vector=vector))
        both.end(name)
    whole = await pending
    request_id = names[0].removesuffix("-0") + "~0.0"
    assert (await both.other.get(f"/v1/requests/{request_id}")).text == whole.text
    assert error(await resumed(both.other, request_id)) == (400, "unsupported_parameter")


async def test_a_response_has_a_limited_number_of_readers(both: Ingresses) -> None:
    pending, request = await both.begin()
    count = both.emit_text(request.request_id, "the river")
    request_id = f"{request.request_id}~0.0"
    readers = [asyncio.create_task(resumed(both.other, request_id)) for _ in range(VIEWS_MAX)]
    await until(lambda: len(both.requests(RequestResumed)) == VIEWS_MAX)
    refused = await resumed(both.other, request_id)
    assert error(refused) == (429, "too_many_readers")
    both.end(request.request_id, output=count)
    assert {(await reader).text for reader in readers} == {(await pending).text}


async def test_the_end_of_an_ingress_leaves_its_streams_to_others(both: Ingresses) -> None:
    pending, request = await both.begin()
    count = both.emit_text(request.request_id, "the river")
    await until(lambda: both.group.replies.position == 1)
    both.front.slots.interrupt_all("the server is shutting down")
    cut = events_of(await pending)
    assert "shutting_down" in cut[-1]
    assert not cut[-1].startswith("id: ")
    both.end(request.request_id, output=count)
    rest = await resumed(both.other, f"{request.request_id}~0.0", f"0-{count}-0")
    assert events_of(rest)[-1] == "data: [DONE]"
    assert both.requests(RequestCancelled) == []


# Idempotency keys


async def repeated(both: Ingresses, body: dict[str, Any], earlier: int, key: str = "k") -> httpx.Response:
    """Send a body to the other ingress with a key, whose owner finds the request at the offset `earlier`."""
    known = len(both.submissions())
    pending = asyncio.create_task(both.other.post(TEXT, json=body, headers={"idempotency-key": key}))
    await until(lambda: len(both.submissions()) > known or pending.done())
    for request in both.submissions()[known:]:
        if request.idempotency_key:
            both.locate(request, earlier, SLOT + 1)
    return await pending


@pytest.mark.parametrize("changes", [STREAM, {"stream": False}, {**STREAM, "n": 2}])
async def test_a_repeated_request_gets_the_response_of_the_first(both: Ingresses, changes: dict[str, Any]) -> None:
    body = text(**changes)
    pending = both.start(TEXT, body, **{"idempotency-key": "k"})
    requests = [await both.next_request() for _ in range(changes.get("n", 1))]
    if not changes["stream"]:
        repeating = asyncio.create_task(repeated(both, body, 0))
        await until(lambda: len(both.submissions()) == 2)
    for request in requests:
        both.reply(request.request_id, "the river")
    whole = await pending
    again = await (repeating if not changes["stream"] else repeated(both, body, 0))
    assert again.text == whole.text
    assert (again.headers["idempotency-replayed"], again.headers["x-request-id"]) == (
        "true",
        whole.headers["x-request-id"],
    )
    assert "idempotency-replayed" not in whole.headers
    await until(lambda: both.log.next_offset(ANSWERS.name, 0))
    slot = both.log.next_offset(TOKENS.name, SLOT)
    both.log.trim(TOKENS.name, SLOT, slot, slot)
    assert (await repeated(both, body, 0)).text == whole.text
    keys = {request.request_id: request.idempotency_key for request in both.submissions()}
    first, second, *_ = (key for key in keys.values() if key)
    assert first == second
    cancelled = {one.request_id for one in both.requests(RequestCancelled)}
    assert all(keys[one.request_id] for one in requests[:1])
    assert not any(keys[name] for name in cancelled), "only later parts of a repetition run, until it is located"


async def test_a_failed_response_does_not_hold_its_key(both: Ingresses) -> None:
    """If its first part has finished, the owner keeps the key. So all ingresses go on with the same other key."""
    body, headers = text(n=2), {"idempotency-key": "k"}

    async def located(slot: int, earlier: int) -> list[RequestSubmitted]:
        """Locate an earlier request for the next submission, and return the parts that follow."""
        first, _ = [await both.next_request() for _ in range(2)]
        both.locate(first, earlier, slot)
        return [await both.next_request() for _ in range(2)]

    pending = both.start(TEXT, body, **headers)
    finished, failed = [await both.next_request() for _ in range(2)]
    both.reply(finished.request_id, "the river")
    both.refuse(failed.request_id, 502, "engine_failed", attempt=1)
    assert error(await pending) == (502, "engine_failed")
    await until(lambda: both.log.next_offset(ANSWERS.name, 0))
    again = both.start(TEXT, body, **headers)
    retried = await located(SLOT, 0)
    for part in retried:
        both.reply(part.request_id, "the river")
    third = asyncio.create_task(both.other.post(TEXT, json=body, headers=headers))
    first, _ = await located(SLOT + 1, 0)
    assert first.idempotency_key == retried[0].idempotency_key != finished.idempotency_key
    both.locate(first, both.requests().index(retried[0]), SLOT + 1)
    assert (await third).text == (await again).text
    assert (await again).status_code == 200


async def test_the_parts_of_a_repetition_count_only_until_it_is_located(both: Ingresses) -> None:
    body, headers = text(n=3), {"idempotency-key": "k"}
    pending = both.start(TEXT, body, **headers)
    parts = [await both.next_request() for _ in range(3)]
    again = asyncio.create_task(both.other.post(TEXT, json=body, headers=headers))
    first, *_ = [await both.next_request() for _ in range(3)]
    assert both.other_front.admission.in_flight == 3
    both.locate(first, 0, SLOT + 1)
    await until(lambda: both.other_front.admission.in_flight == 1)
    assert not again.done()
    for part in parts:
        both.reply(part.request_id, "the river")
    assert (await again).text == (await pending).text


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_stream_with_first_events_is_repeated_once(
    both: Ingresses, monkeypatch: pytest.MonkeyPatch, *, is_silent: bool
) -> None:
    """The Responses API has events before any output, and no head is sent while the owner is silent."""
    body = {"model": NAME, "input": "Hello", "stream": True, "store": False}
    pending = both.start(RESPONSES, body, **{"idempotency-key": "k"})
    both.reply((await both.next_request()).request_id, "the river")
    whole = await pending
    if is_silent:
        monkeypatch.setattr("forebay.ingress.http.response.SILENT_S", 0)
    repeating = both.start(RESPONSES, body, **{"idempotency-key": "k"})
    both.locate(await both.next_request(), 0)
    again = await repeating
    assert (events_of(again), again.headers["idempotency-replayed"]) == (events_of(whole), "true")


async def test_a_repetition_is_read_as_the_first_request(both: Ingresses) -> None:
    """A client that repeats a request with the same `x-request-id` finds the newest one."""
    body, headers = text(**STREAM), {"idempotency-key": "k", "x-request-id": "order-7"}
    for count in (1, 2):
        pending = both.start(TEXT, body, **headers)
        request = await both.next_request()
        if count == 1:
            both.reply(request.request_id, "the river")
        else:
            both.locate(request, 0)
        whole = await pending
    assert (await resumed(both.other, "order-7")).text == whole.text
    last = event_ids(whole)[0]
    assert events_of(await resumed(both.other, "order-7", last)) == events_of(whole)[1:]


async def test_a_response_that_was_located_before_it_is_read_is_ready() -> None:
    stream = Stream(7)
    stream.locate(RequestLocated(request_id="r", partition=0, offset=0, owner_epoch=1, group=NAME, reply_key=7))
    ready = asyncio.ensure_future(stream.ready())
    await asyncio.sleep(0)
    assert ready.done()


async def test_a_key_with_another_body_is_refused(both: Ingresses) -> None:
    body = text(stream=False)
    pending = both.start(TEXT, body, **{"idempotency-key": "k"})
    request = await both.next_request()
    both.reply(request.request_id, "the river")
    await pending
    response = await repeated(both, text(stream=False, max_tokens=7), 0)
    assert error(response) == (409, "idempotency_key_reused")
    assert response.headers["x-should-retry"] == "false", "the official clients send a 409 again"
    (await both.other.delete(f"/v1/requests/{id_of(await pending)}")).raise_for_status()
    assert error(await repeated(both, body, 0)) == (404, "request_not_found")


@pytest.mark.parametrize("given", [[b""], [b"x" * 256], ["é".encode()], [b"a\tb"], [b"a", b"a"]])
async def test_a_malformed_key_is_refused(both: Ingresses, given: list[bytes]) -> None:
    headers = [(b"idempotency-key", value) for value in given]
    response = await both.other.post(TEXT, json=text(), headers=headers)
    assert error(response) == (400, "invalid_idempotency_key")
    assert not both.submissions()


async def test_a_key_depends_on_the_api_key(both: Ingresses) -> None:
    for secret in ("one", "two", "one"):
        pending = both.start(TEXT, text(), **{"idempotency-key": "k", "authorization": f"Bearer {secret}"})
        both.reply((await both.next_request()).request_id, "the river")
        await pending
    keys = [request.idempotency_key for request in both.submissions()]
    assert keys[0] == keys[2] != keys[1]
    assert len({request.body_hash for request in both.submissions()}) == 1


async def test_a_disconnection_does_not_end_the_request_of_a_repetition(both: Ingresses) -> None:
    """A client without a head is cancelled at once, unless its retry waits for the response, here or elsewhere."""
    body, headers = text(stream=False), {"idempotency-key": "k"}
    async with both.http_client(**HEADERS) as (client, _):
        pending = asyncio.create_task(client.post(TEXT, json=body, headers=headers))
        request = await both.next_request()
        again = both.start(TEXT, body, **headers)
        both.locate(await both.next_request(), 0)
        await until(lambda: both.requests(RequestResumed))
        views = both.front.slot.views
        await until(lambda: [view for view in views if view.caught_up.is_set()])
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
    await until(lambda: request.request_id not in both.group.replies)
    both.reply(request.request_id, "the river")
    assert (await again).status_code == 200
    assert not both.requests(RequestCancelled)


async def test_a_stored_response_is_the_same_at_every_ingress(both: Ingresses) -> None:
    pending = both.start(RESPONSES, {"model": NAME, "input": "Hello", "stream": True})
    request = await both.next_request()
    sent = both.emit_text(request.request_id, "the river")
    assert request.rendering is not None
    path = f"{RESPONSES}/{public_id(request.request_id, RequestLocation(0, 0))}"
    resumed = asyncio.create_task(both.other.get(path, params={"stream": "true", "starting_after": 1}))
    partial = (await both.other.get(path)).json()
    assert (partial["status"], partial["output"][0]["content"][0]["text"]) == ("in_progress", "the river")
    both.emit_text(request.request_id, " ran", first=sent)
    both.end(request.request_id, reason="stop", output=sent + 1)
    stream = (await pending).text
    assert stream.endswith((await resumed).text)
    assert len(event_ids(await pending)) == len(event_ids(await resumed)) + 2
    last = events(await pending)[-1]
    for client in (both.client, both.other):
        assert (await client.get(path)).json() == last["response"]
