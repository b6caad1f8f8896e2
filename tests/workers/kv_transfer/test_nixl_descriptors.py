"""Descriptors that are damaged, foreign or made to harm: refused, in the worker's terms, and no harm to the next."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest, xxh3_64_intdigest

pytest.importorskip("numpy", reason="numpy is not installed")
pytest.importorskip("nixl_cu12", reason="NIXL (nixl-cu12) is not installed")

from forebay.events.base import hex_digest, pack_u32, pack_u64
from forebay.events.transfer import Prefilled
from forebay.workers.kv_transfer import nixl_thread
from forebay.workers.kv_transfer.descriptor import BlockLocation, decode_location, encode_location, slots_of
from forebay.workers.kv_transfer.nixl_agent import TransferError, open_agent
from forebay.workers.kv_transfer.nixl_thread import DROPPED, notify
from tests.workers.conftest import until
from tests.workers.kv_transfer.conftest import BLOCK_BYTES, have, transport
from tests.workers.kv_transfer.peer import prefilled

SUMS = pack_u64([11, 22, 33])
PLACE = BlockLocation(
    agent="p@7",
    route=b"somewhere",
    address=1 << 40,
    slots=64,
    block_bytes=BLOCK_BYTES,
    blocks=pack_u32([5, 1, 63]),
    word=3,
    generation=77,
    sums=SUMS,
)


def offered(place: BlockLocation = PLACE, **changes: Any) -> Prefilled:
    generated: dict[str, Any] = {
        "worker_id": "p",
        "worker_epoch": 7,
        "model": "m",
        "connector": "nixl",
        "descriptor": encode_location(place),
        "tokens": 3,
        "lease_us": 1,
        "checksum": hex_digest(xxh3_64_intdigest(SUMS)),
        **changes,
    }
    return Prefilled(**generated)


def changed(**changes: Any) -> Prefilled:
    return offered(msgspec.structs.replace(PLACE, **changes))


def test_nixl_descriptor_decodes_to_the_offer() -> None:
    place = decode_location(offered(), BLOCK_BYTES)
    assert place == PLACE
    assert slots_of(place).tolist() == [5, 1, 63]
    assert place.count == 3


@given(st.integers(0), st.integers(1, 255))
def test_nixl_descriptor_with_a_flipped_bit_is_refused(where: int, mask: int) -> None:
    descriptor = bytearray(offered().descriptor)
    descriptor[where % len(descriptor)] ^= mask
    with pytest.raises(TransferError, match="the descriptor of p is damaged") as caught:
        decode_location(offered(descriptor=bytes(descriptor)), BLOCK_BYTES)
    assert caught.value.reason == "refused"


@given(st.binary(max_size=200))
def test_nixl_garbage_is_refused_with_and_without_a_checksum(garbage: bytes) -> None:
    for descriptor in (garbage, garbage + xxh3_64_digest(garbage)):
        with pytest.raises(TransferError, match=r"the descriptor of p( is damaged|: )"):
            decode_location(offered(descriptor=descriptor), BLOCK_BYTES)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (offered(connector="tcp"), "p transfers KV by tcp, this worker by nixl"),
        (offered(worker_id="q"), "the descriptor is of p@7, expected one of q"),
        (offered(checksum="0" * 16), "the checksums of p@7 do not match 0000000000000000"),
        (changed(sums=b""), "p@7 offers 3 blocks but 0 checksums"),
        (changed(sums=SUMS[:16]), "p@7 offers 3 blocks but 2 checksums"),
        (changed(block_bytes=512), "a block of p@7 has 512 bytes, a block of this worker 4096"),
        (changed(blocks=b""), "p@7 offers an invalid list of blocks"),
        (changed(blocks=b"12345"), "p@7 offers an invalid list of blocks"),
        (changed(blocks=pack_u32([5, 1, 64])), "p@7 offers a block beyond its 64 slots"),
        (changed(blocks=pack_u32([5, 1, (1 << 32) - 1])), "p@7 offers a block beyond its 64 slots"),
        (changed(address=(1 << 63) - 1), "p@7 has impossible memory: 64 blocks of 4096 bytes at"),
        (changed(slots=1 << 30), "cannot decode the descriptor of p: "),
        (changed(word=4096), "cannot decode the descriptor of p: "),
        (changed(generation=0), "cannot decode the descriptor of p: "),
        (changed(agent=""), "cannot decode the descriptor of p: "),
        (changed(route=b""), "cannot decode the descriptor of p: "),
    ],
)
def test_nixl_impossible_descriptors_are_refused_locally(bad: Prefilled, text: str) -> None:
    with pytest.raises(TransferError, match=text) as caught:
        decode_location(bad, BLOCK_BYTES)
    assert caught.value.reason == "refused"


async def test_nixl_forged_location_is_an_error_and_the_next_fetch_succeeds() -> None:
    async with (
        transport("p@1") as (holder, freed),
        transport("d@1") as (reader, _),
        transport("f@1") as (stranger, _),
    ):
        good, strange = prefilled(holder, "a", [1, 2]), prefilled(stranger, "a", [1])
        place, their_place = (decode_location(one, BLOCK_BYTES) for one in (good, strange))
        for reason, changes in (
            ("refused", {"route": b"garbage"}),
            ("refused", {"route": their_place.route}),
            ("refused", {"address": place.address + (1 << 30)}),
            ("refused", {"slots": place.slots * 2}),
            ("expired", {"word": place.word - 1}),
            ("expired", {"generation": place.generation ^ 1}),
        ):
            descriptor = encode_location(msgspec.structs.replace(place, **changes))
            with pytest.raises(TransferError, match="p@1") as caught:
                await reader.fetch(msgspec.structs.replace(good, descriptor=descriptor), 0, [0, 3])
            assert caught.value.reason == reason
        assert reader.stats.failed == {"refused": 4, "expired": 2}
        assert freed == []
        await reader.fetch(good, 0, [0, 3])
        assert have(reader, [0, 3], [1, 2], seed=2)
        await until(lambda: freed == [("a", "fetched")])


async def test_nixl_a_worker_does_not_fetch_from_itself() -> None:
    async with transport("p@3") as (holder, _):
        with pytest.raises(TransferError, match="the blocks belong to p@3 itself"):
            await holder.fetch(prefilled(holder, "a", [1]), 0, [2])


async def test_nixl_invalid_notifications_are_ignored() -> None:
    async with transport("p@4") as (holder, freed):
        place = decode_location(prefilled(holder, "a", [1]), BLOCK_BYTES)
        agent = open_agent("x@4")
        agent.add_remote_agent(place.route)
        for text in ("", "f", "x1", "f-1", "f1e9", "f٣", "f" + "9" * 1000, "f99"):
            agent.send_notif(place.agent, text.encode())
        notify(agent, place, DROPPED)
        await until(lambda: agent.get_new_notifs() or freed)
        assert freed == [("a", "released")]
        agent.remove_remote_agent(place.agent)


async def test_nixl_least_recently_used_holder_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_thread, "PEERS_MAX", 2)
    removed: list[str] = []

    class RecordedPeers(nixl_thread.Peers):
        def forget(self, peer: nixl_thread.Peer) -> None:
            removed.append(peer.name)
            super().forget(peer)

    monkeypatch.setattr(nixl_thread, "Peers", RecordedPeers)
    async with (
        transport("d@5") as (reader, _),
        transport("p@5") as (p, _),
        transport("q@5") as (q, _),
        transport("r@5") as (r, _),
    ):
        for turn, holder in enumerate((p, q, p, r, q, p, r)):
            await reader.fetch(prefilled(holder, f"a{turn}", [turn + 9]), 0, [0])
            assert have(reader, [0], [turn + 9], seed=2)
        assert removed == ["q@5", "p@5", "r@5", "q@5"]
