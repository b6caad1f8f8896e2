"""Chats with tools and reasoning: input of the template, events on the log, and responses."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from forebay.events.base import unpack_u32
from forebay.events.requests import RequestSubmitted
from forebay.ingress.model import DEFAULT_MODEL, Model
from tests.ingress.conftest import MODULE_LOOP, NAME, Scene, make_scene

CHAT = "/v1/chat/completions"
HELLO = {"role": "user", "content": "Hello"}
SCHEMA = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "$defs": {"City": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time", "strict": True}}
TEMPLATE = """{% if tools %}{{ tools | tojson }}
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% if message.reasoning_content %}(thought {{ message.reasoning_content }}){% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}:{{ call.function.arguments.city }}
{%- endfor %}{% if message.tool_call_id %} #{{ message.tool_call_id }}{% endif %}<|im_end|>
{% endfor %}{{ mood }}{{ reasoning_effort }}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}"""
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("tools")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (path / name).write_bytes((DEFAULT_MODEL / name).read_bytes())
    (path / "chat_template.jinja").write_text(TEMPLATE + "{# </think> #}")
    return Model(path)


@pytest.fixture
async def tools(tool_model: Model) -> AsyncIterator[Scene]:
    async with make_scene(copy.copy(tool_model)) as made:  # a test may change attributes of its model
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_scene(tool_model: Model) -> AsyncIterator[Scene]:
    async with make_scene(tool_model) as made:
        yield made


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [HELLO], "max_tokens": 90, **changes}


async def submit_chat(scene: Scene, **changes: Any) -> tuple["asyncio.Task[Any]", RequestSubmitted, str]:
    pending = scene.start(CHAT, chat(**changes))
    await asyncio.sleep(0)
    request = asyncio.create_task(scene.next_request())
    await asyncio.wait((pending, request), return_when=asyncio.FIRST_COMPLETED)
    if not request.done():
        request.cancel()
        raise AssertionError(pending.result().text)
    submitted = request.result()
    prompt: str = scene.model.tokenizer.decode(unpack_u32(submitted.token_ids), skip_special_tokens=False)
    return pending, submitted, prompt


def emit_text(scene: Scene, request: RequestSubmitted, text: str, *, reason: str = "stop") -> None:
    """Emit a text token by token and end the response."""
    at = 0
    for token in scene.model.encode(text):
        at = scene.emit(request.request_id, [token], first=at)
    scene.end(request.request_id, reason=reason, output=at)


async def test_tools_reach_the_template_and_a_call_is_returned(tools: Scene) -> None:
    pending, request, prompt = await submit_chat(tools, tools=[WEATHER, TIME])
    assert json.loads(prompt.splitlines()[0]) == [WEATHER, TIME]
    assert request.sampling.structured is None
    emit_text(tools, request, f"Let me look. {CALL}")
    choice = (await pending).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me look."
    (call,) = message["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": '{"city": "Paris"}'})
    assert call["id"].startswith("call_")


async def test_a_conversation_continues_with_the_result_of_a_tool(tools: Scene) -> None:
    pending, request, _ = await submit_chat(tools, tools=[WEATHER])
    emit_text(tools, request, CALL)
    message = (await pending).json()["choices"][0]["message"]
    assert message["content"] is None
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    pending, request, prompt = await submit_chat(tools, tools=[WEATHER], messages=[HELLO, message, result])
    assert "<|im_start|>assistant\n<tool_call>weather:Paris<|im_end|>" in prompt
    assert f"<|im_start|>tool\nrain #{result['tool_call_id']}<|im_end|>" in prompt
    emit_text(tools, request, "It rains.")
    choice = (await pending).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("It rains.", "stop")


async def test_tool_choice_none_omits_the_tools(tools: Scene) -> None:
    pending, request, prompt = await submit_chat(tools, tools=[WEATHER], tool_choice="none")
    assert "weather" not in prompt
    emit_text(tools, request, CALL)
    choice = (await pending).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


@pytest.mark.parametrize("parallel", [True, False])
async def test_tool_choice_required_constrains_the_output_to_calls(tools: Scene, parallel: bool) -> None:
    pending, request, _ = await submit_chat(
        tools, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=parallel
    )
    structured = request.sampling.structured
    assert structured is not None
    schema = json.loads(structured.text)
    one, other = schema["items"]["anyOf"]
    assert (structured.kind, schema["type"], schema["minItems"]) == ("json_schema", "array", 1)
    assert schema.get("maxItems") == (None if parallel else 1)
    assert one["properties"]["parameters"] == {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}}
    assert schema["$defs"] == SCHEMA["$defs"]
    assert other["properties"] == {
        "name": {"type": "string", "enum": ["time"]},
        "parameters": {"type": "object", "properties": {}},
    }
    emit_text(tools, request, '[{"name": "weather", "parameters": {"city": "Paris"}}]')
    choice = (await pending).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'


async def test_a_named_tool_constrains_the_output_to_its_arguments(tools: Scene) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    pending, request, _ = await submit_chat(tools, tools=[WEATHER, TIME], tool_choice=named, stream=True)
    assert request.sampling.structured is not None
    assert json.loads(request.sampling.structured.text) == SCHEMA
    emit_text(tools, request, '{"city": "Paris"}', reason="length")
    text = (await pending).text
    assert '"finish_reason":"length"' in text
    assert '"name":"weather"' in text


@MODULE_LOOP
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tools": [WEATHER, WEATHER]}, "two functions have the same name"),
        ({"tools": [{"type": "search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "odd": 1}}]}, "tools[0].function.odd"),
        ({"tools": [TIME] * 129}, "tools"),
        ({"tool_choice": "required"}, "the request has no tools"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "'other'"),
        ({"tools": [TIME], "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": [TIME], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "mutually exclusive",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id is missing"),
        (
            {"messages": [{**HELLO, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]},
            "requires the role assistant",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content is missing"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs.bos_token"),
    ],
)
async def test_invalid_tools_are_rejected_by_field_name(
    shared_scene: Scene, changes: dict[str, Any], says: str
) -> None:
    response = await shared_scene.client.post(CHAT, json=chat(**changes))
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]
    assert shared_scene.requests() == []


@pytest.mark.parametrize(
    "arguments", ["", "[]", "null", "1", '{"city', '{"city": "Paris"}}', "[" * 5_000, "\0\n\u2028"]
)
async def test_arguments_may_be_any_text(tools: Scene, arguments: str) -> None:
    called = [{"id": "1", "type": "function", "function": {"name": "not a name!", "arguments": arguments}}] * 20
    await submit_chat(tools, messages=[HELLO, {"role": "assistant", "tool_calls": called}])


async def test_a_message_may_have_many_calls(tools: Scene) -> None:
    called = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}] * 500
    await submit_chat(tools, messages=[HELLO, {"role": "assistant", "tool_calls": called}])


async def test_the_message_of_a_response_that_was_cut_anywhere_is_accepted_as_history(tools: Scene) -> None:
    output = f"<think>\nHm.\n</think>\nLet me look. {CALL}\n{CALL} Done."
    for end in range(1, len(output), 6):
        pending, request, _ = await submit_chat(tools, tools=[WEATHER])
        emit_text(tools, request, output[:end], reason="length")
        choice = (await pending).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        pending, request, _ = await submit_chat(tools, tools=[WEATHER], messages=[HELLO, choice["message"], HELLO])
        emit_text(tools, request, "x")
        assert (await pending).status_code == 200


async def test_different_definitions_of_a_name_cannot_be_merged(tools: Scene) -> None:
    other = {"type": "object", "$defs": {"City": {"type": "integer"}}}
    both = [WEATHER, {"type": "function", "function": {"name": "other", "parameters": other}}]
    response = await tools.client.post(CHAT, json=chat(tools=both, tool_choice="required"))
    assert "'City' has two definitions" in response.json()["error"]["message"]


async def test_reasoning_that_begins_in_the_prompt(tools: Scene) -> None:
    pending, request, prompt = await submit_chat(tools, chat_template_kwargs={"enable_thinking": True, "mood": "calm"})
    assert prompt.endswith("calm<|im_start|>assistant\n<think>\n")
    emit_text(tools, request, "Hm.</think>\n\nYes.")
    message = (await pending).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Yes.", "Hm.", "Hm.")
    pending, request, prompt = await submit_chat(tools, messages=[HELLO, message, HELLO], reasoning_effort="low")
    assert "Yes.(thought Hm.)" in prompt
    assert "low<|im_start|>" in prompt
    emit_text(tools, request, "Yes.")
    assert "reasoning" not in (await pending).json()["choices"][0]["message"]


async def test_tools_and_reasoning_effort_are_rejected_if_the_template_ignores_them(tool_model: Model) -> None:
    (tool_model.directory / "chat_template.jinja").write_text("{{ messages }}")
    async with make_scene(Model(tool_model.directory)) as plain:
        response = await plain.client.post(CHAT, json=chat(reasoning_effort="high"))
        assert "reasoning_effort is not supported" in response.json()["error"]["message"]
        response = await plain.client.post(CHAT, json=chat(tools=[WEATHER]))
        assert "template of this model does not support tools" in response.json()["error"]["message"]


async def test_openai_client_streams_reasoning_and_calls(tools: Scene) -> None:
    text = f"<think>\nHm.\n</think>\nLook: {CALL}\n{CALL}"
    async with tools.openai_client() as client:

        async def stream() -> Any:
            messages: Any = [HELLO]
            tools: Any = [WEATHER]
            async with client.chat.completions.stream(model=NAME, messages=messages, tools=tools) as events:
                thought = ""
                async for event in events:
                    if event.type == "chunk" and event.chunk.choices:
                        thought += getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
                return thought, await events.get_final_completion()

        pending = asyncio.create_task(stream())
        emit_text(tools, await tools.next_request(), text)
        thought, completion = await pending
    choice = completion.choices[0]
    assert (thought, choice.message.content, choice.finish_reason) == ("Hm.\n", "Look:", "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("weather", '{"city": "Paris"}')
    ] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_messages_parsed_by_the_openai_client_may_be_sent_back(tools: Scene) -> None:
    weather: Any = WEATHER
    strict: Any = {**weather, "function": {**weather["function"], "strict": True}}
    hello: Any = HELLO
    async with tools.openai_client() as client:
        pending = asyncio.create_task(client.chat.completions.parse(model=NAME, messages=[hello], tools=[strict]))
        emit_text(tools, await tools.next_request(), f"Look: {CALL}")
        message: Any = (await pending).choices[0].message
        assert message.tool_calls[0].function.parsed_arguments == {"city": "Paris"}
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        given: Any = {**message.model_dump(), "parsed": 1}
        back = client.chat.completions.create(model=NAME, messages=[hello, given, result])
        again = asyncio.create_task(back)
        emit_text(tools, await tools.next_request(), "It is sunny.")
        assert (await again).choices[0].message.content == "It is sunny."
