"""KV events of vLLM 0.32.0 and SGLang 0.5.23 for a tiny model, decoded; encoding them gives the captured bytes."""

from collections.abc import Sequence
from typing import Any

import msgspec

from forebay.core.block_hashes import hash_seed, sequence_hashes
from forebay.events.base import pack_u32, unpack_u64

VLLM_BLOCK_SIZE = 32
VLLM_HEAD = b"\x91\x8b\xa4type\xabBlockS"  # start of the first batch, after its timestamp
PROMPT = list(range(100, 180))
# The greedy response to PROMPT.
GENERATED = [163, 417, 108, 242, 416, 503, 40, 119, 312, 62, 316, 182, 212, 155, 340, 159]
BRANCH = [*PROMPT[:64], *range(300, 340)]
D = [[10 + k, *range(150, 345)] for k in range(4)]

A_HASHES = [702757842669265042, 12727516518541667169]
A_GENERATED_HASH = 16992573556214476673
BRANCH_HASH = 3582626340390673046
SALTED_HASHES = [16510773700617727104, 7308806245783140248]
LORA_HASHES = [16062799444019624759, 2265755298269123510]
D_HASHES = [
    [2227084207853800401, 13595148837508327547, 5580957117320192781, 15658769330470402477,
     3453407083641032739, 2118088261414230009],
    [14012688454956611079, 18262204507293761088, 1967677771415376941, 2864958544198768559,
     12092309630290130684, 5303452940457077073],
    [14354544062062959699, 12059641142046395633, 572302514707227425, 7189200678583012133,
     2502865716401916836, 8283423888130742215],
    [5283516468835338488, 15554094534709248133, 5876946847914293954, 175251049555046654,
     7754762818862562781, 12339062458214011399],
]  # fmt: skip


SGLANG_BLOCK_SIZE = 16


def sglang_stored(
    hashes: Sequence[int | bytes], token_ids: Sequence[Any], parent: int | bytes | None = None, **more: Any
) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(token_ids),
        "block_size": SGLANG_BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
    }
    return {**event, **more}


def vllm_stored(
    hashes: Sequence[int | bytes], token_ids: Sequence[Any], parent: int | bytes | None = None, **more: Any
) -> dict[str, Any]:
    only_vllm = {
        "block_size": VLLM_BLOCK_SIZE,
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return sglang_stored(hashes, token_ids, parent, **{**only_vllm, **more})


def vllm_removed(block: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0, **more}


CLEARED = {"type": "AllBlocksCleared"}
A_STORED = vllm_stored(A_HASHES, PROMPT[:64])
# Each batch with the length of its captured payload.
VLLM_BATCHES: list[tuple[int, list[dict[str, Any]]]] = [
    (296, [A_STORED]),
    (260, [vllm_stored([A_GENERATED_HASH], [*PROMPT[64:], *GENERATED], A_HASHES[1])]),
    (290, [vllm_stored([BRANCH_HASH], BRANCH[64:96], A_HASHES[1])]),
    (305, [vllm_stored(SALTED_HASHES, PROMPT[:64], extra_keys=[["tenant-1"], None])]),
    (
        325,
        [
            vllm_stored(
                LORA_HASHES, PROMPT[:64], lora_id=1, lora_name="tiny-lora", extra_keys=[["tiny-lora"], ["tiny-lora"]]
            )
        ],
    ),
    (704, [vllm_stored(D_HASHES[0], D[0][:192])]),
    (704, [vllm_stored(D_HASHES[1], D[1][:192])]),
    (
        960,
        [
            *map(vllm_removed, [A_GENERATED_HASH, BRANCH_HASH, A_HASHES[1], A_HASHES[0]]),
            vllm_stored(D_HASHES[2], D[2][:192]),
        ],
    ),
    (
        1088,
        [
            *map(vllm_removed, [*SALTED_HASHES[::-1], *LORA_HASHES[::-1], D_HASHES[0][5], D_HASHES[0][4]]),
            vllm_stored(D_HASHES[3], D[3][:192]),
        ],
    ),
    (319, [CLEARED, A_STORED]),
    (319, [CLEARED, A_STORED]),
]

# From the scheduler's side of vLLM's offloading, with the configuration of `tests/engines/test_vllm_offloading.py`.
OFFLOADED_ONCE: dict[str, Any] = {
    "type": "BlockStored", "block_hashes": [0x101010101010101], "parent_block_hash": 0,
    "token_ids": [*range(116, 132)], "block_size": 16, "lora_id": None, "medium": "CPU", "lora_name": None,
    "group_idx": 0, "kv_cache_spec_kind": "full_attention",
}  # fmt: skip
OFFLOADED: list[dict[str, Any]] = [
    OFFLOADED_ONCE,
    OFFLOADED_ONCE | {"medium": "STORAGE", "locality": "LOCAL"},
    OFFLOADED_ONCE | {"medium": "STORAGE", "locality": "REMOTE"},
    {"type": "BlockRemoved", "block_hashes": [0x101010101010101], "medium": "CPU", "group_idx": 0},
]

SGLANG_SAID = [235, 241, 264, 106, 295, 128, 415, 47]
SGLANG_HASHES = [3783480490812179100, -5523102609743566000]
SGLANG_SAID_HASH = -5501173548256900732
SGLANG_BRANCH_HASH = -7066507723633481210


SGLANG_FIRST = sglang_stored(SGLANG_HASHES, range(100, 132))
SGLANG_BATCHES: list[tuple[int, list[dict[str, Any]]]] = [
    (162, [SGLANG_FIRST]),
    (158, [sglang_stored([SGLANG_SAID_HASH], [*range(132, 140), *SGLANG_SAID], SGLANG_HASHES[1])]),
    (173, [sglang_stored([SGLANG_BRANCH_HASH], range(300, 316), SGLANG_HASHES[1])]),
    (35, [CLEARED]),
    (162, [SGLANG_FIRST]),
]


def payload(events: Sequence[Any], ts: float = 1732212345.25) -> bytes:
    """Return an encoded batch of rank 0."""
    return msgspec.msgpack.encode([ts, events, 0])


def ours(token_ids: Sequence[int], block_size: int, lora_name: str = "", cache_namespace: str = "") -> list[int]:
    """Return our hashes of a prompt's full blocks."""
    return unpack_u64(sequence_hashes(pack_u32(token_ids), block_size, hash_seed(lora_name, cache_namespace)))
