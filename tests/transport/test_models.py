"""Storing, loading and removing model cards on the topic `models`."""

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import runtime
from forebay.events.codec import decode, encode
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.models import (
    CHUNK_BYTES_MAX,
    AliasSet,
    AliasTarget,
    FileChunk,
    ModelCard,
    ModelFile,
    ModelStored,
    StoredFile,
)
from forebay.events.topics import ANSWERS, HEARTBEATS, MODELS
from forebay.transport.base import Draft
from forebay.transport.models import (
    CARDS,
    CONTENT,
    NEEDED_S,
    ModelDamaged,
    ModelMissing,
    ModelStore,
    UseUnknown,
    cards_in_use,
    needed_by_answers,
    remove_unused,
    superseded_by,
)
from forebay.transport.sqlite.log import SqliteLog
from tests.harness.fake_runtime import FakeRuntime
from tests.live.shared import background

FILES = {"config.json": b"{}", "tokenizer.json": b"a tokenizer" * 1_000}


def card_of(files: Mapping[str, bytes], context_tokens: int = 4_096) -> ModelCard:
    listed = [
        ModelFile(name=name, sha256=sha256(data).hexdigest(), size=len(data)) for name, data in sorted(files.items())
    ]
    return ModelCard(files=tuple(listed), context_tokens=context_tokens)


Again = Callable[[], Awaitable[ModelStore]]
BIG = random.Random(3).randbytes(CHUNK_BYTES_MAX * 2 + 5)  # does not compress, so it has three pieces


@pytest.fixture
async def store(log: SqliteLog) -> AsyncIterator[ModelStore]:
    store = ModelStore(log)
    await store.start()
    async with background(store.run()):
        yield store
    store.close()


@pytest.fixture
async def again(log: SqliteLog) -> AsyncIterator[Again]:
    """Open the store as another process does."""
    stores: list[ModelStore] = []

    async def opened() -> ModelStore:
        stores.append(ModelStore(log))
        await stores[-1].start()
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


def pieces(log: SqliteLog) -> list[FileChunk]:
    return [decode(MODELS, record.value) for record in log.records(MODELS.name, CONTENT, 0, 1_000)]


async def test_another_process_loads_what_was_stored(log: SqliteLog, store: ModelStore, again: Again) -> None:
    files = {**FILES, "big.json": BIG, "same.json": FILES["config.json"], "empty.json": b""}
    card = card_of(files)
    assert await store.store("m", card, files) == card.digest()
    other = await again()
    assert await other.load(card.digest()) == files
    assert [piece.index for piece in pieces(log) if piece.sha256 == sha256(BIG).hexdigest()] == [0, 1, 2]
    assert max(len(piece.data) for piece in pieces(log)) == CHUNK_BYTES_MAX


async def test_equal_content_is_stored_once(log: SqliteLog, store: ModelStore) -> None:
    first, second = card_of(FILES), card_of(FILES, context_tokens=8_192)
    assert first.digest() != second.digest()
    for _ in range(2):
        await store.store("m", first, FILES)
        await store.stored(first.digest())
    await store.store("n", second, FILES)
    await store.stored(second.digest())
    assert len(pieces(log)) == len(FILES)
    assert log.next_offset(MODELS.name, CARDS) == 2
    assert await store.load(second.digest()) == FILES


async def test_a_card_that_arrives_later_is_awaited(store: ModelStore, again: Again) -> None:
    card = card_of(FILES)
    waiting = asyncio.create_task(store.stored(card.digest()))
    other = await again()
    await other.store("m", card, FILES)
    assert (await waiting).model == "m"


async def test_a_record_without_a_value_removes_a_card(log: SqliteLog, store: ModelStore, again: Again) -> None:
    digest = await store.store("m", card_of(FILES), FILES)
    await store.stored(digest)
    await log.append([Draft(MODELS.name, CARDS, b"", digest.encode())])
    other = await again()
    assert other.cards == {}
    with pytest.raises(ModelMissing, match=f"has no model card {digest}"):
        await other.load(digest)


async def test_a_removed_card_keeps_the_pieces_of_others(log: SqliteLog, store: ModelStore, again: Again) -> None:
    first, second = card_of({**FILES, "big.json": BIG}), card_of(FILES, context_tokens=8_192)
    await store.store("m", first, {**FILES, "big.json": BIG})
    await store.store("m", second, FILES)
    await store.remove([first.digest()])
    assert list(store.cards) == [second.digest()]
    big = sha256(BIG).hexdigest().encode()
    removed = [record.key for record in log.records(MODELS.name, CONTENT, 0, 99) if not record.value]
    assert [key.startswith(big) for key in removed if key is not None] == [True] * 3
    other = await again()
    assert await other.load(second.digest()) == FILES


async def test_pieces_that_are_removed_meanwhile_are_stored_again(
    log: SqliteLog, store: ModelStore, again: Again
) -> None:
    """A process stores a card with the files of another card, whose removal it has not read yet."""
    first, second = card_of(FILES), card_of(FILES, context_tokens=8_192)
    await store.store("m", first, FILES)
    slow = await again()
    await store.remove([first.digest()])
    assert list(slow.cards) == [first.digest()], "it has not read the removal"
    await slow.store("m", second, FILES)
    stored = slow.cards[second.digest()].stored
    removed = {record.key for record in log.records(MODELS.name, CONTENT, 0, 99) if not record.value}
    kept = [log.records(MODELS.name, CONTENT, offset, 1)[0].key for place in stored for offset in place.offsets]
    assert len(kept) == len(FILES)
    assert not removed.intersection(kept)


async def test_cards_are_in_the_order_of_their_newest_records(log: SqliteLog, store: ModelStore, again: Again) -> None:
    first, second, third = (card_of(FILES, context_tokens=tokens) for tokens in (1, 2, 3))
    for card, model in ((first, "m"), (second, "n"), (third, "m")):
        await store.store(model, card, FILES)
    assert superseded_by(store, "m", third.digest()) == [first.digest()]
    assert superseded_by(store, "m", first.digest()) == []
    assert superseded_by(store, "m", "f" * 64) == []
    await log.append([Draft(MODELS.name, CARDS, encode(MODELS, store.cards[first.digest()]), first.digest().encode())])
    other = await again()
    assert superseded_by(other, "m", first.digest()) == [third.digest()]


async def test_the_newest_event_of_an_alias_counts(log: SqliteLog, store: ModelStore, again: Again) -> None:
    for alias, models in (("a", "m"), ("b", "m"), ("a", "no"), ("b", "")):
        targets = tuple(AliasTarget(model=model) for model in models)
        await store.set_alias(AliasSet(alias=alias, targets=targets))
    other = await again()
    assert {name: [one.model for one in alias.targets] for name, alias in other.aliases.items()} == {"a": ["n", "o"]}
    assert [record.key for record in log.records(MODELS.name, CARDS, 0, 9)] == [b"alias/a", b"alias/b"] * 2


async def test_records_that_are_no_cards_are_ignored(log: SqliteLog, store: ModelStore, again: Again) -> None:
    digest = await store.store("m", card_of(FILES), FILES)
    stored = await store.stored(digest)
    chunk = FileChunk(sha256="0" * 64, upload="u", index=0, data=b"x")
    for key, value in (
        (digest, b"\xc1"),
        (digest, encode(MODELS, chunk)),
        ("f" * 64, encode(MODELS, msgspec.structs.replace(stored, model="other"))),
    ):
        await log.append([Draft(MODELS.name, CARDS, value, key.encode())])
    other = await again()
    assert (list(other.cards), other.undecodable) == ([digest], 3)
    assert other.cards[digest].model == "m"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda chunk: msgspec.structs.replace(chunk, data=b"not zlib"), ModelDamaged),
        (lambda chunk: msgspec.structs.replace(chunk, data=zlib.compress(b"A tokenizer" * 1_000)), ModelDamaged),
        (lambda chunk: msgspec.structs.replace(chunk, data=chunk.data[: len(chunk.data) // 2]), ModelDamaged),
        (lambda chunk: msgspec.structs.replace(chunk, sha256="0" * 64), ModelMissing),
    ],
)
async def test_damaged_content_is_not_used(
    log: SqliteLog, store: ModelStore, again: Again, change: Callable[[FileChunk], FileChunk], error: type[Exception]
) -> None:
    digest = await store.store("m", card_of(FILES), FILES)
    stored = await store.stored(digest)
    changed = encode(MODELS, change(pieces(log)[1]))
    (offset,) = await log.append([Draft(MODELS.name, CONTENT, changed)])
    places = (stored.stored[0], StoredFile(sha256=stored.stored[1].sha256, offsets=(offset,)))
    falsified = msgspec.structs.replace(stored, stored=places)
    await log.append([Draft(MODELS.name, CARDS, encode(MODELS, falsified), digest.encode())])
    other = await again()
    with pytest.raises(error, match=r"tokenizer\.json"):
        await other.load(digest)


async def test_content_of_another_size_is_not_used(log: SqliteLog, store: ModelStore) -> None:
    small = card_of({"config.json": b"{}"})
    file = msgspec.structs.replace(small.files[0], size=1)
    card = msgspec.structs.replace(small, files=(file,))
    await store.store("m", card, {"config.json": b"{}"})
    await store.stored(card.digest())
    with pytest.raises(ModelDamaged, match="does not have the SHA-256"):
        await store.load(card.digest())


async def test_a_piece_that_is_missing_is_named(log: SqliteLog, store: ModelStore, again: Again) -> None:
    card = card_of(FILES)
    for stored in ((), (StoredFile(sha256=card.files[0].sha256, offsets=(7,)),)):
        event = ModelStored(model="m", card=card, stored=stored)
        await log.append([Draft(MODELS.name, CARDS, encode(MODELS, event), card.digest().encode())])
        other = await again()
        with pytest.raises(ModelMissing, match=r"config\.json"):
            await other.load(card.digest())


@given(st.dictionaries(st.sampled_from("abcd"), st.binary(max_size=8), min_size=1))
def test_the_digest_covers_names_and_contents(files: dict[str, bytes]) -> None:
    digest = card_of(files).digest()
    assert digest == card_of(dict(reversed(files.items()))).digest()
    assert digest != card_of({**files, "e": b""}).digest()
    name = min(files)
    assert digest != card_of({**files, name: files[name] + b"x"}).digest()


STORED_CARDS = [card_of(FILES, context_tokens=tokens) for tokens in (1, 2, 3)]
GROUPS = {"a": 0, "b": 1}


@asynccontextmanager
async def beating(log: SqliteLog, **cards: str) -> AsyncIterator[None]:
    """Write heartbeats of the owners of these groups, whose workers have these cards, until the body ends."""

    async def beat() -> None:
        while True:
            for group, card in cards.items():
                one = RouterHeartbeat(group=group, router_id="r", role="owner", card=card, released=card == "")
                await log.append([Draft(HEARTBEATS.name, GROUPS[group], encode(HEARTBEATS, one))])
            await asyncio.sleep(0)

    async with background(beat()):
        yield


@pytest.fixture
async def several(log: SqliteLog) -> AsyncIterator[ModelStore]:
    store = ModelStore(log)
    await store.start()
    for card in STORED_CARDS:
        await store.store("a", card, FILES)
    yield store
    store.close()


async def test_cards_that_workers_use_are_kept(log: SqliteLog, several: ModelStore) -> None:
    first, second, third = (card.digest() for card in STORED_CARDS)
    async with beating(log, a=third, b=first):
        assert await cards_in_use(log, GROUPS) == {"a": third, "b": first}
        assert await remove_unused(log, several, GROUPS, [first, second]) == [second]
        assert await remove_unused(log, several, GROUPS, [first, second]) == []
    assert list(several.cards) == [first, third]


async def test_cards_that_kept_answers_may_need_stay(log: SqliteLog, several: ModelStore) -> None:
    """A card is needed for eight days after another card of its model was stored."""
    first, second, third = (card.digest() for card in STORED_CARDS)
    await several.store("b", card_of({"x": b""}), {"x": b""})
    assert await needed_by_answers(log, several) == set()
    await log.append([Draft(ANSWERS.name, 0, b"an answer")])
    assert await needed_by_answers(log, several) == set(several.cards)
    async with beating(log, a=third, b=third):
        assert await remove_unused(log, several, GROUPS, [first, second]) == []
        with runtime.use(FakeRuntime(wall_shift_s=NEEDED_S + 60)):
            assert await needed_by_answers(log, several) == {third, card_of({"x": b""}).digest()}
            assert await remove_unused(log, several, GROUPS, [first, second]) == [first, second]


@pytest.mark.parametrize("card", ["", None])
async def test_nothing_is_removed_while_a_group_has_no_owner(
    log: SqliteLog, several: ModelStore, monkeypatch: pytest.MonkeyPatch, card: str | None
) -> None:
    monkeypatch.setattr("forebay.transport.heartbeats.HEARTBEATS_S", 0.2 if card is None else 60.0)
    owners = {"a": STORED_CARDS[0].digest()} if card is None else {"a": STORED_CARDS[0].digest(), "b": card}
    async with beating(log, **owners):
        with pytest.raises(UseUnknown, match="no router owns b now, so it is unknown which model cards"):
            await remove_unused(log, several, GROUPS, [STORED_CARDS[1].digest()])
    assert len(several.cards) == len(STORED_CARDS)
