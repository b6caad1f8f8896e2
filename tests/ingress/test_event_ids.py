"""The events of a response and their ids depend on the records of its reply slot only."""

import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.base import pack_u32
from forebay.events.codec import decode
from forebay.events.request_ids import parse_public_id
from forebay.events.requests import RequestSubmitted, Sampling
from forebay.events.tokens import TokenEvent, TokensEmitted
from forebay.events.topics import REQUESTS, TOKENS
from forebay.ingress.formatter import StreamEvent
from tests.depth import examples
from tests.ingress.conftest import CHAT, NAME, SLOT, TEXT, Scene, chat, default_model, event_ids, events, text
from tests.ingress.renderings import drawn_response, rendered

REQUEST = RequestSubmitted(
    request_id="a~7",
    model="m",
    token_ids=pack_u32([1, 2, 3]),
    sequence_hashes=b"",
    reply_slot=SLOT,
    timeout_us=1,
    tie_seed=0,
    sampling=Sampling(max_tokens=9),
)


@examples(8)
@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_any_delivery_of_the_records_gives_the_same_events(seed: int, data: st.DataObject) -> None:
    model, rng = default_model(), random.Random(seed)
    first, records = drawn_response(rng, model, REQUEST)
    each = rendered(model, first, records, [*range(1, len(records))])
    cuts = data.draw(st.sets(st.integers(0, len(records))).map(list))
    assert rendered(model, first, records, cuts) == each
    assert first.rendering is not None
    if first.rendering.stream:
        positions: dict[int, list[tuple[int, int]]] = {}
        for event in each:
            positions.setdefault(event.index, []).append((event.position, event.part))
        for found in positions.values():
            assert found[0][1] == 0
            for (position, part), later in pairwise(found):
                assert later == (position, part + 1) or (later[0] > position and later[1] == 0)
    if first.rendering.parts == 1:
        assert rendered(model, first, _split(records), []) == each, "tokens in records of their own"


def _split(records: list[TokenEvent]) -> list[TokenEvent]:
    """Return the records with each token in one of its own."""
    found: list[TokenEvent] = []
    for event in records:
        if not isinstance(event, TokensEmitted):
            found.append(event)
            continue
        (chunk,) = event.chunks
        for at in range(0, len(chunk.token_ids), 4):
            one = {"first_index": chunk.first_index + at // 4, "token_ids": chunk.token_ids[at : at + 4]}
            logprobs = chunk.logprobs[at // 4 : at // 4 + 1]
            part = msgspec.structs.replace(chunk, **one, logprobs=logprobs)
            found.append(msgspec.structs.replace(event, chunks=(part,)))
    return found


async def rendered_again(scene: Scene, response_id: str) -> list[StreamEvent]:
    """Return the events of a response, given only its id and the log."""
    name, location = parse_public_id(response_id)
    assert location is not None
    (record,) = await scene.log.read(REQUESTS.name, location.partition, location.offset, 1)
    first = decode(REQUESTS, record.value)
    assert isinstance(first, RequestSubmitted)
    assert first.request_id in (name, f"{name}-0")
    slot = scene.log.records(TOKENS.name, first.reply_slot, first.reply_from, 10_000)
    records = [decode(TOKENS, one.value) for one in slot]
    return rendered(scene.model, first, records, [], response_id=response_id, group=NAME)


COUNTS = {"include_usage": True, "continuous_usage_stats": True}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, chat()),
    "echo, a stop string, and two choices of each of two prompts": (
        TEXT,
        text(prompt=["one", "two"], n=2, echo=True, stop="stone", logprobs=None),
    ),
    "more choices than run at once": (CHAT, chat(n=70, logprobs=True)),
    "the counts of each chunk": (
        CHAT,
        chat(n=3, stream_options=COUNTS),
    ),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("case", BODIES)
async def test_the_log_has_all_that_a_response_is_rendered_from(scene: Scene, case: str, stream: bool) -> None:
    path, body = BODIES[case]
    given = {key: value for key, value in body.items() if stream or key != "stream_options"}
    pending = scene.start(path, {**given, "stream": stream})
    parts = body.get("n", 1) * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
    open_parts: list[tuple[str, int]] = []
    for number in range(parts):
        request = await scene.next_request()
        at = scene.emit_text(request.request_id, " water")
        open_parts.append((request.request_id, at))
        if number % 8 == 7 or number == parts - 1:  # so that choices are interleaved
            for name, begin in open_parts:
                scene.reply(name, " and stone river", first=begin, cached=1)
            open_parts.clear()
    response = await pending
    assert response.status_code == 200
    response_id = events(response)[0]["id"] if stream else response.json()["id"]
    found = await rendered_again(scene, response_id)
    if stream:
        assert response.content == b"".join(event.encoded() for event in found) + b"data: [DONE]\n\n"
        assert event_ids(response) == [event.id for event in found]
    else:
        assert response.content == found[0].data


async def test_an_error_on_the_log_has_an_id_and_the_first_event_of_a_choice_position_one(scene: Scene) -> None:
    pending = scene.start(CHAT, chat(stream=True))
    request = await scene.next_request()
    at = scene.emit(request.request_id, scene.model.encode(" water")[:1])
    scene.refuse(request.request_id, 502, "worker_lost", attempt=1)
    response = await pending
    assert (at, event_ids(response)) == (1, ["0-1-0", "0-1-1"])
    assert events(response)[-1]["error"]["code"] == "worker_lost"
