"""Prefill and decode workers of TensorRT-LLM, with a stand-in. The real engine was never run."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.workers.engine import KvEngine
from forebay.workers.engines.kv_descriptor import Unfetchable
from forebay.workers.engines.tensorrt_llm import engine as tensorrt_llm_engine
from forebay.workers.engines.tensorrt_llm.engine import CONNECTOR, TensorRtLlmEngine, descriptor
from tests.workers.engine_setup import PROMPT, StandinPair, standin_pair
from tests.workers.standins import tensorrt_llm_standin
from tests.workers.standins.little import answer_of
from tests.workers.standins.tensorrt_llm_standin import LLM, DisaggregatedParams, Logprob

Pair = StandinPair[LLM]


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    tensorrt_llm_standin.install(monkeypatch)
    async with standin_pair(tmp_path, TensorRtLlmEngine, lambda: LLM.made) as both:
        yield both


async def test_prefill_worker_generates_the_first_token(pair: Pair) -> None:
    prefilled = await pair.prefilled(PROMPT, logprobs=2, min_tokens=3)
    assert (prefilled.connector, prefilled.tokens, prefilled.model) == (CONNECTOR, len(PROMPT), "m")
    assert pair.prefill_backend.requested_with[-1]["sampling_params"].max_tokens == 1
    assert pair.prefill_backend.requested_with[-1]["sampling_params"].min_tokens == 3
    assert pair.prefill_backend.args.disable_overlap_scheduler
    answer = await pair.decoded(PROMPT, prefilled, logprobs=2, min_tokens=3)
    assert answer.tokens == answer_of(PROMPT, 6)
    requested = pair.decode_backend.requested_with[-1]["disaggregated_params"]
    assert (requested.request_type, requested.first_gen_tokens) == ("generation_only", answer.tokens[:1])
    assert requested.opaque_state == b"state \xff of " + bytes(PROMPT[:1]), "it passes through as it is"
    assert requested.ctx_request_id == 1 << 62
    ((first),) = requested.first_gen_log_probs
    assert first[answer.tokens[0]] == Logprob(-0.5, 1)


async def test_decode_worker_computes_aggregated_prompts(pair: Pair) -> None:
    assert (await pair.decode.ask(PROMPT, 6)).tokens == answer_of(PROMPT, 6)
    assert pair.decode_backend.requested_with[-1]["disaggregated_params"] is None


async def test_unfetchable_kv_is_reported(pair: Pair) -> None:
    prefilled = await pair.prefilled(PROMPT)
    for changes, fragment in (
        ({"model": "other"}, "of model other"),
        ({"descriptor": msgspec.msgpack.encode({"unknown": 1})}, "unknown"),
        ({"descriptor": msgspec.msgpack.encode({"first_gen_tokens": [1], "opaque_state": b"x"})}, "transfer failed"),
    ):
        answer = await pair.decoded(PROMPT, msgspec.structs.replace(prefilled, **changes))
        assert fragment in (answer.not_fetched or ""), answer
    refused = await pair.decoded(PROMPT, prefilled, top_p=1.5)
    assert refused.error is not None and refused.error.status == 400
    assert (await pair.decoded(PROMPT, prefilled)).tokens == answer_of(PROMPT, 6)


async def test_hung_transfer_ends_with_its_lease(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled = await pair.prefilled(PROMPT)
    monkeypatch.setattr(tensorrt_llm_engine, "LEASE_S", 0.01)
    pair.decode_backend.deaf = True
    assert "could not continue" in ((await pair.decoded(PROMPT, prefilled)).not_fetched or "")
    assert pair.decode_backend.aborted


async def test_prefill_needs_the_prefill_role_and_a_second_token(pair: Pair) -> None:
    answer = await pair.decode.ask(PROMPT, stage="prefill")
    assert answer.error is not None and answer.error.status == 501
    pair.prefill_backend.end_after[PROMPT[0]] = "stop"
    answer = await pair.prefill.ask(PROMPT, stage="prefill")
    assert answer.error is not None and (answer.error.status, "ends with its first token" in answer.error.message) == (
        500,
        True,
    )


async def test_kv_counts_as_kept_until_no_block_is_in_use(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pair.prefill.engine
    assert isinstance(engine, TensorRtLlmEngine)
    assert isinstance(engine, KvEngine)
    for prompt in (PROMPT, [9, *PROMPT]):
        await pair.prefilled(prompt)
    last = list(pair.prefill.answers)[-1]
    pair.prefill_backend.step.clear()
    running = pair.prefill.item([8, *PROMPT], stage="prefill")
    pair.prefill.submit(running)
    assert engine.kept() == 2
    engine.release(last)
    assert engine.kept() == 1
    engine.cancel(running.request_id)
    assert engine.kept() == 0


def test_unencodable_parameters_are_unfetchable() -> None:
    strange: Any = object()
    unknown: list[Any] = [None, {}, DisaggregatedParams(opaque_state=strange)]
    for params in unknown:
        with pytest.raises(Unfetchable):
            descriptor(params)
