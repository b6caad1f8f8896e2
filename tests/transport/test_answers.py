"""Storing, loading and deleting responses on the topic `answers`."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay import runtime
from forebay.events.answers import RETENTION_S, AnswerContent, AnswerDeleted, AnswerStored
from forebay.events.base import U32_BYTES
from forebay.events.codec import decode, encode
from forebay.events.models import CHUNK_BYTES_MAX
from forebay.events.request_ids import RequestLocation
from forebay.events.tokens import ResponseEnded, TokenChunk, TokensEmitted, Usage
from forebay.events.topics import ANSWERS
from forebay.transport import answers
from forebay.transport.answers import (
    CONTENT,
    DELETED,
    INDEX,
    AnswerDamaged,
    AnswerForgotten,
    AnswerStore,
    AnswerTooLarge,
    KnownAnswers,
)
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.harness.fake_runtime import FakeRuntime
from tests.live.shared import background
from tests.system import submitted, until

AT = RequestLocation(1, 7)


def content(tokens: int = 3, name: str = "a") -> AnswerContent:
    token_ids = random.Random(tokens).randbytes(U32_BYTES * tokens)
    chunk = TokenChunk(request_id=name, attempt=1, first_index=0, token_ids=token_ids)
    emitted = TokensEmitted(worker_id="w", worker_epoch=1, owner_epoch=1, chunks=(chunk,))
    usage = Usage(prompt_tokens=3, output_tokens=tokens)
    ended = ResponseEnded(request_id=name, attempt=1, owner_epoch=1, finish_reason="stop", usage=usage)
    return AnswerContent(submission=submitted(name, [1, 2, 3]), events=(emitted, ended))


@asynccontextmanager
async def opened(log: SqliteLog) -> AsyncIterator[AnswerStore]:
    """Open the store as another process does."""
    store = AnswerStore(log)
    async with background(store.run()):
        yield store


@pytest.fixture
async def store(log: SqliteLog) -> AsyncIterator[AnswerStore]:
    async with opened(log) as made:
        yield made


def index_of(log: SqliteLog) -> list[Any]:
    return [decode(ANSWERS, record.value) for record in log.records(ANSWERS.name, INDEX, 0, 9)]


async def test_another_process_loads_what_was_stored(log: SqliteLog, store: AnswerStore) -> None:
    large = content(CHUNK_BYTES_MAX)  # random tokens do not compress, so it has several pieces
    async with opened(log) as other:
        assert await other.load("a", AT) is None
        await store.store("a", AT, large)
        assert await store.load("a", AT) == large
        assert await other.load("a", AT) == large
    async with opened(log) as later:
        assert await later.load("a", AT) == large
        assert await later.load("b", AT) is None, "the location of an answer does not suffice to read it"
        assert await later.load("a", RequestLocation(1, 8)) is None
    (stored,) = index_of(log)
    assert len(stored.offsets) > 4


async def test_an_answer_is_stored_once(log: SqliteLog, store: AnswerStore) -> None:
    for tokens in (3, 4):
        await store.store("a", AT, content(tokens))
    assert await store.load("a", AT) == content(3)
    assert log.next_offset(ANSWERS.name, INDEX) == 1


@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_deleted_answer_is_deleted_everywhere(log: SqliteLog, store: AnswerStore, *, is_stored: bool) -> None:
    """The deletion removes the pieces on a compacted topic, and a later attempt to store the answer has no effect."""
    async with opened(log) as other:
        if is_stored:
            await store.store("a", AT, content())
        await store.delete("a", AT)
        await until(lambda: other.position == log.next_offset(ANSWERS.name, INDEX))
        for one in (store, other):
            assert isinstance(await one.load("a", AT), AnswerDeleted)
        await other.store("a", AT, content())
        assert isinstance(await other.load("a", AT), AnswerDeleted)
    pieces = log.records(ANSWERS.name, CONTENT, 0, 9)
    assert len({record.key for record in pieces}) == is_stored
    assert not pieces or not pieces[-1].value


async def test_an_answer_that_is_deleted_while_it_is_stored_stays_deleted(log: SqliteLog, store: AnswerStore) -> None:
    async with opened(log) as other:
        storing = asyncio.create_task(store.store("a", AT, content(CHUNK_BYTES_MAX)))
        await until(lambda: log.next_offset(ANSWERS.name, CONTENT))
        await other.delete("a", AT)
        await storing
        await until(lambda: other.position == log.next_offset(ANSWERS.name, INDEX))
        for one in (store, other):
            assert isinstance(await one.load("a", AT), AnswerDeleted)
    (stored,) = [event for event in index_of(log) if isinstance(event, AnswerStored)]
    pieces = log.records(ANSWERS.name, CONTENT, 0, 99)
    assert [bool(record.value) for record in pieces] == [True] * len(stored.offsets) + [False] * len(stored.offsets)
    assert isinstance(index_of(log)[-1], AnswerDeleted), "compaction keeps the newest record"


async def test_an_answer_whose_ingress_died_after_storing_it_stays_deleted(log: SqliteLog, store: AnswerStore) -> None:
    await store.store("a", AT, content())
    stored = log.records(ANSWERS.name, INDEX, 0, 1)[0]
    await store.delete("a", AT)
    await log.append([Draft(ANSWERS.name, INDEX, stored.value, stored.key)])
    async with opened(log) as later:
        await until(lambda: store.position == later.position == 3)
        for one in (store, later):
            assert isinstance(await one.load("a", AT), AnswerDeleted)


async def test_an_expired_answer_is_gone(store: AnswerStore) -> None:
    await store.store("a", AT, content())
    with runtime.use(FakeRuntime(wall_shift_s=RETENTION_S + 1)):
        assert await store.load("a", AT) is None


async def test_retention_removes_index_and_content(log: SqliteLog, store: AnswerStore) -> None:
    await store.store("a", AT, content())
    log.trim(ANSWERS.name, INDEX, 1, 1)
    assert await store.load("a", AT) is None
    other = RequestLocation(1, 8)
    await store.store("a", other, content())
    log.trim(ANSWERS.name, CONTENT, 2, 2)
    with pytest.raises(AnswerDamaged, match="the topic answers has no piece 0 of the answer to a"):
        await store.load("a", other)


async def test_records_that_are_no_answers_are_ignored(log: SqliteLog, store: AnswerStore) -> None:
    await store.store("a", AT, content())
    (record,) = log.records(ANSWERS.name, INDEX, 0, 1)
    event: AnswerStored = decode(ANSWERS, record.value)
    odd = [
        (b"?", b"1.7"),
        (b"", b"1.7"),
        (record.value, b"1.8"),
        (log.records(ANSWERS.name, CONTENT, 0, 1)[0].value, b"1.7"),
    ]
    await log.append([Draft(ANSWERS.name, INDEX, value, key) for value, key in odd])
    await until(lambda: store.undecodable == len(odd))
    assert await store.load("a", AT) == content()
    for damaged in (replace(event, size=1), replace(event, size=1 << 40), replace(event, upload="other")):
        await log.append([Draft(ANSWERS.name, INDEX, encode(ANSWERS, damaged), event.key)])
        await until(lambda: store.position == log.next_offset(ANSWERS.name, INDEX))
        with pytest.raises(AnswerDamaged):
            await store.load("a", AT)


async def test_a_too_large_answer_is_not_kept(store: AnswerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "CONTENT_BYTES_MAX", 1_000)
    with pytest.raises(AnswerTooLarge, match=r"at most 1,000 are kept"):
        await store.store("a", AT, content(300))
    assert await store.load("a", AT) is None


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 1 << 62) | st.just(DELETED)), max_size=60))
def test_the_newest_index_record_of_each_request_is_known(updates: list[tuple[int, int]]) -> None:
    """Beyond the limit, the oldest requests are forgotten. Neither they nor deleted ones become new again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "KNOWN_MAX", 16)
        patch.setattr(answers, "FORGOTTEN", 4)
        known, expected, first = KnownAnswers(), dict[int, int](), 0
        for request, record in updates:
            known.set(request, record)
            if expected.get(request) != DELETED:
                expected[request] = record
            if len(expected) > 16:
                for oldest in sorted(expected)[:4]:
                    del expected[oldest]
                    first = max(first, oldest + 1)
            for one in range(41):
                if one < first:
                    with pytest.raises(AnswerForgotten):
                        known.get(one)
                else:
                    assert known.get(one) == expected.get(one)


async def test_all_answers_of_a_tenant_are_forgotten_while_others_use_the_store(
    log: SqliteLog, store: AnswerStore
) -> None:
    def of(tenant: str, name: str) -> AnswerContent:
        return replace(content(name=name), submission=submitted(name, [1], tenant=tenant))

    places = [RequestLocation(1, number) for number in range(6)]
    for number, tenant in enumerate(["acme", "beta", "acme", "", "acme"]):
        await store.store(f"r{number}", places[number], of(tenant, f"r{number}"))
    await store.delete("r2", places[2])
    twice, *_ = index_of(log)
    lost = replace(twice, request_id="r5", offset=5, upload="lost", offsets=(99,))
    for event in (twice, lost):
        await log.append([Draft(ANSWERS.name, INDEX, encode(ANSWERS, event), event.key)])
    await log.append([Draft(ANSWERS.name, INDEX, b"\xc1")])
    with closing(AnswerStore(log)) as command:
        assert await command.forget("acme") == 3
    with closing(AnswerStore(log)) as command:
        assert await command.forget("acme") == 0
    await until(lambda: store.position == log.next_offset(ANSWERS.name, INDEX))
    found = [await store.load(f"r{number}", place) for number, place in enumerate(places[:5])]
    assert [isinstance(one, AnswerDeleted) for one in found] == [True, False, True, False, True]
    assert isinstance(found[1], AnswerContent)
