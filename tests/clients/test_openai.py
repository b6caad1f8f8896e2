"""The official `openai` client for Python."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.checks import NAME, checked

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Forecast(BaseModel):
    city: str
    degrees: int


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(max_retries=0) as made:
        yield made


def test_a_chat_is_streamed(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, stream=True
    )
    chunks = [checked(chunk, "forebay") for chunk in stream]
    assert len("".join(chunk.choices[0].delta.content or "" for chunk in chunks).split()) == 8
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_response_is_created_and_streamed(client: openai.OpenAI) -> None:
    fields: Any = {"model": NAME, "input": "Hello", "max_output_tokens": 8, "temperature": 0.0}
    whole = checked(client.responses.create(**fields))
    assert len(whole.output_text.split()) == 8
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    *_, last = [checked(event) for event in client.responses.create(**fields, stream=True)]
    assert (last.type, last.response.output_text) == ("response.incomplete", whole.output_text)


def test_a_response_is_parsed(client: openai.OpenAI) -> None:
    fields: Any = {"model": NAME, "input": "Paris", "text_format": Forecast}
    assert isinstance(client.responses.parse(**fields).output_parsed, Forecast)
    with client.responses.stream(**fields) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert events.get_final_response().output_parsed == Forecast.model_validate_json(text)


def test_a_function_is_called_and_its_result_answered(client: openai.OpenAI) -> None:
    fields: Any = {"model": NAME, "tools": [WEATHER], "max_output_tokens": 60}
    first = checked(client.responses.create(**fields, input="What is the weather in Paris?"))
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "14 degrees"}
    second = checked(client.responses.create(**fields, input=[result], previous_response_id=first.id))
    assert len(second.output_text.split()) > 10
    items = client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]


def test_a_background_response_is_retrieved_streamed_cancelled_and_deleted(client: openai.OpenAI) -> None:
    fields: Any = {"model": NAME, "input": "Hello", "background": True}
    created = checked(client.responses.create(**fields, max_output_tokens=20))
    events = [checked(event) for event in client.responses.retrieve(created.id, stream=True)]
    *_, last = events
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert len(last.response.output_text.split()) == 20
    after = events[5].sequence_number
    rest = client.responses.retrieve(created.id, stream=True, starting_after=after)
    assert [event.to_dict() for event in rest] == [event.to_dict() for event in events[6:]]
    assert checked(client.responses.retrieve(created.id)).output_text == last.response.output_text
    client.responses.delete(created.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created.id)
    long = client.responses.create(**fields, max_output_tokens=30_000)
    assert checked(client.responses.cancel(long.id)).status == "cancelled"
