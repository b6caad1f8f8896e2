"""Names of the blocks of a mock engine."""

from forebay.core.block_hashes import hash_seed, mm_hashes, sequence_hashes
from forebay.events.base import array_u64, pack_u32
from forebay.events.media import Media
from forebay.workers.engines.mock.tiers import KnownBlocks
from forebay.workers.kv_tiers.identity import BlockName, KeyChain, KvIdentity, media_by_block

BLOCK_SIZE = 4
IDENTITY = KvIdentity(
    weights="w", tp_rank=0, tp_size=1, layout="test", dtype="uint8", block_size=BLOCK_SIZE, block_bytes=32
)
PROMPT = list(range(1, 18))  # four full blocks


def names_of(prompt: list[int], *media: Media, salt: str = "", lora: str = "") -> list[BlockName]:
    packed = pack_u32(prompt)
    places = [(one.digest, one.first_token, one.tokens) for one in media]
    chain = KeyChain(IDENTITY, salt=salt, adapter=lora)
    keys = chain.extend(None, packed, media_by_block(places, BLOCK_SIZE))
    hashes = sequence_hashes(packed, BLOCK_SIZE, hash_seed(lora, salt), mm_hashes(media, BLOCK_SIZE))
    return [BlockName(*pair) for pair in zip(keys, array_u64(hashes), strict=True)]


def known() -> KnownBlocks:
    return KnownBlocks(KeyChain(IDENTITY))


def test_blocks_are_known_while_a_request_or_the_device_has_them() -> None:
    one, names = known(), names_of(PROMPT)
    hashes = [name.sequence_hash for name in names]
    one.begin(names)
    one.begin(names[:2])
    assert one.stored(hashes[:3]) == names[:3]
    one.end(names)
    assert len(one) == 3, "the fourth block is nowhere"
    assert one.removed([*hashes, 99]) == names[:3]
    assert len(one) == 2
    one.end(names[:2])
    assert len(one) == 0


def test_a_block_that_the_device_stores_twice_is_removed_once() -> None:
    one, names = known(), names_of(PROMPT)
    hashes = [name.sequence_hash for name in names]
    one.begin(names)
    for _ in range(2):
        assert len(one.stored(hashes)) == 4
    one.end(names)
    assert len(one.removed(hashes)) == 4
    assert (len(one), one.removed(hashes)) == (0, [])


def test_output_blocks_have_the_names_of_the_same_tokens_in_a_prompt() -> None:
    one, whole = known(), names_of(PROMPT)
    one.begin(whole[:2])
    for at in (2, 3):
        tokens = pack_u32(PROMPT[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE])
        one.name_output(whole[at - 1].sequence_hash, whole[at].sequence_hash, tokens)
    one.name_output(12345, 67890, pack_u32(PROMPT[:4]))  # nobody knows the block before it
    stored = one.stored([name.sequence_hash for name in whole])
    assert stored == whole
    one.settle()
    one.end(whole[:2])
    assert len(one) == 4, "the device has them"
    one.clear(requests=False)
    assert len(one) == 0


def test_output_blocks_that_the_device_does_not_store_are_forgotten() -> None:
    one, whole = known(), names_of(PROMPT)
    one.begin(whole[:1])
    one.name_output(whole[0].sequence_hash, whole[1].sequence_hash, pack_u32(PROMPT[4:8]))
    one.settle()
    assert one.get(whole[1].sequence_hash) is None
    one.clear(requests=True)
    assert len(one) == 0
