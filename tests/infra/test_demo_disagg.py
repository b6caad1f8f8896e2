"""The verdict of `make demo-disagg`, and its check of the tokens of mock engines."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from forebay.engine_model.model import EngineConfig
from forebay.events.base import pack_u32, unpack_u32
from forebay.events.requests import RequestSubmitted, Sampling
from forebay.events.tokens import AttemptStarted, ResponseEnded, TokenChunk, TokensEmitted
from forebay.events.work import WorkItem
from forebay.ingress.model import DEFAULT_MODEL, Model, word_token_ids
from forebay.workers.engine import EngineBatch
from forebay.workers.engines.mock.engine import MockEngine
from tests.harness.demo_disagg import Result
from tests.harness.mock_words import Words

PROMPT = list(range(300, 330))
COUNT = 9
GOOD: dict[str, Any] = {
    "answered_once": 9,
    "stages": Counter({"prefill": 9, "decode": 9, "decode again": 1}),
    "moved_bytes": 2_500_000,
    "verified": 18,
    "decisions": 18,
}


def test_disagg_the_last_line_summarizes_the_result() -> None:
    result = Result(9, **GOOD)
    result.judge()
    assert result.line() == (
        "9 requests, 9 answered once, 0 with wrong tokens; routed: 9 decode, 1 decode again, 9 prefill; "
        "2.5 MB of KV moved, 0 transfers failed; verified 18 of 18: ok"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"answered_once": 8}, "1 requests were not answered once"),
        ({"wrong": 2}, "2 responses have wrong tokens"),
        ({"moved_bytes": 0}, "no KV was moved"),
        ({"verified": 17}, "18 decisions were recorded and 17 of them derived equal"),
    ],
)
def test_disagg_each_unmet_requirement_is_reported(change: dict[str, int], problem: str) -> None:
    result = Result(9, **{**GOOD, **change})
    result.judge()
    assert result.problems == [problem]
    assert result.line().endswith(f": FAILED ({problem})")


def engine_tokens(prompt: list[int], count: int) -> list[int]:
    """Return the tokens that a mock engine generates for a prompt."""
    vocabulary = word_token_ids(Model(DEFAULT_MODEL).tokenizer)
    engine = MockEngine(EngineConfig(vocabulary=vocabulary), speedup=1000.0)
    item = WorkItem(
        request_id="r",
        attempt=1,
        owner_epoch=0,
        worker_epoch=0,
        rank=0,
        token_ids=pack_u32(prompt),
        sequence_hashes=b"",
        reply_slot=0,
        sampling=Sampling(max_tokens=count),
    )
    tokens: list[int] = []

    async def run() -> None:
        done = asyncio.Event()

        def publish(batch: EngineBatch) -> None:
            tokens.extend(token for one in batch.emitted for token in unpack_u32(one.token_ids))
            if batch.finished:
                done.set()

        running = asyncio.create_task(engine.run(publish))
        engine.submit(item)
        await done.wait()
        running.cancel()

    asyncio.run(run())
    return tokens


def submission() -> RequestSubmitted:
    return RequestSubmitted(
        request_id="r",
        model="m",
        token_ids=pack_u32(PROMPT),
        sequence_hashes=b"",
        reply_slot=0,
        timeout_us=1,
        tie_seed=1,
        sampling=Sampling(max_tokens=COUNT),
    )


def emitted(attempt: int, first: int, tokens: list[int]) -> TokensEmitted:
    chunk = TokenChunk(request_id="r", attempt=attempt, first_index=first, token_ids=pack_u32(tokens))
    return TokensEmitted(worker_id="w", worker_epoch=0, owner_epoch=1, chunks=(chunk,), group="m")


def test_disagg_wrong_responses_are_detected() -> None:
    words = Words()
    whole = engine_tokens(PROMPT, COUNT)
    end = ResponseEnded(request_id="r", attempt=1, owner_epoch=1, finish_reason="length", group="m")
    assert words.wrong([submission()], [emitted(1, 0, whole), end]) == []
    assert words.wrong([submission()], [emitted(1, 0, whole)]) != [], "the response has no end"
    assert words.wrong([submission()], [emitted(1, 0, whole[:-1]), end]) != []
    assert words.wrong([submission()], [emitted(1, 0, [*whole[:-1], whole[0] + 1]), end]) != []
    other = engine_tokens(PROMPT + whole[:4], COUNT - 4)
    begins = AttemptStarted(request_id="r", attempt=2, owner_epoch=1, worker_id="v", group="m")
    late = ResponseEnded(request_id="r", attempt=2, owner_epoch=1, finish_reason="length", group="m")
    moved = [emitted(1, 0, whole[:4]), begins, emitted(1, 4, other), emitted(2, 4, whole[4:]), late]
    assert words.wrong([submission()], moved) == [], "tokens of attempt 1 after attempt 2 began are stale"
    assert words.wrong([submission()], [emitted(1, 0, whole[:4]), begins, emitted(2, 4, other), late]) != []
