"""Folds of responses without a log: objects of streams and whole responses, errors, and steps after the end."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.state.reply_slot import ResponseState, apply
from forebay.events.base import pack_u32
from forebay.events.tokens import Embedded, ResponseEnded, ResponseError, TokenChunk, TokenEvent, TokensEmitted, Usage
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.requests import TextBody
from forebay.ingress.parsers.composer import Composer, TextAssembler
from forebay.ingress.response_fold import CompletionFold, EmbeddingFold

MODEL = Model(DEFAULT_MODEL)
TOKENS = MODEL.encode("the river ran to the sea, and the sea was full")
ENDED = ResponseEnded(
    request_id="a",
    attempt=1,
    owner_epoch=1,
    finish_reason="stop",
    usage=Usage(prompt_tokens=3, output_tokens=len(TOKENS), cached_tokens=2),
)
FAILED = ResponseEnded(
    request_id="a",
    attempt=1,
    owner_epoch=1,
    finish_reason="error",
    error=ResponseError(status=502, code="worker_lost", message="lost"),
)


def completion(*, stream: bool) -> CompletionFold:
    body = TextBody(model="m", prompt="p", stream=stream)
    return CompletionFold("a", body, 3, [Composer(TextAssembler(MODEL.decoder(), []))], created_s=7)


def emitted(*spans: tuple[int, int]) -> TokensEmitted:
    """Return an event with the tokens of these spans, one chunk each."""
    chunks = tuple(
        TokenChunk(request_id="a", attempt=1, first_index=begin, token_ids=pack_u32(TOKENS[begin:end]))
        for begin, end in spans
    )
    return TokensEmitted(worker_id="w", worker_epoch=1, owner_epoch=1, chunks=chunks)


def fold_all(fold: CompletionFold, *events: TokenEvent) -> list[Any]:
    state, objects = ResponseState(), []
    for event in events:
        apply({"a": state}, event, "")
        objects += fold.step(state)
    return [msgspec.json.decode(one) for one in objects]


@given(cuts=st.sets(st.integers(1, len(TOKENS) - 1)))
def test_a_stream_and_a_whole_response_have_the_same_text(cuts: set[int]) -> None:
    bounds = [0, *sorted(cuts), len(TOKENS)]
    events = [emitted(span) for span in pairwise(bounds)]
    chunks = fold_all(completion(stream=True), *events, ENDED)
    (whole,) = fold_all(completion(stream=False), *events, ENDED)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == whole["choices"][0]["text"] == MODEL.tokenizer.decode(TOKENS)
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([emitted((0, 2), (3, 4))], "tokens_missing"),
        ([emitted((0, 2)), FAILED], "worker_lost"),
    ],
)
def test_output_before_an_error_is_sent(events: list[TokenEvent], code: str) -> None:
    fold = completion(stream=True)
    (chunk,) = fold_all(fold, *events)
    assert chunk["choices"][0]["text"] == MODEL.tokenizer.decode(TOKENS[:2])
    assert fold.error is not None
    assert (fold.is_over, fold.error.code, fold.cancel_reason) == (True, code, code)


def test_a_completion_ignores_an_embedding() -> None:
    fold = completion(stream=True)
    embedded = Embedded(request_id="a", attempt=1, owner_epoch=1, worker_id="w", vector=b"1234")
    assert fold_all(fold, embedded) == []
    assert (fold.is_over, fold.cancel_reason) == (False, "")


def test_steps_after_the_end_return_nothing() -> None:
    fold, state = completion(stream=False), ResponseState()
    for event in (emitted((0, 2)), ENDED):
        apply({"a": state}, event, "")
    assert len(fold.step(state)) == 1
    assert fold.step(state) == []
    assert (fold.cached_tokens, fold.cancel_reason) == (2, "stop")


def test_missing_tokens_fail_an_embedding() -> None:
    fold, state = EmbeddingFold("a", EmbeddingBody(model="m", input="x"), 1, 1), ResponseState()
    apply({"a": state}, emitted((3, 4)), "")
    assert fold.step(state) == []
    assert fold.error is not None
    assert (fold.error.status, fold.error.code) == (502, "tokens_missing")
