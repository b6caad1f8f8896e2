"""A recorded answer leads to the same response as the records of the reply slot."""

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from forebay.core.state.reply_slot import ResponseState, apply
from forebay.events.base import pack_u32
from forebay.events.tokens import (
    AttemptStarted,
    PrefilledBy,
    ResponseEnded,
    TokenChunk,
    TokenEvent,
    TokenLogprob,
    TokensEmitted,
    Usage,
)
from forebay.ingress.recorder import RecordedStream, Recorder
from tests.system import submitted

PARTS = ("a-0", "a-1")
STATE = ("tokens", "logprobs", "served", "next_index", "worker_id", "rank", "attempt", "prefilled", "ended")

parts = st.sampled_from(PARTS)
attempts = st.integers(1, 3)
epochs = st.integers(0, 2)
chunks = st.builds(
    lambda name, attempt, first, count, prefilled, has_logprobs: TokenChunk(
        request_id=name,
        attempt=attempt,
        first_index=first,
        token_ids=pack_u32(range(first, first + count)),
        prefilled=PrefilledBy(worker_id="p") if prefilled else None,
        logprobs=tuple(TokenLogprob(logprob=-float(at)) for at in range(first, first + count)) if has_logprobs else (),
    ),
    parts, attempts, st.integers(0, 4), st.integers(1, 3), st.booleans(), st.booleans(),
)  # fmt: skip
emitted = st.builds(
    lambda worker, epoch, found: TokensEmitted(worker_id=worker, worker_epoch=1, owner_epoch=epoch, chunks=found),
    st.sampled_from(("w1", "w2")),
    epochs,
    st.lists(chunks, min_size=1, max_size=3, unique_by=lambda chunk: chunk.request_id).map(tuple),
)
started = st.builds(AttemptStarted, request_id=parts, attempt=attempts, owner_epoch=epochs, worker_id=st.just("w"))
usage = Usage(prompt_tokens=1, output_tokens=1)
ended = st.builds(
    ResponseEnded,
    request_id=parts,
    attempt=attempts,
    owner_epoch=epochs,
    finish_reason=st.just("stop"),
    usage=st.just(usage),
)


def tokens(attempt: int, count: int) -> TokensEmitted:
    """Return an event with the first tokens of a part."""
    chunk = TokenChunk(request_id="a-0", attempt=attempt, first_index=0, token_ids=pack_u32(range(count)))
    return TokensEmitted(worker_id=f"w{attempt}", worker_epoch=1, owner_epoch=1, chunks=(chunk,))


def states_of(replies: dict[str, Any]) -> list[list[Any]]:
    return [[getattr(reply, name) for name in STATE] for reply in replies.values()]


@example([tokens(1, 3), tokens(2, 2)])
@given(st.lists(st.one_of(emitted, emitted, started, ended), max_size=20))
def test_a_recorded_answer_has_the_output_of_the_slot(events: list[TokenEvent]) -> None:
    recorder = Recorder()
    live = {name: RecordedStream(0, name, recorder) for name in PARTS}
    for event in events:
        apply(live, event, "")
    assert recorder.has_gap == any(one.gap for one in live.values())
    if recorder.has_gap:
        return  # such an answer is not kept
    kept = {name: ResponseState() for name in PARTS}
    content = recorder.content(submitted("a-0", [1]), has_failed=False)
    for event in content.events:
        apply(kept, event, "")
    assert states_of(kept) == states_of(live)
    assert len(content.events) <= sum(len(event.chunks) if isinstance(event, TokensEmitted) else 1 for event in events)
