"""The fold over a reply slot: each token once, in order, from whoever may speak, and nothing after the end."""

import struct
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from forebay.core.state.reply_slot import ResponseState, apply
from forebay.events.base import pack_u32
from forebay.events.tokens import (
    AttemptStarted,
    CommandResponse,
    DestinationSelected,
    Embedded,
    PrefilledBy,
    RequestLocated,
    ResponseEnded,
    ResponseError,
    RouteResponse,
    TokenChunk,
    TokenEvent,
    TokenLogprob,
    TokensEmitted,
    Usage,
)

NAME = "a"
GROUP = "model"
LENGTH = 20
WHO = 1_000  # a token says who said it, and at which index


def emitted(first: int, tokens: list[int], *, attempt: int = 1, owner: int = 1, name: str = NAME) -> TokensEmitted:
    chunk = TokenChunk(request_id=name, attempt=attempt, first_index=first, token_ids=pack_u32(tokens))
    return TokensEmitted(
        worker_id=f"w{attempt}", worker_epoch=attempt, owner_epoch=owner, chunks=(chunk,), rank=attempt, group=GROUP
    )


def started(attempt: int, owner: int = 1, name: str = NAME) -> AttemptStarted:
    return AttemptStarted(request_id=name, attempt=attempt, owner_epoch=owner, worker_id=f"w{attempt}", group=GROUP)


def ended(attempt: int = 1, owner: int = 1, name: str = NAME) -> ResponseEnded:
    usage = Usage(prompt_tokens=1, output_tokens=LENGTH)
    return ResponseEnded(
        request_id=name, attempt=attempt, owner_epoch=owner, finish_reason="length", usage=usage, group=GROUP
    )


def folded(*slot: TokenEvent) -> ResponseState:
    reply = ResponseState()
    for record in slot:
        apply({NAME: reply}, record, GROUP)
    return reply


OTHER_RESPONSES: list[TokenEvent] = [
    RouteResponse(request_id=NAME, owner_epoch=9, pool="default", mode="kv", group=GROUP),
    CommandResponse(command_id=NAME, owner_epoch=1, group=GROUP),
]
SLOTS: dict[str, tuple[list[TokenEvent], list[int], int, str]] = {
    "known tokens are dropped": (
        [emitted(0, [10, 11]), emitted(1, [11, 12]), emitted(0, [10, 11]), emitted(3, [13])], [10, 11, 12, 13], 1, "w1",
    ),
    "repeated tokens do not change the worker": (
        [emitted(0, [10, 11]), started(2), emitted(0, [10], attempt=2)], [10, 11], 2, "w1",
    ),
    "a later attempt makes later records stale": (
        [emitted(0, [10]), started(2), emitted(1, [99]), ended(1), emitted(1, [11], attempt=2)], [10, 11], 2, "w2",
    ),
    "a later owner voids an earlier one in the same attempt": (
        [emitted(0, [10]), started(1, 7), emitted(1, [99], owner=6), ended(1, 6), emitted(1, [11], owner=7)],
        [10, 11], 1, "w1",
    ),
    "a start that comes late takes nothing back": (
        [started(3), started(2), emitted(0, [99], attempt=2), emitted(0, [10], attempt=3)], [10], 3, "w3",
    ),
    "tokens of a later attempt start it": (
        [emitted(0, [10], attempt=2), emitted(1, [99], attempt=1), ended(0)], [10], 2, "w2",
    ),
    "other responses are not part of it": ([emitted(0, [10]), *OTHER_RESPONSES, emitted(1, [11])], [10, 11], 1, "w1"),
}  # fmt: skip


@pytest.mark.parametrize(("slot", "tokens", "attempt", "worker_id"), SLOTS.values(), ids=SLOTS)
def test_a_reply_slot_returns_the_tokens_of_each_request(
    slot: list[TokenEvent], tokens: list[int], attempt: int, worker_id: str
) -> None:
    reply = folded(*slot)
    assert (reply.tokens, reply.next_index, reply.attempt) == (tokens, len(tokens), attempt)
    assert (reply.worker_id, reply.rank, reply.ended, reply.gap) == (worker_id, int(worker_id[1:]), None, False)
    assert reply.is_stale(attempt - 1, 9)
    assert not reply.is_stale(attempt, 7)
    assert not any(apply({NAME: reply}, other, GROUP) for other in OTHER_RESPONSES)


def test_prefilled_by_comes_with_the_first_valid_token() -> None:
    first = emitted(0, [10])
    whose = PrefilledBy(worker_id="p", rank=2)
    response = msgspec.structs.replace(first, chunks=(msgspec.structs.replace(first.chunks[0], prefilled=whose),))
    assert folded(first).prefilled is None
    assert folded(response, emitted(1, [11])).prefilled == whose
    assert folded(response, started(2), emitted(1, [11], attempt=2)).prefilled == whose, "whoever goes on"
    assert folded(started(2), response, emitted(0, [10], attempt=2)).prefilled is None, "it is void"


def test_tokens_taken_away_stay_counted() -> None:
    reply = folded(emitted(0, [10, 11]))
    reply.tokens.clear()
    assert apply({NAME: reply}, emitted(1, [11, 12]), GROUP) == [reply]
    assert (reply.tokens, reply.next_index) == ([12], 3)


def test_nothing_counts_after_the_end() -> None:
    end = ended(1)
    late: list[TokenEvent] = [emitted(1, [11]), emitted(5, [15]), started(2), ended(2), emitted(1, [11], attempt=2)]
    reply = folded(emitted(0, [10]), end, *late)
    assert reply.ended is end
    assert (reply.tokens, reply.next_index, reply.attempt, reply.gap) == ([10], 1, 1, False)


def test_a_response_ends_with_an_error() -> None:
    error = ResponseError(status=503, code="no_workers", message="none")
    refused = ResponseEnded(request_id=NAME, attempt=0, owner_epoch=0, finish_reason="error", error=error, group=GROUP)
    assert folded(refused, emitted(0, [10])).ended is refused


def test_a_repeated_request_is_located_once() -> None:
    located = RequestLocated(request_id=NAME, partition=2, offset=7, owner_epoch=1, group=GROUP, reply_key=5)
    reply = ResponseState(5)
    assert apply({NAME: reply}, msgspec.structs.replace(located, reply_key=6), GROUP) == []
    assert (apply({NAME: reply}, located, GROUP), reply.located) == ([reply], located)
    again = msgspec.structs.replace(located, owner_epoch=9)
    assert (apply({NAME: reply}, again, GROUP), reply.located) == ([], located)
    assert folded(ended(), msgspec.structs.replace(located, reply_key=0)).located is None


def test_a_gateway_gets_each_destination_once() -> None:
    def destination(attempt: int, owner: int = 1, key: int = 5) -> DestinationSelected:
        where: dict[str, Any] = {"worker_id": "w", "worker_epoch": 3, "rank": 0, "endpoint": "h:1", "group": GROUP}
        return DestinationSelected(request_id=NAME, attempt=attempt, owner_epoch=owner, reply_key=key, **where)

    reply = ResponseState(5)
    slot = [destination(1, key=6), destination(1), destination(1, owner=2), destination(2, owner=2), destination(1)]
    found = [reply.destination for event in slot if apply({NAME: reply}, event, GROUP)]
    assert (found, reply.foreign) == ([slot[1], slot[3]], 1)
    assert apply({NAME: reply}, msgspec.structs.replace(ended(2, 2), reply_key=5), GROUP) == [reply]
    assert apply({NAME: reply}, destination(3), GROUP) == []


def test_a_response_with_a_gap_never_ends() -> None:
    reply = folded(
        emitted(0, [10]), emitted(2, [12]), emitted(1, [11]), started(2), emitted(1, [11], attempt=2), ended(2)
    )
    assert reply.gap
    assert (reply.tokens, reply.ended) == ([10], None)


def test_only_the_replies_that_changed_are_named() -> None:
    replies = {"a": ResponseState(), "b": ResponseState()}
    chunks = [TokenChunk(request_id=name, attempt=1, first_index=0, token_ids=pack_u32([1])) for name in "axb"]
    both = TokensEmitted(worker_id="w1", worker_epoch=1, owner_epoch=1, chunks=tuple(chunks), group=GROUP)
    assert apply(replies, both, GROUP) == [replies["a"], replies["b"]]
    assert apply(replies, both, GROUP) == []
    assert apply(replies, emitted(2, [3], name="b"), GROUP) == [replies["b"]]
    assert replies["b"].gap
    for foreign in (started(2, name="x"), ended(name="x"), started(2)):
        assert apply(replies, foreign, GROUP) == []
    assert apply(replies, ended(1), GROUP) == []
    assert apply(replies, ended(2), GROUP) == [replies["a"]]
    assert apply(replies, ended(2), GROUP) == []


@dataclass
class Speaker:
    """A worker with one attempt, as the protocol wants it; it never learns that another took over."""

    attempt: int
    owner: int
    length: int  # where it finds its end, unless more was said before
    position: int | None = None  # None: it did not begin
    done: bool = False

    def speak(self, slot: list[TokenEvent], size: int, back: int, owner_later: int) -> None:
        """Put its next record on the slot: chunks of any size, some of it again, under owners that follow."""
        if self.position is None:
            if self.attempt > 1:
                slot.append(started(self.attempt, self.owner))
            before = folded(*slot)
            self.position, self.done = before.next_index, before.ended is not None
            return
        self.owner += owner_later
        if self.position < self.length:
            first = max(0, self.position - back)
            last = min(self.length, self.position + size)
            tokens = [self.attempt * WHO + index for index in range(first, last)]
            slot.append(emitted(first, tokens, attempt=self.attempt, owner=self.owner))
            self.position = last
        else:
            slot.append(ended(self.attempt, self.owner))
            self.done = True


@dataclass
class Story:
    """Who spoke for a request, and what stands on the slot."""

    speakers: list[Speaker]
    slot: list[TokenEvent] = field(default_factory=list)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Attempts that begin one after the other or overlap, with zombies of all of them speaking on."""
    lengths = draw(st.lists(st.integers(LENGTH // 2, LENGTH), min_size=2, max_size=4))
    story = Story([Speaker(attempt, attempt, length) for attempt, length in enumerate(lengths, 1)])
    turns = st.tuples(st.sampled_from(story.speakers), st.integers(1, 3), st.integers(0, 2), st.integers(0, 1))
    for speaker, size, back, owner_later in draw(st.lists(turns, min_size=20, max_size=60)):
        if not speaker.done:
            speaker.speak(story.slot, size, back, owner_later)
    last = story.speakers[-1]
    while not last.done:
        last.speak(story.slot, 3, 0, 0)
    return story


@given(stories())
def test_each_token_once_in_order_and_nothing_after_the_end(story: Story) -> None:
    """However attempts, owners and zombies interleave; and what was read once is never taken back."""
    reply = ResponseState()
    heard: list[int] = []
    highest = 0
    end_at = None
    for position, record in enumerate(story.slot):
        changed = apply({NAME: reply}, record, GROUP)
        new, reply.tokens = reply.tokens, []
        if isinstance(record, AttemptStarted):
            highest = max(highest, record.attempt)
        if changed:
            assert end_at is None, "something came after the end"
            assert reply.attempt >= highest
        if end_at is None and reply.ended is not None:
            assert reply.ended.attempt >= highest, "a void end was believed"
            end_at = position
        assert all(token // WHO >= highest for token in new), "a void attempt was heard"
        heard += new
        assert not reply.gap
    assert [token % WHO for token in heard] == list(range(len(heard)))
    assert [token // WHO for token in heard] == sorted(token // WHO for token in heard)
    assert end_at is not None
    assert folded(*story.slot).tokens == heard
    event(f"{len({token // WHO for token in heard})} attempts heard")


def embedded(number: float, *, attempt: int = 1, name: str = NAME) -> Embedded:
    return Embedded(
        request_id=name,
        attempt=attempt,
        owner_epoch=1,
        worker_id=f"w{attempt}",
        vector=struct.pack("<f", number),
        rank=attempt,
        group=GROUP,
    )


def test_a_vector_counts_as_tokens_do() -> None:
    reply = ResponseState()
    replies = {NAME: reply}
    assert apply(replies, embedded(0.5, name="b"), GROUP) == []
    assert apply(replies, embedded(0.5), GROUP) == [reply]
    assert (reply.vector, reply.worker_id, reply.rank) == (struct.pack("<f", 0.5), "w1", 1)
    apply(replies, started(2), GROUP)
    assert apply(replies, embedded(1.5), GROUP) == [], "attempt 1 is void"
    assert apply(replies, embedded(2.5, attempt=2), GROUP) == [reply]
    assert apply(replies, ended(2), GROUP) == [reply]
    assert apply(replies, embedded(3.5, attempt=2), GROUP) == [], "it is over"
    assert (reply.vector, reply.worker_id, reply.rank) == (struct.pack("<f", 2.5), "w2", 2)


def test_events_of_another_group_are_ignored() -> None:
    reply = folded(emitted(0, [10]))
    for record in (emitted(1, [11], attempt=2, owner=9), started(2, owner=9), ended(2, owner=9)):
        assert apply({NAME: reply}, record, "other-model") == []
    assert (reply.tokens, reply.attempt, reply.ended) == ([10], 1, None)


def test_tokens_are_taken_up_to_a_position_with_aligned_logprobs_and_their_workers() -> None:
    reply = ResponseState()
    other = TokenChunk(
        request_id=NAME,
        attempt=2,
        first_index=2,
        token_ids=pack_u32([3, 4]),
        logprobs=(TokenLogprob(logprob=-1.0),) * 2,
    )
    apply({NAME: reply}, emitted(0, [1, 2]), GROUP)
    apply({NAME: reply}, msgspec.structs.replace(emitted(0, [], attempt=2), chunks=(other,)), GROUP)
    assert [reply.served_at(at).worker_id for at in range(4)] == ["w1", "w1", "w2", "w2"]
    assert reply.take(3) == ([1, 2, 3], [None, None, TokenLogprob(logprob=-1.0)])
    assert reply.take() == ([4], [TokenLogprob(logprob=-1.0)])
    embedded = Embedded(
        request_id=NAME, attempt=2, owner_epoch=1, worker_id="w2", vector=struct.pack("<f", 1.0), group=GROUP
    )
    assert apply({NAME: reply}, embedded, GROUP) == [reply]
