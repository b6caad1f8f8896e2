"""The API keys on the topic `keys`."""

import asyncio
from contextlib import closing
from hashlib import sha256

import pytest
from msgspec.structs import replace

from forebay.events.codec import encode
from forebay.events.keys import KeySet
from forebay.events.topics import KEYS
from forebay.transport import keys
from forebay.transport.base import Draft
from forebay.transport.keys import PARTITION, KeyBook
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import background
from tests.system import until


def key_of(name: str) -> KeySet:
    return KeySet(key_hash=sha256(name.encode()).hexdigest(), tenant=name)


def id_of(name: str) -> str:
    return key_of(name).key_id


async def test_the_newest_event_of_a_key_counts_until_a_record_without_value_removes_it() -> None:
    with closing(SqliteLog.open(None)) as log:
        writer = KeyBook(log)
        await writer.start()
        for name in ("one", "two"):
            await writer.set(key_of(name))
        await writer.set(replace(key_of("one"), revoked_us=7))
        reader = KeyBook(log)
        await reader.start()
        assert (
            reader.keys
            == writer.keys
            == {id_of("one"): replace(key_of("one"), revoked_us=7), id_of("two"): key_of("two")}
        )
        async with background(reader.run()):
            await log.append([Draft(KEYS.name, PARTITION, b"", key_of("two").key)])
            await until(lambda: id_of("two") not in reader.keys)
        assert set(reader.keys) == {id_of("one")}


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (b"{", b""),
        (encode(KEYS, key_of("two")), key_of("one").key),
        (encode(KEYS, key_of("two")), None),
        (b"", b"\xff"),
        (b"", b"no id of a key"),
        (b"", None),
    ],
)
async def test_a_malformed_record_changes_nothing(value: bytes, key: bytes | None) -> None:
    with closing(SqliteLog.open(None)) as log:
        book = KeyBook(log)
        await book.start()
        await book.set(key_of("one"))
        await log.append([Draft(KEYS.name, PARTITION, value, key)])
        await book.start()
        assert list(book.keys.values()) == [key_of("one")]
        assert book.undecodable == bool(value)


async def test_the_number_of_keys_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "KEYS_MAX", 2)
    with closing(SqliteLog.open(None)) as log:
        book = KeyBook(log)
        await book.start()
        await asyncio.gather(*(book.set(key_of(name)) for name in ("one", "two", "three")))
        await book.set(replace(key_of("one"), revoked_us=7))
        assert [key.tenant for key in book.keys.values()] == ["one", "two"]
        assert book.keys[id_of("one")] == replace(key_of("one"), revoked_us=7)
        assert book.undecodable == 1
