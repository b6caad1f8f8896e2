"""The official `openai` client for Python."""

from collections.abc import Iterator

import openai
import pytest

from tests.clients.checks import NAME, checked


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
