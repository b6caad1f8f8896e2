"""OpenAI's client of the Responses API against a running `forebay up`."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import BaseModel

from tests.cli.up import running
from tests.harness.sdk_types import validated

pytestmark = pytest.mark.timeout(180)
MODEL = "forebay-default"


class CalendarEvent(BaseModel):
    name: str
    participants: list[str]


def tool(name: str, description: str) -> Any:
    parameters = {
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"],
        "additionalProperties": False,
    }
    return {"type": "function", "name": name, "description": description, "parameters": parameters, "strict": True}


TOOLS = [tool("get_weather", "Get current temperature for a given location."), tool("send_letter", "Send a letter.")]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with running("--workers", "2") as up, up.client() as made:
        yield made


def create(client: openai.OpenAI, **fields: Any) -> Any:
    """Return a response, after it and the events of an equal stream matched the types of the client."""
    given: dict[str, Any] = {
        "model": MODEL,
        "input": "Hello there",
        "temperature": 0,
        "max_output_tokens": 200,
        **fields,
    }
    response = client.responses.create(**given)
    validated(Response, response.to_dict())
    events = list(client.responses.create(**given, stream=True))
    for event in events:
        validated(ResponseStreamEvent, event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    shapes = [[(item.type, item.status) for item in one.output] for one in (response, events[-1].response)]
    assert shapes[0] == shapes[1]
    counts = [one.usage.output_tokens_details.reasoning_tokens for one in (response, events[-1].response)]
    assert counts[0] == counts[1]
    assert (response.status, response.output_text) == (events[-1].response.status, events[-1].response.output_text)
    return response


def test_text_and_its_log_probabilities(client: openai.OpenAI) -> None:
    response = create(client, max_output_tokens=4, include=["message.output_text.logprobs"], top_logprobs=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    ((part,),) = [item.content for item in response.output]
    assert "".join(one.token for one in part.logprobs) == response.output_text
    assert response.usage.output_tokens == len(part.logprobs)


def test_functions_are_called_and_their_results_answered(client: openai.OpenAI) -> None:
    asked = [{"role": "user", "content": "Get the weather in Paris, then send a letter."}]
    response = create(client, input=asked, tools=TOOLS)
    assert [(item.type, item.name) for item in response.output] == [
        ("function_call", "get_weather"),
        ("function_call", "send_letter"),
    ]
    assert all(set(json.loads(item.arguments)) == {"place"} for item in response.output)
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "done"} for item in response.output]
    answer = create(client, input=[*asked, *(item.to_dict() for item in response.output), *results], tools=TOOLS)
    assert [item.type for item in answer.output] == ["message"]
    forced = create(client, tools=TOOLS, tool_choice={"type": "function", "name": "send_letter"})
    assert [(item.type, item.name) for item in forced.output] == [("function_call", "send_letter")]
    single = create(client, input=asked, tools=TOOLS, parallel_tool_calls=False)
    assert [item.name for item in single.output] == ["get_weather"]


def test_reasoning_is_an_item_of_its_own(client: openai.OpenAI) -> None:
    response = create(client, reasoning={"effort": "low"})
    reasoning, message = response.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert 10 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    again = create(client, input=[{"role": "user", "content": "Hi"}, *(item.to_dict() for item in response.output)])
    assert again.output_text


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    given: Any = {"model": MODEL, "input": "Alice and Bob are going to a fair.", "text_format": CalendarEvent}
    assert isinstance(client.responses.parse(**given).output_parsed, CalendarEvent)
    with client.responses.stream(**given) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_response().output_parsed, CalendarEvent)
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
    schema = {"type": "json_schema", "name": "event", "schema": CalendarEvent.model_json_schema()}
    CalendarEvent.model_validate_json(create(client, text={"format": schema}).output_text)


def test_an_error_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        create(client, tools=[{"type": "web_search"}])
    assert (raised.value.param, raised.value.code) == ("tools[0]", "unsupported_parameter")


def test_a_conversation_continues_from_stored_responses(client: openai.OpenAI) -> None:
    first = create(client, max_output_tokens=4)
    second = create(client, max_output_tokens=4, input="And then?", previous_response_id=first.id)
    items = [validated(ResponseItem, item.to_dict()) for item in client.responses.input_items.list(second.id)]
    assert [item.content[0].text for item in items] == ["And then?", first.output_text, "Hello there"]
    assert client.responses.retrieve(second.id) == second
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_a_background_response_is_resumed_and_cancelled(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": MODEL, "input": "Hello there", "background": True}
    events: list[Any] = []
    for event in client.responses.create(**given, stream=True, max_output_tokens=50):
        events.append(event)
        if len(events) == 20:
            break
    rest: list[Any] = list(client.responses.retrieve(events[0].response.id, stream=True, starting_after=9))
    assert [event.to_dict() for event in rest[:10]] == [event.to_dict() for event in events[10:]]
    assert rest[-1].response.usage.output_tokens == 50
    queued = client.responses.create(**given, max_output_tokens=4000)
    assert queued.status == "queued"
    assert client.responses.cancel(queued.id).status == "cancelled"
    assert validated(Response, client.responses.retrieve(queued.id).to_dict()).status == "cancelled"
