"""Later attempts: the response continues after the valid tokens, despite late output of earlier attempts."""

import asyncio
import sys
from typing import Any

import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import hash_seed, sequence_hashes
from forebay.core.state.reply_slot import ResponseState, apply
from forebay.engine_model.sequence import generate_tokens
from forebay.events.base import pack_u32, unpack_u64
from forebay.events.codec import decode, encode
from forebay.events.progress import FirstTokenEmitted, OutputGrown, RequestFailed, RequestFinished
from forebay.events.requests import Sampling, StructuredOutput
from forebay.events.tokens import AttemptStarted, ResponseEnded, ResponseError, TokenChunk, TokensEmitted, Usage
from forebay.events.topics import TOKENS
from forebay.events.work import WorkCancelled, WorkItem
from forebay.transport import patience
from forebay.transport.base import Draft, LogError, LogUnavailable, Record
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.runtime.resume import PAGE_RECORDS, continued
from forebay.workers.runtime.worker import Worker
from tests.harness.faulty_log import FaultyLog
from tests.workers.conftest import GROUP, VOCABULARY, WORK, WORK_SLOT, Scene, until, work_item

SLOT = 3
PROMPT = [1, 2, 3, 4, 5, 6]


class GatedLog(FaultyLog):
    """A log whose reads wait until they are let through, or go wrong."""

    def __init__(self, log: SqliteLog) -> None:
        super().__init__(log, crash_after=sys.maxsize)
        self.open = asyncio.Event()
        self.reading = 0
        self.error: LogError | None = None
        self.torn = False
        self.unavailable = 0  # number of reads that fail
        self.begins = 0

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        self.reading += 1
        if self.unavailable:
            self.unavailable -= 1
            raise LogUnavailable("the broker does not respond")
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return [] if self.torn else await super().read(topic, partition, offset, limit)

    async def begin(self, topic: str, partition: int) -> int:
        return self.begins


def emitted(name: str, first: int, tokens: list[int], *, attempt: int = 1) -> TokensEmitted:
    chunk = TokenChunk(request_id=name, attempt=attempt, first_index=first, token_ids=pack_u32(tokens))
    return TokensEmitted(worker_id="w0", worker_epoch=0, owner_epoch=0, chunks=(chunk,), group=GROUP)


def later(name: str, epoch: int, max_tokens: int = 10, **changes: Any) -> WorkItem:
    return work_item(name, PROMPT, max_tokens, **{"worker_epoch": epoch, "attempt": 2, **changes})


def expected_output(text: list[int], count: int) -> list[int]:
    """Return the output of a mock engine, which depends only on the prompt and the position."""
    return generate_tokens(xxh3_64_intdigest(pack_u32(text), 0), 0, count, VOCABULARY)


def observed(scene: Scene, name: str) -> ResponseState:
    reply = ResponseState()
    for event in scene.tokens():
        apply({name: reply}, event, GROUP)
    return reply


def finished(scene: Scene, name: str, attempt: int = 2) -> list[RequestFinished]:
    ends = scene.progress(RequestFinished)
    return [end for end in ends if (end.request_id, end.attempt) == (name, attempt)]


async def continues(scene: Scene, item: WorkItem) -> RequestFinished:
    """Send a later attempt, wait for its end, and return it."""
    await scene.send(item)
    await until(lambda: finished(scene, item.request_id, item.attempt))
    return finished(scene, item.request_id, item.attempt)[0]


@pytest.fixture
def gate(log: SqliteLog) -> GatedLog:
    return GatedLog(log)


async def test_response_continues_on_another_worker_despite_late_output(scene: Scene) -> None:
    """A lost worker that still emits: no token is repeated, out of order or after the end."""
    zombie, heir = scene.worker(speedup=10.0), scene.worker(name="w2", token="t2")
    async with scene.serving(zombie) as old, scene.serving(heir, "t2", slot=6) as new:
        await scene.send(later("a", old, 150, attempt=1))
        await until(lambda: scene.chunks("a", 1))
        await scene.send(later("a", new, 150), slot=6)
        await until(lambda: finished(scene, "a") and finished(scene, "a", 1))
    events = scene.tokens()
    begin = next(at for at, event in enumerate(events) if isinstance(event, AttemptStarted))
    before = ResponseState()
    for event in events[:begin]:
        apply({"a": before}, event, GROUP)
    generated = before.tokens
    assert 0 < len(generated) < 150
    assert [event.chunks[0].attempt for event in events[begin:] if isinstance(event, TokensEmitted)].count(1) > 0
    assert scene.chunks("a", 2)[0].first_index == len(generated)
    reply = observed(scene, "a")
    assert reply.tokens == expected_output(PROMPT, 150)
    assert reply.ended is not None
    assert reply.ended.attempt == 2
    assert reply.ended.usage == Usage(prompt_tokens=6, output_tokens=150, cached_tokens=0)
    (end,) = finished(scene, "a")
    assert (end.finish_reason, end.output_tokens) == ("length", 150)
    assert [first.attempt for first in scene.progress(FirstTokenEmitted)] == [1, 2]
    assert heir.counters.continued == 1


async def test_structured_response_is_not_continued(scene: Scene, epoch: int) -> None:
    sampling = Sampling(max_tokens=10, structured=StructuredOutput(kind="json_object"))
    await scene.append(TOKENS, SLOT, emitted("a", 0, [7, 8]))
    await scene.send(later("a", epoch, sampling=sampling))
    await scene.send(later("b", epoch, sampling=sampling))  # without output
    await until(lambda: scene.progress(RequestFailed) and scene.progress(RequestFinished))
    error = scene.end("a").error
    assert (error.status, error.code) == (503, "structure_interrupted")
    assert [end.request_id for end in scene.progress(RequestFinished)] == ["b"]


@pytest.mark.parametrize("count", [2, 10])
async def test_a_response_of_text_is_not_continued(scene: Scene, epoch: int, count: int) -> None:
    """Even with `max_tokens` tokens: they were computed from text, so their number is approximate."""
    event = emitted("a", 0, [7] * count)
    chunks = tuple(msgspec.structs.replace(chunk, text_only=True) for chunk in event.chunks)
    await scene.append(TOKENS, SLOT, msgspec.structs.replace(event, chunks=chunks))
    await scene.send(later("a", epoch))
    await scene.send(later("b", epoch))  # without output
    await until(lambda: scene.progress(RequestFailed) and scene.progress(RequestFinished))
    error = scene.end("a").error
    assert (error.status, error.code) == (502, "response_interrupted")
    assert f"after {count} output tokens" in error.message
    assert "text only" in error.message
    assert [end.request_id for end in scene.progress(RequestFinished)] == ["b"]


def test_continued_response_keeps_the_remaining_min_tokens() -> None:
    for least, left in ((5, 3), (1, 0)):
        item = later("a", 1, sampling=Sampling(max_tokens=10, min_tokens=least))
        rest = continued(item, [7, 8], 4).sampling
        assert (rest.max_tokens, rest.min_tokens) == (8, left)


async def test_earlier_output_is_cached_and_not_counted_as_prompt(scene: Scene, epoch: int) -> None:
    generated = list(range(1000, 1010))
    await scene.append(TOKENS, SLOT, emitted("a", 0, generated))
    await scene.ask("warm", PROMPT + generated, 1)
    await until(lambda: finished(scene, "warm", 1))
    await continues(scene, later("a", epoch, 12))
    reply = observed(scene, "a")
    assert reply.tokens == generated + expected_output(PROMPT, 12)[10:]
    assert reply.ended is not None
    assert reply.ended.usage == Usage(prompt_tokens=6, output_tokens=12, cached_tokens=6)
    assert finished(scene, "a")[0].cached_tokens == 6


async def test_continued_response_keeps_adapter_and_tenant(scene: Scene) -> None:
    generated = list(range(1000, 1010))
    salts = {"lora_name": "adapter", "cache_namespace": "tenant"}
    seed = hash_seed(*salts.values())
    prompt, whole = pack_u32(PROMPT), pack_u32(PROMPT + generated)
    salted = {**salts, "sequence_hashes": sequence_hashes(whole, 4, seed)}
    async with scene.serving(scene.worker(loras=("adapter",))) as epoch:
        await scene.append(TOKENS, SLOT, emitted("a", 0, generated))
        await scene.ask("plain", PROMPT + generated, 1)
        await until(lambda: finished(scene, "plain", 1))
        plain = len(scene.kv())
        await continues(scene, later("a", epoch, 15, **salts, sequence_hashes=sequence_hashes(prompt, 4, seed)))
        await scene.ask("again", PROMPT + generated, 1, **salted)
        await until(lambda: finished(scene, "again", 1))
    assert finished(scene, "a")[0].cached_tokens == 0
    assert finished(scene, "again", 1)[0].cached_tokens == 12
    stored = [block for event in scene.kv()[plain:] for block in unpack_u64(event.sequence_hashes)]
    # The last token of an answer is never computed, so its block is not full.
    assert stored == unpack_u64(sequence_hashes(pack_u32(PROMPT + observed(scene, "a").tokens[:-1]), 4, seed))


async def test_growth_of_a_continued_response_counts_from_its_prompt(scene: Scene) -> None:
    async with scene.serving(scene.worker(speedup=5.0)) as epoch:  # a token a batch
        await scene.append(TOKENS, SLOT, emitted("a", 0, [7] * 5))
        await continues(scene, later("a", epoch, 60, report_output=True))
    reported = [event.output_tokens for event in scene.progress(OutputGrown)]
    assert reported == [6, *range(7, 60, 4)]


async def test_ended_response_is_reported_to_the_owner_only(scene: Scene, epoch: int) -> None:
    await scene.send(later("a", epoch, 6, attempt=1))
    await until(lambda: finished(scene, "a", 1))
    await continues(scene, later("a", epoch, 6))
    assert [type(event) for event in scene.tokens()][-2:] == [ResponseEnded, AttemptStarted]
    (first,), (second,) = finished(scene, "a", 1), finished(scene, "a")
    assert (second.finish_reason, second.output_tokens) == (first.finish_reason, first.output_tokens) == ("length", 6)
    assert [event.attempt for event in scene.progress(FirstTokenEmitted)] == [1]


async def test_an_end_with_an_error_is_reported_as_a_failure(scene: Scene, epoch: int) -> None:
    error = ResponseError(status=400, code="context_length_exceeded", message="too long")
    ended = ResponseEnded(request_id="a", attempt=1, owner_epoch=0, finish_reason="error", error=error, group=GROUP)
    await scene.append(TOKENS, SLOT, ended)
    await scene.send(later("a", epoch))
    await until(lambda: scene.progress(RequestFailed))
    assert [(failed.attempt, failed.error) for failed in scene.progress(RequestFailed)] == [(2, "too long")]
    assert scene.tokens(ResponseEnded) == [ended]


async def test_complete_response_without_an_end_is_ended(scene: Scene, epoch: int) -> None:
    await scene.append(TOKENS, SLOT, emitted("a", 0, [7] * 10))
    await continues(scene, later("a", epoch))
    reply = observed(scene, "a")
    assert (reply.tokens, scene.chunks("a", 2)) == ([7] * 10, [])
    assert reply.ended is not None
    assert (reply.ended.finish_reason, reply.ended.usage) == ("length", Usage(prompt_tokens=6, output_tokens=10))
    assert [type(event) for event in scene.progress()] == [RequestFinished]


async def test_response_with_a_gap_fails(scene: Scene, epoch: int) -> None:
    await scene.append(TOKENS, SLOT, emitted("a", 0, [7]))
    await scene.append(TOKENS, SLOT, emitted("a", 2, [9]))
    await scene.send(later("a", epoch))
    await until(lambda: scene.progress(RequestFailed))
    (ended,) = scene.tokens(ResponseEnded)
    assert ended.error == ResponseError(
        status=502, code="tokens_missing", message="output tokens after the first 1 were lost; send the request again"
    )


async def test_superseded_attempt_emits_nothing(scene: Scene, worker: Worker, epoch: int) -> None:
    started = AttemptStarted(request_id="a", attempt=3, owner_epoch=0, worker_id="w3")
    await scene.append(TOKENS, SLOT, started)
    await scene.send(later("a", epoch))
    await until(lambda: worker.counters.superseded)
    await continues(scene, later("b", epoch))
    assert scene.chunks("a", 2) == []
    assert {event.request_id for event in [*scene.progress(), *scene.tokens(ResponseEnded)]} == {"b"}


async def test_earlier_request_with_the_same_id_is_ignored(scene: Scene, epoch: int) -> None:
    """An id may be used again."""
    await scene.append(TOKENS, SLOT, emitted("a", 0, [1, 2, 3]))
    usage = Usage(prompt_tokens=1, output_tokens=3)
    ended = ResponseEnded(request_id="a", attempt=1, owner_epoch=0, finish_reason="stop", usage=usage)
    begin = await scene.append(TOKENS, SLOT, ended) + 1
    await scene.append(TOKENS, SLOT, emitted("a", 0, [7, 8]))
    await scene.append(TOKENS, SLOT, emitted("b", 0, [5]))
    for item in (later("b", epoch), later("a", epoch, reply_from=begin), later("c", epoch, reply_from=10_000)):
        await scene.send(item)
    await until(lambda: all(finished(scene, name) for name in "abc"))
    assert [scene.chunks(name, 2)[0].first_index for name in "abc"] == [2, 1, 0]


async def test_undecodable_output_is_skipped_and_counted(scene: Scene, worker: Worker, epoch: int) -> None:
    await scene.log.append([Draft(TOKENS.name, SLOT, b"\xc1")])
    begin = await scene.append(TOKENS, SLOT, emitted("a", 0, [7, 8]))
    await continues(scene, later("a", epoch))
    assert finished(scene, "a")[0].output_tokens == 10
    assert worker.counters.reading.undecodable == 1
    records = scene.log.records(TOKENS.name, SLOT, begin, 100)
    chunks = [event.chunks[0] for record in records if isinstance(event := decode(TOKENS, record.value), TokensEmitted)]
    assert [chunk.first_index for chunk in chunks][:2] == [0, 2]


async def test_moved_requests_share_one_read_of_a_slot(scene: Scene, worker: Worker, epoch: int) -> None:
    names = [f"r{number}" for number in range(40)]
    generated = [emitted(name, at, [at]) for at in range(40) for name in names]
    assert len(generated) > 2 * PAGE_RECORDS
    await scene.log.append([Draft(TOKENS.name, SLOT, encode(TOKENS, event)) for event in generated])
    items = [later(name, epoch, 42) for name in names]
    await scene.log.append([Draft(WORK.name, WORK_SLOT, encode(WORK, item)) for item in items])
    await until(lambda: all(finished(scene, name) for name in names))
    assert all(observed(scene, name).tokens[:40] == list(range(40)) for name in names)
    assert worker.counters.continued == len(names)
    assert worker.counters.reading.passes == 1


async def test_cancellation_or_new_attempt_during_the_read(scene: Scene, gate: GatedLog) -> None:
    worker = scene.worker(log=gate)
    async with scene.serving(worker) as epoch:
        for name in ("a", "b"):
            await scene.append(TOKENS, SLOT, emitted(name, 0, [7]))
            await scene.send(later(name, epoch))
        await until(lambda: gate.reading)
        await scene.send(WorkCancelled(request_id="a", attempt=2, owner_epoch=0, worker_epoch=epoch))
        await scene.send(later("b", epoch, attempt=3))
        await scene.send(later("c", epoch, attempt=1))
        await until(lambda: finished(scene, "c", 1))
        gate.open.set()
        await until(lambda: finished(scene, "b", 3))
    assert [event.request_id for event in scene.tokens(ResponseEnded)] == ["c", "b"]
    assert scene.chunks("a", 2) == scene.chunks("b", 2) == []
    assert scene.chunks("b", 3)[0].first_index == 1
    assert worker.counters.continued == 1


async def test_repeated_item_during_the_read(scene: Scene, gate: GatedLog) -> None:
    worker = scene.worker(log=gate)
    async with scene.serving(worker) as epoch:
        await scene.send(later("a", epoch, owner_epoch=1))
        await until(lambda: gate.reading)
        await scene.send(later("a", epoch, owner_epoch=2))
        await until(lambda: worker.counters.repeated)
        gate.open.set()
        await until(lambda: finished(scene, "a"))
    assert [event.owner_epoch for event in scene.tokens(AttemptStarted)] == [1]
    assert {event.owner_epoch for event in scene.tokens(TokensEmitted)} == {2}
    assert len(observed(scene, "a").tokens) == 10


async def test_worker_lost_during_the_read_emits_nothing(scene: Scene, gate: GatedLog) -> None:
    worker = scene.worker(log=gate)
    async with scene.serving(worker) as epoch:
        await scene.send(later("a", epoch))
        await until(lambda: gate.reading)
        await scene.lose(epoch)
        again = await scene.admit(worker, "t1.2")
        gate.open.set()
        await continues(scene, later("b", again))
    assert {event.request_id for event in [*scene.progress(), *scene.tokens(ResponseEnded)]} == {"b"}
    assert scene.chunks("a", 2) == []


async def test_response_without_its_start_fails_alone(scene: Scene, gate: GatedLog) -> None:
    gate.open.set()
    gate.begins = 2
    async with scene.serving(scene.worker(log=gate)) as epoch:
        await scene.append(TOKENS, SLOT, emitted("a", 0, [7]))
        await scene.append(TOKENS, SLOT, emitted("a", 1, [8]))
        await scene.append(TOKENS, SLOT, emitted("b", 0, [9]))
        await scene.send(later("a", epoch, reply_from=1))
        await scene.send(later("b", epoch, reply_from=2))
        await until(lambda: scene.progress(RequestFailed) and finished(scene, "b"))
    assert scene.end("a").error.code == "tokens_missing"
    assert scene.chunks("b", 2)[0].first_index == 1


async def test_a_slot_that_cannot_be_read_now_is_read_again(
    scene: Scene, gate: GatedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "RETRY_S", 0.001)
    gate.unavailable = 3
    gate.open.set()
    async with scene.serving(scene.worker(log=gate)) as epoch:
        output = expected_output(PROMPT, 10)
        await scene.append(TOKENS, SLOT, emitted("a", 0, output[:4]))
        await continues(scene, later("a", epoch))
    assert observed(scene, "a").tokens == output
    assert len(scene.tokens(AttemptStarted)) == 1


@pytest.mark.parametrize("torn", [False, True])
async def test_a_slot_that_cannot_be_read_ends_the_worker(scene: Scene, gate: GatedLog, torn: bool) -> None:
    gate.torn = torn
    gate.error = None if torn else LogError("the disk is gone")
    gate.open.set()
    worker = scene.worker(log=gate)
    async with scene.running(worker) as task:
        await scene.send(later("a", scene.epoch))
        with pytest.raises(ExceptionGroup) as caught:
            await task
    assert caught.group_contains(
        LogError, match="partition 3 of tokens ends at offset 0" if torn else "the disk is gone"
    )
