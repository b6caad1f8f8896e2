"""Names and bytes of the blocks of a mock engine, and the check of what a request has loaded."""

import numpy
import pytest

from forebay.core.block_hashes import hash_seed, mm_hashes, sequence_hashes
from forebay.events.base import array_u64, pack_u32
from forebay.events.media import Media
from forebay.workers.engines.mock.block_contents import BlockContents, KvCheck, media_hashes
from forebay.workers.engines.standin_encoder import StandInEncoder
from forebay.workers.kv_tiers.identity import BlockName, KeyChain, KvIdentity, media_by_block
from tests.workers.pictures import shown

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


def contents() -> BlockContents:
    return BlockContents(IDENTITY.block_bytes, KeyChain(IDENTITY))


def begun(one: BlockContents, names: list[BlockName]) -> None:
    one.begin(names, [name.sequence_hash for name in names])


def test_blocks_are_known_while_a_request_or_the_device_has_them() -> None:
    one, names = contents(), names_of(PROMPT)
    hashes = [name.sequence_hash for name in names]
    begun(one, names)
    begun(one, names[:2])
    assert [block.name for block in one.stored(hashes[:3])] == names[:3]
    one.end(names)
    assert len(one) == 3, "the fourth block is nowhere"
    assert [block.name for block in one.removed([*hashes, 99])] == names[:3]
    assert len(one) == 2
    one.end(names[:2])
    assert len(one) == 0


def test_a_block_that_the_device_stores_twice_is_removed_once() -> None:
    one, names = contents(), names_of(PROMPT)
    hashes = [name.sequence_hash for name in names]
    begun(one, names)
    for _ in range(2):
        assert len(one.stored(hashes)) == 4
    one.end(names)
    assert len(one.removed(hashes)) == 4
    assert (len(one), one.removed(hashes)) == (0, [])


def test_output_blocks_have_the_names_of_the_same_tokens_in_a_prompt() -> None:
    one, whole = contents(), names_of(PROMPT)
    begun(one, whole[:2])
    for at in (2, 3):
        tokens = pack_u32(PROMPT[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE])
        one.name_output(whole[at - 1].sequence_hash, whole[at].sequence_hash, tokens)
    one.name_output(12345, 67890, pack_u32(PROMPT[:4]))  # nobody knows the block before it
    stored = one.stored([name.sequence_hash for name in whole])
    assert [block.name for block in stored] == whole
    assert [block.word for block in stored] == [name.sequence_hash for name in whole]
    one.settle()
    one.end(whole[:2])
    assert len(one) == 4, "the device has them"
    one.clear(requests=False)
    assert len(one) == 0


def test_output_blocks_that_the_device_does_not_store_are_forgotten() -> None:
    one, whole = contents(), names_of(PROMPT)
    begun(one, whole[:1])
    one.name_output(whole[0].sequence_hash, whole[1].sequence_hash, pack_u32(PROMPT[4:8]))
    one.settle()
    assert one.get(whole[1].sequence_hash) is None
    one.clear(requests=True)
    assert len(one) == 0


def test_only_leading_blocks_with_known_bytes_are_offered() -> None:
    one, names = contents(), names_of(PROMPT)
    one.begin(names, [names[0].sequence_hash, None, names[2].sequence_hash, None])
    assert [block.name for block in one.stored(name.sequence_hash for name in names)] == names[:1]
    one.learn(names, [name.sequence_hash for name in names])
    assert [block.name for block in one.stored(name.sequence_hash for name in names)] == names


def test_the_check_depends_on_every_byte() -> None:
    one, names = contents(), names_of(PROMPT)
    begun(one, names)
    blocks = [one.bytes_of(block) for block in one.stored(name.sequence_hash for name in names)]

    def seen(*flipped: tuple[int, int]) -> int:
        check = KvCheck((), len(names), BLOCK_SIZE, (0,))
        for at, (block, name) in enumerate(zip(blocks, names, strict=True)):
            read = block.copy()
            for number, offset in flipped:
                if number == at:
                    read[offset] ^= 1
            check.read(at, read, name.sequence_hash)
        return check.wrong()

    assert seen() == 0
    every = [seen((at, offset)) for at in range(4) for offset in range(32)]
    assert 0 not in every
    assert len(set(every)) == len(every)
    whole = [seen(*((at, offset) for offset in range(32))) for at in range(4)]
    assert 0 not in whole, "all bytes of a block wrong alike"


def test_a_block_of_another_prompt_is_wrong() -> None:
    one, names, others = contents(), names_of(PROMPT), names_of(PROMPT[1:])
    begun(one, others)
    (foreign,) = one.stored([others[1].sequence_hash])
    check = KvCheck((), len(names), BLOCK_SIZE, (0,))
    check.read(1, one.bytes_of(foreign), names[1].sequence_hash)
    assert check.wrong()


def test_the_bytes_depend_on_the_embeddings_before_the_end_of_the_block() -> None:
    red, blue, green = shown((255, 0, 0), 4), shown((0, 0, 255), 11), shown((0, 255, 0), 11)
    embeddings = StandInEncoder().encode_all([red, blue])
    hashes = media_hashes([red, blue], embeddings)
    assert hashes[:1] == (0,)
    assert len(set(hashes)) == 3
    assert media_hashes([red, green], StandInEncoder().encode_all([red, green]))[:2] == hashes[:2]
    names = names_of(PROMPT, red, blue)
    check = KvCheck([red, blue], len(names), BLOCK_SIZE, hashes)
    words = [check.word(at, name.sequence_hash) for at, name in enumerate(names)]
    # The second image begins with the last token of the third block.
    media = [hashes[0], hashes[1], hashes[2], hashes[2]]
    assert words == [name.sequence_hash ^ one for name, one in zip(names, media, strict=True)]
    assert check.media_hash == hashes[2]


@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_a_decode_worker_learns_the_embeddings_from_its_kv(wrong: int | None) -> None:
    red, blue = shown((255, 0, 0), 4), shown((0, 0, 255), 12)
    hashes = media_hashes([red, blue], StandInEncoder().encode_all([red, blue]))
    names = names_of([*PROMPT, *PROMPT], red, blue)
    known = KvCheck([red, blue], len(names), BLOCK_SIZE, hashes)
    check = KvCheck([red, blue], len(names), BLOCK_SIZE, hashes[:1])
    assert [check.word(at, 0) for at in range(len(names))] == [0, *[None] * 7]
    for at, name in enumerate(names[:-1]):
        word = known.word(at, name.sequence_hash)
        assert word is not None
        block = numpy.full(4, word ^ (at == wrong), dtype="<u8").view(numpy.uint8)
        check.read(at, block, name.sequence_hash)
    check.learn(hashes[2])
    assert (check.wrong() == 0) == (wrong is None)
    assert check.word(5, 7) == hashes[2] ^ 7
    assert check.media_hash == hashes[2]
