"""The Responses API: bodies become chats, and output becomes the objects and events of OpenAI's types."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase, ResponseCreateParamsStreaming

from forebay.events.base import unpack_u32
from forebay.events.rendering import Rendering
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import RequestLocated, Usage
from forebay.ingress.errors import ApiError
from forebay.ingress.finder import RequestFinder
from forebay.ingress.formatter import ServingInfo, StreamEvent, WholeChoice
from forebay.ingress.http.responses import with_history
from forebay.ingress.openai.fields import parse
from forebay.ingress.parsers.deltas import DecodedLogprob, OutputDelta, ToolCallDelta, merge_deltas
from forebay.ingress.responses.body import ResponsesBody
from forebay.ingress.responses.formatter import ResponsesFormatter, response_of
from tests.harness.field_tables import rows
from tests.harness.sdk_types import validated
from tests.ingress.conftest import NAME, RESPONSES, Scene, make_scene
from tests.ingress.conftest import error as error_of

ID = "resp_1~2~0.1f"
SERVED = ServingInfo("r", "w1", 0, 1)
USAGE = Usage(prompt_tokens=9, output_tokens=4, cached_tokens=8)
FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
EVERYTHING: Any = {
    "instructions": "Be brief.",
    "metadata": {"order": "7"},
    "tools": [FUNCTION],
    "tool_choice": {"type": "function", "name": "weather"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "max_output_tokens": 50,
    "user": "u",
}


def body(**fields: Any) -> ResponsesBody:
    return parse(ResponsesBody, json.dumps({"model": NAME, "input": "Hello there", **fields}).encode())


def formatter(**fields: Any) -> ResponsesFormatter:
    options = body(**fields).options
    return ResponsesFormatter(Rendering(api="responses", model=NAME, created_s=1_700_000_000, options=options), ID)


def read(events: list[StreamEvent]) -> list[Any]:
    """Return events as the types of OpenAI's client. Raises if one does not match."""
    found = [validated(ResponseStreamEvent, msgspec.json.decode(event.data)) for event in events]
    assert [event.type for event in found] == [event.name for event in events]
    return found


def streamed(deltas: list[OutputDelta], reason: str = "stop", **fields: Any) -> list[Any]:
    made = formatter(**fields)
    events = made.begin()
    for delta in deltas:
        events += made.delta(0, delta)
    return read([*events, *made.close(0, reason, SERVED), *made.finish(USAGE)])


LOGPROB = DecodedLogprob(b" yes", -0.5, (DecodedLogprob(b" yes", -0.5), DecodedLogprob(b"\xe2", -2.0)))
texts = st.text(min_size=1, max_size=5)
text_deltas = (
    st.builds(OutputDelta, content=texts, logprobs=st.sampled_from([(), (LOGPROB,)]))
    | st.builds(OutputDelta, logprobs=st.just((LOGPROB,)))
    | st.builds(OutputDelta, reasoning=texts)
)


def with_calls(pieces: list[OutputDelta | list[str]]) -> list[OutputDelta]:
    """Return deltas in which each list of arguments is a call."""
    found: list[OutputDelta] = []
    for index, piece in enumerate(pieces):
        if isinstance(piece, OutputDelta):
            found.append(piece)
        else:
            calls = [ToolCallDelta(index, "weather", f"call_{index}")]
            calls += [ToolCallDelta(index, arguments=text) for text in piece]
            found += [OutputDelta(calls=(call,)) for call in calls]
    return found


deltas = st.lists(text_deltas | st.lists(texts, max_size=3), max_size=10).map(with_calls)


@given(deltas=deltas, reason=st.sampled_from(["stop", "tool_calls", "length", "content_filter"]))
def test_every_event_has_the_official_type_and_adds_up_to_the_whole(deltas: list[OutputDelta], reason: str) -> None:
    events = streamed(deltas, reason, **EVERYTHING)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    response = events[-1].response
    made = formatter(**EVERYTHING)
    whole = json.loads(made.whole([WholeChoice(tuple(deltas), reason, SERVED)], USAGE))
    assert validated(Response, whole) == response
    merged = merge_deltas(deltas)
    assert response.output_text == merged.content
    arguments = [item.arguments for item in response.output if item.type == "function_call"]
    assert arguments == [call.arguments for call in merged.calls]
    for index, item in enumerate(response.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert (own[0].type, own[-1].type) == ("response.output_item.added", "response.output_item.done")
        assert own[-1].item == item
        assert response_of(item.id) == ID
        added = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert added == (item.arguments if item.type == "function_call" else item.content[0].text)


def test_events_come_in_the_official_order() -> None:
    call = ToolCallDelta(0, "weather", "call_0", "{}")
    found = streamed([OutputDelta(reasoning="Hm"), OutputDelta("Yes"), OutputDelta(calls=(call,))], "tool_calls")
    assert [event.type.removeprefix("response.") for event in found] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    usage = found[-1].response.usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens) == (9, 8, 4)
    assert (usage.total_tokens, usage.output_tokens_details.reasoning_tokens) == (13, 1)


@pytest.mark.parametrize(
    ("reason", "why"), [("length", "max_output_tokens"), ("content_filter", "content_filter"), ("stop", None)]
)
def test_an_end_before_the_end_makes_a_response_incomplete(reason: str, why: str | None) -> None:
    *_, last = streamed([OutputDelta("Yes")], reason)
    status = "completed" if why is None else "incomplete"
    assert (last.type, last.response.status) == (f"response.{status}", status)
    assert (last.response.incomplete_details and last.response.incomplete_details.reason) == why
    assert last.response.output[0].status == status


def test_a_response_without_text_has_an_empty_message() -> None:
    (message,) = streamed([OutputDelta()])[-1].response.output
    assert (message.type, message.content[0].text) == ("message", "")


def test_reasoning_has_at_most_the_tokens_of_the_output() -> None:
    # The last token's text ends with a character that was kept back because a tag may begin with it.
    usage = streamed([OutputDelta(reasoning="x")] * (USAGE.output_tokens + 1))[-1].response.usage
    assert usage.output_tokens_details.reasoning_tokens == USAGE.output_tokens


def test_an_error_ends_a_stream_with_a_failed_response() -> None:
    made = formatter()
    events = [*made.begin(), *made.delta(0, OutputDelta("Yes"))]
    *_, last = read([*events, *made.error(ApiError(503, "no_worker", "no worker"))])
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == ("server_error", "no_worker: no worker")
    assert last.response.output[0].content[0].text == "Yes"


def test_log_probabilities_belong_to_the_text_of_their_tokens() -> None:
    tag, first, last = (DecodedLogprob(text, -1.0) for text in (b"</think>", b"\xc3", b"\xa9"))
    outputs = [OutputDelta(logprobs=(one,)) for one in (tag, first)]
    outputs += [OutputDelta("\xe9", logprobs=(last,)), OutputDelta(" yes", logprobs=(LOGPROB,))]
    events = streamed([*outputs, OutputDelta(logprobs=(tag,))], **EVERYTHING)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [[one.token for one in delta.logprobs] for delta in deltas] == [["\ufffd", "\ufffd"], [" yes"]]
    part = events[-1].response.output[0].content[0]
    assert [one.bytes for one in part.logprobs] == [[0xC3], [0xA9], [*b" yes"]]
    assert part.logprobs[2].top_logprobs[1].bytes == [0xE2]


def test_calls_may_be_interleaved() -> None:
    parts = ((0, "a", '{"x":'), (1, "b", ""), (0, "", "1"), (1, "", "{}"), (0, "", "}"))
    outputs = [OutputDelta(calls=(ToolCallDelta(at, name, name, text),)) for at, name, text in parts]
    events = streamed([*outputs[:3], OutputDelta("Hm"), *outputs[3:]], "tool_calls")
    for index, item in enumerate(events[-1].response.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[-1].item == item, "an item has no event after it is done"
    assert [getattr(item, "arguments", "") for item in events[-1].response.output] == ['{"x":1}', "{}", ""]


def test_the_parts_of_a_long_call_are_joined_in_linear_time() -> None:
    outputs = [OutputDelta(calls=(ToolCallDelta(0, arguments="x" * 20),))] * 200_000
    assert len(merge_deltas(outputs).calls[0].arguments) == 20 * len(outputs)


def test_a_background_response_is_queued_until_its_first_output() -> None:
    events = streamed([OutputDelta(), OutputDelta("Yes")], background=True)
    assert [event.type.removeprefix("response.") for event in events[:3]] == ["created", "queued", "in_progress"]
    assert [event.response.status for event in events[:3]] == ["queued", "queued", "in_progress"]


def test_every_field_of_the_official_client_is_known() -> None:
    known = {name for name, _, _ in rows(ResponsesBody)}
    official = {*ResponseCreateParamsBase.__annotations__, *ResponseCreateParamsStreaming.__annotations__}
    assert official <= known


IMAGE = {"type": "input_image", "image_url": "data:,x"}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {"type": "reasoning", "id": "rs_0_x", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One moment."}]},
    {"type": "function_call", "call_id": "call_0", "name": "weather", "arguments": "{}", "status": "completed"},
    {"type": "function_call_output", "call_id": "call_0", "output": "14 degrees"},
    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "status": "completed"},
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, IMAGE]},
]


def test_items_become_the_messages_of_a_chat() -> None:
    found = body(input=CONVERSATION, instructions="Be brief.")
    call = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    assert found.completion.chat() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "One moment.",
            "tool_calls": [call],
            "reasoning_content": "Hm",
            "reasoning": "Hm",
        },
        {"role": "tool", "content": "14 degrees", "tool_call_id": "call_0"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]},
    ]
    (ref,) = found.completion.media()
    renamed = found.renamed(ApiError(400, "media_invalid", f"{ref.where} is no image", ref.where))
    assert renamed.param == "input[6].content[1].image_url"
    assert renamed.message == f"{renamed.param} is no image"


def test_a_message_after_a_call_is_a_message_of_its_own() -> None:
    call = {"type": "function_call", "call_id": "call_0", "name": "weather", "arguments": "{}"}
    first, second = body(input=[call, call, {"role": "assistant", "content": "Done."}]).completion.chat()
    assert (len(first["tool_calls"]), first["content"], second["content"]) == (2, None, "Done.")


def test_only_a_stored_response_outlives_its_connection_and_keeps_its_input() -> None:
    assert (body().outlives, json.loads(body().conversation)) == (True, [{"role": "user", "content": "Hello there"}])
    assert (body(store=False).outlives, body(store=False).conversation) == (False, "")


def test_a_conversation_that_is_too_long_is_refused() -> None:
    with pytest.raises(ApiError, match="10,000 items"):
        _ = body(input=[{"role": "user", "content": "a"}] * 10_000).completion
    with pytest.raises(ApiError, match="set store to false"):
        _ = body(input="a" * (8 << 20)).conversation


class Rejected(NamedTuple):
    fields: dict[str, Any]
    param: str
    code: str = "unsupported_parameter"


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


@pytest.mark.parametrize(
    "case",
    [
        *(Rejected({name: "x"}, name) for name in ("conversation", "prompt", "truncation", "service_tier")),
        Rejected({"max_tool_calls": 3}, "max_tool_calls"),
        Rejected({"foo": 1}, "foo", "unknown_parameter"),
        Rejected({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        Rejected({"include": ["file_search_call.results"]}, "include[0]"),
        Rejected({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        Rejected({"stream_options": {}}, "stream_options", "invalid_value"),
        Rejected({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        Rejected({"text": {"verbosity": "max"}}, "text.verbosity", "invalid_value"),
        Rejected({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "invalid_value"),
        Rejected({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema", "invalid_value"),
        Rejected({"text": {"format": {"type": "text", "name": "x"}}}, "text.format.name", "invalid_value"),
        Rejected({"tools": [{"type": "web_search"}]}, "tools[0]"),
        Rejected({"tools": [FUNCTION, {"type": "mcp", "server_label": "x"}]}, "tools[1]"),
        Rejected({"tools": [{**FUNCTION, "foo": 1}]}, "tools[0].foo", "unknown_parameter"),
        Rejected({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_value"),
        Rejected({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        Rejected({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        Rejected(item(type="web_search_call", id="ws_1"), "input[0]"),
        Rejected(item(role="user", content=[{"type": "input_file", "file_id": "x"}]), "input[0].content[0]"),
        Rejected(item(role="user", content=[{"type": "input_text"}]), "input[0].content[0].text", "invalid_value"),
        Rejected(item(role="user", content=[]), "input[0].content", "invalid_value"),
        Rejected(item(role="user", content="x", output="y"), "input[0].output", "invalid_value"),
        Rejected(item(type="reasoning", role="assistant"), "input[0].role", "invalid_value"),
        Rejected(
            item(role="user", content=[{"type": "input_text", "text": "x", "image_url": "y"}]),
            "input[0].content[0].image_url",
            "invalid_value",
        ),
        Rejected(item(role="user", content=4), "input[0].content", "invalid_value"),
        Rejected(item(role="user", content="x", foo=1), "input[0].foo", "unknown_parameter"),
        Rejected(item(type="function_call_output", call_id="c", output="x"), "input[0].call_id", "invalid_value"),
        Rejected(item(type="reasoning", encrypted_content="x"), "input[0].encrypted_content"),
    ],
    ids=lambda case: json.dumps(case.fields)[:60],
)
def test_what_is_not_supported_is_refused_by_its_name(case: Rejected) -> None:
    with pytest.raises(ApiError) as raised:
        _ = body(**case.fields).completion
    assert (raised.value.status, raised.value.code, raised.value.param) == (400, case.code, case.param)
    assert case.param in raised.value.message


async def test_a_response_is_created_and_streamed(scene: Scene) -> None:
    pending = scene.start(RESPONSES, {"model": NAME, "input": "Hello there", "metadata": {"order": "7"}})
    request = await scene.next_request()
    scene.reply(request.request_id, " the river", reason="stop", cached=4)
    whole = validated(Response, (await pending).json())
    assert (whole.output_text, whole.status, whole.metadata) == (" the river", "completed", {"order": "7"})
    assert whole.usage is not None
    assert whole.usage.input_tokens_details.cached_tokens == 4
    pending = scene.start(RESPONSES, {"model": NAME, "input": "Hello there", "stream": True})
    request = await scene.next_request()
    scene.reply(request.request_id, " the river")
    found = [line.split("\n") for line in (await pending).text.split("\n\n") if line]
    events = read(
        [StreamEvent(data.removeprefix("data: ").encode(), name.removeprefix("event: ")) for _, name, data in found]
    )
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == " the river"
    assert len({line[0] for line in found}) == len(found)


async def test_errors_of_preparation_have_the_names_of_the_body(scene: Scene) -> None:
    given = {"model": NAME, "input": "Hello", "max_output_tokens": 1_000_000}
    error = (await scene.client.post(RESPONSES, json=given)).json()["error"]
    assert error["param"] == "max_output_tokens"
    assert "max_output_tokens 1000000 exceeds" in error["message"]
    given = {"model": NAME, "input": [{"role": "user", "content": [IMAGE]}]}
    error = (await scene.client.post(RESPONSES, json=given)).json()["error"]
    assert (error["param"], error["code"]) == ("input[0].content[0].image_url", "unsupported_parameter")


async def test_an_error_quotes_the_words_of_the_client(scene: Scene) -> None:
    tools = [
        {"type": "function", "name": name, "parameters": {"$defs": {"max_tokens": {"type": kind}}}}
        for name, kind in (("a", "string"), ("b", "null"))
    ]
    given = {"model": NAME, "input": "Hello", "tools": tools, "tool_choice": "required"}
    error = (await scene.client.post(RESPONSES, json=given)).json()["error"]
    assert error["param"] == "tools"
    assert "'max_tokens' has two definitions" in error["message"]


@pytest.fixture
async def client(scene: Scene) -> AsyncIterator[openai.AsyncOpenAI]:
    async with scene.openai_client() as made:
        yield made


async def finished(scene: Scene, client: openai.AsyncOpenAI, text: str = " the river", **fields: Any) -> Any:
    """Return a complete response to a request with these fields."""
    given: dict[str, Any] = {"model": NAME, "input": "Hello there", **fields}
    pending = asyncio.create_task(client.responses.create(**given))
    request = await scene.next_request()
    scene.reply(request.request_id, text, reason="stop")
    return await pending


async def test_a_stored_response_is_read_continued_and_deleted(scene: Scene, client: openai.AsyncOpenAI) -> None:
    first = await finished(scene, client)
    assert await client.responses.retrieve(first.id) == first
    second = await finished(scene, client, " ran", input="And then?", previous_response_id=first.id, instructions="x")
    third = await finished(scene, client, input="Go on", previous_response_id=second.id)
    (*_, request) = scene.requests(RequestSubmitted)
    prompt = scene.model.decode(list(unpack_u32(request.token_ids)))
    places = [prompt.index(words) for words in ("Hello there", " the river", "And then?", " ran", "Go on")]
    assert places == sorted(places)
    page = await client.responses.input_items.list(third.id, limit=2, order="asc")
    listed = [validated(ResponseItem, item.to_dict()) async for item in page]
    texts = [item.content[0].text for item in listed]
    assert texts == ["Hello there", " the river", "And then?", " ran", "Go on"]
    assert len({item.id for item in listed}) == len(listed)
    assert listed[1].id == first.output[0].id
    await client.responses.delete(first.id)
    for gone in (first.id, "resp_1~0000000000000001~0.0", "resp_1", request.request_id):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(gone)
    with pytest.raises(openai.BadRequestError, match="Previous response with id"):
        await client.responses.create(model=NAME, input="x", previous_response_id=first.id)
    for query in ("order=up", "limit=0", "limit=101", "after=msg_1"):
        found = await scene.client.get(f"{RESPONSES}/{second.id}/input_items?{query}")
        assert (found.status_code, found.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_items_with_one_id_are_listed_once_each(scene: Scene, client: openai.AsyncOpenAI) -> None:
    items: Any = [{"role": "user", "content": text, "id": "msg_x"} for text in "abc"]
    response = await finished(scene, client, input=items)
    page = await client.responses.input_items.list(response.id, limit=1, order="asc")
    listed: list[Any] = [item async for item in page]
    assert [item.content[0].text for item in listed] == ["a", "b", "c"]
    assert listed[0].id == "msg_x"


async def test_a_response_is_not_continued_by_another_model(scene: Scene, client: openai.AsyncOpenAI) -> None:
    first = await finished(scene, client)
    async with make_scene() as other:
        with pytest.raises(ApiError, match="is of the model") as raised:
            await with_history(body(previous_response_id=first.id), RequestFinder(scene.models), other.group, "")
    assert (raised.value.status, raised.value.param) == (400, "previous_response_id")


@pytest.mark.parametrize("step", ["stored", "read"])
async def test_an_expired_previous_response_is_named(
    scene: Scene, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def expired(*_: object) -> None:
        raise ApiError(410, "answer_expired", "the answer has expired")

    given = {"model": NAME, "input": "Hello", "previous_response_id": (await finished(scene, client)).id}
    monkeypatch.setattr(f"forebay.ingress.http.responses.{step}", expired)
    response = await scene.client.post(RESPONSES, json=given)
    assert (*error_of(response), response.json()["error"]["param"]) == (410, "answer_expired", "previous_response_id")


async def test_a_response_that_is_not_stored_is_unknown(scene: Scene, client: openai.AsyncOpenAI) -> None:
    response = await finished(scene, client, store=False)
    with pytest.raises(openai.NotFoundError, match="Response with id"):
        await client.responses.retrieve(response.id)


async def test_a_repeated_background_response_is_the_first_one(scene: Scene, client: openai.AsyncOpenAI) -> None:
    given: dict[str, Any] = {"model": NAME, "input": "Hello", "background": True}
    given["extra_headers"] = {"Idempotency-Key": "k"}
    first = asyncio.create_task(client.responses.create(**given))
    request = await scene.next_request()
    scene.emit_text(request.request_id, " the river")
    second = asyncio.create_task(client.responses.create(**given))
    again = await scene.next_request()
    located = RequestLocated(
        request_id=again.request_id, partition=0, offset=0, owner_epoch=1, reply_key=again.reply_key
    )
    scene.send(located)
    assert (await second).id == (await first).id
    scene.end(request.request_id)


async def test_an_item_reference_stands_for_the_item(scene: Scene, client: openai.AsyncOpenAI) -> None:
    first = await finished(scene, client)
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    again = await finished(
        scene,
        client,
        input=[{"role": "user", "content": "Hello there"}, reference, {"role": "user", "content": "And then?"}],
    )
    listed: list[Any] = [item async for item in await client.responses.input_items.list(again.id)]
    assert [item.content[0].text for item in listed] == ["And then?", " the river", "Hello there"]
    with pytest.raises(openai.NotFoundError, match="Item with id"):
        await client.responses.create(model=NAME, input=[{"type": "item_reference", "id": "msg_7_" + first.id}])


async def test_a_background_response_is_polled_streamed_and_cancelled(scene: Scene, client: openai.AsyncOpenAI) -> None:
    queued = await client.responses.create(model=NAME, input="Hello", background=True)
    assert (queued.status, queued.background) == ("queued", True)
    request = await scene.next_request()
    sent = scene.emit_text(request.request_id, " the river")
    await until_status(client, queued.id, "in_progress", " the river")
    with pytest.raises(openai.BadRequestError, match="has not finished"):
        await client.responses.create(model=NAME, input="x", previous_response_id=queued.id)
    stream = await client.responses.retrieve(queued.id, stream=True, starting_after=3)
    assert (await anext(aiter(stream))).sequence_number == 4
    scene.emit_text(request.request_id, " ran", first=sent)
    scene.end(request.request_id, reason="stop", output=sent + 1)
    events: list[Any] = [event async for event in stream]
    assert events[-1].type == "response.completed"
    assert await client.responses.retrieve(queued.id) == events[-1].response
    other: Any = await client.responses.create(model=NAME, input="Hello", background=True, stream=True)
    created: Any = await anext(aiter(other))
    request = await scene.next_request()
    cancelling = asyncio.create_task(client.responses.cancel(created.response.id))
    await scene.cancelled()
    scene.refuse(request.request_id, 499, "cancelled")
    assert (await cancelling).status == "cancelled"
    last: Any = [event async for event in other][-1]
    assert (last.type, last.response.status) == ("response.failed", "cancelled")
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        await client.responses.cancel((await finished(scene, client)).id)


async def until_status(client: openai.AsyncOpenAI, response_id: str, status: str, text: str) -> None:
    """Poll a response until it has this status and text."""
    while True:
        response = await client.responses.retrieve(response_id)
        validated(Response, response.to_dict())
        if (response.status, response.output_text) == (status, text):
            return


async def test_a_stored_response_that_cannot_be_read_is_an_error(
    scene: Scene, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued = await client.responses.create(model=NAME, input="Hello", background=True)
    request = await scene.next_request()
    scene.emit_text(request.request_id, " the river")
    monkeypatch.setattr("forebay.ingress.streams.VIEWS_MAX", 0)
    assert error_of(await scene.client.get(f"{RESPONSES}/{queued.id}"))[:2] == (429, "too_many_readers")


async def test_a_failed_response_is_read(scene: Scene, client: openai.AsyncOpenAI) -> None:
    queued = await client.responses.create(model=NAME, input="Hello", background=True)
    request = await scene.next_request()
    scene.emit_text(request.request_id, " the river")
    scene.refuse(request.request_id, 502, "worker_lost", attempt=1)
    response = await client.responses.retrieve(queued.id)
    while response.status != "failed":
        response = await client.responses.retrieve(queued.id)
    assert response.error is not None
    assert (response.error.code, response.output_text) == ("server_error", " the river")
    assert response.error.message.startswith("worker_lost: ")


@pytest.mark.parametrize(
    "query",
    [
        "stream=true&starting_after=-1",
        "stream=true&starting_after=x",
        "starting_after=1",
        "stream=true&starting_after=99",
        "include=message.output_text.logprobs",  # which the request did not include
        "include[]=file_search_call.results",
    ],
)
async def test_an_invalid_position_or_output_is_refused(scene: Scene, query: str) -> None:
    async with scene.openai_client() as client:
        response = await finished(scene, client)
    found = await scene.client.get(f"{RESPONSES}/{response.id}?{query}")
    error = found.json()["error"]
    assert (found.status_code, error["param"].partition("[")[0]) == (
        400,
        re.findall(r"starting_after|include", query)[0],
    )


async def test_a_background_response_with_a_key_waits_for_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the owner knows whether the key is that of an earlier request."""
    monkeypatch.setattr("forebay.ingress.http.response.GRACE_S", 0.0)
    async with make_scene(timeout_s=0.05) as scene:
        given = {"model": NAME, "input": "Hello", "background": True}
        response = await scene.start(RESPONSES, given, **{"idempotency-key": "k"})
    assert error_of(response) == (504, "deadline_exceeded")
