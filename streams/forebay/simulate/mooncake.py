"""Rows of Mooncake traces: JSON lines with timestamp (ms), input_length, output_length and hash_ids.

Each hash id stands for 512 prompt tokens. Source: the traces published with the Mooncake paper (FAST '25).
"""

from typing import Annotated

import msgspec

from forebay.simulate.workloads.source import OUTPUT_TOKENS_MAX, PROMPT_TOKENS_MAX, TIME_MS_MAX, BlockId

BLOCK_TOKENS = 512

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=TIME_MS_MAX)]
PromptTokens = Annotated[int, msgspec.Meta(ge=1, le=PROMPT_TOKENS_MAX)]
OutputTokens = Annotated[int, msgspec.Meta(ge=1, le=OUTPUT_TOKENS_MAX)]


class MooncakeRow(msgspec.Struct, frozen=True, gc=False):
    """One request of a Mooncake trace, with the field names of the trace."""

    timestamp: Milliseconds
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: list[BlockId]
