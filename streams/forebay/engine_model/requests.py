"""Configuration of the engine model, its requests, and the errors of `EngineModel.submit`."""

from typing import Literal

import msgspec

from forebay.core.block_hashes import HASH_SEED
from forebay.engine_model.timing import EngineTiming, MockerTiming

VOCABULARY_MAX = 65_536  # a token is sampled from 16 bits

EngineStage = Literal["aggregated", "prefill", "decode"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Size and timing of the engine. The defaults are those of Dynamo's mocker.

    If there is no vocabulary, the engine emits no tokens, which is faster. It then needs only the length of a prompt,
    and hashes output blocks from `token_seed`, so requests with different seeds share no output blocks. All other
    results are the same.
    """

    vocabulary: tuple[int, ...] | None  # token ids to sample output from; None emits no tokens
    block_size: int = 64  # tokens per KV block
    kv_blocks_total: int = 16_384
    max_num_seqs: int = 256  # maximum number of running sequences
    max_num_batched_tokens: int = 8192
    timing: EngineTiming = MockerTiming()  # computes the duration of a step

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
    request_id: str
    attempt: int
    token_ids: bytes  # prompt tokens, followed by the output tokens of earlier attempts, as packed u32
    sequence_hashes: bytes  # packed u64 sequence hashes of the full prompt blocks
    token_seed: int  # seed of the output tokens
    max_tokens: int  # number of output tokens to generate
    hash_seed: int = HASH_SEED  # seed that `sequence_hashes` were computed with; also used for output blocks
    # `mm_hash` values of the images, videos and sounds in the last prompt block, if that block is not full.
    tail_mm_hashes: tuple[int, ...] = ()
    # First output tokens of this attempt as packed u32, at most `max_tokens`. Further tokens are sampled.
    output: bytes = b""
    # Number of output tokens before the first token of this attempt in the whole response. A sampled token depends only
    # on `token_seed` and its position in the response. So with the same seed, this attempt generates the tokens that an
    # earlier attempt would have generated.
    first_position: int = 0
    # `aggregated` computes the prompt and generates the output. `prefill` computes the prompt and keeps its KV for
    # another engine. `decode` fetches this KV and generates the output.
    stage: EngineStage = "aggregated"


class RequestRefused(Exception):
    """The engine does not accept a request, and has not changed. The text explains this to the client."""


class RequestTooLarge(RequestRefused):
    """Prompt and output of the request together need more KV blocks than the engine has."""


class RequestMalformed(RequestRefused):
    """The prompt is empty, no output is requested, or the sequence hashes do not match the blocks of the prompt."""


class QueueFull(RequestRefused):
    """The engine's queue has `WAITING_MAX` requests."""
