"""Random responses as records of a reply slot, and their renderings under different deliveries."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from forebay.core.state.reply_slot import ResponseState, apply
from forebay.events.base import pack_u32
from forebay.events.rendering import Rendering
from forebay.events.request_ids import part_ids
from forebay.events.requests import RequestSubmitted, reply_key_of
from forebay.events.tokens import (
    AttemptStarted,
    ResponseEnded,
    ResponseError,
    TokenChunk,
    TokenEvent,
    TokenLogprob,
    TokensEmitted,
    TopLogprob,
    Usage,
)
from forebay.ingress.formatter import StreamEvent
from forebay.ingress.model import Model
from forebay.ingress.openai.fields import encoded_options
from forebay.ingress.openai.requests import CompletionOptions
from forebay.ingress.openai.tools import Function, Tool, ToolSelection
from forebay.ingress.parsers.selection import NONE, ParserFactory
from forebay.ingress.prepare import part_nonce, tie_seed_of
from forebay.ingress.response_fold import FORMATTERS, fold_of
from forebay.ingress.responses.body import ResponsesBody

TOOLS = tuple(Tool(type="function", function=Function(name=name)) for name in ("time", "weather"))
CALL = '{"name": "weather", "arguments": {"city": "K\u00f6ln"}}'
PIECES = (
    *("water", " ran", " and stone", "\n", "  ", "\U0001f980 ", "\u00e9t\u00e9", "<think>", "</think>", " hm"),
    *("<tool_call>\n", "\n</tool_call>", CALL, f"[{CALL}]", "[TOOL_CALLS]", "weather[ARGS]{}", "<|python_tag|>", "<"),
)
STOPS = ("and st", "ran", "stone", "}}", "</")


def drawn_rendering(rng: random.Random) -> Rendering:
    """Return the rendering of a random completion request of any API."""
    api = rng.choice(sorted(FORMATTERS.keys() - {"embeddings"}))
    has_choices = api in ("chat_completions", "completions")
    prompts, per_prompt = 1, rng.choice((1, 1, 2)) if has_choices else 1
    fields: dict[str, Any] = {}
    if api == "completions":
        prompts = rng.choice((1, 2))
        fields["echo"] = rng.choice(((), ("Once", "upon")[:prompts]))
    else:
        choice = ToolSelection(TOOLS, rng.choice((None, None, "", "weather")), parallel=rng.random() < 0.5)
        fields = {
            "is_chat": True,
            "is_open": rng.random() < 0.3,
            "tools": choice.encoded() if rng.random() < 0.6 else "",
            "tool_parser": rng.choice(("hermes", "mistral", "llama3_json")),
            "reasoning_parser": rng.choice(("", "qwen3", "deepseek_r1")),
        }
    if api == "responses":
        fields["options"] = ResponsesBody(model="m", input="hi").options
    if has_choices:
        counts = rng.choice((False, True))
        options = CompletionOptions(counts, counts and rng.random() < 0.5, rng.random() < 0.3)
        fields["options"] = encoded_options(options)
    return Rendering(
        api=api,
        model="m",
        created_s=7,
        parts=prompts * per_prompt,
        choices_per_prompt=per_prompt,
        prompt_tokens=5,
        stream=rng.random() < 0.5,
        stops=tuple(rng.sample(STOPS, rng.choice((0, 1, 2)))),
        special=rng.random() < 0.2,
        **fields,
    )


def drawn_response(
    rng: random.Random, model: Model, request: RequestSubmitted
) -> tuple[RequestSubmitted, list[TokenEvent]]:
    """Return a request like this one as the first part of a random response, and the records of its reply slot."""
    rendering = drawn_rendering(rng)
    ids = part_ids(request.request_id, rendering.parts)
    sampling = msgspec.structs.replace(request.sampling, logprobs=rng.choice((None, None, 0, 2)))
    first = msgspec.structs.replace(request, request_id=ids[0], sampling=sampling, rendering=rendering)
    slots = [
        [_keyed(event, key) for event in _records_of(rng, model, name, has_logprobs=sampling.logprobs is not None)]
        for name, key in zip(ids, reply_keys(first), strict=True)
    ]
    records: list[TokenEvent] = []
    while any(slots):
        records.append(rng.choice([slot for slot in slots if slot]).pop(0))
        if rng.random() < 0.2:
            records.append(rng.choice(records))  # sent again
    return first, records


def _records_of(rng: random.Random, model: Model, name: str, *, has_logprobs: bool) -> Iterator[TokenEvent]:
    token_ids = model.encode("".join(rng.choices(PIECES, k=rng.randrange(9))))
    token_ids += rng.choices(range(model.vocabulary_size), k=rng.randrange(3))
    attempt = owner = 1
    begin = 0
    while begin < len(token_ids):
        end = min(len(token_ids), begin + rng.choice((1, 1, 2, 5)))
        yield _emitted(rng, name, token_ids, begin, end, attempt, owner, has_logprobs=has_logprobs)
        if rng.random() < 0.2:  # a retry, or another owner
            attempt, owner = rng.choice(((attempt + 1, owner), (attempt, owner + 1)))
            yield AttemptStarted(request_id=name, attempt=attempt, owner_epoch=owner, worker_id="w")
            yield _emitted(rng, name, token_ids, begin, end, 1, 1, has_logprobs=has_logprobs)  # stale, or known
        begin = end + (rng.random() < 0.02)  # or a gap
    facts: dict[str, Any] = {"request_id": name, "attempt": attempt, "owner_epoch": owner}
    if rng.random() < 0.1:
        error = ResponseError(status=502, code="worker_lost", message="lost")
        yield ResponseEnded(**facts, finish_reason="error", error=error)
        return
    usage = Usage(prompt_tokens=5, output_tokens=len(token_ids), cached_tokens=rng.randrange(5))
    yield ResponseEnded(**facts, finish_reason=rng.choice(("stop", "length")), filtered=rng.random() < 0.1, usage=usage)


def _emitted(
    rng: random.Random,
    name: str,
    token_ids: list[int],
    begin: int,
    end: int,
    attempt: int,
    owner: int,
    *,
    has_logprobs: bool,
) -> TokensEmitted:
    top = (TopLogprob(token_id=5, logprob=-0.5),)
    logprobs = [TokenLogprob(logprob=-one / 7, top=top) for one in token_ids[begin:end]]
    chunk = TokenChunk(
        request_id=name,
        attempt=attempt,
        first_index=begin,
        token_ids=pack_u32(token_ids[begin:end]),
        logprobs=tuple(logprobs) if has_logprobs and rng.random() < 0.9 else (),
    )
    return TokensEmitted(worker_id=f"w{attempt}", worker_epoch=1, owner_epoch=owner, chunks=(chunk,))


def _keyed(event: TokenEvent, key: int) -> TokenEvent:
    if not isinstance(event, TokensEmitted):
        return msgspec.structs.replace(event, reply_key=key)
    chunks = tuple(msgspec.structs.replace(one, reply_key=key) for one in event.chunks)
    return msgspec.structs.replace(event, chunks=chunks)


def reply_keys(first: RequestSubmitted) -> list[int]:
    """Return the reply key of each part of a response, given its first part."""
    assert first.rendering is not None
    return [reply_key_of(tie_seed_of(part_nonce(first.nonce, index))) for index in range(first.rendering.parts)]


def rendered(
    model: Model,
    first: RequestSubmitted,
    records: list[TokenEvent],
    cuts: list[int],
    *,
    response_id: str = "r",
    group: str = "",
) -> list[StreamEvent]:
    """Return the events of a response to a client, the error included.

    `cuts` are positions in `records`: the fold takes the records between two of them at once, as an ingress does.
    """
    rendering = first.rendering
    assert rendering is not None
    parsers = ParserFactory(model, rendering.tool_parser or NONE, rendering.reasoning_parser or NONE)
    fold = fold_of(first, rendering, model, parsers)
    events = fold.begin(response_id)
    states = {name: ResponseState(key) for name, key in zip(fold.ids, reply_keys(first), strict=True)}
    indexes = {id(state): index for index, state in enumerate(states.values())}
    for begin, end in pairwise([0, *sorted(cuts), len(records)]):
        changes = [
            (state, state.next_index, state.ended is not None or state.gap)
            for event in records[begin:end]
            for state in apply(states, event, group)
        ]
        if len(states) == 1 and changes:
            events += fold.step(changes[0][0])  # which takes everything
            continue
        for state, before, has_end in changes:
            events += fold.step(state, indexes[id(state)], before=before, has_end=has_end)
    if fold.error is not None:
        events += fold.error_events(fold.error)
    return events
