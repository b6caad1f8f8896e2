"""Anthropic's Messages API: bodies become chats, and output becomes the blocks and events of that API."""

import asyncio
import json
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from pydantic_core import from_json

from forebay.events.rendering import Rendering
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import Usage
from forebay.events.trace_ids import TraceIds
from forebay.ingress.body_limits import BodyLimits
from forebay.ingress.errors import ApiError
from forebay.ingress.formatter import ServingInfo, StreamEvent, WholeChoice
from forebay.ingress.messages.body import MessagesBody
from forebay.ingress.messages.formatter import MessagesFormatter
from forebay.ingress.openai.fields import parse
from forebay.ingress.openai.requests import PARTS_MAX
from forebay.ingress.parsers.deltas import OutputDelta, ToolCallDelta
from tests.ingress.conftest import COUNT_TOKENS, HELLO, MESSAGES, MODULE_LOOP, NAME, Scene, make_scene

ID = "msg_1~2~0.1f"
SERVED = ServingInfo("r", "w1", 0, 1)
USAGE = Usage(prompt_tokens=9, output_tokens=4, cached_tokens=8)
WEATHER = {"name": "weather", "description": "Weather.", "input_schema": {"type": "object"}}


def plain(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": HELLO, "max_tokens": 50, **fields}


def body(**fields: Any) -> MessagesBody:
    return parse(MessagesBody, json.dumps(plain(**fields)).encode())


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def formatter() -> MessagesFormatter:
    return MessagesFormatter(Rendering(api="messages", model=NAME, created_s=0, prompt_tokens=9), ID)


def read(events: list[StreamEvent]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [msgspec.json.decode(event.data) for event in events]
    assert [event["type"] for event in found] == [event.name for event in events]
    return found


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events of a stream add up to, as Anthropic's clients do. Raises for a wrong order."""
    message: dict[str, Any] = events[0]["message"]
    arguments: dict[int, str] = {}  # of each open block
    for event in events[1:]:
        blocks: list[Any] = message["content"]
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(blocks)
                assert all(blocks[other]["type"] == "tool_use" for other in arguments)
                blocks.append(block)
                arguments[index] = ""
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index in arguments
                match delta:
                    case {"type": "input_json_delta", "partial_json": text}:
                        arguments[index] += text
                    case {"type": "signature_delta", "signature": text}:
                        blocks[index]["signature"] = text
                    case {"type": "text_delta" | "thinking_delta", **output}:
                        ((name, text),) = output.items()
                        blocks[index][name] += text
            case {"type": "content_block_stop", "index": index}:
                if text := arguments.pop(index):
                    blocks[index]["input"] = arguments_of(text)
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                assert not arguments
                message |= {**delta, "usage": usage}
    assert events[-1] == {"type": "message_stop"}
    return message


def arguments_of(text: str) -> dict[str, Any]:
    try:
        found = from_json(text, allow_partial=True)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


texts = st.text(min_size=1, max_size=5)
calls = st.dictionaries(texts, texts | st.integers(), max_size=2)


@given(
    outputs=st.lists(st.builds(OutputDelta, texts) | st.builds(OutputDelta, reasoning=texts), max_size=8),
    arguments=st.lists(calls, max_size=3),
    reason=st.sampled_from(["stop", "tool_calls", "length", "content_filter"]),
)
def test_the_events_of_a_stream_add_up_to_the_whole(
    outputs: list[OutputDelta], arguments: list[dict[str, Any]], reason: str
) -> None:
    outputs.insert(0, OutputDelta())
    for index, given_ in enumerate(arguments):
        text = json.dumps(given_)
        parts = ["", *([text[:3], text[3:]] if given_ else [])]  # some parsers emit nothing for no arguments
        first, *others = (ToolCallDelta(index, arguments=part) for part in parts)
        named = replace(first, name="weather", call_id=f"call-{index}")
        # Each call continues after the begin of the next one, and among text and reasoning.
        outputs[2 * index + 1 : 2 * index + 1] = [OutputDelta(calls=(call,)) for call in (named, *others)]
    stream = formatter()
    events = [event for output in outputs for event in stream.delta(0, output)]
    found = message_of(read([*events, *stream.close(0, reason, SERVED), *stream.finish(USAGE)]))
    whole = json.loads(formatter().whole([WholeChoice(outputs, reason, SERVED)], USAGE))
    assert found == whole
    assert [block["input"] for block in found["content"] if block["type"] == "tool_use"] == arguments
    assert found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"] == 9


def test_calls_may_be_interleaved() -> None:
    parts = ((0, "a", '{"x":'), (1, "b", ""), (0, "", "1"), (1, "", "{}"), (0, "", "}"))
    outputs = [OutputDelta(calls=(ToolCallDelta(at, name, name, text),)) for at, name, text in parts]
    outputs.insert(3, OutputDelta("Hm"))
    stream = formatter()
    events = [event for output in outputs for event in stream.delta(0, output)]
    found = message_of(read([*events, *stream.close(0, "tool_calls", SERVED), *stream.finish(USAGE)]))
    assert found["content"] == [
        {"type": "tool_use", "id": "a", "name": "a", "input": {"x": 1}},
        {"type": "tool_use", "id": "b", "name": "b", "input": {}},
        {"type": "text", "text": "Hm"},
    ]


def test_the_events_come_in_the_official_order() -> None:
    stream = formatter()
    outputs = [OutputDelta(reasoning="Hm"), OutputDelta("Yes"), OutputDelta(calls=(ToolCallDelta(0, "f", "c", "{}"),))]
    events = [event for output in outputs for event in stream.delta(0, output)]
    found = read([*events, *stream.close(0, "tool_calls", SERVED), *stream.finish(USAGE)])
    assert found[0]["message"]["usage"] == {
        "input_tokens": 9,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
    }
    assert [one.get("delta", {}).get("type") or one["type"] for one in found] == [
        "message_start",
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    (failed,) = stream.error(ApiError(503, "no_worker", "no worker"))
    assert failed.name == "error"
    assert json.loads(failed.data) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "no worker", "details": {"error_code": "no_worker"}},
        "request_id": ID,
    }


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"a": 1, "b": "Par', {"a": 1}),
        ("", {}),
        ("[1]", {"arguments": "[1]"}),
        ("none", {"arguments": "none"}),
    ],
)
def test_arguments_that_are_no_object_reach_the_client(arguments: str, found: dict[str, Any]) -> None:
    output = OutputDelta(calls=(ToolCallDelta(0, "weather", "c", arguments),))
    whole = json.loads(formatter().whole([WholeChoice([output], "length", SERVED)], USAGE))
    assert whole["content"] == [{"type": "tool_use", "id": "c", "name": "weather", "input": found}]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}, IMAGE]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "s"},
            {"type": "text", "text": "One moment."},
            {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Köln"}, "caller": {"type": "direct"}},
            {"type": "tool_use", "id": "d", "name": "weather", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [IMAGE], "is_error": True},
            {"type": "tool_result", "tool_use_id": "d"},
            {"type": "text", "text": "And now?"},
        ],
    },
    {"role": "system", "content": "Be kind."},
    {"role": "assistant", "content": "The"},
]


def test_blocks_become_the_messages_of_a_chat() -> None:
    found = body(messages=CONVERSATION, system=[{"type": "text", "text": "Be brief."}], stop_sequences=["."])
    chat = found.completion
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": text}}
        for name, text in (("c", '{"city":"Köln"}'), ("d", "{}"))
    ]
    assert chat.chat() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "image"}]},
        {
            "role": "assistant",
            "content": "One moment.",
            "reasoning_content": "Hm",
            "reasoning": "Hm",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "Error: "}, {"type": "image"}]},
        {"role": "tool", "tool_call_id": "d", "content": ""},
        {"role": "user", "content": "And now?"},
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "The"},
    ]
    assert [(ref.url, found.own_name(ref.where)) for ref in chat.media()] == [
        ("data:image/png;base64,AAAA", "messages[0].content[1].source"),
        ("data:image/png;base64,AAAA", "messages[2].content[0].content[0].source"),
    ]
    assert (chat.continue_final_message, chat.stop_strings, chat.size_bytes) == (True, ["."], found.size_bytes)


def test_all_blocks_count_in_their_limit() -> None:
    text = {"type": "text", "text": "x"}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text] * PARTS_MAX}
    for fields in (user(result), {"system": [text] * PARTS_MAX, **user(text)}):
        with pytest.raises(ApiError, match=f"{PARTS_MAX + 1:,} blocks"):
            body(**fields)


def test_images_do_not_count_in_the_limit_of_text() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 5_000}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [image, {"type": "text", "text": "x" * 5_000}]}
    limits = BodyLimits(text_bytes_max=6_000, takes_media=True)
    limits.require(json.dumps(user(image, result)).encode())
    with pytest.raises(ApiError, match="without its images"):
        limits.require(json.dumps(user(image, result, {"type": "text", "text": "x" * 1_000})).encode())


@pytest.mark.parametrize(
    ("choice", "tools", "forced", "parallel"),
    [
        ({"type": "auto"}, 1, None, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, 1, None, False),
        ({"type": "any"}, 1, "", True),
        ({"type": "tool", "name": "weather"}, 1, "weather", False),
        ({"type": "none"}, 0, None, True),
    ],
)
def test_a_tool_choice_is_that_of_a_chat(choice: Any, tools: int, forced: str | None, *, parallel: bool) -> None:
    found = body(tools=[WEATHER], tool_choice=choice).completion.choice
    assert (len(found.tools), found.forced, found.parallel) == (tools, forced, parallel)


SWITCHABLE, ALWAYS, NEVER = "{% if enable_thinking %}<think>{% endif %}</think>", "</think>", "{{ messages }}"


@pytest.mark.parametrize(
    ("kind", "template", "arguments"),
    [
        ("enabled", SWITCHABLE, {"enable_thinking": True}),
        ("disabled", SWITCHABLE, {"enable_thinking": False}),
        ("adaptive", SWITCHABLE, {}),
        ("enabled", ALWAYS, {}),
        ("disabled", ALWAYS, None),
        ("enabled", NEVER, None),
        ("disabled", NEVER, {}),
    ],
)
def test_thinking_depends_on_the_chat_template(kind: str, template: str, arguments: dict[str, Any] | None) -> None:
    chat = body(thinking={"type": kind}).completion
    if arguments is None:
        with pytest.raises(ApiError, match=f"does not support the type '{kind}'"):
            chat.template_arguments(template)
    else:
        assert chat.template_arguments(template) == arguments


@pytest.fixture(scope="module")
def admin_token() -> str:
    return ""


def shape(response: httpx.Response) -> tuple[int, str, str]:
    """Return status, type and code of an error."""
    found = response.json()
    assert (set(found), found["type"]) == ({"type", "error", "request_id"}, "error")
    return response.status_code, found["error"]["type"], found["error"]["details"]["error_code"]


FORM = {"type": "json_schema", "schema": {"type": "object"}}


class Refused(NamedTuple):
    fields: dict[str, Any]
    message: str
    code: str = "unsupported_parameter"


@MODULE_LOOP
@pytest.mark.parametrize(
    "case",
    [
        Refused({"max_tokens": 0}, "max_tokens: ", "invalid_value"),
        Refused({"max_tokens": None}, "max_tokens: ", "invalid_value"),
        Refused({"temperature": 1.5}, "temperature: ", "invalid_value"),
        Refused({"foo": 1}, "'foo'", "unknown_parameter"),
        Refused({"container": "x"}, "container is"),
        Refused({"mcp_servers": [{}]}, "mcp_servers is"),
        Refused({"nvext": {"extra_fields": ["worker_id"]}}, "nvext.extra_fields is"),
        Refused({"thinking": {"type": "between_tools"}}, "thinking.type: ", "invalid_value"),
        Refused({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]: tools of type bash_20250124 "),
        Refused({"tools": [{"name": "x"}]}, "tools[0].input_schema is missing", "invalid_value"),
        Refused({"tool_choice": {"type": "any"}}, "tool_choice is any, but", "invalid_value"),
        Refused({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name is", "invalid_value"),
        Refused({"tool_choice": {"type": "auto", "name": "x"}}, "tool_choice.name is not allowed", "invalid_value"),
        Refused(
            {"tool_choice": {"type": "none", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use is not",
            "invalid_value",
        ),
        Refused(
            {"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens is not", "invalid_value"
        ),
        Refused(
            {
                "tools": [
                    {"name": name, "input_schema": {"$defs": {"reasoning_effort": {"type": kind}}}}
                    for name, kind in (("a", "string"), ("b", "null"))
                ],
                "tool_choice": {"type": "any"},
            },
            "tools: 'reasoning_effort' has two definitions",
            "invalid_value",
        ),
        Refused(user({"type": "tool_result", "tool_use_id": "c"}), "[0].tool_use_id: no earlier", "invalid_value"),
        Refused(
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "any"},
                "output_config": {"format": FORM},
            },
            "tool_choice and output_config.format are",
            "invalid_value",
        ),
        Refused(user({"type": "document", "source": {"type": "text"}}), "content[0]: blocks of type document are"),
        Refused(user({"type": "thinking", "thinking": "x"}), "messages[0].content[0]: blocks of type thinking "),
        Refused(user({"type": "text"}), "messages[0].content[0].text is missing", "invalid_value"),
        Refused(user({"type": "text", "text": "x", "id": "y"}), "messages[0].content[0].id is not", "invalid_value"),
        Refused(user({"type": "text", "text": "x", "y": 1}), "'messages[0].content[0].y'", "unknown_parameter"),
        Refused(
            user({"type": "text", "text": "x", "is_error": True, "thinking": "y", "name": "y", "tool_use_id": "y"}),
            "messages[0].content[0].thinking is not",
            "invalid_value",
        ),
        Refused(user(), "messages[0].content is empty", "invalid_value"),
        Refused(
            user({"type": "image", "source": {"type": "base64", "media_type": "x", "data": "x", "url": "x"}}),
            "content[0].source.url is not allowed",
            "invalid_value",
        ),
        Refused(user(IMAGE), "messages[0].content[0].source: this model does not support images"),
        Refused(
            user({"type": "image", "source": {"type": "file"}}),
            "content[0].source: sources of type file",
        ),
        Refused(
            {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "messages[1].content[0]: blocks of type redacted_thinking",
        ),
        Refused({"messages": [*HELLO, {"role": "assistant", "content": ""}]}, "the last message has", "invalid_value"),
        Refused({"model": "x"}, "'x'", "model_not_found"),
        Refused({"max_tokens": 1 << 20}, "max_tokens 1048576 exceeds the context", "context_length_exceeded"),
    ],
    ids=lambda case: json.dumps(case.fields)[:60],
)
async def test_invalid_bodies_get_an_error_in_the_format_of_the_api(shared_scene: Scene, case: Refused) -> None:
    response = await shared_scene.client.post(MESSAGES, json=plain(**case.fields))
    status = 404 if case.code == "model_not_found" else 400
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert shape(response) == (status, kind, case.code)
    assert case.message in response.json()["error"]["message"]


@MODULE_LOOP
async def test_neutral_fields_are_accepted_and_tokens_are_counted(shared_scene: Scene) -> None:
    neutral = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []},
        "tools": [{**WEATHER, "type": "custom", "cache_control": None, "strict": True}],
        "thinking": {"type": "adaptive", "display": "summarized"},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    function = {"name": "weather", "description": "Weather.", "parameters": {"type": "object"}}
    chat = {"messages": HELLO, "tools": [{"type": "function", "function": function}]}
    expected = (await shared_scene.client.post("/tokenize", json=chat)).json()["count"]
    for fields in (plain(**neutral), {"model": NAME, "messages": HELLO, **neutral}):
        response = await shared_scene.client.post(COUNT_TOKENS, json=fields, headers=headers)
        assert (response.status_code, response.json()) == (200, {"input_tokens": expected})
    failed = await shared_scene.client.post(COUNT_TOKENS, json=plain(output_config={"effort": "high"}, **user(IMAGE)))
    assert "images" in failed.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_names_the_stop_sequence(scene: Scene, *, stream: bool) -> None:
    asked = scene.start(MESSAGES, plain(stop_sequences=["never", " you"], stream=stream))
    request = await scene.next_request()
    assert request.request_id.startswith("msg_")
    assert request.rendering is not None
    scene.reply(request.request_id, "How are you today", reason="stop", cached=8)
    response = await asked
    assert response.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    if not stream:
        found = response.json()
    else:
        events = [dict(line.split(": ", 1) for line in one.split("\n")) for one in response.text.strip().split("\n\n")]
        found = message_of([json.loads(event["data"]) for event in events])
        assert [event["event"] for event in events][-2:] == ["message_delta", "message_stop"]
    assert found["id"].startswith(request.request_id)
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert (found["content"], found["model"]) == ([{"type": "text", "text": "How are"}], NAME)
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", " you")
    assert found["usage"]["input_tokens"] == request.rendering.prompt_tokens - found["usage"]["cache_read_input_tokens"]
    assert scene.metric('dynamo_frontend_requests_total{endpoint="messages"')


async def test_a_whole_message_has_the_blocks_of_its_stream_in_their_order() -> None:
    text = 'Wait. <tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call> Done.'
    found = []
    async with make_scene(tool_call_parser="hermes") as scene:
        for stream in (False, True):
            asked = scene.start(MESSAGES, plain(tools=[WEATHER], stream=stream))
            scene.reply((await scene.next_request()).request_id, text, reason="stop")
            response = await asked
            events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]
            found.append(message_of(events) if stream else response.json())
    assert [block["type"] for block in found[0]["content"]] == ["text", "tool_use", "text"]
    assert [block["type"] for block in found[1]["content"]] == ["text", "tool_use", "text"]


async def test_errors_outside_of_the_route_have_the_format_of_the_api(scene: Scene) -> None:
    asked = scene.start(MESSAGES, plain())
    scene.refuse((await scene.next_request()).request_id, 429, "queue_full")
    response = await asked
    assert (*shape(response), response.headers["retry-after"]) == (429, "rate_limit_error", "queue_full", "1")
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert shape(await scene.client.get(MESSAGES)) == (405, "invalid_request_error", "method_not_allowed")
    assert shape(await scene.client.post(f"{MESSAGES}/batches", json={})) == (404, "not_found_error", "not_found")
    undeclared = await scene.client.post(MESSAGES, content=b"{}", headers={"content-type": "text/plain"})
    assert shape(undeclared) == (415, "invalid_request_error", "unsupported_media_type")
    scene.front.drain.begin()
    assert shape(await scene.client.post(MESSAGES, json=plain())) == (503, "overloaded_error", "shutting_down")
    async with make_scene(api_keys=("key",)) as keyed:
        found = await keyed.client.post(MESSAGES, json=plain(), headers={"x-api-key": "other"})
        assert shape(found) == (401, "authentication_error", "invalid_api_key")


async def test_a_later_error_is_an_event_and_its_code_is_logged(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "forebay.access")
    body = plain(stream=True)
    async with scene.http_client() as (client, _):
        sent = asyncio.create_task(client.send(client.build_request("POST", MESSAGES, json=body), stream=True))
        name = (await scene.next_request()).request_id
        scene.emit_text(name, "How are")
        response = await sent
        scene.refuse(name, 502, "worker_lost", attempt=1)
        last = (await response.aread()).decode().rstrip().split("\n")
    assert (response.status_code, last[-2]) == (200, "event: error")
    failure = json.loads(last[-1].removeprefix("data: "))
    assert failure["error"] == {
        "type": "api_error",
        "message": "because of worker_lost",
        "details": {"error_code": "worker_lost"},
    }
    assert failure["request_id"].startswith(name)
    (entry,) = (one.__dict__["fields"] for one in caplog.records if one.name == "forebay.access")
    assert (entry["path"], entry["error"]) == (MESSAGES, "worker_lost")
    first = scene.requests(RequestSubmitted)[0]
    assert entry["trace_id"] == TraceIds.of(first, 0).trace
