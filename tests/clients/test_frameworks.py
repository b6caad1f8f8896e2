"""Frameworks for agents, with their default models where these are models of an API that forebay serves."""

from typing import Any

import agents
import litellm
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent

from tests.clients.checks import NAME

pytestmark = pytest.mark.usefixtures("url")
QUESTION = "What is the weather in Paris?"


class Forecast(BaseModel):
    city: str
    degrees: int


def get_weather(city: str) -> str:
    """Get the current weather of a city.

    Args:
        city: name of the city.
    """
    cities.append(city)
    return "14 degrees"


cities: list[str] = []  # for which a tool was called


@pytest.fixture(autouse=True)
def clear() -> None:
    cities.clear()


@pytest.mark.parametrize("model", [f"openai:{NAME}", f"anthropic:{NAME}"])
async def test_pydantic_ai(model: str) -> None:
    agent = Agent(model, instructions="Be brief.", tools=[get_weather], model_settings={"max_tokens": 60})
    run = await agent.run(QUESTION)
    assert len(cities) == 1
    assert run.output
    async with agent.run_stream(QUESTION, message_history=run.all_messages()) as stream:
        assert await stream.get_output()
    assert len(cities) == 2
    forecast = await Agent(model, output_type=Forecast).run("Paris")
    assert isinstance(forecast.output, Forecast)


async def test_openai_agents() -> None:
    agents.set_tracing_disabled(True)
    agent = agents.Agent(name="weather", model=NAME, tools=[agents.function_tool(get_weather)])
    run = await agents.Runner.run(agent, QUESTION)
    assert len(cities) == 1
    assert run.final_output
    stream = agents.Runner.run_streamed(agent, QUESTION)
    kinds = {event.type async for event in stream.stream_events()}
    assert kinds == {"agent_updated_stream_event", "raw_response_event", "run_item_stream_event"}
    assert len(cities) == 2
    assert stream.final_output


async def test_langchain_with_the_responses_api() -> None:
    model = ChatOpenAI(model=NAME, use_responses_api=True, max_tokens=60)
    called = await model.bind_tools([get_weather]).ainvoke(QUESTION)
    assert [call["name"] for call in called.tool_calls] == ["get_weather"]
    text = ""
    async for chunk in model.astream("Hello"):
        text += str(chunk.text)
    assert len(text.split()) == 60
    assert isinstance(await model.with_structured_output(Forecast).ainvoke("Paris"), Forecast)


async def test_litellm_with_the_responses_api() -> None:
    fields: Any = {"model": f"openai/{NAME}", "input": "Hello", "max_output_tokens": 20}
    whole: Any = await litellm.aresponses(**fields)
    *_, last = [event async for event in await litellm.aresponses(**fields, stream=True)]
    for response in (whole, last.response):
        (message,) = response.output
        assert len(message.content[0].text.split()) == 20


async def test_litellm_with_the_messages_api() -> None:
    fields: Any = {"model": f"anthropic/{NAME}", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    whole: Any = await litellm.acompletion(**fields)
    stream: Any = await litellm.acompletion(**fields, stream=True)
    streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    for text in (whole.choices[0].message.content, streamed):
        assert len(text.split()) == 8
