"""Requests for engine models, and what came of them."""

from array import array
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from forebay.core.block_hashes import HASH_SEED, sequence_hashes
from forebay.engine_model.loading import TierMatch
from forebay.engine_model.model import (
    EngineConfig,
    EngineModel,
    EngineRequest,
    EngineStage,
    EngineStep,
    Finished,
    Removed,
    Stored,
)
from forebay.engine_model.timing import StepWork
from forebay.events.base import pack_u32, unpack_u32, unpack_u64

VOCABULARY = tuple(range(1000, 1100))
BLOCK = 4


def config(**changes: Any) -> EngineConfig:
    sizes: dict[str, Any] = {"block_size": BLOCK, "kv_blocks_total": 32, "max_num_seqs": 4}
    return EngineConfig(**{"vocabulary": VOCABULARY, "max_num_batched_tokens": 16, **sizes, **changes})


def request(
    name: str,
    prompt: list[int],
    max_tokens: int,
    *,
    seed: int = 7,
    attempt: int = 1,
    block: int = BLOCK,
    salt: int = HASH_SEED,
    stage: EngineStage = "aggregated",
) -> EngineRequest:
    packed = pack_u32(prompt)
    fields: dict[str, Any] = {"token_seed": seed, "max_tokens": max_tokens, "hash_seed": salt, "stage": stage}
    chain = sequence_hashes(packed, block, salt)
    return EngineRequest(request_id=name, attempt=attempt, token_ids=packed, sequence_hashes=chain, **fields)


def engine(*requests: EngineRequest, match: TierMatch | None = None, **changes: Any) -> EngineModel:
    model = EngineModel(config(**changes), match)
    for one in requests:
        model.submit(one)
    return model


def fetch_all(model: EngineModel, until_us: int = 0, seeds: Mapping[str, int] | None = None) -> list[EngineStep]:
    """Run to the end. All KV arrives at once, with the seeds of its requests."""
    steps: list[EngineStep] = []
    while True:
        for fetch in model.fetches():
            assert model.fetched(fetch.request_id, *([seeds[fetch.request_id]] if seeds else []))
        step = model.step(until_us)
        if step is None:
            return steps
        steps.append(step)


# Strategies: prompts of which many share a prefix, and the sizes of an engine that has to preempt
prompts = st.builds(lambda root, size: [root] * min(size, 3) + list(range(size)), st.integers(0, 2), st.integers(1, 30))
sizes = st.fixed_dictionaries(
    {
        "kv_blocks_total": st.integers(15, 40),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 40),
    }
)


class RecordingTiming:
    def __init__(self) -> None:
        self.calls: list[dict[str, int]] = []

    def step_us(self, work: StepWork) -> int:
        self.calls.append(work._asdict())
        return 10


def run(model: EngineModel, until_us: int = 0) -> list[EngineStep]:
    steps = []
    while (step := model.step(until_us)) is not None:
        steps.append(step)
    return steps


def answers(steps: list[EngineStep]) -> dict[str, list[int]]:
    """Tokens by request; fails when an index is missing, repeated or out of order."""
    output: dict[str, list[int]] = {}
    for step in steps:
        for chunk in step.emitted:
            tokens = output.setdefault(chunk.request_id, [])
            assert chunk.first_index == len(tokens)
            tokens += unpack_u32(chunk.token_ids)
    return output


def replay_cache(steps: list[EngineStep]) -> set[int]:
    content: set[int] = set()
    for step in steps:
        for change in step.cache_changes:
            match change:
                case Stored(parent=parent, hashes=hashes):
                    assert parent is None or parent in content
                    assert content.isdisjoint(hashes)
                    content.update(hashes)
                case Removed(hashes=hashes):
                    assert content.issuperset(hashes)
                    content.difference_update(hashes)
    return content


def finished(steps: list[EngineStep]) -> list[Finished]:
    return [end for step in steps for end in step.finished]


def hashes(prompt: list[int]) -> list[int]:
    return list(unpack_u64(sequence_hashes(pack_u32(prompt), BLOCK)))


class Tier:
    """Slower tier with some blocks. It records which requests it was asked about."""

    def __init__(self, *prompts: list[int]) -> None:
        self.content = {block for prompt in prompts for block in hashes(prompt)}
        self.asked: list[tuple[str, int]] = []

    def match(self, request_id: str, chain: "array[int]", first: int) -> int:
        self.asked.append((request_id, first))
        at = first
        while at < len(chain) and chain[at] in self.content:
            at += 1
        return at - first
