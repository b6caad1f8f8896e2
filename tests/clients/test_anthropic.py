"""The official `anthropic` client for Python."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from tests.clients.checks import NAME, checked

WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HELLO: Any = [{"role": "user", "content": "Hello"}]


class Forecast(BaseModel):
    city: str
    degrees: int


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(max_retries=0) as made:
        yield made


def streamed(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    """Return the message that the events of a stream add up to, after a check of each event."""
    with client.messages.create(model=NAME, stream=True, **fields) as events:
        for event in events:
            checked(event)
    with client.messages.stream(model=NAME, **fields) as stream:
        return stream.get_final_message()


def test_a_message_and_a_stream_have_the_same_content(client: anthropic.Anthropic) -> None:
    # This version of the client has no argument `temperature`.
    fields: Any = {"messages": HELLO, "max_tokens": 8, "system": "Be brief.", "extra_body": {"temperature": 0.0}}
    response = client.messages.with_raw_response.create(model=NAME, **fields)
    whole = checked(response.parse())
    assert (whole.stop_reason, whole.usage.output_tokens, whole.id[:4]) == ("max_tokens", 8, "msg_")
    assert response.request_id
    assert whole.id.startswith(response.request_id)
    assert len(whole.content[0].text.split()) == 8
    stream = streamed(client, **fields)
    assert (stream.content[0].text, stream.stop_reason) == (whole.content[0].text, "max_tokens")
    assert stream.usage.output_tokens == 8
    assert stream.usage.input_tokens + (stream.usage.cache_read_input_tokens or 0) > 8
    words = whole.content[0].text.split(" ")
    stopped = client.messages.create(model=NAME, stop_sequences=["never", words[4]], **fields)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", words[4])


def test_a_tool_is_called_and_its_result_answered(client: anthropic.Anthropic) -> None:
    fields: Any = {"tools": [WEATHER], "max_tokens": 200}
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    whole = checked(client.messages.create(model=NAME, messages=messages, **fields))
    for message in (whole, streamed(client, messages=messages, **fields)):
        (block,) = message.content
        assert (message.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "get_weather")
        assert isinstance(block.input["city"], str)
    result = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "14 degrees"}
    messages += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model=NAME, messages=messages, **fields)
    assert [block.type for block in answer.content] == ["text"]
    forced = client.messages.create(model=NAME, messages=HELLO, tool_choice={"type": "any"}, **fields)
    assert forced.stop_reason == "tool_use"


def test_thinking_is_streamed_and_sent_back(client: anthropic.Anthropic) -> None:
    fields: Any = {"max_tokens": 1200, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    fields["extra_body"] = {"stop_sequences": [" the"], "temperature": 0.0}  # ends the 1,200 words
    message = streamed(client, messages=HELLO, **fields)
    thinking, *_ = message.content
    assert (thinking.type, thinking.signature) == ("thinking", message.id)
    assert len(thinking.thinking.split()) > 10
    again: Any = [*HELLO, {"role": "assistant", "content": message.content}, *HELLO]
    assert checked(client.messages.create(model=NAME, messages=again, **fields)).content[0].type == "thinking"


def test_an_output_is_parsed(client: anthropic.Anthropic) -> None:
    message = client.messages.parse(model=NAME, messages=HELLO, max_tokens=100, output_format=Forecast)
    assert isinstance(message.parsed_output, Forecast)


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    count = checked(client.messages.count_tokens(model=NAME, messages=HELLO, tools=[WEATHER], system="Be brief."))
    usage = client.messages.create(model=NAME, messages=HELLO, tools=[WEATHER], system="Be brief.", max_tokens=1).usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_models_are_listed(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_a_reused_key_is_not_sent_again(client: anthropic.Anthropic) -> None:
    fields: Any = {"model": NAME, "messages": HELLO, "extra_headers": {"Idempotency-Key": "k"}}
    client.messages.create(max_tokens=1, **fields)
    with pytest.raises(anthropic.ConflictError) as caught:
        client.with_options(max_retries=2).messages.create(max_tokens=2, **fields)
    assert caught.value.request.headers["x-stainless-retry-count"] == "0"


def test_errors_have_their_class_and_code(client: anthropic.Anthropic) -> None:
    def failure(client: anthropic.Anthropic, **fields: Any) -> tuple[str, str | None, str | None]:
        fields = {"model": NAME, "messages": HELLO, "max_tokens": 8, **fields}
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**fields)
        return type(caught.value).__name__, caught.value.type, caught.value.error_code

    invalid = "BadRequestError", "invalid_request_error"
    assert failure(client, model="x") == ("NotFoundError", "not_found_error", "model_not_found")
    assert failure(client, max_tokens=0) == (*invalid, "invalid_value")
    assert failure(client, extra_body={"foo": 1}) == (*invalid, "unknown_parameter")
    assert failure(client, tools=[{"type": "web_search_20250305", "name": "web_search"}]) == (
        *invalid,
        "unsupported_parameter",
    )
    stranger = client.with_options(api_key="another")
    assert failure(stranger) == ("AuthenticationError", "authentication_error", "invalid_api_key")
