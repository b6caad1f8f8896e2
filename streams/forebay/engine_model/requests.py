"""The engine model's size, what it is asked, and why it refuses."""

from typing import Literal

import msgspec

from forebay.core.block_hashes import HASH_SEED
from forebay.engine_model.timing import EngineTiming, MockerTiming

VOCABULARY_MAX = 65_536  # a token is drawn from 16 bits

EngineStage = Literal["aggregated", "prefill", "decode"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's size and pace. Defaults are Dynamo's mocker's; `vocabulary` is the token ids to speak with.

    Without a vocabulary the engine is silent: prompts count by their length, no tokens are emitted, and output blocks
    are named after `token_seed`, so that requests of different seeds share none. All else is the same, and faster.
    """

    vocabulary: tuple[int, ...] | None
    block_size: int = 64
    kv_blocks_total: int = 16_384
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    timing: EngineTiming = MockerTiming()

    def __post_init__(self) -> None:
        if min(self.block_size, self.kv_blocks_total, self.max_num_seqs) < 1:
            raise ValueError("block_size, kv_blocks_total and max_num_seqs must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence needs a token per step"
            )
        if self.vocabulary is not None and not 1 <= len(self.vocabulary) <= VOCABULARY_MAX:
            raise ValueError(f"a vocabulary has 1 to {VOCABULARY_MAX} tokens, not {len(self.vocabulary)}")


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to answer a prompt: packed u32 tokens, packed u64 hashes of its full blocks.

    `hash_seed` is the one that the hashes were made with: output blocks are named with it, too. `tail_mm_hashes` are of
    what stands in the prompt's last block, if that is not full. In the stage `prefill` the prompt is computed and kept
    for another engine; in the stage `decode` another computed it, and it is to be fetched.
    """

    request_id: str
    attempt: int
    token_ids: bytes
    sequence_hashes: bytes
    token_seed: int
    max_tokens: int
    hash_seed: int = HASH_SEED
    tail_mm_hashes: tuple[int, ...] = ()
    stage: EngineStage = "aggregated"


class RequestRefused(Exception):
    """The engine does not take the request; nothing changed. The text is fit for the caller."""


class RequestTooLarge(RequestRefused):
    """Prompt and answer together can never fit into the cache."""


class RequestMalformed(RequestRefused):
    """An empty prompt, no token wanted, or hashes that do not belong to the prompt's blocks."""


class QueueFull(RequestRefused):
    """As many requests wait as ever may."""
